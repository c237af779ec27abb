"""The embedded text model, from which WINGS starts: a decoder that knows text alone, beside the embedded vision tower.

In: a seed. Out: a PaliGemma whose decoder has learned the sentences of `eval/text/sentences.py` from random weights,
causally, and whose projector knows nothing. It is trained when it is first needed, and kept in runs/.
"""

import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist

from eval.records import Record
from eval.text import sentences
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import EMBEDDED
from train.optim import Rule
from train.run import lock_folder
from train.studies.encoded import learn, prepare
from weights.checkpoint import empty_model
from weights.export import companions, export_model
from weights.fingerprint import exact_fingerprint
from weights.load import load_model

TEXT_BASE = "embedded-text"  # as a --base
# half of the text is lookup: it takes the longest to learn
TASKS = ("add", "lookup", "copy", "lookup", "fact", "lookup")
STEPS, ROWS, RATE = 900, 48, 3e-3
RECIPE = (TASKS, STEPS, ROWS, RATE)  # what decides the model, with the base and the seed


def text_record(number: int, seed: int, tasks: Sequence[str] = TASKS) -> Record:
    """A sentence of the train split, the tasks in turn."""
    s = sentences.sentence(tasks[number % len(tasks)], "train", number, seed)
    return Record(f"{s.task}/{number}", f"{s.task}/{number}", (), ((s.prefix, s.suffix),))


def text_records(steps: int, seed: int) -> list[Record]:
    return [text_record(number, seed) for number in range(steps * ROWS)]


def train_text_base(base: PaliGemma, processor: Processor, steps: int, seed: int, run: Path) -> PaliGemma:
    """A decoder of the sizes of `base`, trained on text alone; an interrupted `run` goes on."""
    model = initialize(PaliGemma(base.config), seed)
    model.vision_tower.load_state_dict(base.vision_tower.state_dict())
    micros = prepare(text_records(steps, seed), processor, base.vision_tower, ROWS)
    learn(model, [Rule(r"language_model\..*", RATE, 1e-9)], micros, run)
    return model


def keep(model: PaliGemma, folder: Path) -> None:
    """Write `model` to folder/model, and delete the checkpoints of its training in folder/run."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    export_model(model, folder / "model", companions=companions(EMBEDDED))
    shutil.rmtree(folder / "run")


def open_text_base(seed: int, dtype: torch.dtype, device: torch.device, runs: Path = Path("runs")) -> PaliGemma:
    """The text model of a seed, from the folder of `runs` that is named after all that decides it, or trained there.

    Of several processes the first one trains, and the others wait for it. On "meta" nothing is trained.
    """
    base = load_model(EMBEDDED)
    if device.type == "meta":
        return empty_model(base.config, dtype)
    decides = sha256(repr((exact_fingerprint(base), seed, *RECIPE)).encode()).hexdigest()[:12]
    folder = runs / f".{TEXT_BASE}-{decides}"
    if not (dist.is_initialized() and dist.get_rank()) and not (folder / "model").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder), same_command_goes_on():
            print(f"{TEXT_BASE}: a decoder learns text alone, once; it is kept in {folder}", flush=True)
            keep(train_text_base(base, Processor.from_source(EMBEDDED), STEPS, seed, folder / "run"), folder)
    if dist.is_initialized():
        dist.barrier()
    return load_model(folder / "model", dtype=dtype, device=device)

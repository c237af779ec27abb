"""A transformer that knows the scenes in words as well as the embedded Mamba: the control of the Q-Mamba study.

In: scenes described in words (`train/embedded/mamba.py`). Out: a Gemma trained on as many of them as that takes.
"""

from pathlib import Path

from safetensors.torch import save_file

from model.mamba import MambaLM
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import EMBEDDED
from train.embedded.mamba import BATCH, accuracy, teach
from train.studies.engine import ScaledStudy
from train.studies.qmamba_tables import CONTROL
from train.systems.qmamba import TINY_MAMBA
from weights.load import load_mamba

VERSION = 3  # of the code that decides what is learned: raise it to train all again
SCENES_IN_WORDS = 20_000  # at most
ROUNDS, GAP = 6, 0.5  # of the search for their number: trainings, points of accuracy
ASKED = 3_200  # scenes that measure what a model knows: the standard error of a difference is below GAP


def run_language(study: ScaledStudy) -> dict:
    """`learn_language` of as many scenes as make it know what the embedded Mamba does, found by bisection on validation
    scenes."""
    known = run_mamba(study)["validation"]
    low, high = 0, study.scaled(SCENES_IN_WORDS, BATCH) // BATCH
    tried: dict[int, dict] = {}
    while len(tried) < ROUNDS and (steps := max(1, (low + high) // 2)) not in tried:
        tried[steps] = found = learn_language(study, steps * BATCH)
        if abs(found["validation"] - known) <= GAP:
            break
        low, high = (steps, high) if found["validation"] < known else (low, steps)
    return min(tried.values(), key=lambda one: abs(one["validation"] - known))


def run_mamba(study: ScaledStudy) -> dict:
    """`knowledge` of the embedded Mamba."""

    def work(folder: Path) -> dict:
        return knowledge(load_mamba(TINY_MAMBA), open_processor())

    return study.finish("the Mamba's language", ("mamba", VERSION, ASKED, study.fingerprint), work)[0]


def open_processor() -> Processor:
    return Processor(CONTROL, Processor.from_source(EMBEDDED).tokenizer)


def knowledge(model: PaliGemma | MambaLM, processor: Processor) -> dict[str, float]:
    """What a model knows of unseen scenes in words, see `train.embedded.mamba.accuracy`."""
    names = {"answer_tokens": "test", "validation": "validation"}
    return {name: accuracy(model, processor, ASKED, split) for name, split in names.items()}


def learn_language(study: ScaledStudy, count: int) -> dict:
    """`knowledge` and {"cpu_seconds", "file", "scenes"} of a Gemma trained on `count` scenes in words."""

    def work(folder: Path) -> dict:
        model, processor = initialize(PaliGemma(CONTROL)), open_processor()
        teach(model, list(model.language_model.parameters()), processor, count)
        file = folder / "model.safetensors"
        save_file(model.language_model.state_dict(), file)
        return {"file": str(file.relative_to(study.out)), "scenes": count} | knowledge(model, processor)

    return study.finish(
        f"the transformer's language, {count:,} scenes", ("language", VERSION, ASKED, count, CONTROL), work
    )[0]

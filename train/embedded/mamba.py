"""Make the embedded language model: a Mamba of half a million parameters, taught with scenes that are told in words.

In: the scenes of `eval/scenes.py`, of which it is told what is in each of the 16 cells, where a Q-Mamba later reads a
picture's queries. Out: a folder with config.json, model.safetensors and tokenizer.model, which transformers opens too.
`weights/tiny-mamba` is what this command writes:

    python -m train.pretrain_mamba --out runs/tiny-mamba

It knows the prompts of VQA and of the probes from text alone, as a published language model knows language: stage 1 of
`train/recipes.py` leaves it as it is.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from eval import scenes
from model.common import UserError, atomic_path, write_text
from model.config import PRESETS
from model.mamba import MambaLM, initialize_mamba
from model.processor import Batch, Processor, load_tokenizer
from model.source import BUNDLED_FOLDER
from model.system_configs import MambaConfig
from train.data.batches import supervised
from train.optim import count, rate_factor

CONFIG = MambaConfig(vocab_size=1728, hidden_size=128, num_hidden_layers=2, eos_token_id=1, bos_token_id=2)
SAMPLES, BATCH, RATE = 20_000, 32, 3e-3
PROBES = ("locate", "count", "exist")


def tell(index: int, split: str, processor: Processor) -> tuple[list[int], list[int]]:
    """A scene in words, what is in each cell from the top left on, then its questions with their answers.

    Ids, and their types: 1 for answers. Six questions are those that VQA has on it, three are probes.
    """
    samples = scenes.vqa_picture(split, index)
    cells, dice = samples[0].scene.squares, scenes.Dice(f"tell/{split}/{index}")
    asked = [(sample.prefix, sample.suffix) for sample in samples]
    for probe in PROBES:
        kind, wording = scenes.PROBES[probe]
        facts = list(scenes.facts(cells, kind))
        if facts:
            wanted = dice.pick(sorted({answer for answer, *_ in facts}))
            answer, thing, _ = dice.pick([fact for fact in facts if fact[0] == wanted])
            asked.append((f"{wording} {thing}", answer))
    ids = [processor.encode(f" {name}")[-1] for name in cells]
    types = [0] * len(ids)
    for prefix, suffix in dice.draw(asked, len(asked)):
        more, their_types = processor.layout(0, prefix, suffix)
        ids, types = ids + more, types + their_types
    return ids, types


def told_batches(processor: Processor, samples: int, batch_size: int, split: str = "train") -> Iterator[Batch]:
    """Batches of `tell`, whose token_type_ids are 0 at the scene alone: all that is said of it is causal."""
    for start in range(0, samples // batch_size * batch_size, batch_size):
        batch = processor.pad([tell(start + row, split, processor) for row in range(batch_size)])
        places = batch.attention_mask.cumsum(1)
        yield Batch(
            batch.input_ids,
            batch.pixel_values,
            (places > scenes.GRID**2).long(),
            batch.attention_mask,
            batch.labels,
            batch.image_index,
        )


def answers(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (B, T, V) and targets (B, T) of the supervised tokens."""
    positions, targets = supervised(batch.labels)
    logits = model(
        input_ids=batch.input_ids,
        pixel_values=None,
        token_type_ids=batch.token_type_ids,
        attention_mask=batch.attention_mask,
        positions_to_keep=positions,
    )
    return logits, targets


def teach(
    model: nn.Module, parameters: list[nn.Parameter], processor: Processor, samples: int = SAMPLES, rate: float = RATE
) -> None:
    """Train `model`, a language model of any kind, in place: AdamW over `parameters`, a warm-up, and a linear decay."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    total = max(1, samples // BATCH)
    model.train()
    bar = tqdm(told_batches(processor, total * BATCH, BATCH), total=total, desc="text", unit="batch")
    for step, batch in enumerate(bar):
        optimizer.param_groups[0]["lr"] = rate * rate_factor(step, total, total // 50, "linear")
        logits, targets = answers(model, batch)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, processor: Processor, samples: int = 320) -> float:
    """Share of answer tokens, in percent, that are the likeliest after all that precedes them, on unseen scenes."""
    right = total = 0
    for batch in told_batches(processor, samples, BATCH, "test"):
        logits, targets = answers(model, batch)
        counted = (targets != -100) & (targets != processor.config.eos_token_id)
        right += int((logits.argmax(-1) == targets)[counted].sum())
        total += int(counted.sum())
    return 100 * right / total


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.pretrain_mamba", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/tiny-mamba"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: %(default)s)"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="scenes to tell (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.samples < BATCH:
        raise UserError(f"--samples is {args.samples}, expected at least {BATCH}")
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    tokenizer = BUNDLED_FOLDER / "tokenizer.model"
    processor, model = Processor(PRESETS["tiny"], load_tokenizer(tokenizer)), MambaLM(CONFIG)
    initialize_mamba(model.backbone, args.seed)
    print(f"{count(model.parameters()):,} parameters, {args.samples:,} scenes")
    teach(model, list(model.parameters()), processor, args.samples)
    model = model.to(torch.bfloat16).float()  # what is measured is what is shipped
    record = {
        "answer_tokens": round(accuracy(model, processor), 1),
        "samples": args.samples,
        "seed": args.seed,
        "seconds": round(time.perf_counter() - started),
        "torch": torch.__version__,
    }
    with atomic_path(args.out / "model.safetensors") as temporary:
        save_file(
            {name: tensor.bfloat16() for name, tensor in model.state_dict().items()},
            temporary,
            metadata={"format": "pt"},
        )
    write_text(args.out / "config.json", json.dumps(CONFIG.to_dict() | {"torch_dtype": "bfloat16"}, indent=2) + "\n")
    write_text(args.out / "pretraining.json", json.dumps(record, indent=1) + "\n")
    shutil.copyfile(tokenizer, args.out / tokenizer.name)
    print(
        f"{record['answer_tokens']} % of the answers' tokens are right; {args.out}: model.safetensors, config.json, "
        f"tokenizer.model, pretraining.json; {record['seconds']} s"
    )

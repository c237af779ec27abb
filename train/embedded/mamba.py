"""Make the embedded language model: a Mamba of half a million parameters that reads scenes described in words.

    python -m train.embedded.mamba --out runs/tiny-mamba

In: the scenes of `eval/scenes.py`, each described by the names in its 16 squares; in these positions a Q-Mamba later
reads the queries of a picture. Out: a folder with config.json, model.safetensors and tokenizer.model, which
transformers opens too. `weights/tiny-mamba` is what this command writes.

The model learns the prompts of VQA and of the probes from text alone, as a published language model has learned
language. Stage 1 of `train/systems/qmamba.py` does not change it.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from eval import scenes
from model.common import run_command
from model.config import PRESETS
from model.mamba import MambaLM, initialize_mamba
from model.processor import Batch, Processor
from model.source import BUNDLED_FOLDER
from model.system_configs import MambaConfig
from model.tokenizer import load_tokenizer
from train.data.batches import supervised
from train.flags import flag, read_flags
from train.optim import count, rate_factor
from train.run import check_empty
from weights.export import export_model

CONFIG = MambaConfig(vocab_size=1728, hidden_size=128, num_hidden_layers=2, eos_token_id=1, bos_token_id=2)
SAMPLES, BATCH, RATE = 20_000, 32, 3e-3  # scenes, scenes of a batch, AdamW's peak learning rate
PROBES = ("locate", "count", "exist")


@dataclass(frozen=True)
class MambaOptions:
    """The flags of this command."""

    out: Path = flag(Path("runs/tiny-mamba"), "folder to write", metavar="DIR")
    seed: int = flag(0, "of the weights")
    samples: int = flag(SAMPLES, "scenes to learn from", least=BATCH)


def describe_scene(index: int, split: str, processor: Processor) -> tuple[list[int], list[int]]:
    """A scene in words: the names in its squares, row by row, then nine questions with their answers.

    Returns a row of `Processor.pad`: the answers are learned. Six questions are VQA's on this scene, three are probes.
    """
    samples = scenes.vqa_picture(split, index)
    squares, dice = samples[0].scene.squares, scenes.Dice(f"tell/{split}/{index}")
    asked = [(sample.prefix, sample.suffix) for sample in samples]
    for probe in PROBES:
        kind, wording = scenes.PROBES[probe]
        facts = list(scenes.facts(squares, kind))
        if facts:
            wanted = dice.pick(sorted({answer for answer, *_ in facts}))
            answer, thing, _ = dice.pick([fact for fact in facts if fact[0] == wanted])
            asked.append((f"{wording} {thing}", answer))
    ids = [processor.encode(f" {name}")[-1] for name in squares]
    learned = [0] * len(ids)
    for prefix, suffix in dice.draw(asked, len(asked)):
        more, _, answer = processor.layout(0, prefix, suffix)
        ids, learned = ids + more, learned + answer
    return ids, learned, learned


def described_batches(processor: Processor, samples: int, batch_size: int, split: str = "train") -> Iterator[Batch]:
    """Batches of `describe_scene`; token_type_ids are 0 at the scene only, so all questions and answers are causal."""
    for start in range(0, samples // batch_size * batch_size, batch_size):
        batch = processor.pad([describe_scene(start + row, split, processor) for row in range(batch_size)])
        places = batch.attention_mask.cumsum(1)
        yield replace(batch, token_type_ids=(places > scenes.GRID**2).long())


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
    """Train `model`, any language model, in place: AdamW over `parameters`, with a warm-up and a linear decay."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    total = max(1, samples // BATCH)
    model.train()
    bar = tqdm(described_batches(processor, total * BATCH, BATCH), total=total, desc="text", unit="batch")
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
def accuracy(model: nn.Module, processor: Processor, samples: int = 320, split: str = "test") -> float:
    """Percent of the answer tokens of unseen scenes to which the model gives the highest probability."""
    right = total = 0
    for batch in described_batches(processor, samples, BATCH, split):
        logits, targets = answers(model, batch)
        counted = (targets != -100) & (targets != processor.config.eos_token_id)
        right += int((logits.argmax(-1) == targets)[counted].sum())
        total += int(counted.sum())
    return 100 * right / total


def main(argv: Sequence[str] | None = None) -> None:
    options = read_flags(MambaOptions, "train.embedded.mamba", __doc__, argv)
    check_empty(options.out)
    started, tokenizer = time.perf_counter(), BUNDLED_FOLDER / "tokenizer.model"
    processor, model = Processor(PRESETS["tiny"], load_tokenizer(tokenizer)), MambaLM(CONFIG)
    initialize_mamba(model.backbone, options.seed)
    print(f"{count(model.parameters()):,} parameters, {options.samples:,} scenes")
    teach(model, list(model.parameters()), processor, options.samples)
    model = model.to(torch.bfloat16).float()  # evaluate the weights as they are written
    record = {
        "answer_tokens": round(accuracy(model, processor), 1),
        "samples": options.samples,
        "seed": options.seed,
        "seconds": round(time.perf_counter() - started),
        "torch": torch.__version__,
    }
    texts = {"pretraining.json": json.dumps(record, indent=1) + "\n"}
    export_model(model, options.out, dtype=torch.bfloat16, companions=[tokenizer], texts=texts)
    print(
        f"{record['answer_tokens']} % of the answers' tokens are right; {options.out}: model.safetensors, config.json, "
        f"tokenizer.model, pretraining.json; {record['seconds']} s"
    )


if __name__ == "__main__":
    run_command(main)

"""Train the embedded language model: a Mamba of half a million parameters that reads scenes described in words.

In: the scenes of `eval/scenes.py`, each described by the names in its 16 squares; in these positions a Q-Mamba later
reads the queries of a picture. Out: the trained model. `train/pretrain_mamba.py` is the command.

The model learns the prompts of VQA and of the probes from text alone, as a published language model has learned
language. Stage 1 of `train/systems/qmamba.py` does not change it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from eval import scenes
from model.processor import Batch, Processor
from model.system_configs import MambaConfig
from train.data.batches import supervised
from train.optim import rate_factor

CONFIG = MambaConfig(vocab_size=1728, hidden_size=128, num_hidden_layers=2, eos_token_id=1, bos_token_id=2)
SAMPLES, BATCH, RATE = 20_000, 32, 3e-3  # scenes, scenes of a batch, AdamW's peak learning rate
PROBES = ("locate", "count", "exist")


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

"""Make the embedded language model: a Mamba of half a million parameters that reads scenes described in words.

    python -m train.embedded.mamba --out runs/tiny-mamba

In: the scenes of `eval/scenes.py`, each described by the names in its 16 squares, in whose positions a Q-Mamba later
reads the queries of a picture, and asked with the prompts of VQA and of the probes. Out: what `weights/tiny-mamba` is.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from eval import scenes
from model.common import run_command
from model.config import PRESETS
from model.mamba import MambaLM, initialize_mamba
from model.processor import Processor, TokenRow
from model.source import BUNDLED_FOLDER
from model.system_configs import MambaConfig
from model.tokenizer import load_tokenizer
from train.data.batches import supervised
from train.flags import flag, read_flags
from train.optim import rate_factor
from train.run import check_empty
from weights.export import export_model

CONFIG = MambaConfig(vocab_size=1728, hidden_size=128, num_hidden_layers=2, eos_token_id=1, bos_token_id=2)
SAMPLES, BATCH, RATE = 20_000, 32, 3e-3  # scenes, scenes of a batch, AdamW's peak learning rate


@dataclass(frozen=True)
class MambaOptions:
    """The flags of this command."""

    out: Path = flag(Path("runs/tiny-mamba"), "folder to write", metavar="DIR")
    seed: int = flag(0, "of the weights")
    samples: int = flag(SAMPLES, "scenes to learn from", least=BATCH)


def describe_scene(index: int, split: str, processor: Processor) -> TokenRow:
    """A scene in words: the names in its squares, row by row, then six questions of VQA on it and three probes, whose
    answers are learned."""
    samples = scenes.vqa_picture(split, index)
    squares, dice = samples[0].scene.squares, scenes.Dice(f"tell/{split}/{index}")
    asked = [(sample.prefix, sample.suffix) for sample in samples]
    for kind, wording in (scenes.PROBES[probe] for probe in ("locate", "count", "exist")):
        if facts := list(scenes.facts(squares)[kind]):
            wanted = dice.pick(sorted({answer for answer, *_ in facts}))
            answer, thing, _ = dice.pick([fact for fact in facts if fact[0] == wanted])
            asked.append((f"{wording} {thing}", answer))
    ids = [processor.encode(f" {name}")[-1] for name in squares]
    learned = [0] * len(ids)
    for prefix, suffix in dice.draw(asked, len(asked)):
        more, _, answer = processor.layout(0, prefix, suffix)
        ids, learned = ids + more, learned + answer
    return ids, learned, learned


def answers(model: MambaLM, step: int, split: str, processor: Processor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (B, T, V) and targets (B, T) of the answers in BATCH described scenes, from scene BATCH · step on."""
    rows = [describe_scene(index, split, processor) for index in range(step * BATCH, (step + 1) * BATCH)]
    batch = processor.pad(rows)
    positions, targets = supervised(batch.labels)
    return model(batch.input_ids, batch.attention_mask, positions_to_keep=positions), targets


@torch.no_grad()
def accuracy(model: MambaLM, processor: Processor, samples: int = 320) -> float:
    """Percent of the answer tokens of unseen scenes to which the model gives the highest probability."""
    right = []
    for step in range(samples // BATCH):
        logits, targets = answers(model, step, "test", processor)
        counted = (targets != -100) & (targets != processor.config.eos_token_id)
        right += (logits.argmax(-1) == targets)[counted].tolist()
    return 100 * sum(right) / len(right)


def main(argv: Sequence[str] | None = None) -> None:
    options = read_flags(MambaOptions, "train.embedded.mamba", __doc__, argv)
    check_empty(options.out)
    tokenizer, total = BUNDLED_FOLDER / "tokenizer.model", options.samples // BATCH
    processor, model = Processor(PRESETS["tiny"], load_tokenizer(tokenizer)), MambaLM(CONFIG)
    initialize_mamba(model.backbone, options.seed)
    optimizer = torch.optim.AdamW(model.train().parameters(), RATE, (0.9, 0.98), weight_decay=0.0)
    for step in tqdm(range(total), "text"):
        optimizer.param_groups[0]["lr"] = RATE * rate_factor(step, total, total // 50, "linear")
        logits, targets = answers(model, step, "train", processor)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model = model.eval().to(torch.bfloat16).float()  # evaluate the weights as they are written
    record = {"answer_tokens": round(accuracy(model, processor), 1), "samples": options.samples, "seed": options.seed}
    texts = {"pretraining.json": json.dumps(record | {"torch": torch.__version__}, indent=1) + "\n"}
    export_model(model, options.out, dtype=torch.bfloat16, companions=[tokenizer], texts=texts)
    print(f"{options.out}: {record['answer_tokens']} % of the answers' tokens are right")


if __name__ == "__main__":
    run_command(main)

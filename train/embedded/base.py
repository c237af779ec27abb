"""Make the embedded base: a PaliGemma of two million parameters that sees, from nothing, in minutes on two cores.

In: the scenes of `eval/scenes.py` and their tokenizer. Out: a model folder in the published format, with
`pretraining.json` (accuracies, settings, the tokenizer's hash). `weights/tiny` is what this command writes:

    python -m train.pretrain --out runs/tiny

What it took, each measured: dense tasks before questions; Muon on the matrices; a linear decay at the end; wide
position embeddings; no loss on what cannot be known. And losses for what the answers need but tell too faintly, or it
is luck when it is learned: which object a patch shows and where (alignment, without which nothing is learned at all),
and which patches a name means (attention, on two heads of one layer).

With `--text [PATH …]` it makes a language model of plain text instead; its own flags: `python -m train.text --help`.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from eval import scenes
from eval.run import Ask
from model.attention import tapped
from model.common import UserError, write_text
from model.config import PRESETS
from model.paligemma import PaliGemma, initialize
from model.processor import Processor, load_tokenizer
from model.source import BUNDLED_FOLDER
from train.data.batches import MicroBatch, collate
from train.data.records import sample_record
from train.distributed import World, ask_together, join_world, leave_world
from train.optim import count, rate_factor, set_rates
from weights.export import export_model

ALONE = World(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Stage:
    """So many samples of a mixture of tasks (their shares), Muon's rate, the weights of the three losses.

    The rate warms up over 2 % of the stage and falls linearly over its last 20 %.
    """

    samples: int
    shares: dict[str, float]
    muon_lr: float
    answer_weight: float = 1.0
    alignment_weight: float = 0.0
    attention_weight: float = 0.0
    by_example: bool = False  # the mean over examples, as in big_vision, instead of over tokens


DENSE = {"scan": 0.2, "detect_all": 0.7, "locate": 1.0, "count": 1.0, "exist": 1.0}
QUESTIONS = {
    "vqa": 3.0,
    "count": 0.7,
    "exist": 0.2,
    "locate": 0.2,
    "vertical": 0.2,
    "horizontal": 0.2,
    "cell": 0.6,
    "caption": 0.4,
    "detect_all": 0.2,
    "detect": 1.0,
}
# of a picture's six questions, one: as many numbers as yes/no and other, for numbers are the hardest to learn
ASKED = (0, 1, 2, 2, 3, 4, 5, 2, 0, 1)
STAGES = (
    Stage(3_000, DENSE, 0.01, answer_weight=0.0, alignment_weight=1.0),
    Stage(20_000, DENSE, 0.01, alignment_weight=0.5, attention_weight=0.5),
    Stage(36_000, QUESTIONS, 0.005),
    # by tokens, captions and boxes outweigh one-word answers; by example from the start, places are learned badly
    Stage(24_000, QUESTIONS, 0.005, by_example=True),
    # a second decay gained VQA 7 points when the first had ended at 82 %, at twice the rate 1
    Stage(24_000, QUESTIONS, 0.005, by_example=True),
)


def batches(
    stage: Stage, number: int, batch_size: int, processor: Processor, seed: int, world: World = ALONE
) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
    """This process's part of the stage's batches: a MicroBatch and the object of every patch (pictures, I), as the
    token of its name."""
    dice = random.Random(f"pretrain/{seed}/{number}")
    tasks, shares = list(stage.shares), list(stage.shares.values())
    drawn = dict.fromkeys(tasks, number * 10_000_000)  # no stage sees a sample of another
    piece = {name: processor.encode(f" {name}")[-1] for name in (*scenes.NAMES, scenes.NONE)}
    for _ in range(stage.samples // batch_size):
        wanted = []
        for task in dice.choices(tasks, shares, k=batch_size):
            index = drawn[task] * len(scenes.QUESTIONS) + dice.choice(ASKED) if task == "vqa" else drawn[task]
            wanted.append((task, index))
            drawn[task] += 1
        samples = [scenes.sample(task, "train", index, seed) for task, index in wanted[world.rank :: world.size]]
        micro = collate([sample_record(s, str(i)) for i, s in enumerate(samples)], processor)
        for row, s in enumerate(samples):
            for column, loss in enumerate(_counts(s, processor)):
                if not loss:
                    micro.targets[row, column] = -100
        first = {int(picture): row for row, picture in reversed(list(enumerate(micro.image_index)))}
        cells = torch.tensor([[piece[name] for name in samples[first[i]].scene.squares] for i in range(len(first))])
        yield micro, cells


def _counts(sample: scenes.Sample, processor: Processor) -> list[bool]:
    """Which tokens of the answer carry loss: not those within spans that nobody could know."""
    if not sample.unsupervised:
        return []
    start, counts = 0, []
    for piece in processor.tokenizer.encode(sample.suffix, out_type=str):
        counts.append(not any(a <= start < b for a, b in sample.unsupervised))
        start += len(piece)
    return counts


def make_optimizers(model: PaliGemma, world: World = ALONE) -> list[torch.optim.Optimizer]:
    """Muon (Jordan 2024) for the matrices inside the layers, AdamW for embeddings, norms, biases and the patches.

    Muon costs as much as a quarter of the gradients: each process steps its own share of the matrices.
    """
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    muon = torch.optim.Muon(shares(model, world)[world.rank], lr=0.01, momentum=0.95, weight_decay=0.0)
    adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    adamw.param_groups[0]["base_lr"] = 1e-3
    return [muon, adamw]


def shares(model: PaliGemma, world: World) -> list[list[torch.nn.Parameter]]:
    """The matrices that Muon moves, by the rank of the process that steps them."""
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    return [inside[rank :: world.size] for rank in range(world.size)]


def losses(
    model: PaliGemma, micro: MicroBatch, cells: torch.Tensor, stage: Stage, processor: Processor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of three cross-entropies (3,), and what each is a sum over (3,): the answers; each patch against the words
    for what it shows and where; and the attention of names to the patches that show what they name."""
    features = model.encode_images(micro.batch.pixel_values)
    sums, over = [features.new_zeros(()) for _ in range(3)], torch.zeros(3)
    if stage.alignment_weight:
        words = model.language_model.embed_tokens.weight
        sums[1] = F.cross_entropy((features @ words.T).flatten(0, 1), cells.flatten(), reduction="sum")
        for ids, sides in places(processor, cells.shape[1]):
            logits = (features @ words[ids].T).flatten(0, 1)
            sums[1] = sums[1] + F.cross_entropy(logits, sides.repeat(len(features)), reduction="sum")
        over[1] = cells.numel()
    if stage.answer_weight:
        batch, seen = micro.batch, []
        attention = model.language_model.layers[MATCHING_LAYER].self_attn
        with tapped({attention: seen.append} if stage.attention_weight else {}):
            logits = model(
                batch.input_ids,
                None,
                batch.token_type_ids,
                batch.attention_mask,
                positions_to_keep=micro.positions,
                image_features=features,
                image_index=micro.image_index,
            )
        by_token = F.cross_entropy(logits.transpose(1, 2), micro.targets, ignore_index=-100, reduction="none")  # (B, T)
        counts = (micro.targets != -100).sum(1).clamp(min=1)
        sums[0] = (by_token.sum(1) / counts).sum() if stage.by_example else by_token.sum()
        over[0] = len(counts) if stage.by_example else counts.sum()
        if seen:
            mass = matched(seen[0], micro, cells, processor)
            sums[2], over[2] = -mass.clamp(min=1e-9).log().sum(), mass.numel()
    return torch.stack(sums), over


MATCHING_LAYER, MATCHING_HEADS = 1, 2


def matched(weights: torch.Tensor, micro: MicroBatch, cells: torch.Tensor, processor: Processor) -> torch.Tensor:
    """How much attention (B, N, S, Sk) names in the text, and " none", give to the patches that show it, (matches,)."""
    ids = micro.batch.input_ids
    patches = (ids == processor.config.image_token_id).nonzero()[:, 1].view(len(ids), -1)  # (B, I)
    to_patches = weights[:, :MATCHING_HEADS].gather(
        3, patches[:, None, None].expand(-1, MATCHING_HEADS, ids.shape[1], -1)
    )
    shown = name_tokens(processor)[ids][:, :, None] == cells[micro.image_index][:, None]  # (B, S, I)
    return (to_patches * shown[:, None]).sum(-1)[shown.any(-1)[:, None].expand(-1, MATCHING_HEADS, -1)]


@lru_cache
def name_tokens(processor: Processor) -> torch.Tensor:
    """By token (V,): itself, but for a name at the start of a text, whose token lacks the space, its other token."""
    tokens = torch.arange(processor.config.text.vocab_size)
    for name in scenes.NAMES:
        tokens[processor.encode(name)[-1]] = processor.encode(f" {name}")[-1]
    return tokens


@lru_cache
def places(processor: Processor, patches: int) -> list[tuple[list[int], torch.Tensor]]:
    """The words for above and below, left and right, as tokens, and which of the two holds for every patch (I,)."""
    cell, side = torch.arange(patches), int(patches**0.5)
    words = (("top", "bottom"), ("top left", "top right"))
    lower, right = cell // side >= side // 2, cell % side >= side // 2
    return [
        ([processor.encode(word)[-1] for word in pair], half.long())
        for pair, half in zip(words, (lower, right), strict=True)
    ]


def together(tensors: Sequence[torch.Tensor], world: World, source: int | None = None) -> None:
    """Replace each by its sum over the processes, or by that of the process `source`."""
    if world.size == 1:
        return
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    dist.all_reduce(flat) if source is None else dist.broadcast(flat, source)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.detach().copy_(part.view_as(tensor))


def pretrain(
    model: PaliGemma,
    processor: Processor,
    seed: int = 0,
    batch_size: int = 32,
    scale: float = 1.0,
    world: World = ALONE,
) -> None:
    """Train `model` in place through all stages; `scale` shortens them, for tests.

    The processes of `world` share every batch, and all end with the same weights.
    """
    model.train()
    optimizers, shared = make_optimizers(model, world), shares(model, world)
    for number, stage in enumerate(STAGES):
        total = max(1, int(stage.samples * scale) // batch_size)
        stage = replace(stage, samples=total * batch_size)
        optimizers[0].param_groups[0]["base_lr"] = stage.muon_lr
        bar = tqdm(
            batches(stage, number, batch_size, processor, seed, world),
            total=total,
            desc=f"stage {number}",
            unit="batch",
            disable=not world.is_first,
        )
        for step, (micro, cells) in enumerate(bar):
            warmup, decay = total // 50, total // 5
            factor = min(rate_factor(step, total, warmup, "constant"), (total - step) / max(1, decay))
            sums, over = losses(model, micro, cells, stage, processor)
            together([over], world)
            means = sums / over.clamp(min=1)
            (means @ torch.tensor([stage.answer_weight, stage.alignment_weight, stage.attention_weight])).backward()
            together([p.grad for p in model.parameters() if p.grad is not None], world)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                set_rates(optimizer, factor)
                optimizer.step()
            for rank, matrices in enumerate(shared):
                together(matrices, world, source=rank)
            model.zero_grad()
            if step % 20 == 0:
                told = means.detach()
                together([told], world)
                names = ("answer", "alignment", "attention")
                bar.set_postfix({name: f"{value:.3f}" for name, value in zip(names, told, strict=True)})
    model.eval()


def accuracies(
    model: PaliGemma, processor: Processor, count: int = 400, split: str = "test", world: World = ALONE
) -> dict[str, float]:
    """Exact match on whole answers, in percent, by task, and by answer type for VQA; `count` samples each."""
    result = {}
    for task in (*scenes.PROBES, "detect", "caption", "vqa", *scenes.NEEDLES):
        samples = [scenes.sample(task, split, i) for i in range(count * (3 if task == "vqa" else 1))]
        asks = [Ask(f"{i}", f"{s.image_id}", sample_record(s, split).picture, s.prefix) for i, s in enumerate(samples)]
        answers = ask_together(world, model, processor, asks, max_new_tokens=48)
        hits = [answer == s.suffix for answer, s in zip(answers, samples, strict=True)]
        result[task] = 100 * sum(hits) / len(hits)
        for answer_type in sorted({s.answer_type for s in samples} - {None}):
            typed = [hit for hit, s in zip(hits, samples, strict=True) if s.answer_type == answer_type]
            result[f"{task} {answer_type}"] = 100 * sum(typed) / len(typed)
    return {name: round(value, 1) for name, value in result.items()}


def make_base(args: argparse.Namespace, world: World) -> None:
    """The whole job, in each process of `world`; the first one writes and tells."""
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    tokenizer = BUNDLED_FOLDER / "tokenizer.model"
    processor = Processor(PRESETS["tiny"], load_tokenizer(tokenizer))
    model = initialize(PaliGemma(PRESETS["tiny"]), args.seed, position_std=0.5)
    if world.is_first:
        print(f"{count(model.parameters()):,} parameters, {sum(stage.samples for stage in STAGES):,} samples")
    pretrain(model, processor, args.seed, scale=args.scale, world=world)
    model = model.to(torch.bfloat16).float()  # what is measured is what is shipped, in half the bytes
    result = accuracies(model, processor, world=world)
    seconds = time.perf_counter() - started
    if not world.is_first:
        return
    export_model(model, args.out, dtype=torch.bfloat16, companions=[tokenizer])
    record = {
        "accuracy": result,
        "seed": args.seed,
        "scale": args.scale,
        "seconds": round(seconds),
        "processes": world.size,
        "threads": args.threads,
        "torch": torch.__version__,
        "tokenizer_sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
    }
    write_text(args.out / "pretraining.json", json.dumps(record, indent=1) + "\n")
    shipped = BUNDLED_FOLDER / "pretraining.json"
    reference = json.loads(shipped.read_text())["accuracy"] if shipped.exists() else {}
    print(f"\n{'exact match, %':<14}{'now':>8}{'shipped':>9}")
    for name, value in result.items():
        print(f"{name:<14}{value:8.1f}{reference.get(name, float('nan')):9.1f}")
    print(f"\n{args.out}: model.safetensors, config.json, tokenizer.model, pretraining.json; {seconds:.0f} s")


def one_of_many(rank: int, args: argparse.Namespace, port: int) -> None:
    """What each of several processes does. They find each other as those of torchrun do."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.processes, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    try:
        make_base(args, join_world("cpu"))
    finally:
        leave_world()


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if any(part.partition("=")[0] == "--text" for part in argv):
        importlib.import_module("train.text").main(argv)
        return
    parser = argparse.ArgumentParser(
        prog="python -m train.pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"), help="folder to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples (default: %(default)s)")
    parser.add_argument(
        "--processes",
        type=int,
        default=2 if (os.cpu_count() or 1) > 1 else 1,
        help="processes that share every batch; a small model gains more by them than by threads "
        "(default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="length of all stages (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.scale <= 0:
        raise UserError(f"--scale is {args.scale}, expected a positive number")
    if not 1 <= args.processes <= 32 or args.threads < 1:
        raise UserError(f"--processes {args.processes} --threads {args.threads}: expected 1 to 32, and at least 1")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise UserError(f"--out {args.out}: exists and is not empty: give a new folder")
    if args.processes == 1:
        make_base(args, ALONE)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_of_many, (args, port), args.processes)

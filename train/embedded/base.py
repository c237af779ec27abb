"""Make the embedded base from nothing: a PaliGemma of two million parameters, in minutes on two cores.

    python -m train.embedded.base --out runs/tiny
    torchrun --nproc_per_node=2 -m train.embedded.base …      processes that share every batch

In: the scenes of `eval/scenes.py` and their tokenizer. Out: a model folder in the published format, with
`pretraining.json` (accuracies, settings, the tokenizer's hash). `weights/tiny` is what this command writes.

What was needed, each part measured: dense tasks before questions; Muon on the matrices; a linear decay at the end;
large initial position embeddings; no loss on answers that cannot be known. Two auxiliary losses make
learning reliable across seeds: the alignment loss (each patch against the words for its object and its place; without
it nothing is learned), and the attention loss (two heads of one layer attend from a name to the patches that show it).
"""

import hashlib
import json
import random
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
from eval.records import sample_record
from eval.run import Ask
from model.attention import tapped
from model.common import run_command
from model.config import PRESETS
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import BUNDLED_FOLDER
from model.tokenizer import load_tokenizer
from train.data.batches import MicroBatch, collate
from train.distributed import World, ask_together, join_world, leave_world
from train.flags import flag, read_flags
from train.optim import MuonAdamW, Rule, count, matching, parameter_groups, rate_factor, set_rates
from train.run import check_empty
from weights.export import export_model

ALONE = World(0, 1, torch.device("cpu"))
MATCHING_LAYER, MATCHING_HEADS = 1, 2
MUON_LR, ADAMW_LR = 0.01, 1e-3


@dataclass(frozen=True)
class BaseOptions:
    """The flags of this command."""

    out: Path = flag(Path("runs/tiny"), "folder to write", metavar="DIR")
    seed: int = flag(0, "of weights and samples")
    scale: float = flag(1.0, "length of all stages", least=1e-6)


@dataclass(frozen=True)
class PretrainingStage:
    """A part of pre-training: samples, the shares of the tasks, Muon's learning rate, the weights of the three losses.

    The rate warms up over the first 2 % of the stage and falls linearly over its last 20 %.
    """

    samples: int
    shares: dict[str, float]
    muon_lr: float
    answer_weight: float = 1.0
    alignment_weight: float = 0.0
    attention_weight: float = 0.0
    by_example: bool = False  # mean of the answer loss over examples, as in big_vision, instead of over tokens


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
# Which of a picture's six questions is asked. Numbers are the hardest to learn: they come about as often as the others.
ASKED = (0, 1, 2, 2, 3, 4, 5, 2, 0, 1)
STAGES = (
    PretrainingStage(3_000, DENSE, MUON_LR, answer_weight=0.0, alignment_weight=1.0),
    PretrainingStage(20_000, DENSE, MUON_LR, alignment_weight=0.5, attention_weight=0.5),
    PretrainingStage(36_000, QUESTIONS, 0.005),
    # A mean over tokens favours captions and boxes over one-word answers; by_example from the start harms places.
    PretrainingStage(24_000, QUESTIONS, 0.005, by_example=True),
    # A second decay raised VQA by 7 points from 82 %; at twice this rate, by 1.
    PretrainingStage(24_000, QUESTIONS, 0.005, by_example=True),
)


def batches(
    stage: PretrainingStage, number: int, batch_size: int, processor: Processor, seed: int, world: World = ALONE
) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
    """This process's part of each batch, and the token of the name that each patch shows (pictures, I)."""
    rng = random.Random(f"pretrain/{seed}/{number}")
    tasks, shares = list(stage.shares), list(stage.shares.values())
    drawn = dict.fromkeys(tasks, number * 10_000_000)  # the stages share no samples
    piece = {name: processor.encode(f" {name}")[-1] for name in (*scenes.NAMES, scenes.NONE)}
    for _ in range(stage.samples // batch_size):
        wanted = []
        for task in rng.choices(tasks, shares, k=batch_size):
            index = drawn[task] * len(scenes.QUESTIONS) + rng.choice(ASKED) if task == "vqa" else drawn[task]
            wanted.append((task, index))
            drawn[task] += 1
        samples = [scenes.sample(task, "train", index, seed) for task, index in wanted[world.rank :: world.size]]
        micro = collate([sample_record(s, str(i)) for i, s in enumerate(samples)], processor)
        for row, s in enumerate(samples):
            for column, has_loss in enumerate(_has_loss(s, processor)):
                if not has_loss:
                    micro.targets[row, column] = -100
        first = {int(picture): row for row, picture in reversed(list(enumerate(micro.image_index)))}
        shown = [[piece[name] for name in samples[first[i]].scene.squares] for i in range(len(first))]
        yield micro, torch.tensor(shown)


def _has_loss(sample: scenes.Sample, processor: Processor) -> list[bool]:
    """Which tokens of the answer have a loss: not those within spans that the picture does not determine."""
    if not sample.unsupervised:
        return []
    start, result = 0, []
    for piece in processor.tokenizer.encode(sample.suffix, out_type=str):
        result.append(not any(a <= start < b for a, b in sample.unsupervised))
        start += len(piece)
    return result


def make_optimizer(model: PaliGemma) -> MuonAdamW:
    """Muon (Jordan 2024) for the matrices inside the layers, AdamW for embeddings, norms, biases and the patches."""
    groups = parameter_groups(model, [Rule(matching(model, ".*"), MUON_LR)])
    return MuonAdamW(groups, (0.9, 0.98), ADAMW_LR / MUON_LR)


def losses(
    model: PaliGemma, micro: MicroBatch, shown: torch.Tensor, stage: PretrainingStage, processor: Processor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the three losses (3,), and the number of terms in each (3,).

    They are the cross-entropy of the answers; that of each patch against the words for its object and its place; and
    -log of the attention from names to the patches that show them. shown: (pictures, I) token of what each patch shows.
    """
    features = model.encode_images(micro.batch.pixel_values)
    sums, terms = [features.new_zeros(()) for _ in range(3)], torch.zeros(3)
    if stage.alignment_weight:
        words = model.language_model.embed_tokens.weight
        sums[1] = F.cross_entropy((features @ words.T).flatten(0, 1), shown.flatten(), reduction="sum")
        for ids, sides in places(processor, shown.shape[1]):
            logits = (features @ words[ids].T).flatten(0, 1)
            sums[1] = sums[1] + F.cross_entropy(logits, sides.repeat(len(features)), reduction="sum")
        terms[1] = shown.numel()
    if stage.answer_weight:
        batch, weights = micro.batch, []
        attention = model.language_model.layers[MATCHING_LAYER].self_attn
        with tapped({attention: weights.append} if stage.attention_weight else {}):
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
        terms[0] = len(counts) if stage.by_example else counts.sum()
        if weights:
            mass = matched(weights[0], micro, shown, processor)
            sums[2], terms[2] = -mass.clamp(min=1e-9).log().sum(), mass.numel()
    return torch.stack(sums), terms


def matched(weights: torch.Tensor, micro: MicroBatch, shown: torch.Tensor, processor: Processor) -> torch.Tensor:
    """The share of their attention that names in the text, and " none", give to the patches that show them: (matches,).

    weights: (B, N, S, Sk), of which the first MATCHING_HEADS heads count. shown: (pictures, I) tokens.
    """
    ids = micro.batch.input_ids
    patches = (ids == processor.config.image_token_id).nonzero()[:, 1].view(len(ids), -1)  # (B, I)
    to_patches = weights[:, :MATCHING_HEADS].gather(
        3, patches[:, None, None].expand(-1, MATCHING_HEADS, ids.shape[1], -1)
    )
    is_match = name_tokens(processor)[ids][:, :, None] == shown[micro.image_index][:, None]  # (B, S, I)
    return (to_patches * is_match[:, None]).sum(-1)[is_match.any(-1)[:, None].expand(-1, MATCHING_HEADS, -1)]


@lru_cache
def name_tokens(processor: Processor) -> torch.Tensor:
    """A map of tokens (V,): a name without the leading space to the one with it, all others to themselves."""
    tokens = torch.arange(processor.config.text.vocab_size)
    for name in scenes.NAMES:
        tokens[processor.encode(name)[-1]] = processor.encode(f" {name}")[-1]
    return tokens


@lru_cache
def places(processor: Processor, patches: int) -> list[tuple[list[int], torch.Tensor]]:
    """The tokens of the words for above and below, left and right, and which of the two fits each patch (I,)."""
    patch, side = torch.arange(patches), int(patches**0.5)
    words = (("top", "bottom"), ("top left", "top right"))
    lower, right = patch // side >= side // 2, patch % side >= side // 2
    return [
        ([processor.encode(word)[-1] for word in pair], half.long())
        for pair, half in zip(words, (lower, right), strict=True)
    ]


def add_gradients(model: PaliGemma, world: World) -> None:
    """Replace each gradient by its sum over the processes."""
    if world.size == 1:
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def pretrain(
    model: PaliGemma,
    processor: Processor,
    seed: int = 0,
    batch_size: int = 32,
    scale: float = 1.0,
    world: World = ALONE,
    stages: Sequence[PretrainingStage] = STAGES,
) -> None:
    """Train `model` in place through all stages; `scale` shortens them, for tests.

    The processes of `world` share every batch and end with the same weights.
    """
    model.train()
    optimizer = make_optimizer(model)
    for number, stage in enumerate(stages):
        total = max(1, int(stage.samples * scale) // batch_size)
        stage = replace(stage, samples=total * batch_size)
        weights = torch.tensor([stage.answer_weight, stage.alignment_weight, stage.attention_weight])
        optimizer.param_groups[-1]["base_lr"] = stage.muon_lr  # the last group is Muon's
        bar = tqdm(
            batches(stage, number, batch_size, processor, seed, world),
            total=total,
            desc=f"stage {number}",
            unit="batch",
            disable=not world.is_first,
        )
        for step, (micro, shown) in enumerate(bar):
            sums, terms = losses(model, micro, shown, stage, processor)
            means = sums / torch.tensor(world.totals(*terms.tolist())).clamp(min=1)
            (means @ weights).backward()
            add_gradients(model, world)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            decay = (total - step) / max(1, total // 5)
            set_rates(optimizer, min(rate_factor(step, total, total // 50, "constant"), decay))
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 0:
                answer, alignment, attention = world.totals(*means.tolist())
                bar.set_postfix(answer=f"{answer:.3f}", alignment=f"{alignment:.3f}", attention=f"{attention:.3f}")
    model.eval()


def accuracies(
    model: PaliGemma, processor: Processor, count: int = 400, split: str = "test", world: World = ALONE
) -> dict[str, float]:
    """Exact match of answers, in percent, by task, and by answer type for VQA; `count` samples each."""
    result = {}
    for task in (*scenes.PROBES, "detect", "caption", "vqa", *scenes.NEEDLES):
        samples = [scenes.sample(task, split, i) for i in range(count * (3 if task == "vqa" else 1))]
        drawn = [sample_record(s, split) for s in samples]
        asks = [Ask(f"{i}", record.key, record.pictures[0], record.prefix) for i, record in enumerate(drawn)]
        answers = ask_together(world, model, processor, asks, max_new_tokens=48)
        hits = [answer == s.suffix for answer, s in zip(answers, samples, strict=True)]
        result[task] = 100 * sum(hits) / len(hits)
        for answer_type in sorted({s.answer_type for s in samples} - {None}):
            typed = [hit for hit, s in zip(hits, samples, strict=True) if s.answer_type == answer_type]
            result[f"{task} {answer_type}"] = 100 * sum(typed) / len(typed)
    return {name: round(value, 1) for name, value in result.items()}


def make_base(options: BaseOptions, world: World) -> None:
    """Train, evaluate and export the base, in every process of `world`; the first one writes and prints."""
    started, out, tokenizer = time.perf_counter(), options.out, BUNDLED_FOLDER / "tokenizer.model"
    torch.manual_seed(options.seed)
    processor = Processor(PRESETS["tiny"], load_tokenizer(tokenizer))
    model = initialize(PaliGemma(PRESETS["tiny"]), options.seed, position_std=0.5)
    if world.is_first:
        print(f"{count(model.parameters()):,} parameters, {sum(stage.samples for stage in STAGES):,} samples")
    pretrain(model, processor, options.seed, scale=options.scale, world=world)
    model = model.to(torch.bfloat16).float()  # evaluate the weights as they are written, in bf16
    result = accuracies(model, processor, max(8, round(400 * min(1.0, options.scale))), world=world)
    seconds = time.perf_counter() - started
    if not world.is_first:
        return
    shipped = BUNDLED_FOLDER / "pretraining.json"
    record = {
        "accuracy": result,
        "seed": options.seed,
        "scale": options.scale,
        "seconds": round(seconds),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "tokenizer_sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
    }
    texts = {"pretraining.json": json.dumps(record, indent=1) + "\n"}
    export_model(model, out, dtype=torch.bfloat16, companions=[tokenizer], texts=texts)
    reference = json.loads(shipped.read_text())["accuracy"] if shipped.exists() else {}
    print(f"\n{'exact match, %':<14}{'now':>8}{'shipped':>9}")
    for name, value in result.items():
        print(f"{name:<14}{value:8.1f}{reference.get(name, float('nan')):9.1f}")
    print(f"\n{out}: model.safetensors, config.json, tokenizer.model, pretraining.json; {seconds:.0f} s")


def main(argv: Sequence[str] | None = None) -> None:
    options = read_flags(BaseOptions, "train.embedded.base", __doc__, argv)
    check_empty(options.out)
    try:
        make_base(options, join_world("cpu"))
    finally:
        leave_world()


if __name__ == "__main__":
    run_command(main)

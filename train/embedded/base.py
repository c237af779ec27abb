"""Make the embedded base from nothing: a PaliGemma of two million parameters, in minutes on two cores.

    python -m train.embedded.base --out runs/tiny
    torchrun --nproc_per_node=2 -m train.embedded.base …      processes that share every batch: `weights/tiny`

In: the scenes of `eval/scenes.py` and their tokenizer. Out: a model folder in the published format, with accuracies.

Measured, each part is needed: dense tasks before questions; Muon on the matrices; a linear decay at the end; large
initial position embeddings; no loss on answers that the picture does not determine. Two auxiliary losses make learning
reliable across seeds: alignment (each patch predicts the words for its object and its place; without it nothing is
learned), and attention (two heads of one layer attend from a name to the patches that show it).
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from eval import scenes
from eval.question import Question
from eval.records import sample_record
from model.attention import tapped
from model.common import run_command
from model.config import PRESETS
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import BUNDLED_FOLDER
from model.tokenizer import load_tokenizer
from train.data.batches import MicroBatch, collate
from train.distributed import World, ask_together, joined_world
from train.flags import flag, read_flags
from train.optim import MuonAdamW, Rule, count, matching, parameter_groups, rate_factor, set_rates
from train.run import check_empty
from train.supervised import forward
from weights.export import export_model

BATCH = 32
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
    """A part of pre-training: samples, the shares of the tasks, Muon's learning rate, the weights of the losses of
    answers, alignment and attention. by_example: the loss of answers is a mean over examples, as in big_vision, instead
    of over tokens. The rate warms up over the first 2 % of the stage and falls linearly over its last 20 %."""

    samples: int
    shares: dict[str, float]
    muon_lr: float
    weights: tuple[float, float, float] = (1.0, 0.0, 0.0)
    by_example: bool = False


DENSE = {"scan": 0.2, "detect_all": 0.7, "locate": 1.0, "count": 1.0, "exist": 1.0}
QUESTIONS = {"vqa": 3.0, "count": 0.7} | dict.fromkeys(("exist", "locate", "vertical", "horizontal"), 0.2)
QUESTIONS |= {"cell": 0.6, "caption": 0.4, "detect_all": 0.2, "detect": 1.0}
# Which of a picture's six questions is asked. Numbers are the hardest to learn: they come about as often as the others.
ASKED = (0, 1, 2, 2, 3, 4, 5, 2, 0, 1)
STAGES = (
    PretrainingStage(3_000, DENSE, MUON_LR, (0.0, 1.0, 0.0)),
    PretrainingStage(20_000, DENSE, MUON_LR, (1.0, 0.5, 0.5)),
    PretrainingStage(36_000, QUESTIONS, 0.005),
    # A mean over tokens favours captions and boxes over one-word answers; by_example from the start harms places.
    PretrainingStage(24_000, QUESTIONS, 0.005, by_example=True),
    # A second decay raised VQA by 7 points from 82 %; at twice this rate, by 1.
    PretrainingStage(24_000, QUESTIONS, 0.005, by_example=True),
)


def batches(
    stage: PretrainingStage, number: int, processor: Processor, seed: int, world: World, rows: int = BATCH
) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
    """This process's part of each batch of `rows`, and the token of the name that each patch shows (pictures, I)."""
    rng = random.Random(f"pretrain/{seed}/{number}")
    drawn = dict.fromkeys(stage.shares, number * 10_000_000)  # the stages share no samples
    piece = {name: processor.encode(f" {name}")[-1] for name in (*scenes.NAMES, scenes.NONE)}
    for _ in range(stage.samples // rows):
        wanted = []
        for task in rng.choices([*stage.shares], [*stage.shares.values()], k=rows):
            index = drawn[task] * len(scenes.QUESTIONS) + rng.choice(ASKED) if task == "vqa" else drawn[task]
            wanted.append((task, index))
            drawn[task] += 1
        samples = [scenes.sample(task, "train", index, seed) for task, index in wanted[world.rank :: world.size]]
        micro = collate([sample_record(s, str(i)) for i, s in enumerate(samples)], processor)
        for row, s in enumerate(samples):  # tokens that the picture does not determine are not learned
            starts = accumulate(map(len, processor.tokenizer.encode(s.suffix, out_type=str)[:-1]), initial=0)
            unknown = [any(a <= start < b for a, b in s.unsupervised) for start in starts]
            micro.targets[row, torch.tensor(unknown).nonzero()[:, 0]] = -100
        by_picture = dict(zip(micro.batch.image_index.tolist(), samples, strict=True))
        shown = [[piece[name] for name in s.scene.squares] for s in by_picture.values()]
        yield micro, torch.tensor(shown)


def losses(
    model: PaliGemma, micro: MicroBatch, shown: torch.Tensor, stage: PretrainingStage, processor: Processor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the three losses (3,), and the number of terms in each (3,): the cross-entropy of the answers; that of
    each patch against the words for its object and its place; and -log of the attention from names to the patches that
    show them. shown: (pictures, I) token of what each patch shows."""
    features, weights = model.encode_images(micro.batch.pixel_values), []
    sums, terms = [features.new_zeros(()) for _ in range(3)], torch.zeros(3)
    has_answers, has_alignment, has_attention = map(bool, stage.weights)
    if has_alignment:
        words = model.language_model.embed_tokens.weight
        for ids, wanted in [(slice(None), shown), *places(processor)]:
            logits, wanted = features @ words[ids].T, wanted.expand_as(shown)
            sums[1] = sums[1] + F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        terms[1] = shown.numel()
    if has_answers:
        attention = model.language_model.layers[MATCHING_LAYER].self_attn
        with tapped({attention: weights.append} if has_attention else {}):
            logits = forward(model, micro, image_features=features)
        by_token = F.cross_entropy(logits.transpose(1, 2), micro.targets, reduction="none")  # (B, T)
        counts = (micro.targets != -100).sum(1).clamp(min=1)
        sums[0] = (by_token.sum(1) / counts).sum() if stage.by_example else by_token.sum()
        terms[0] = len(counts) if stage.by_example else counts.sum()
        if has_attention:
            mass = matched(weights[0], micro, shown, processor)
            sums[2], terms[2] = -mass.clamp(min=1e-9).log().sum(), mass.numel()
    return torch.stack(sums), terms


def matched(weights: torch.Tensor, micro: MicroBatch, shown: torch.Tensor, processor: Processor) -> torch.Tensor:
    """The share of their attention that names in the text, and " none", give to the patches that show them: (matches,).
    weights: (B, N, S, Sk), of which the first MATCHING_HEADS heads count. shown: (pictures, I) tokens."""
    ids = micro.batch.input_ids
    patches = (ids == processor.config.image_token_id).nonzero()[:, 1].view(len(ids), -1)  # (B, I)
    heads = weights[:, :MATCHING_HEADS]
    to_patches = heads.gather(3, patches[:, None, None].expand(*heads.shape[:3], -1))
    tokens = torch.arange(processor.config.text.vocab_size)  # names without the leading space count as those with it
    for name in scenes.NAMES:
        tokens[processor.encode(name)[-1]] = processor.encode(f" {name}")[-1]
    is_match = tokens[ids][:, :, None] == shown[micro.batch.image_index][:, None]  # (B, S, I)
    return (to_patches * is_match[:, None]).sum(-1)[is_match.any(-1)[:, None].expand(heads.shape[:3])]


def places(processor: Processor) -> list[tuple[list[int], torch.Tensor]]:
    """The tokens of the words for above and below, left and right, and which of the two fits each patch (I,)."""
    side = scenes.GRID
    half = torch.arange(side) // (side // 2)
    pairs = (("top", "bottom"), half.repeat_interleave(side)), (("top left", "top right"), half.repeat(side))
    return [([processor.encode(word)[-1] for word in words], sides) for words, sides in pairs]


def pretrain(model: PaliGemma, processor: Processor, seed: int, scale: float, world: World) -> None:
    """Train `model` in place through all stages, times `scale`. The processes of `world` share every batch."""
    model.train()
    groups = parameter_groups(model, [Rule(matching(model, ".*"), MUON_LR)])
    optimizer = MuonAdamW(groups, (0.9, 0.98), ADAMW_LR / MUON_LR)
    for number, stage in enumerate(STAGES):
        stage = replace(stage, samples=max(BATCH, int(stage.samples * scale)))
        total = stage.samples // BATCH
        optimizer.param_groups[-1]["base_lr"] = stage.muon_lr  # the last group is Muon's
        drawn = batches(stage, number, processor, seed, world)
        for step, (micro, shown) in enumerate(tqdm(drawn, f"stage {number}", total, disable=not world.is_first)):
            sums, terms = losses(model, micro, shown, stage, processor)
            means = sums / torch.tensor(world.totals(*terms.tolist())).clamp(min=1)
            (means @ torch.tensor(stage.weights)).backward()
            for parameter in model.parameters() if world.size > 1 else ():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            clip_grad_norm_(model.parameters(), 1.0)
            decay = (total - step) / max(1, total // 5)
            set_rates(optimizer, min(rate_factor(step, total, total // 50, "constant"), decay))
            optimizer.step()
            optimizer.zero_grad()
    model.eval()


def accuracies(model: PaliGemma, processor: Processor, count: int, world: World) -> dict[str, float]:
    """Exact match of answers in the test split, in percent, by task; `count` a task."""
    result = {}
    for task in (*scenes.PROBES, "detect", "caption", "vqa", *scenes.NEEDLES):
        samples = [scenes.sample(task, "test", i) for i in range(count * (3 if task == "vqa" else 1))]
        records = [sample_record(s, "test") for s in samples]
        asks = [Question(f"{i}", record.key, record.pictures[0], record.prefix) for i, record in enumerate(records)]
        answers = ask_together(world, model, processor, asks, max_new_tokens=48)
        hits = [answer == s.suffix for answer, s in zip(answers, samples, strict=True)]
        result[task] = round(100 * sum(hits) / len(hits), 1)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    options = read_flags(BaseOptions, "train.embedded.base", __doc__, argv)
    check_empty(options.out)
    with joined_world("cpu") as world:
        torch.manual_seed(options.seed)
        tokenizer = BUNDLED_FOLDER / "tokenizer.model"
        processor = Processor(PRESETS["tiny"], load_tokenizer(tokenizer))
        model = initialize(PaliGemma(PRESETS["tiny"]), options.seed, position_std=0.5)
        pretrain(model, processor, options.seed, options.scale, world)
        model = model.to(torch.bfloat16).float()  # evaluate the weights as they are written, in bf16
        result = accuracies(model, processor, max(8, round(400 * min(1.0, options.scale))), world)
        if not world.is_first:
            return
        record = {"accuracy": result, "seed": options.seed, "scale": options.scale, "processes": world.size}
        record |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        record["tokenizer_sha256"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        texts = {"pretraining.json": json.dumps(record, indent=1) + "\n"}
        export_model(model, options.out, dtype=torch.bfloat16, companions=[tokenizer], texts=texts)
        print(f"exact match, %: {result}\n{options.out}: {count(model.parameters()):,} parameters")


if __name__ == "__main__":
    run_command(main)

"""An alignment stage for pictures of one's own: the vision tower learns from the answers before the
decoder reads it.

In: a model and the records of its fine-tuning. Out: the same model with another vision tower, in
place.

A tower learns shapes and colors slowly through the decoder: most of the time goes into reading
questions. Here a small head, thrown away afterwards, predicts the answer from the projected patches
and the number of the question (as the baselines of VQA do: Antol et al. 2015; Zhou et al. 2015), at
a fraction of the cost.
"""

import contextlib
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from eval.data.records import Record
from eval.progress import Bar
from eval.question import parts_of
from model.common import UserError
from model.device import autocast_of
from model.images import to_pixels
from model.paligemma import PaliGemma
from model.siglip import Siglip
from model.source import BUNDLED_FOLDER
from train.checkpoint import Progress, load_checkpoint, save_checkpoint
from train.data.batches import shifted
from train.distributed import World
from train.optim import MuonAdamW, Rule, parameter_groups, parameter_names, rate_factor, set_rates
from train.run import Interrupted, catch_signals
from train.settings import Settings
from weights.masks import read_arrays

PICTURES = 32  # of a step
MOST_PASSES = 50  # over the data
CACHED = 1 << 28  # bytes of pictures that are kept in memory
COMMON = 1000  # questions, and answers, that have a number of their own
MUON_LR, ADAMW_RATIO, HEAD_LR = 0.02, 0.05, 3e-3
SIDE = 64  # pixels of a picture of the small tower
PATCH = 8  # and of its patches
SMALL_TOWER = BUNDLED_FOLDER / "tower.safetensors"


def small_tower(model: PaliGemma) -> None:
    """Give the embedded base, in place, the small tower that lies beside it. It has learned strokes,
    colors, places and angles, also under noise, from 371,000 drawn pictures of signs; it has seen no
    letter, no digit and no photograph. Raises UserError for a base of other sizes."""
    vision = replace(model.config.vision, image_size=SIDE, patch_size=PATCH)
    tower = Siglip(vision)
    try:
        tower.load_state_dict(read_arrays(SMALL_TOWER))
    except RuntimeError:  # of other names or sizes
        raise UserError(
            "--new-tower: the small tower fits the embedded base alone: leave it out"
        ) from None
    old = model.vision_tower.embeddings.patch_embedding.weight
    model.config = replace(model.config, vision=vision)
    model.vision_tower = tower.to(old)


class AnswerHead(nn.Module):
    """Logits (2, N, A) of the answers to N questions: two readings of patches (B, I, H).

    questions (B, Q): numbers. is_asked (B, Q): True at N places, False at padding. The first
    reading attends to the patches, as the decoder will: a mean alone loses places. The second takes
    the greatest value of each channel: it learns small objects in noise sooner. Each reading has a
    loss of its own.
    """

    def __init__(self, width: int, questions: int, answers: int):
        super().__init__()
        inner = 256
        self.key, self.value, self.mean, self.most = (nn.Linear(width, inner) for _ in range(4))
        self.query, self.question = nn.Embedding(questions, inner), nn.Embedding(questions, inner)
        self.prior, self.answer = nn.Embedding(questions, answers), nn.Linear(inner, answers)
        nn.init.normal_(self.question.weight, 1.0, 0.5)
        nn.init.zeros_(self.prior.weight)

    def forward(self, patches: Tensor, questions: Tensor, is_asked: Tensor) -> Tensor:
        parts = self.query(questions), self.key(patches), self.value(patches)
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in parts)  # four heads
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        attended = attended + self.mean(patches.mean(1))[:, None]
        greatest = self.most(patches).amax(1)[:, None].expand_as(attended)
        seen = torch.stack((attended, greatest))[:, is_asked]
        questions = questions[is_asked]
        return self.answer(F.gelu(seen) * self.question(questions)) + self.prior(questions)


def align(
    model: PaliGemma,
    records: Sequence[Record],
    settings: Settings,
    world: World,
    run: Path | None,
    progress: Progress,
) -> list[float]:
    """Train the vision tower for `settings.align` steps of PICTURES pictures of `records`, or for
    MOST_PASSES passes if these are fewer, in place.

    It goes on from the checkpoint of `progress`, and writes its own to `run`, if that is given.
    Returns the loss of each step. Records without exactly one picture, and pictures that cannot be
    read, are left out. Every process does the same work and takes the tower of the first. Raises
    UserError for a loss that is not finite, and Interrupted after a signal, once all is saved.
    """
    # 1. the head, and one optimizer for both
    asked = numbered_questions(records)
    pictures = {record.key: record.pictures[0] for record in records if record.key in asked}
    # no gradient is scaled here
    autocast = "none" if settings.autocast == "fp16" else settings.autocast
    head, optimizer = open_head(model, settings.seed)
    begin = progress.aligned
    if run and begin:
        load_checkpoint(run, progress, optimizer)

    # 2. the pictures of each step
    steps = plan_pictures(sorted(asked), settings)
    side = model.config.vision.image_size

    @lru_cache(CACHED // (12 * side**2))  # every pass reads each picture
    def pixels_of(key: str) -> Tensor | None:
        with contextlib.suppress(UserError):
            return to_pixels(pictures[key], side)

    # 3. the steps
    losses = []
    bar = Bar(
        steps[begin:],
        "alignment",
        total=len(steps),
        initial=begin,
        disable=not world.is_first,
    )
    alone = replace(world, size=1)
    with catch_signals() as received:
        for step, keys in enumerate(bar, begin):
            torch.manual_seed(settings.seed * 1_000_003 + step)  # no random state is saved
            found = {key: pixels_of(key) for key in keys}
            opened = {key: pixels for key, pixels in found.items() if pixels is not None}
            if opened:
                loss = loss_of(model, head, opened, asked, autocast)
                losses.append(loss.item())
                if not math.isfinite(losses[-1]):
                    raise UserError(
                        f"alignment, step {step}: the loss is {losses[-1]}: leave --align or "
                        "--autocast out"
                    )
                set_rates(optimizer, rate_factor(step, len(steps), 20, "cosine"))
                update(loss, model, head, optimizer)
                bar.set_postfix({"loss": f"{losses[-1]:.3f}"}, refresh=False)
            progress.aligned = step + 1
            if run and (received or progress.aligned % settings.checkpoint_every == 0):
                save_checkpoint(run, progress, model, optimizer, alone)
            if received:
                raise Interrupted(received[0])
    if world.size > 1:  # GPUs need not agree to the bit
        for parameter in model.vision_tower.parameters():
            dist.broadcast(parameter.detach(), 0)
    return losses


def open_head(model: PaliGemma, seed: int) -> tuple[AnswerHead, MuonAdamW]:
    """A new head, and an optimizer of it and of the vision tower."""
    torch.manual_seed(seed)
    head = AnswerHead(model.config.text.hidden_size, COMMON + 1, COMMON)
    head.to(model.device)
    tower = model.vision_tower
    heads = parameter_groups(head, [Rule(parameter_names(head, ".*"), HEAD_LR)])
    towers = parameter_groups(tower, [Rule(parameter_names(tower, ".*"), MUON_LR)])
    return head, MuonAdamW(towers, (0.9, 0.98), ADAMW_RATIO, heads)


def plan_pictures(keys: Sequence[str], settings: Settings) -> list[list[str]]:
    """The pictures of each step, by key; every pass has each once."""
    if not keys:
        print("alignment is left out: no answer about one picture occurs twice", file=sys.stderr)
    rng = random.Random(f"align/{settings.seed}")
    passes = (rng.sample(keys, len(keys)) for _ in range(MOST_PASSES))
    order = list(islice(chain.from_iterable(passes), settings.align * PICTURES))
    return parts_of(order, PICTURES)


def update(loss: Tensor, model: PaliGemma, head: AnswerHead, optimizer: MuonAdamW) -> None:
    """A step of tower and head; the projector's gradients are thrown away."""
    loss.backward()
    nn.utils.clip_grad_norm_([*model.vision_tower.parameters(), *head.parameters()], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()


def loss_of(
    model: PaliGemma,
    head: AnswerHead,
    opened: Mapping[str, Tensor],
    asked: Mapping[str, list[tuple[int, int]]],
    autocast: str,
) -> Tensor:
    """The loss of all questions about pictures (3, R, R) by key, the mean of both readings."""
    device = model.device
    numbers = [torch.tensor(asked[key]) for key in opened]  # (Q, 2): question, answer
    padded = pad_sequence(numbers, batch_first=True, padding_value=-1).to(device)
    questions, answers = padded.unbind(2)
    pixels = shifted(torch.stack([*opened.values()]))
    with autocast_of(autocast, device):
        patches = model.encode_images(pixels.to(device)).float()
    is_asked = answers >= 0
    logits = head(patches, questions.clamp(min=0), is_asked)
    return F.cross_entropy(logits.flatten(0, 1), answers[is_asked].repeat(2))


def numbered_questions(records: Sequence[Record]) -> dict[str, list[tuple[int, int]]]:
    """By picture, the numbers of its questions and answers. Question 0 stands for all that are not
    common. Boxes are left out, and answers that are not common or occur once."""
    usable = [r for r in records if len(r.pictures) == 1 and r.suffix and "<loc" not in r.suffix]
    questions = Counter(record.prefix for record in usable)
    answers = Counter(record.suffix for record in usable)
    question_number = {
        text: number for number, (text, _) in enumerate(questions.most_common(COMMON), 1)
    }
    answer_number = {
        text: number
        for number, (text, times) in enumerate(answers.most_common(COMMON))
        if times > 1
    }
    numbers = defaultdict(list)
    for record in usable:
        if record.suffix in answer_number:
            question = question_number.get(record.prefix, 0)
            numbers[record.key].append((question, answer_number[record.suffix]))
    return numbers


def is_taught(records: Sequence[Record]) -> bool:
    """Whether `align` teaches the tower with most of the records. Such a tower is then frozen;
    another one learns on with the decoder."""
    return 2 * sum(map(len, numbered_questions(records).values())) > len(records)

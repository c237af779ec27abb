"""What a language model does with its context: `python -m eval.systems.text all RUN…`, or one of

nll           negative log-likelihood of a token in nats, by the length of the context
recall        accuracy on one of N records
needle        accuracy on one of N needles in a text; needle-map by N and their depth in %
attention     share of the attention on the needle asked for, by its depth; attention-noise on the
              rest of the text
examples      accuracy by the number of examples in context; examples-margin between the best and
              worst of their orders

In: run folders of `train.systems.text`. Out: tables of each, with 95 % intervals over examples, on
the test split. Protocols: Ye et al. 2024, sections 3.3 (context), 3.4 (needles, attention) and 3.5
(examples), at a smaller size.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from eval.command import add_flag, command_parser, positive
from eval.explore.record import deciding_maps
from eval.report import interval_of, interval_text, markdown_table
from eval.systems.needles import shares_of
from eval.systems.text.corpus import Corpus, kept_corpus
from eval.systems.text.tasks import LETTERS, SHOWN, Document, Tasks
from model.common import UserError, read_bytes, read_json, shown
from model.device import choose_device
from model.generate import NonFiniteError, check_finite, finite_rows
from model.systems.configs import BOS, PAD
from model.systems.language import TextModel
from weights.load import load_model

SPLIT, SEED = "test", 7
RECALL = (4, 8, 16, 32, 64, 128)  # records; up to 64 in training
NEEDLES = (1, 4, 16, 32, 64)  # in a text
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
EXAMPLES = (4, 8, 16, 32, 64)
ORDERS = 6  # of the same examples
BATCH = 64  # rows per forward pass


class Scores(NamedTuple):
    """One panel: the score of each example, its label (row of the table) and its group; examples of
    one group are not independent."""

    labels: Sequence
    groups: Sequence
    values: Sequence[float]


Panels = dict[str, Scores]


@torch.no_grad()
def nll(
    model: TextModel,
    corpus: Corpus,
    length: int,
    limit: int,
    split: str = SPLIT,
) -> Panels:
    """Negative log-likelihood of a token, in nats, by how many tokens of its own document the model
    has seen, on `limit` windows of `length` tokens; label: the longest context of the bin. Under
    "all" each bin weighs the same. Raises UserError if no document is that long."""
    device = next(model.parameters()).device
    rows = []
    for number, (place, document) in enumerate(windows(corpus, length, limit, split), 1):
        tokens = corpus.ids[split][place : place + length].tolist()
        ids = torch.tensor([[BOS, *tokens]], device=device)
        logits = model(ids[:, :-1])
        check_finite(logits, f"nll test {number}")
        losses = F.cross_entropy(logits[0], ids[0, 1:], reduction="none").cpu().numpy()
        for first, last in context_bins(length):
            rows.append((last, document, float(losses[first:last].mean())))
    return {"nll": Scores(*zip(*rows, strict=True))}


def windows(
    corpus: Corpus,
    length: int,
    limit: int,
    split: str = SPLIT,
) -> list[tuple[int, int]]:
    """(start, document) of up to `limit` windows of `length` tokens, evenly taken from those that
    lie side by side."""
    places = []
    for document, (start, end) in enumerate(pairwise(corpus.starts[split].tolist())):
        places += [(place, document) for place in range(start, end - length + 1, length)]
    if not places:
        raise UserError(
            f"no document of the {split} split has {length} tokens: give longer documents"
        )
    return places[:: -(-len(places) // limit)]


def context_bins(length: int) -> list[tuple[int, int]]:
    """Positions [first, last) of each bin: up to 16, then doubled, the last ends at `length`."""
    inner = [16 << n for n in range(length.bit_length()) if 16 << n < length]
    return list(pairwise([0, *inner, length]))


def recall(
    model: TextModel,
    corpus: Corpus,
    length: int,
    limit: int,
    split: str = SPLIT,
) -> Panels:
    """Accuracy on one of N records, `limit` tests of each N that fits."""
    tasks = Tasks(corpus, split)
    dice = Random(f"recall/{split}/{SEED}")
    numbers = [n for n in RECALL if n + 4 < length for _ in range(limit)]
    right = hits(model, [tasks.recall(dice, n, 1) for n in numbers], "recall")
    return {"recall": Scores(numbers, range(len(right)), right)}


def needle_tests(
    corpus: Corpus,
    length: int,
    limit: int,
    numbers: Sequence[int] = NEEDLES,
    split: str = SPLIT,
) -> list[tuple[int, float, Document]]:
    """(N, depth, document) of `limit` tests of each number of needles that fits, every depth as
    often as another."""
    tasks = Tasks(corpus, split)
    dice = Random(f"needle/{split}/{SEED}")
    tests = []
    for n in numbers:
        if 3 * n < length:
            for test in range(limit):
                depth = DEPTHS[test % len(DEPTHS)]
                tests.append((n, depth, tasks.needles(dice, length, n, 1, depth)))
    return tests


def needle(
    model: TextModel,
    corpus: Corpus,
    length: int,
    limit: int,
    split: str = SPLIT,
) -> Panels:
    """Accuracy on one of N needles, `limit` tests of each N; the same by N and depth."""
    drawn = needle_tests(corpus, length, limit, split=split)
    numbers, depths, documents = zip(*drawn, strict=True)
    right = hits(model, documents, "needle")
    tests = range(len(documents))
    places = [(n, 100 * depth) for n, depth in zip(numbers, depths, strict=True)]
    return {
        "needle": Scores(numbers, tests, right),
        "needle-map": Scores(places, tests, right),
    }


def attention(model: TextModel, corpus: Corpus, length: int, limit: int) -> Panels:
    """Shares of the attention that predicts a needle's value, by the needle's depth: on its line,
    and on the noise, which is the rest of the text and the other needles. For the largest number of
    needles that fits."""
    most = max(n for n in NEEDLES if 3 * n < length)
    tests = needle_tests(corpus, length, limit, [most])
    depths = [100 * depth for _, depth, _ in tests]
    shares = []
    for number, (*_, document) in enumerate(tests, 1):
        shares.append(attention_shares(model, document, f"attention test {number}"))
    of_needles, of_noise = zip(*shares, strict=True)
    return {
        "attention": Scores(depths, range(limit), of_needles),
        "attention-noise": Scores(depths, range(limit), of_noise),
    }


@torch.no_grad()
def attention_shares(
    model: TextModel, document: Document, name: str = "document"
) -> tuple[float, float]:
    """Of |A|, or |A₁ − λ·A₂|, the share on the line of the first needle asked for, and on the rest
    of its haystack, at the position that decides the answer; the mean over layers and heads.
    Absolute values, since a difference may be negative, and the norm by head takes any factor
    out."""
    place = document.answers[0]
    first = document.needles[0]
    ids = torch.tensor([document.ids[:place]], device=model.device)
    rows, _ = deciding_maps(model, place - 1, name, input_ids=ids)
    maps = torch.stack(rows).cpu().numpy()
    answer, haystack, *_ = shares_of(maps, [(first, first + 2), document.haystack], 0)
    return float(answer.mean()), float((haystack - answer).mean())


def examples(
    model: TextModel,
    corpus: Corpus,
    length: int,
    limit: int,
    split: str = SPLIT,
) -> Panels:
    """Accuracy by the number of examples that fit, over ORDERS random orders of the same examples,
    `limit` questions of each; and the margin: how far the best order of a question is above the
    worst, 1 where the order decides."""
    tasks = Tasks(corpus, split)
    dice = Random(f"examples/{split}/{SEED}")
    # 1. the examples, then their orders
    counts = [count for count in EXAMPLES if count + 4 <= length for _ in range(limit)]
    episodes = [tasks.episode(dice, count) for count in counts]
    documents = []
    for drawn, asked in episodes:
        for _ in range(ORDERS):
            order = dice.sample(drawn, len(drawn))
            documents.append(tasks.listed(order, asked[:1]))
    # 2. right ones of each episode
    right = np.array(hits(model, documents, "examples")).reshape(-1, ORDERS)
    margin = right.max(1) - right.min(1)
    groups = [f"{count}/{number % limit}" for number, count in enumerate(counts)]
    return {
        "examples": Scores(counts, groups, right.mean(1).tolist()),
        "examples-margin": Scores(counts, groups, margin.tolist()),
    }


@torch.no_grad()
def hits(model: TextModel, documents: Sequence[Document], name: str) -> list[float]:
    """For each document, 1 if its first answer is the likeliest token after those before it, else
    0."""
    device = next(model.parameters()).device
    right = []
    for start in range(0, len(documents), BATCH):
        batch = documents[start : start + BATCH]
        # padded on the right, where a causal model does not see it
        ids = pad_sequence([torch.tensor(document.ids) for document in batch], True, PAD).to(device)
        places = torch.tensor([[document.answers[0]] for document in batch], device=device)
        logits = model(ids, positions_to_keep=places - 1)
        if broken := (~finite_rows(logits)).nonzero().flatten().tolist():
            raise NonFiniteError(broken, f"{name} test {start + broken[0] + 1}")
        is_right = logits.argmax(-1) == ids.gather(1, places)
        right += is_right[:, 0].float().tolist()
    return right


MEASURES = {measure.__name__: measure for measure in (nll, recall, needle, attention, examples)}


def chance(panel: str, n: int) -> float:
    """The accuracy of repeating the value of any of n records: the right one, or another with the
    same value."""
    if panel == "examples":
        return 1 / SHOWN
    return 1 / n + (1 - 1 / n) / len(LETTERS)


def table(panel: str, scores: Scores) -> list[str]:
    """A Markdown table of a panel: a row per label, and the mean over all, with their intervals
    over examples."""
    body = []
    for label in [*dict.fromkeys(scores.labels), "all"]:
        rows = [row for row in zip(*scores, strict=True) if label in ("all", row[0])]
        _, groups, values = zip(*rows, strict=True)
        interval = interval_of(values, list(map(str, groups)))
        by_guess = ""
        if panel in ("recall", "needle", "examples") and label != "all":
            by_guess = f"{chance(panel, label):.3f}"
        name = ", ".join(map(str, label)) if isinstance(label, tuple) else str(label)
        body.append([name, by_guess, interval_text(interval, 3)])
    return markdown_table([panel, "chance", "mean [95 %]"], body)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.systems.text", __doc__)
    parser.add_argument("measure", choices=[*MEASURES, "all"], help="what to measure")
    parser.add_argument("run", nargs="+", type=Path, help="run folders")
    add_flag(parser, "--limit", "windows, tests of a number", 100, type=positive, metavar="N")
    add_flag(parser, "--device", "cpu, cuda, …", "cpu")
    args = parser.parse_args(argv)
    for folder in args.run:
        settings = read_json(folder / "config.json")
        if "corpus" not in settings or not (folder / "model" / "config.json").is_file():
            raise UserError(
                f"{folder}: no finished run of train.systems.text: give one, or finish it with "
                "--resume"
            )
        place = Path(settings["corpus"] or folder / "corpus")
        corpus = kept_corpus(place)
        its, own = (read_bytes(part / "tokenizer.model") for part in (place, folder / "model"))
        if its != own:
            problem = f"is not the corpus of {folder}: another run has made it anew"
            raise UserError(f"{place}: {problem}: give each text a --corpus of its own")
        model = load_model(folder / "model", device=choose_device(args.device))
        print(f"{shown(folder)}\n")
        for name in MEASURES if args.measure == "all" else [args.measure]:
            panels = MEASURES[name](model, corpus, settings["length"], args.limit)
            for panel, scores in panels.items():
                print("\n".join([*table(panel, scores), ""]))

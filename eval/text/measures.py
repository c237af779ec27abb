"""What a language model does with its context: five measurements, of several runs of one or of both kinds of attention.

    python -m eval.text nll RUN…           negative log-likelihood by the length of the context
    python -m eval.text recall RUN…        recall of one of N records
    python -m eval.text needle RUN…        retrieval of one of N needles in a text, by its depth
    python -m eval.text attention RUN…     share of the attention on the needle asked for, and on what is noise
    python -m eval.text examples RUN…      accuracy by the number of examples in context, in several orders
    python -m eval.text all RUN…

In: run folders of `train.systems.text`. Out: a table and a figure of each, over all runs of one kind of attention, and
the difference of the kinds on the same examples, with 95 % intervals over runs and examples, all on the test split.

Protocols: Ye et al. 2024, sections 3.3 (context), 3.4 (needles, attention) and 3.5 (examples), at a smaller size.
Answers are judged in one forward pass: an answer is right if each of its tokens is the likeliest after the tokens
before it. Greedy decoding would give the same answer.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn.utils.rnn import pad_sequence

from eval import figures
from eval.command import add_flag, command_parser, positive
from eval.explore.record import decoder_maps
from eval.open import out_folder
from eval.report import interval_text, markdown_table
from eval.statistics import bootstrap
from eval.text.corpus import BOS, PAD, Corpus, kept_corpus
from eval.text.tasks import LETTERS, SHOWN, Document, Tasks
from model.common import UserError, read_json
from model.device import choose_device
from model.generate import NonFiniteError, check_finite, finite_rows
from model.language import TextModel
from weights.load import load_model

SPLIT, SEED = "test", 7
RECALL = (4, 8, 16, 32, 64, 128)  # records; up to 64 in training
NEEDLES = (1, 4, 16, 32, 64)  # in a text
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
EXAMPLES = (4, 8, 16, 32, 64)
ORDERS = 6  # of the same examples
BATCH = 64  # rows per forward pass


class Scores(NamedTuple):
    """One panel: the score of each example, its label (its place on the x axis; (column, row) in a heat map) and its
    group; examples of one group are not independent."""

    title: str
    x_label: str
    y_label: str
    labels: Sequence
    groups: Sequence
    values: Sequence[float]


# The measurements


@torch.no_grad()
def nll(model: TextModel, corpus: Corpus, length: int, limit: int, split: str = SPLIT) -> dict[str, Scores]:
    """Negative log-likelihood of a token, in nats, by how many tokens of its own document the model has seen.

    On `limit` windows of `length` tokens that lie within a document of the split; label: the longest context of
    the bin (…, 17–32, 33–64, …). Under "all" each bin weighs the same. Raises UserError if no document is that long.
    """
    rows = []
    for number, (place, document) in enumerate(windows(corpus, length, limit, split), start=1):
        ids = torch.tensor([[BOS, *corpus.ids[split][place : place + length].tolist()]], device=device_of(model))
        logits = model(ids[:, :-1])
        check_finite(logits, f"nll test {number}")
        losses = F.cross_entropy(logits[0], ids[0, 1:], reduction="none").cpu().numpy()
        rows += [(last, document, float(losses[first:last].mean())) for first, last in context_bins(length)]
    title = "negative log-likelihood by context", "tokens of context, up to", "nats a token"
    return {"nll": Scores(*title, *zip(*rows, strict=True))}


def windows(corpus: Corpus, length: int, limit: int, split: str = SPLIT) -> list[tuple[int, int]]:
    """(start, document) of up to `limit` windows of `length` tokens, evenly taken from those that lie side by side."""
    starts = corpus.starts[split].tolist()
    documents = enumerate(zip(starts, starts[1:], strict=False))
    places = [(place, n) for n, (start, end) in documents for place in range(start, end - length + 1, length)]
    if not places:
        raise UserError(f"no document of the {split} split has {length} tokens: give longer documents")
    return places[:: -(-len(places) // limit)]


def context_bins(length: int) -> list[tuple[int, int]]:
    """Positions [first, last) of each bin: up to 16, then doubled, the last ends at `length`."""
    ends = [16]
    while ends[-1] < length:
        ends.append(min(2 * ends[-1], length))
    return list(zip([0, *ends], ends, strict=False))


def recall(model: TextModel, corpus: Corpus, length: int, limit: int, split: str = SPLIT) -> dict[str, Scores]:
    """Accuracy on one of N records, `limit` tests of each N that fits."""
    tasks, dice = Tasks(corpus, split), random.Random(f"recall/{split}/{SEED}")
    numbers = [n for n in RECALL if n + 4 < length for _ in range(limit)]
    right = hits(model, [tasks.recall(dice, n, 1) for n in numbers], "recall")
    return {"recall": Scores("recall of a record", "records", "accuracy", numbers, range(len(right)), right)}


def needle_tests(
    corpus: Corpus, length: int, limit: int, numbers: Sequence[int] = NEEDLES, split: str = SPLIT
) -> list[tuple[int, float, Document]]:
    """(N, depth, document) of `limit` tests of each number of needles that fits, every depth as often as another."""
    tasks, dice = Tasks(corpus, split), random.Random(f"needle/{split}/{SEED}")
    drawn = [(n, DEPTHS[test % len(DEPTHS)]) for n in numbers if 3 * n < length for test in range(limit)]
    return [(n, depth, tasks.needles(dice, length, n, 1, depth)) for n, depth in drawn]


def needle(model: TextModel, corpus: Corpus, length: int, limit: int, split: str = SPLIT) -> dict[str, Scores]:
    """Accuracy on one of N needles, `limit` tests of each N; the same by N and depth, as a heat map."""
    numbers, depths, documents = zip(*needle_tests(corpus, length, limit, split=split), strict=True)
    right, tests = hits(model, documents, "needle"), range(len(documents))
    places = [(n, 100 * depth) for n, depth in zip(numbers, depths, strict=True)]
    heads = ("needles in a text", "needles"), ("needles by their number and depth", "needles, depth in %")
    return {
        "needle": Scores(*heads[0], "accuracy", numbers, tests, right),
        "needle-map": Scores(*heads[1], "accuracy", places, tests, right),
    }


def attention(model: TextModel, corpus: Corpus, length: int, limit: int) -> dict[str, Scores]:
    """Shares of the attention that predicts a needle's value, by the needle's depth: on its line, and on the noise,
    which is the rest of the text and the other needles. For the largest number of needles that fits."""
    most = max(n for n in NEEDLES if 3 * n < length)
    tests = needle_tests(corpus, length, limit, [most])
    shares = [attention_shares(model, test[-1], f"attention test {n}") for n, test in enumerate(tests, start=1)]
    answer, noise = zip(*shares, strict=True)
    head = "depth in the text, %", "share", [100 * depth for _, depth, _ in tests], range(len(tests))
    return {
        "attention": Scores(f"attention on the answer ({most} needles)", *head, answer),
        "attention-noise": Scores(f"attention on noise ({most} needles)", *head, noise),
    }


@torch.no_grad()
def attention_shares(model: TextModel, document: Document, name: str = "document") -> tuple[float, float]:
    """Of |A|, or |A₁ − λ·A₂|, the share on the line of the first needle asked for, and on the rest of its haystack; the
    mean over layers, heads, and the positions that decide the answer.

    Absolute values, since a difference may be negative, and the norm by head takes any factor out.
    """
    (start, end), (first, last) = document.answers[0], document.needles[0]
    ids = torch.tensor([document.ids[: end - 1]], device=device_of(model))
    layers, _ = decoder_maps(model, lambda weights: weights[0, :, start - 1 : end - 1].float(), name, input_ids=ids)
    shares = []
    for layer, maps in layers.items():
        weights = (maps[0] if len(maps) == 1 else maps[0] - layer.coefficient() * maps[1]).abs()  # (N, answer, S)
        weights = weights / weights.sum(-1, keepdim=True)
        answer = weights[..., first:last].sum(-1).mean()
        shares.append((answer.item(), (weights[..., slice(*document.haystack)].sum(-1).mean() - answer).item()))
    return tuple(np.mean(shares, axis=0).tolist())


def examples(model: TextModel, corpus: Corpus, length: int, limit: int, split: str = SPLIT) -> dict[str, Scores]:
    """Accuracy by the number of examples, over ORDERS random orders of the same examples, `limit` questions of each
    number; and the margin: how far the best order of a question is above the worst, 1 where its answer depends on the
    order. Raises UserError where the examples do not fit."""
    tasks, dice = Tasks(corpus, split), random.Random(f"examples/{split}/{SEED}")
    if max(EXAMPLES) + 4 > length:
        raise UserError(f"{max(EXAMPLES)} examples take {max(EXAMPLES) + 4} tokens, the model knows rows of {length}")
    counts = [count for count in EXAMPLES for _ in range(limit)]
    episodes = [tasks.episode(dice, count) for count in counts]
    orders = [(dice.sample(shown, len(shown)), asked[:1]) for shown, asked in episodes for _ in range(ORDERS)]
    right = np.array(hits(model, [tasks.listed(*order) for order in orders], "examples")).reshape(-1, ORDERS)
    questions = [f"{count}/{number}" for count in EXAMPLES for number in range(limit)]
    head, margin = ("examples", "accuracy", counts, questions), right.max(1) - right.min(1)
    return {
        "examples": Scores(f"examples in context, {SHOWN} keys", *head, right.mean(1).tolist()),
        "examples-margin": Scores(f"best minus worst of {ORDERS} orders", *head, margin.tolist()),
    }


@torch.no_grad()
def hits(model: TextModel, documents: Sequence[Document], name: str = "document") -> list[float]:
    """For each document, 1 if each token of its first answer is the likeliest after the tokens before it, else 0."""
    right = []
    for start in range(0, len(documents), BATCH):
        batch = documents[start : start + BATCH]
        # padded on the right, where a causal model does not see it
        ids = pad_sequence([torch.tensor(document.ids) for document in batch], True, PAD).to(device_of(model))
        places = [torch.arange(*document.answers[0]) for document in batch]
        valid = pad_sequence([torch.ones_like(place) for place in places], True).bool().to(ids.device)
        places = pad_sequence(places, True, 1).to(ids.device)
        logits = model(ids, positions_to_keep=places - 1)
        if broken := (~finite_rows(logits)).nonzero().flatten().tolist():
            raise NonFiniteError(broken, f"{name} test {start + broken[0] + 1}")
        is_right = logits.argmax(-1) == ids.gather(1, places)
        right += (is_right | ~valid).all(1).float().tolist()
    return right


def device_of(model: TextModel) -> torch.device:
    return model.language_model.embed_tokens.weight.device


MEASURES: dict[str, Callable[..., dict[str, Scores]]] = {"nll": nll, "recall": recall, "needle": needle}
MEASURES |= {"attention": attention, "examples": examples}


# Several runs


def by_label(runs: Mapping[str, Sequence[Scores]], paired: bool = True) -> dict:
    """The same panel of every run, by the kind of attention, to {label: {kind: Interval, "difference": Interval}}, and
    so under "all": means with their intervals over runs and examples. paired: the runs of both kinds are of the same
    seeds in one order, and the difference is differential minus plain, seed by seed."""
    first = next(iter(runs.values()))[0]
    kinds, result = sorted(runs, reverse=True), {}  # plain, differential
    for label in [*dict.fromkeys(first.labels), "all"]:
        chosen = [i for i, other in enumerate(first.labels) if label in ("all", other)]
        groups = [str(first.groups[i]) for i in chosen]
        scores = {kind: np.array([[run.values[i] for i in chosen] for run in runs[kind]]) for kind in kinds}
        result[label] = {kind: bootstrap(values, groups) for kind, values in scores.items()}
        if paired and len(kinds) == 2:
            result[label]["difference"] = bootstrap(scores["differential"] - scores["plain"], groups)
    return result


def chance(name: str, labels: Iterable = ()) -> dict:
    """By label of a panel with these `labels`, the accuracy of repeating the value of any record of the document: the
    right one of N, or another whose value happens to be the same. Empty for panels without such a baseline."""
    if name not in ("recall", "needle", "needle-map", "examples"):
        return {}
    known = {label: label[0] if isinstance(label, tuple) else label for label in labels if label != "all"}
    if name == "examples":
        return dict.fromkeys(known, 1 / SHOWN)
    return {label: 1 / n + (1 - 1 / n) / len(LETTERS) for label, n in known.items()}


def table(panel: Scores, rows: Mapping, chances: Mapping) -> list[str]:
    """A Markdown table: a row per label, with its `chances` if there are any."""
    body = []
    for label, row in rows.items():
        parts = label if isinstance(label, tuple) else (label,)
        line = [", ".join(part if isinstance(part, str) else f"{part:g}" for part in parts)]
        if chances:
            line.append(f"{chances[label]:.3f}" if label in chances else "")
        for kind, value in row.items():
            unsure = " n.s." if kind == "difference" and not value.significant else ""
            line.append(interval_text(value, 3, signed=kind == "difference") + unsure)
        body.append(line)
    return markdown_table([panel.x_label, *(["chance"] if chances else []), *rows["all"]], body)


def chart(panel: Scores, rows: Mapping) -> Image.Image:
    """The means by label with their intervals, a line per kind of attention; or a heat map of each kind."""
    labels = [label for label in rows if label != "all"]
    kinds = [kind for kind in rows["all"] if kind != "difference"]
    if isinstance(labels[0], tuple):
        columns, depths = (list(dict.fromkeys(part)) for part in zip(*labels, strict=True))
        grids = {kind: [[rows[column, depth][kind].mean for column in columns] for depth in depths] for kind in kinds}
        marks = [f"{depth:g} %" for depth in depths], [f"{n:g}" for n in columns]
        return figures.heatmaps(grids, panel.title, axes=("depth of the needle", "needles"), marks=marks)
    lines = {kind: [(label, rows[label][kind].mean) for label in labels] for kind in kinds}
    bars = {kind: [(label, *rows[label][kind][1:]) for label in labels] for kind in kinds}
    log = all(isinstance(label, int) for label in labels)
    return figures.line_chart(lines, panel.title, panel.x_label, panel.y_label, log_x=log, bars=bars)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.text", __doc__)
    parser.add_argument("measure", choices=[*MEASURES, "all"], help="what to measure")
    parser.add_argument("run", nargs="+", type=Path, help="run folders; both kinds are compared seed by seed")
    limit = "windows, tests of a kind, questions of a number"
    add_flag(parser, "--limit", limit, 100, type=positive, metavar="N")
    add_flag(parser, "--length", "longest context (default: that of the runs' training)", type=positive, metavar="N")
    add_flag(parser, "--device", "cpu, cuda, …", "cpu")
    add_flag(parser, "--out", "folder of the pictures (default: runs/eval/text)", type=Path, metavar="DIR")
    add_flag(parser, "--json", "print JSON only (default: a table)", False)
    args = parser.parse_args(argv)
    if args.limit < len(DEPTHS):
        raise UserError(f"--limit is {args.limit}, expected at least {len(DEPTHS)}: one test per depth")
    out, runs = out_folder(args.out, "text"), []
    for folder in args.run:
        settings = read_json(folder / "config.json")
        if "corpus" not in settings or not (folder / "model" / "config.json").is_file():
            raise UserError(f"{folder}: no finished run of train.systems.text: give one, or finish it with --resume")
        corpus = kept_corpus(Path(settings["corpus"] or folder / "corpus"))
        runs.append((settings["seed"], settings["attention"], settings["length"], corpus, folder))
    if len({(length, corpus.digest) for _, _, length, corpus, _ in runs}) > 1:
        raise UserError("the runs learned from different text or rows: measure them one by one")
    seeds: dict[str, list[int]] = {}
    panels: dict[str, dict[str, list[Scores]]] = {}
    for seed, kind, length, corpus, folder in sorted(runs, key=lambda run: run[0]):  # both kinds in one order
        seeds.setdefault(kind, []).append(seed)
        model = load_model(folder / "model", device=choose_device(args.device))
        for name in MEASURES if args.measure == "all" else [args.measure]:
            for panel, scores in MEASURES[name](model, corpus, args.length or length, args.limit).items():
                panels.setdefault(panel, {}).setdefault(kind, []).append(scores)
    paired = len(set(map(tuple, seeds.values()))) == 1
    values, lines = {}, []
    for name, by_kind in panels.items():
        panel, rows = next(iter(by_kind.values()))[0], by_label(by_kind, paired)
        figures.save(chart(panel, rows), out / f"{name}.png")
        values[name] = {str(label): {kind: v._asdict() for kind, v in row.items()} for label, row in rows.items()}
        lines += [f"{panel.title}, {panel.y_label}", "", *table(panel, rows, chance(name, rows)), ""]
    if min(map(len, seeds.values())) < 3:
        lines += ["Fewer than three runs of a kind: the intervals hardly reflect how runs differ.", ""]
    if not paired:
        lines += [f"Seeds differ ({seeds}): the kinds are not compared.", ""]
    counts = ", ".join(f"{len(of_kind)} {kind}" for kind, of_kind in seeds.items())
    lines.append(f"{counts}; in {out}: {', '.join(f'{name}.png' for name in panels)}")
    print(json.dumps(values) if args.json else "\n".join(lines))

"""MMNeedle: find the sub-image that a caption describes in a stitched picture of N×N, or say that it is not there.

    python -m eval.needle                       the newest run, or the embedded base, on the embedded scenes
    python -m eval.needle --coco DIR --captions file_to_caption.json --metadata DIR --model SRC --adapter RUN
    python -m eval.needle --results responses.json

In: tests (`eval/data.py`) and a folder of COCO pictures, or a response file in MMNeedle's format. Out: such a file,
accuracies (`eval/needle_scoring.py`) beside chance, a heatmap of accuracy by place, and a sheet of hits and misses; of
--results the heatmap, where --out is given.

Source: Wang et al., "Multimodal Needle in a Haystack: Benchmarking Long-Context Capability of Multimodal Large Language
Models", NAACL 2025, arXiv 2406.11230 (its prompts, parsing and measures). The `paper` protocol is the adaptation of the
differential PaliGemma paper: M = 1, N = 2, and two questions with one word to answer.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from eval import scenes
from eval.bench import Benchmark, limit_flag, run
from eval.command import whole
from eval.data import ABSENT, NeedleTest, find_image, find_images, read_captions, read_needle_tests
from eval.figures import contact_sheet, draw_boxes, heatmaps, save
from eval.haystacks import FIRST_ABSENT_ID, choose, draw_tests, stitch
from eval.needle_scoring import (
    accuracy_by_place,
    judge,
    mean_over_places,
    read_responses,
    response_record,
    score_responses,
    write_responses,
)
from eval.question import Question
from eval.report import Row
from model.common import UserError, run_command, shown

Place = tuple[int, int, int]  # (index, row, col), counted from 0, or ABSENT
PROTOCOLS = ("paper", "constrained", "official")
PROTOCOL_HELP = (
    "paper: one-word answers, any other counts as absent; constrained: the likelier of the words; official: MMNeedle's "
    "own prompt and parsing"
)
KINDS = "; ".join(f"{kind}: {title}" for kind, title in scenes.NEEDLE_TITLES.items())
KIND_HELP = f"embedded tests, sub-images and the objects in them ({KINDS}; default: all)"
METADATA_HELP = (
    "with --coco: folder of MMNeedle's N_N.json and annotations_M_N_N.json (default: tests are drawn from all "
    "captioned pictures that are there)"
)
LIMIT = 200  # tests of each kind, by default


class Trial(NamedTuple):
    """A test, functions that give its M pictures, and the files that they read."""

    test: NeedleTest
    pictures: tuple[Callable, ...]
    files: Sequence[Path] = ()


class Needle(Benchmark):
    """A `Row` is a test: its first question, its response record, and whether all of it is right."""

    name = "needle"
    max_new_tokens = 64
    protocol = "paper"
    flags = {
        "--protocol": dict(help=PROTOCOL_HELP, default="paper", choices=PROTOCOLS),
        "--kind": dict(help=KIND_HELP, default=list(scenes.NEEDLES), nargs="+", choices=list(scenes.NEEDLES)),
        "--needles": dict(help="needles a test", default=1, type=whole(1, 16), metavar="K"),
        "--negatives": dict(help="add as many tests whose needles are absent", default=False),
        "--coco": dict(help="folder of COCO val2014 pictures (default: the embedded scenes)", metavar="DIR"),
        "--captions": dict(help="with --coco: MMNeedle's or COCO's caption file", metavar="FILE"),
        "--metadata": dict(help=METADATA_HELP, metavar="DIR"),
        "--pictures": dict(help="with --coco: stitched pictures a test", default=1, type=whole(1, 100), metavar="M"),
        "--side": dict(help="with --coco: sub-images a side", default=2, type=whole(1, 64), metavar="N"),
        "--seed": dict(help="of drawn tests, with --coco", default=42, type=whole(0, 2**63 - 1)),
        "--limit": limit_flag(f"tests of each kind (default: {LIMIT})"),
    }

    def questions(self, args):
        self.protocol, limit = args.protocol, args.limit or LIMIT
        if args.negatives and limit > FIRST_ABSENT_ID:
            raise UserError(f"--limit {limit} with --negatives, whose ids begin at {FIRST_ABSENT_ID}: lower it")
        if args.coco is not None:
            trials = coco_trials(args)
        elif args.captions or args.metadata or (args.pictures, args.side) != (1, 2):
            raise UserError("--captions, --metadata, --pictures and --side belong to --coco: give that too")
        else:
            halves, trials = (False, True)[: 1 + args.negatives], {}
            for kind in args.kind:
                drawn = (embedded_trials(kind, limit, args.needles, absent=absent) for absent in halves)
                trials[kind] = [trial for half in drawn for trial in half]
        return [question for kind, of_kind in trials.items() for question in asks_of(of_kind, args.protocol, kind)]

    def rows(self, questions, answers):
        return [row_of(*response) for response in responses_of(questions, answers, self.protocol)]

    def read(self, file, args):
        kind, records = Path(file).stem, read_responses(file)
        if args.out:
            save(heatmaps({kind: accuracy_by_place(records)}), args.out / f"heatmap-{kind}.png")
        return [row_of(Question(r["id"], str(r["id"]), (), "", kind=kind), r) for r in records]

    def summary(self, rows):
        lines = {}
        for kind, of_kind in by_kind(rows).items():
            records, test = [row.answer for row in of_kind if row.answer], of_kind[0].question.truth
            grid = accuracy_by_place(records, test and test.side)
            lines[kind] = score_responses(records) | {"exact, mean over places": mean_over_places(grid)}
            if test is not None:
                lines[kind]["chance"] = chance(test)
            halves = [[r for r in records if r["ground_truth"].startswith("0, ") is absent] for absent in (False, True)]
            if all(halves):
                names = f"  positives, {kind}", f"  negatives, {kind}"
                lines |= zip(names, map(score_responses, halves), strict=True)
            places = ((f"row {r}, column {c}", v) for r, row in enumerate(grid, 1) for c, v in enumerate(row, 1))
            lines |= {f"  {kind}, {place}": {"exact": value} for place, value in places if not math.isnan(value)}
        return {
            line: {name: None if math.isnan(value) else 100 * value for name, value in values.items()}
            for line, values in lines.items()
        }

    def write(self, rows, out, subject):
        grids, notes, trained = {}, {}, subject.trained_tasks()
        for kind, of_kind in by_kind(rows).items():
            title = title_of(kind)
            records = [response_record(q.truth, said and said["response"]) for q, said, _ in of_kind]
            write_responses(out / f"responses-{kind}.json", records)
            grids[title] = accuracy_by_place(records, of_kind[0].question.truth.side)
            if kind in scenes.NEEDLE_TITLES and trained is not None and kind not in trained:
                notes[title] = "not trained on"
            if scored := [row for row in of_kind if row.answer]:
                exact = 100 * score_responses([row.answer for row in scored])["exact"]
                heading = f"{subject.title}, {title}: {exact:.1f} % exact (blue: the needle)"
                save(draw_sheet(scored, heading), out / f"sheet-{kind}.png")
        title = f"{subject.title}: needles found, {self.protocol} protocol"
        save(heatmaps(grids, title, notes), out / "heatmap.png")


def row_of(question: Question, record: dict) -> Row:
    """The row of a test; without a response there is no answer."""
    verdict = judge(record)
    scores = {} if verdict is None else {f"exact, {question.kind}": float(verdict[2])}
    return Row(question, record if scores else None, scores)


def by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(row.question.kind, []).append(row)
    return kinds


def chance(test: NeedleTest) -> float:
    """The probability to guess all K places: they are distinct, of the P = M·N² that there are."""
    return 1 / math.perm(len(test.haystack) * test.side**2, len(test.places))


# Tests


def embedded_trials(
    kind: str, count: int, needles: int = 1, *, absent: bool = False, split: str = "test"
) -> list[Trial]:
    """`count` tests on the embedded scenes, of a kind in `scenes.NEEDLES`; first needles take all places in turn."""
    trials = []
    for number in range(count):
        drawn = scenes.needle(kind, split, number, needles=needles, negative=absent)
        name = f"{kind}-{needles}{'-absent' * absent}/{split}/{number}"
        names = tuple(f"{name}/{row}_{col}" for row in range(drawn.n) for col in range(drawn.n))
        places = tuple(ABSENT if row < 0 else (0, row, col) for row, col in drawn.targets)
        targets = tuple(f"{name}/absent" if row < 0 else names[row * drawn.n + col] for row, col in drawn.targets)
        test = NeedleTest(number + FIRST_ABSENT_ID * absent, (names,), places, targets, drawn.captions)
        trials.append(Trial(test, (drawn.scene.render,)))
    return trials


def coco_trials(args: Namespace) -> dict[str, list[Trial]]:
    """The tests on COCO's pictures that the flags ask for, under MMNeedle's name for their kind.

    With --metadata MMNeedle's own tests; else drawn from all captioned pictures of the folder.
    """
    if args.captions is None:
        raise UserError("--coco needs --captions: MMNeedle's caption file, or COCO's captions_val2014.json")
    few, limit = f"{args.needles}_" if args.needles > 1 else "", args.limit or LIMIT
    size, halves = f"{args.side}_{args.side}", (False, True)[: 1 + args.negatives]
    if args.metadata is None:
        listed = read_captions(args.captions)
        listed = {name if Path(name).name != name else f"val2014/{name}": text for name, text in listed.items()}
        pictures = {name: find_image(args.coco, name) for name in listed}
        captions = {name: text for name, text in listed.items() if pictures[name].is_file()}
        if not captions:
            problem = f"none of its {len(listed)} pictures is in {shown(args.coco)}, nor in val2014 there"
            raise UserError(f"{shown(args.captions)}: {problem}: give the folder that holds them")
        drawn = limit, args.pictures, args.side, args.needles
        tests = [test for absent in halves for test in draw_tests(captions, *drawn, absent=absent, seed=args.seed)]
    else:
        files = [Path(args.metadata, f"{name}{size}.json") for name in ("", f"{few}annotations_{args.pictures}_")]
        listed = read_needle_tests(*files, args.captions)
        by_half = [[test for test in listed if (ABSENT in test.places) is absent] for absent in halves]
        tests = [test for half in by_half for test in choose(half, limit, args.seed)]
        pictures = find_images((name for test in tests for grid in test.haystack for name in grid), args.coco, files[0])
    trials = []
    for test in tests:
        grids = [[pictures[name] for name in grid] for grid in test.haystack]
        trials.append(Trial(test, tuple(partial(stitch, grid) for grid in grids), sum(grids, [])))
    return {f"{few}{args.pictures}_{size}": trials}


# Prompts and answers


def official_prompt(captions: Sequence[str], pictures: int, side: int) -> str:
    """MMNeedle's own instruction for K captions, M `pictures` of `side`×`side` sub-images."""
    count = len(captions)
    head = (
        f"Given {pictures} image{'s' * (pictures > 1)} indexed from 1 to {pictures}, each divided into {side}*{side} "
        f"subimage{'s' * (side > 1)}, identify the "
    )
    example = "For example, '1, 2, 3' indicates the subimage in the first image, second row, and third column. "
    if count == 1:
        return (
            f"{head}subimage that best matches the provided caption. Respond with 'index, row, column' and nothing "
            f"else. {example}If no match is found, respond only with '-1'.\nCaption: {captions[0]}"
        )
    layout = "; ".join(f"index_{i}, row_{i}, column_{i}" for i in range(1, count + 1))
    return (
        f"{head}subimages that best match the provided {count} captions. Respond in the format: {layout}. Only provide "
        f"this information. {example}If no subimage matches a caption, respond with '-1' for that caption."
    ) + "".join(f"\nCaption_{i}: {caption}" for i, caption in enumerate(captions, 1))


def parse_place(answers: Sequence[str], side: int) -> Place:
    """The place from the answers to `scenes.place_questions`, each exactly one of its words; else `ABSENT`."""
    numbers = []
    for said, (_, words) in zip(answers, scenes.place_questions("", side), strict=True):
        if (word := said.strip().lower()) not in words:
            return ABSENT
        numbers.append(words.index(word))
    return (0, *(numbers if side == 2 else divmod(numbers[0], side)))


def prompts_of(test: NeedleTest, protocol: str) -> list[tuple[str, tuple[str, ...]]]:
    """(prompt, choices) of all questions about a test, caption by caption; no choices: a free answer.

    Raises UserError for a protocol that cannot ask them.
    """
    pictures = len(test.haystack)
    if protocol == "official":
        return [(official_prompt(test.captions, pictures, test.side), ())]
    if pictures > 1 or test.side == 1 or protocol == "constrained" and ABSENT in test.places:
        lacks = "several pictures, or undivided ones" if pictures > 1 or test.side == 1 else "needles that are absent"
        raise UserError(f"--protocol {protocol} has no answer for {lacks}: take official")
    asked = [question for caption in test.captions for question in scenes.place_questions(caption, test.side)]
    return asked if protocol == "constrained" else [(prompt, ()) for prompt, _ in asked]


def respond(test: NeedleTest, answers: Sequence[str | None], protocol: str) -> str | None:
    """MMNeedle's response from the answers to `prompts_of`; None if one is missing."""
    if None in answers:
        return None
    if protocol == "official":
        return answers[0]
    each = len(answers) // len(test.captions)
    places = [parse_place(answers[at : at + each], test.side) for at in range(0, len(answers), each)]
    return "; ".join("-1" if place == ABSENT else ", ".join(str(number + 1) for number in place) for place in places)


def asks_of(trials: Sequence[Trial], protocol: str, kind: str = "") -> list[Question]:
    """What is asked about the trials, one after the other. Raises UserError for a protocol that cannot ask them."""
    questions = []
    for test, pictures, files in trials:
        key = sha256(repr(test.haystack).encode()).hexdigest()  # several tests may share a haystack
        picture = pictures[0] if len(pictures) == 1 else pictures
        for number, (prompt, words) in enumerate(prompts_of(test, protocol)):
            name = f"{kind}/{test.id}/{number}".removeprefix("/")
            questions.append(Question(name, key, picture, prompt, words, files, truth=test, kind=kind))
    return questions


def responses_of(questions: Sequence[Question], answers: Sequence[str | None], protocol: str) -> list:
    """(first question, response record) of each test, from the answers to `asks_of`; the record has them as "said"."""
    responses, pairs = [], zip(questions, answers, strict=True)
    for _, group in groupby(pairs, key=lambda pair: id(pair[0].truth)):
        of_test = list(group)
        question, said = of_test[0][0], [answer for _, answer in of_test]
        record = response_record(question.truth, respond(question.truth, said, protocol))
        responses.append((question, record | {"said": said}))
    return responses


def evaluate_embedded(
    model, processor, kind: str, count: int, progress: str | None = None, *, ask_all: Callable, protocol: str = "paper"
) -> float:
    """Exact accuracy in percent on `count` tests of the embedded test split: all questions of a test must be right."""
    questions = asks_of(embedded_trials(kind, count), protocol)
    answers = ask_all(model, processor, questions, progress=progress)
    return 100 * score_responses(record for _, record in responses_of(questions, answers, protocol))["exact"]


# Figures


def draw_sheet(rows: Sequence[Row], title: str):
    """A contact sheet of up to eight hits and eight misses: pictures with a frame around the needle, and answers."""
    hits, misses = ([row for row in rows if any(row.scores.values()) is right][:8] for right in (True, False))
    from model.images import load_image  # imports torch, which scoring does not need

    pictures, captions = [], []
    for question, record, _ in hits + misses:
        test = question.truth
        index, size = max(0, test.places[0][0]), 512 / test.side
        needles = zip(test.places, test.captions, strict=True)
        here = [(row, col, caption) for (at, row, col), caption in needles if at == index]
        boxes = [(col * size, row * size, (col + 1) * size, (row + 1) * size) for row, col, _ in here]
        picture = load_image(question.images()[index]).resize((512, 512))
        labels = [caption for *_, caption in here] if len(test.places) > 1 else None
        pictures.append(draw_boxes(picture, boxes, labels, width=4))
        captions.append(f"said {', '.join(record['said'])} | {' | '.join(test.captions)}")
    return contact_sheet(pictures, captions, [True] * len(hits) + [False] * len(misses), title=title)


def title_of(kind: str) -> str:
    """A kind of test in words: `2×2, one object each` for n2o1; of COCO's K_M_N_N the numbers of needles, pictures and
    sub-images."""
    if kind in scenes.NEEDLE_TITLES:
        return scenes.NEEDLE_TITLES[kind]
    *needles, pictures, side, _ = kind.split("_")
    of_pictures = f"{pictures} picture{'s' * (pictures != '1')} of {side}×{side}"
    return f"{needles[0]} needles, {of_pictures}" if needles else of_pictures


main = partial(run, Needle())

if __name__ == "__main__":
    run_command(main)

"""MMNeedle: find the sub-image that a caption describes in a stitched picture of N×N, or say that it is not there.

    python -m eval.needle                       the newest run, or the embedded base, on the embedded scenes
    python -m eval.needle --coco DIR --captions file_to_caption.json --metadata DIR --model SRC --adapter RUN
    python -m eval.needle --results responses.json

In: tests (`eval/data.py`) and a folder of COCO pictures, or a response file in MMNeedle's format. Out: such a file,
accuracies (`eval/needle_scoring.py`) beside chance, a heatmap of accuracy by place, and a sheet of hits and misses.

Source: Wang et al., "Multimodal Needle in a Haystack: Benchmarking Long-Context Capability of Multimodal Large Language
Models", NAACL 2025, arXiv 2406.11230 (its prompts, parsing and measures). The `paper` protocol is the adaptation of the
differential PaliGemma paper: M = 1, N = 2, and two questions with one word to answer.
"""

import json
import math
import random
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from eval import scenes
from eval.bench import Benchmark, run
from eval.command import whole
from eval.data import ABSENT, NeedleTest, find_image, find_picture, read_captions, read_needle_tests
from eval.figures import contact_sheet, draw_boxes, heatmaps, save
from eval.needle_scoring import accuracy_by_place, judge, read_responses, response_record, score_responses
from eval.question import Question
from eval.report import Row
from model.common import UserError, run_command, write_text
from model.images import load_image

PROTOCOLS = ("paper", "constrained", "official")
PROTOCOL_HELP = "paper: one exact word; constrained: the likelier word; official: MMNeedle's own prompt and parsing"
KINDS = "; ".join(f"{kind}: {title}" for kind, title in scenes.NEEDLE_TITLES.items())
METADATA_HELP = "folder of MMNeedle's N_N.json and annotations_M_N_N.json (default: tests are drawn from --captions)"
LIMIT = 200  # tests of each kind, by default
FIRST_ABSENT_ID = 5000  # MMNeedle's ids from here on have no needle in the haystack
SUB_IMAGE = 256  # px along each side of a sub-image


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
        "--kind": dict(help=f"of embedded tests ({KINDS}; default: all)", nargs="+", choices=list(scenes.NEEDLES)),
        "--coco": dict(help="folder of COCO val2014 pictures (default: the embedded scenes)", metavar="DIR"),
        "--captions": dict(help="with --coco: MMNeedle's or COCO's caption file", metavar="FILE"),
        "--metadata": dict(help=f"with --coco: {METADATA_HELP}", metavar="DIR"),
        "--needles": dict(help="needles a test", default=1, type=whole(1, 16), metavar="K"),
        "--negatives": dict(help="add as many tests whose needles are absent", default=False),
        "--pictures": dict(help="with --coco: stitched pictures a test", default=1, type=whole(1, 100), metavar="M"),
        "--side": dict(help="with --coco: sub-images a side", default=2, type=whole(1, 64), metavar="N"),
        "--seed": dict(help="of drawn tests, with --coco", default=42, type=whole(0, 2**63 - 1)),
        "--limit": dict(help="tests of each kind", default=LIMIT, type=whole(1, FIRST_ABSENT_ID), metavar="N"),
    }

    def questions(self, args):
        self.protocol = args.protocol
        if args.coco is not None:
            trials = coco_trials(args)
        elif args.captions or args.metadata or (args.pictures, args.side) != (1, 2):
            raise UserError("--captions, --metadata, --pictures and --side belong to --coco: give that too")
        else:
            drawn = partial(embedded_trials, count=args.limit or LIMIT, needles=args.needles)
            halves, kinds = (False, True)[: 1 + args.negatives], args.kind or scenes.NEEDLES
            trials = {kind: [trial for half in halves for trial in drawn(kind, absent=half)] for kind in kinds}
        return [question for kind, of_kind in trials.items() for question in asks_of(of_kind, args.protocol, kind)]

    def rows(self, questions, answers):
        return rows_of(questions, answers, self.protocol)

    def read(self, file, args):
        kind = Path(file).stem
        return [row_of(Question(r["id"], str(r["id"]), (), "", kind=kind), r) for r in read_responses(file)]

    def summary(self, rows):
        lines: dict[str, dict] = {}
        for kind, group in groupby(rows, key=lambda row: row.question.kind):
            of_kind = list(group)
            records, test = [row.answer for row in of_kind if row.answer], of_kind[0].question.truth
            by_place = accuracy_by_place(records)
            mean = sum(by_place.values()) / len(by_place) if by_place else None
            lines[kind] = score_responses(records) | {"exact, mean over places": mean}
            if test is not None:  # K distinct ones of the P = M·N² places there are
                lines[kind]["chance"] = 1 / math.perm(len(test.haystack) * test.side**2, len(test.places))
            halves = [[r for r in records if r["ground_truth"].startswith("0, ") is absent] for absent in (False, True)]
            if all(halves):
                names = f"  positives, {kind}", f"  negatives, {kind}"
                lines |= zip(names, map(score_responses, halves), strict=True)
            lines |= {f"  {kind}, row {r}, column {c}": {"exact": value} for (r, c), value in by_place.items()}
        return {line: {name: v if v is None else 100 * v for name, v in of.items()} for line, of in lines.items()}

    def write(self, rows, out, subject):
        grids = {}
        for kind, group in groupby(rows, key=lambda row: row.question.kind):
            of_kind = list(group)
            test = of_kind[0].question.truth
            title = f"{len(test.places)} needle(s) in {len(test.haystack)} picture(s) of {test.side}×{test.side}"
            title = scenes.NEEDLE_TITLES.get(kind, title)
            records = [response_record(q.truth, said and said["response"]) for q, said, _ in of_kind]
            write_text(out / f"responses-{kind}.json", json.dumps(records, ensure_ascii=False, indent=1) + "\n")
            by_place, numbers = accuracy_by_place(records), range(1, test.side + 1)
            grids[title] = [[by_place.get((row, col), math.nan) for col in numbers] for row in numbers]
            if scored := [row for row in of_kind if row.answer]:
                exact = 100 * score_responses([row.answer for row in scored])["exact"]
                heading = f"{subject.title}, {title}: {exact:.1f} % exact (blue: the needle)"
                save(draw_sheet(scored, heading), out / f"sheet-{kind}.png")
        save(heatmaps(grids, f"{subject.title}: needles found, {self.protocol} protocol"), out / "heatmap.png")


# Tests


def embedded_trials(
    kind: str, count: int, split: str = "test", *, needles: int = 1, absent: bool = False
) -> list[Trial]:
    """`count` tests on the embedded scenes, of a kind in `scenes.NEEDLES`; first needles take all places in turn.

    Raises UserError for more needles than places."""
    if needles > (places := scenes.layout_of(kind)[0] ** 2):
        raise UserError(f"--needles {needles}: {kind} has {places} places")
    trials = []
    for number in range(count):
        drawn = scenes.needle(kind, split, number, needles=needles, negative=absent)
        name = f"{kind}-{needles}{'-absent' * absent}/{split}/{number}"
        names = tuple(f"{name}/{at // drawn.n}_{at % drawn.n}" for at in range(drawn.n**2))
        places = tuple(ABSENT if absent else (0, row, col) for row, col in drawn.targets)
        targets = tuple(f"{name}/absent" if absent else names[row * drawn.n + col] for row, col in drawn.targets)
        test = NeedleTest(number + FIRST_ABSENT_ID * absent, (names,), places, targets, drawn.captions)
        trials.append(Trial(test, (drawn.scene.render,)))
    return trials


def coco_trials(args: Namespace) -> dict[str, list[Trial]]:
    """The tests on COCO's pictures that the flags ask for, under MMNeedle's name for their kind.

    With --metadata MMNeedle's own tests; else drawn from all captioned pictures of the folder. Raises UserError.
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
        drawn = limit, args.pictures, args.side, args.needles, args.seed
        tests = [test for absent in halves for test in draw_tests(captions, *drawn, absent=absent)]
    else:
        files = [Path(args.metadata, f"{name}{size}.json") for name in ("", f"{few}annotations_{args.pictures}_")]
        listed = read_needle_tests(*files, args.captions)
        by_half = [[test for test in listed if (ABSENT in test.places) is absent] for absent in halves]
        tests = [test for half in by_half for test in choose(half, limit, args.seed)]
        names = {name for test in tests for grid in test.haystack for name in grid}
        pictures = {name: find_picture(args.coco, name) for name in names}
    grids = [[[pictures[name] for name in grid] for grid in test.haystack] for test in tests]
    trials = [Trial(t, tuple(partial(stitch, g) for g in of), sum(of, [])) for t, of in zip(tests, grids, strict=True)]
    return {f"{few}{args.pictures}_{size}": trials}


def draw_tests(
    captions: Mapping[str, str], count: int, pictures=1, side=2, needles=1, seed: int = 42, *, absent=False
) -> list[NeedleTest]:
    """`count` tests over captioned pictures (name to caption), of M `pictures` of `side`×`side` and K `needles`.

    First needles take all places in turn. No picture occurs twice in a test; with `absent` the needles are not in it.
    Raises UserError if pictures are few.
    """
    names, draw, tests = sorted(captions), random.Random(seed), []
    cells, size = side**2, pictures * side**2
    if needles > size or len(names) < size + needles * absent:
        problem = f"--captions: {len(names)} of its pictures are in --coco, too few for {pictures} of {side} by {side}"
        raise UserError(f"{problem} and {needles} needle(s): give the folder that holds them, or ask for less")
    for number in range(count):
        drawn = draw.sample(names, size + needles * absent)
        others = draw.sample([spot for spot in range(size) if spot != number % size], needles - 1)
        spots = range(size, size + needles) if absent else [number % size, *others]
        places = tuple(ABSENT if absent else (s // cells, s % cells // side, s % side) for s in spots)
        haystack = tuple(tuple(drawn[at : at + cells]) for at in range(0, size, cells))
        targets = tuple(drawn[spot] for spot in spots)
        of_targets = tuple(captions[name] for name in targets)
        tests.append(NeedleTest(number + FIRST_ABSENT_ID * absent, haystack, places, targets, of_targets))
    return tests


def choose(tests: Sequence[NeedleTest], count: int, seed: int) -> list[NeedleTest]:
    """`count` tests drawn at random, in the order of their ids; with one needle a test the same number for every place,
    if there are as many. Raises UserError if there are too few."""
    draw, pools = random.Random(seed), defaultdict(list)
    for test in tests:
        pools[test.places].append(test)
    if not 0 < len(pools) <= count or any(len(places) > 1 for places in pools):
        pools = {(): tests}
    each = count // len(pools)
    if (least := min(map(len, pools.values()))) < each:
        raise UserError(f"--limit: {each} tests of a place are asked for, {least} are there: lower it")
    return sorted((test for _, pool in sorted(pools.items()) for test in draw.sample(pool, each)), key=lambda t: t.id)


def stitch(pictures: Sequence[Path | Image.Image], size: int = SUB_IMAGE) -> Image.Image:
    """N² pictures, row-major, each resized to size×size px (aspect not kept), as one. Raises UserError."""
    side = math.isqrt(len(pictures))
    canvas = Image.new("RGB", (side * size, side * size))
    for at, picture in enumerate(pictures):
        canvas.paste(load_image(picture).resize((size, size)), (at % side * size, at // side * size))
    return canvas


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


def asks_of(trials: Sequence[Trial], protocol: str, kind: str = "") -> list[Question]:
    """All questions about the trials, caption by caption; without choices the answer is free.

    Raises UserError for a protocol that cannot ask them."""
    questions = []
    for test, pictures, files in trials:
        asked = [question for caption in test.captions for question in scenes.place_questions(caption, test.side)]
        if protocol == "official":
            asked = [(official_prompt(test.captions, len(pictures), test.side), ())]
        elif len(pictures) > 1 or test.side == 1 or protocol == "constrained" and ABSENT in test.places:
            lacks = "several pictures, undivided ones, or (constrained) needles that are absent"
            raise UserError(f"--protocol {protocol} has no answer for {lacks}: take official")
        key = sha256(repr(test.haystack).encode()).hexdigest()  # several tests may share a haystack
        picture = pictures[0] if len(pictures) == 1 else pictures
        for number, (prompt, words) in enumerate(asked):
            name, choices = f"{kind}/{test.id}/{number}".removeprefix("/"), words if protocol == "constrained" else ()
            questions.append(Question(name, key, picture, prompt, choices, files, truth=test, kind=kind))
    return questions


def respond(test: NeedleTest, answers: Sequence, protocol: str) -> str | None:
    """MMNeedle's response from the answers to `asks_of`; None if one is missing. An answer that is not exactly one of
    its words says that the needle is absent."""
    if protocol == "official" or None in answers:
        return None if None in answers else answers[0]
    words, places = [words for _, words in scenes.place_questions("", test.side)], []
    for at in range(0, len(answers), len(words)):
        said = [answer.strip().lower() for answer in answers[at : at + len(words)]]
        numbers = [of.index(word) if word in of else -1 for word, of in zip(said, words, strict=True)]
        place = numbers if test.side == 2 else divmod(numbers[0], test.side)
        places.append("-1" if -1 in numbers else ", ".join(["1", *(str(number + 1) for number in place)]))
    return "; ".join(places)


def rows_of(questions: Sequence[Question], answers: Sequence, protocol: str) -> list[Row]:
    """The row of each test, from the answers to `asks_of`; its record has them as "said"."""
    rows, pairs = [], zip(questions, answers, strict=True)
    for _, group in groupby(pairs, key=lambda pair: id(pair[0].truth)):
        (question, *_), said = zip(*group, strict=True)
        record = response_record(question.truth, respond(question.truth, said, protocol))
        rows.append(row_of(question, record | {"said": said}))
    return rows


def row_of(question: Question, record: dict) -> Row:
    """Without a response there is no answer."""
    verdict = judge(record)
    return Row(question, verdict and record, {f"exact, {question.kind}": float(verdict[2])} if verdict else {})


def evaluate_embedded(model, processor, kind: str, count: int, progress=None, *, ask_all, protocol="paper") -> float:
    """Exact accuracy in percent on `count` tests of the embedded test split: all questions of a test must be right."""
    questions = asks_of(embedded_trials(kind, count), protocol)
    rows = rows_of(questions, ask_all(model, processor, questions, progress=progress), protocol)
    return 100 * score_responses(row.answer for row in rows if row.answer)["exact"]


def draw_sheet(rows: Sequence[Row], title: str) -> Image.Image:
    """A contact sheet of up to eight hits and eight misses: pictures with a frame around the needle, and answers."""
    hits, misses = ([row for row in rows if any(row.scores.values()) is right][:8] for right in (True, False))
    pictures, captions = [], []
    for question, record, _ in hits + misses:
        test = question.truth
        index, size = max(0, test.places[0][0]), 512 / test.side
        needles = zip(test.places, test.captions, strict=True)
        here = [(row, col, caption) for (at, row, col), caption in needles if at == index]
        boxes = [(col * size, row * size, (col + 1) * size, (row + 1) * size) for row, col, _ in here]
        picture = load_image(question.images()[index]).resize((512, 512))
        labels = [caption for *_, caption in here] if len(test.places) > 1 else ()
        pictures.append(draw_boxes(picture, boxes, labels, width=4))
        captions.append(f"said {', '.join(record['said'])} | {' | '.join(test.captions)}")
    return contact_sheet(pictures, captions, [True] * len(hits) + [False] * len(misses), title=title)


main = partial(run, Needle())

if __name__ == "__main__":
    run_command(main)

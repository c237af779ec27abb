"""MMNeedle: find the sub-image that a caption describes in a stitched picture of N×N, or say that it is not there.

    python -m eval.needle                       the newest run, or the embedded base, on the embedded scenes
    python -m eval.needle --coco DIR --captions file_to_caption.json --metadata DIR --model SRC --adapter RUN
    python -m eval.needle --results responses.json

In: tests (`eval/data/published.py`) and a folder of COCO pictures, or a response file in MMNeedle's
format. Out: such a file, existence, index and exact accuracy beside chance, a heatmap of accuracy
by place, and a sheet of hits and misses.

Source: Wang et al., "Multimodal Needle in a Haystack: Benchmarking Long-Context Capability of Multimodal Large Language
Models", NAACL 2025, arXiv 2406.11230 (its prompts, parsing and measures). The `paper` protocol is the adaptation of the
differential PaliGemma paper: M = 1, N = 2, and two questions with one word to answer.
"""

import json
import math
import random
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from PIL import Image

from eval.bench import Benchmark, Row, by_kind, run
from eval.command import whole
from eval.data import published, scenes
from eval.data.published import ABSENT, NeedleTest, check, find_image, find_picture, read, text
from eval.figures import contact_sheet, draw_boxes, heatmaps, save
from eval.question import Question
from model.common import UserError, quoted, run_command, write_text
from model.images import load_image

PROTOCOLS = ("paper", "constrained", "official")
PROTOCOL_HELP = "paper: one exact word; constrained: the likelier word; official: MMNeedle's own prompt and parsing"
KINDS = "; ".join(f"{kind}: {title}" for kind, title in scenes.NEEDLE_TITLES.items())
METADATA_HELP = "folder of MMNeedle's N_N.json and annotations_M_N_N.json (default: 2×2 tests drawn from --captions)"
LIMIT, SEED = 200, 42  # tests of each kind, by default; of their draw
FIRST_ABSENT_ID = 5000  # MMNeedle's ids from here on have no needle in the haystack
SUB_IMAGE = 256  # px along each side of a sub-image
PLACE = r"(0, 0, 0|[1-9][0-9]?, [1-9][0-9]?, [1-9][0-9]?)"  # absent, or counted from 1
TRUTH = re.compile(f"{PLACE}(; {PLACE})*")


class Needle(Benchmark):
    """A `Row` is a test: its first question; its response record, with the answers to `asks_of` as
    "said"; and, if it has a response, whether all is right."""

    name = "needle"
    max_new_tokens = 64
    protocol = "paper"
    flags = {
        "--protocol": dict(help=PROTOCOL_HELP, default="paper", choices=PROTOCOLS),
        "--kind": dict(
            help=f"of embedded tests ({KINDS}; default: all)",
            nargs="+",
            choices=list(scenes.NEEDLES),
        ),
        "--coco": dict(
            help="folder of COCO val2014 pictures (default: the embedded scenes)", metavar="DIR"
        ),
        "--captions": dict(help="with --coco: MMNeedle's or COCO's caption file", metavar="FILE"),
        "--metadata": dict(help=f"with --coco: {METADATA_HELP}", metavar="DIR"),
        "--needles": dict(help="needles a test", default=1, type=whole(1, 16), metavar="K"),
        "--negatives": dict(help="add as many tests whose needles are absent", default=False),
        "--pictures": dict(
            help="with --metadata: pictures a test", default=1, type=whole(1, 100), metavar="M"
        ),
        "--side": dict(
            help="with --metadata: sub-images a side", default=2, type=whole(1, 64), metavar="N"
        ),
        "--limit": dict(
            help="tests of each kind", default=LIMIT, type=whole(1, FIRST_ABSENT_ID), metavar="N"
        ),
    }

    def questions(self, args):
        self.protocol = args.protocol
        halves = (False, True)[: 1 + args.negatives]
        if bool(args.coco) != bool(args.captions) or args.metadata and not args.coco:
            raise UserError(
                "--coco, --captions and --metadata belong together: give at least the first two"
            )
        is_special = (
            (args.pictures, args.side) != (1, 2)
            or args.coco
            and (args.needles > 1 or args.negatives)
        )
        if is_special and not args.metadata:
            raise UserError(
                "--pictures, --side, and more or absent needles on COCO's pictures: give "
                "--metadata too"
            )
        if args.metadata:
            tests = official_tests(args, halves)
        elif args.coco:
            tests = {"1_2_2": drawn_tests(args.coco, args.captions, args.limit)}
        else:
            drawn = partial(embedded_tests, count=args.limit, needles=args.needles)
            kinds = args.kind or scenes.NEEDLES
            tests = {
                kind: [test for half in halves for test in drawn(kind, absent=half)]
                for kind in kinds
            }
        return [
            question
            for kind, of_kind in tests.items()
            for question in asks_of(of_kind, args.protocol, kind)
        ]

    def rows(self, questions, answers):
        rows, pairs = [], zip(questions, answers, strict=True)
        for _, group in groupby(pairs, key=lambda pair: id(pair[0].truth)):
            (question, *_), said = zip(*group, strict=True)
            record = response_record(question.truth, respond(question.truth, said, self.protocol))
            rows.append(row_of(question, record | {"said": said}))
        return rows

    def read(self, file, args):
        kind = Path(file).stem
        return [
            row_of(Question(r["id"], str(r["id"]), (), "", kind=kind), r)
            for r in read_responses(file)
        ]

    def summary(self, rows):
        lines: dict[str, dict] = {}
        for kind, of_kind in by_kind(rows).items():
            records, test = [row.answer for row in of_kind if row.scores], of_kind[0].question.truth
            by_place = accuracy_by_place(records)
            mean = sum(by_place.values()) / len(by_place) if by_place else None
            lines[kind] = score_responses(records) | {"exact, mean over places": mean}
            if test is not None:  # K distinct ones of the P = M·N² places there are
                lines[kind]["chance"] = 1 / math.perm(
                    len(test.haystack) * test.side**2, len(test.places)
                )
            halves = [
                [r for r in records if r["ground_truth"].startswith("0, ") is absent]
                for absent in (False, True)
            ]
            if all(halves):
                names = f"  positives, {kind}", f"  negatives, {kind}"
                lines |= zip(names, map(score_responses, halves), strict=True)
            lines |= {
                f"  {kind}, row {r}, column {c}": {"exact": value}
                for (r, c), value in by_place.items()
            }
        return {
            line: {name: v if v is None else 100 * v for name, v in of.items()}
            for line, of in lines.items()
        }

    def write(self, rows, out, subject):
        grids = {}
        for kind, of_kind in by_kind(rows).items():
            test = of_kind[0].question.truth
            title = f"{len(test.places)} needle(s) in {len(test.haystack)} picture(s) of {test.side}×{test.side}"
            title = scenes.NEEDLE_TITLES.get(kind, title)
            records = [response_record(q.truth, record["response"]) for q, record, _ in of_kind]
            write_text(
                out / f"responses-{kind}.json",
                json.dumps(records, ensure_ascii=False, indent=1) + "\n",
            )
            by_place, numbers = accuracy_by_place(records), range(1, test.side + 1)
            grids[title] = [
                [by_place.get((row, col), math.nan) for col in numbers] for row in numbers
            ]
            if scored := [row for row in of_kind if row.scores]:
                exact = 100 * score_responses(records)["exact"]
                heading = f"{subject.title}, {title}: {exact:.1f} % exact (blue: the needle)"
                save(draw_sheet(scored, heading), out / f"sheet-{kind}.png")
        save(
            heatmaps(grids, f"{subject.title}: needles found, {self.protocol} protocol"),
            out / "heatmap.png",
        )


# Tests


def embedded_tests(
    kind: str, count: int, split: str = "test", *, needles: int = 1, absent: bool = False
) -> list[NeedleTest]:
    """`count` tests on the embedded scenes, of a kind in `scenes.NEEDLES`; first needles take all
    places in turn. Raises UserError for more needles than places."""
    if needles > (places := scenes.layout_of(kind)[0] ** 2):
        raise UserError(f"--needles {needles}: {kind} has {places} places")
    tests = []
    for number in range(count):
        drawn = scenes.needle(kind, split, number, needles=needles, negative=absent)
        name = f"{kind}-{needles}{'-absent' * absent}/{split}/{number}"
        names = tuple(f"{name}/{at // drawn.n}_{at % drawn.n}" for at in range(drawn.n**2))
        places = tuple(ABSENT if absent else (0, row, col) for row, col in drawn.targets)
        targets = tuple(
            f"{name}/absent" if absent else names[row * drawn.n + col] for row, col in drawn.targets
        )
        id_, pictures = number + FIRST_ABSENT_ID * absent, (drawn.scene.render,)
        tests.append(NeedleTest(id_, (names,), places, targets, drawn.captions, pictures))
    return tests


def official_tests(args: Namespace, halves: Sequence[bool]) -> dict[str, list[NeedleTest]]:
    """MMNeedle's own tests on COCO's pictures that the flags ask for, under its name for their
    kind; of each half those with the needles there or absent. Raises UserError."""
    few, size = f"{args.needles}_" if args.needles > 1 else "", f"{args.side}_{args.side}"
    files = [
        Path(args.metadata, f"{name}{size}.json")
        for name in ("", f"{few}annotations_{args.pictures}_")
    ]
    listed = published.read_needle_tests(*files, args.captions)
    by_half = [[test for test in listed if (ABSENT in test.places) is absent] for absent in halves]
    chosen = [test for half in by_half for test in choose(half, args.limit, SEED)]
    return {f"{few}{args.pictures}_{size}": [on_pictures(test, args.coco) for test in chosen]}


def drawn_tests(
    coco: str | Path, captions: str | Path, count: int, seed: int = SEED
) -> list[NeedleTest]:
    """`count` tests of one needle in 2×2 pictures, drawn from all captioned ones of a folder:
    needles take all places in turn, no picture occurs twice in a test. Raises UserError if pictures
    are few."""
    listed = published.read_captions(captions)
    listed = {
        name if Path(name).name != name else f"val2014/{name}": text
        for name, text in listed.items()
    }
    names, draw, tests = (
        sorted(name for name in listed if find_image(coco, name).is_file()),
        random.Random(seed),
        [],
    )
    if len(names) < 4:
        problem = f"--captions: {len(names)} of its pictures are in --coco, too few for 2 by 2"
        raise UserError(f"{problem}: give the folder that holds them")
    for number in range(count):
        grid, spot = tuple(draw.sample(names, 4)), number % 4
        test = NeedleTest(
            number, (grid,), ((0, *divmod(spot, 2)),), (grid[spot],), (listed[grid[spot]],)
        )
        tests.append(on_pictures(test, coco))
    return tests


def on_pictures(test: NeedleTest, folder: str | Path) -> NeedleTest:
    """The test on stitched pictures of a folder. Raises UserError for one that is not there."""
    grids = [[find_picture(folder, name) for name in grid] for grid in test.haystack]
    return replace(
        test, pictures=tuple(partial(stitch, grid) for grid in grids), files=tuple(sum(grids, []))
    )


def choose(tests: Sequence[NeedleTest], count: int, seed: int) -> list[NeedleTest]:
    """`count` tests drawn at random, in the order of their ids; with one needle a test the same
    number for every place, if there are as many. Raises UserError if there are too few."""
    draw, pools = random.Random(seed), defaultdict(list)
    for test in tests:
        pools[test.places].append(test)
    if not 0 < len(pools) <= count or any(len(places) > 1 for places in pools):
        pools = {(): tests}
    each = count // len(pools)
    if (least := min(map(len, pools.values()))) < each:
        raise UserError(
            f"--limit: {each} tests of a place are asked for, {least} are there: lower it"
        )
    return sorted(
        (test for _, pool in sorted(pools.items()) for test in draw.sample(pool, each)),
        key=lambda t: t.id,
    )


def stitch(pictures: Sequence[Path]) -> Image.Image:
    """N² pictures, row-major, each resized to SUB_IMAGE (aspect not kept), as one. Raises
    UserError."""
    side, size = math.isqrt(len(pictures)), SUB_IMAGE
    canvas = Image.new("RGB", (side * size, side * size))
    for at, picture in enumerate(pictures):
        canvas.paste(
            load_image(picture).resize((size, size)), (at % side * size, at // side * size)
        )
    return canvas


# Prompts and answers


def official_prompt(captions: Sequence[str], pictures: int, side: int) -> str:
    """MMNeedle's own instruction for K captions, M `pictures` of `side`×`side` sub-images."""
    head = f"Given {pictures} image{'s' * (pictures > 1)} indexed from 1 to {pictures}, each divided into "
    head += f"{side}*{side} subimage{'s' * (side > 1)}, identify the subimage"
    example = "For example, '1, 2, 3' indicates the subimage in the first image, second row, and third column. "
    if len(captions) == 1:
        head += " that best matches the provided caption. Respond with 'index, row, column' and nothing else. "
        return (
            f"{head}{example}If no match is found, respond only with '-1'.\nCaption: {captions[0]}"
        )
    layout = "; ".join(f"index_{i}, row_{i}, column_{i}" for i in range(1, len(captions) + 1))
    head += f"s that best match the provided {len(captions)} captions. Respond in the format: {layout}. Only provide "
    head += f"this information. {example}If no subimage matches a caption, respond with '-1' for that caption."
    return head + "".join(f"\nCaption_{i}: {caption}" for i, caption in enumerate(captions, 1))


def asks_of(tests: Sequence[NeedleTest], protocol: str, kind: str = "") -> list[Question]:
    """All questions about the tests, caption by caption; without choices the answer is free. Raises
    UserError for a protocol that cannot ask them."""
    questions = []
    for test in tests:
        asked = [
            question
            for caption in test.captions
            for question in scenes.place_questions(caption, test.side)
        ]
        if protocol == "official":
            asked = [(official_prompt(test.captions, len(test.pictures), test.side), ())]
        elif (
            len(test.pictures) > 1
            or test.side == 1
            or protocol == "constrained"
            and ABSENT in test.places
        ):
            lacks = "several pictures, undivided ones, or (constrained) needles that are absent"
            raise UserError(f"--protocol {protocol} has no answer for {lacks}: take official")
        key = sha256(repr(test.haystack).encode()).hexdigest()  # several tests may share a haystack
        for number, (prompt, words) in enumerate(asked):
            name, choices = (
                f"{kind}/{test.id}/{number}".removeprefix("/"),
                words if protocol == "constrained" else (),
            )
            questions.append(
                Question(
                    name, key, test.pictures, prompt, choices, test.files, truth=test, kind=kind
                )
            )
    return questions


def respond(test: NeedleTest, answers: Sequence, protocol: str) -> str | None:
    """MMNeedle's response from the answers to `asks_of`; None if one is missing. An answer that is
    not exactly one of its words says that the needle is absent."""
    if protocol == "official" or None in answers:
        return None if None in answers else answers[0]
    words, places = [words for _, words in scenes.place_questions("", test.side)], []
    for at in range(0, len(answers), len(words)):
        said = [answer.strip().lower() for answer in answers[at : at + len(words)]]
        numbers = [
            of.index(word) if word in of else -1 for word, of in zip(said, words, strict=True)
        ]
        place = numbers if test.side == 2 else divmod(numbers[0], test.side)
        places.append(
            "-1" if -1 in numbers else ", ".join(["1", *(str(number + 1) for number in place)])
        )
    return "; ".join(places)


def row_of(question: Question, record: dict) -> Row:
    """Without a response nothing is scored."""
    verdict = judge(record)
    return Row(question, record, {f"exact, {question.kind}": float(verdict[2])} if verdict else {})


def evaluate_embedded(model, processor, kind: str, count: int, progress=None, *, ask_all) -> float:
    """Exact accuracy in percent on `count` tests of the embedded test split: all questions of a
    test must be right."""
    questions = asks_of(embedded_tests(kind, count), Needle.protocol)
    rows = Needle().rows(questions, ask_all(model, processor, questions, progress=progress))
    return 100 * score_responses(row.answer for row in rows)["exact"]


def draw_sheet(rows: Sequence[Row], title: str) -> Image.Image:
    """A contact sheet of up to eight hits and eight misses: pictures with a frame around the
    needle, and answers."""
    hits, misses = (
        [row for row in rows if any(row.scores.values()) is right][:8] for right in (True, False)
    )
    pictures, captions = [], []
    for question, record, _ in hits + misses:
        test = question.truth
        index, size = max(0, test.places[0][0]), 512 / test.side
        here = {
            place: text
            for place, text in zip(test.places, test.captions, strict=True)
            if place[0] == index
        }
        boxes = [
            (col * size, row * size, (col + 1) * size, (row + 1) * size) for _, row, col in here
        ]
        picture = load_image(question.images()[index]).resize((512, 512))
        labels = list(here.values()) if len(test.places) > 1 else ()
        pictures.append(draw_boxes(picture, boxes, labels, width=4))
        captions.append(f"said {', '.join(record['said'])} | {' | '.join(test.captions)}")
    return contact_sheet(
        pictures, captions, [True] * len(hits) + [False] * len(misses), title=title
    )


# Response files and measures


def response_record(test: NeedleTest, response: str | None) -> dict:
    """One record of a response file: the response and the truth, places counted from 1, 0 for an
    absent needle."""
    truth = "; ".join(", ".join(str(number + 1) for number in place) for place in test.places)
    targets, captions = [Path(target).name for target in test.targets], list(test.captions)
    if len(captions) == 1:
        (targets,), (captions,) = targets, captions
    return {
        "id": test.id,
        "response": response,
        "ground_truth": truth,
        "target_path": targets,
        "caption": captions,
    }


def read_responses(path: str | Path) -> list[dict]:
    """Read a response file, MMNeedle's or ours. Raises UserError for a malformed record or an id
    that occurs twice."""

    def response(record: dict) -> dict:
        truth = text(record, "ground_truth")
        expected = "'index, row, column', each from 1 to 99, or '0, 0, 0', joined by '; '"
        check(bool(TRUTH.fullmatch(truth)), f"ground_truth is {quoted(truth)}, expected {expected}")
        check(
            isinstance(record["id"], int | str),
            f"id is {quoted(record['id'])}, expected a number or a text",
        )
        check(isinstance(record["response"], str | None), "response is no text")
        return record

    records = read(path, response)
    published.check_unique((record["id"] for record in records), path)
    return records


def answers_of(record: dict) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(true answers, given answers), one per needle, "-1" for an absent one; none for a record
    without response. A response is read without newlines, without spaces and periods at its ends,
    and split at ";". Of several needles MMNeedle reads these as "none is there": -1, -1; -1, -1,
    -1, -1-1, and -1, -1, -1; -1, -1, -1."""
    if record["response"] is None:
        return (), ()
    truth = tuple(
        "-1" if part.startswith("0, ") else part for part in record["ground_truth"].split("; ")
    )
    given, count = record["response"].replace("\n", "").strip().strip(".").strip(), len(truth)
    if count == 1:
        return truth, (given,)
    parts = tuple(part.strip() for part in given.split("; "))
    none = {
        "-1",
        "; ".join(["-1, -1, -1"] * count),
        *(mark.join(["-1"] * count) for mark in ("", ", ", "; ")),
    }
    return truth, ("-1",) * count if "; ".join(parts) in none else parts


def judge(record: dict) -> tuple[bool, bool, bool] | None:
    """Whether a response is right in (existence, index, exact); None if there is no response.
    Existence: the answer is "-1" exactly if no needle is there. Index: the parts before the first
    ", " agree. Exact: all agrees. With several needles the whole list must agree."""
    truth, given = answers_of(record)
    if not truth:
        return None
    nothing = ("-1",) * len(truth)
    index = [part.split(", ")[0] for part in truth] == [part.split(", ")[0] for part in given]
    return (truth == nothing) == (given == nothing), index, truth == given


def score_responses(records: Iterable[dict]) -> dict[str, float]:
    """Accuracies "existence", "index" and "exact", fractions of the responses that are not None; 0
    without any."""
    verdicts = [verdict for record in records if (verdict := judge(record)) is not None] or [
        (False,) * 3
    ]
    means = (sum(column) / len(verdicts) for column in zip(*verdicts, strict=True))
    return dict(zip(("existence", "index", "exact"), means, strict=True))


def accuracy_by_place(records: Iterable[dict]) -> dict[tuple[int, int], float]:
    """Exact accuracy of the needles by their row and column, from 1. With one needle a test and
    side 2 these are the paper's quadrants, and their mean is its "index accuracy"."""
    hits: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for record in records:
        truth, given = answers_of(record)
        for at, part in enumerate(truth):
            if part != "-1":
                _, row, col = map(int, part.split(", "))
                hits[row, col].append(given[at : at + 1] == (part,))
    return {place: sum(hits[place]) / len(hits[place]) for place in sorted(hits)}


main = partial(run, Needle())

if __name__ == "__main__":
    run_command(main)

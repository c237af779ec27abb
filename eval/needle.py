"""MMNeedle: find the sub-image that a caption describes in a stitched picture of N×N, or say that
it is not there.

    python -m eval.needle               the newest run, or the embedded base, on the embedded scenes
    python -m eval.needle --coco DIR --captions FILE --metadata DIR --model SRC --adapter RUN
    python -m eval.needle --results responses.json

In: tests (`eval/data/mmneedle.py`) and a folder of COCO pictures, or a response file in MMNeedle's
format. Out: such a file, existence, index and exact accuracy beside chance, a heatmap of accuracy
by place, and a sheet of hits and misses.

Source: Wang et al., "Multimodal Needle in a Haystack: Benchmarking Long-Context Capability of
Multimodal Large Language Models", NAACL 2025, arXiv 2406.11230 (its prompts, parsing and measures).
The `paper` protocol is the adaptation of the differential PaliGemma paper: M = 1, N = 2, and two
questions with one word to answer.
"""

import math
import random
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import groupby, product, zip_longest
from pathlib import Path

import numpy as np
from PIL import Image

from eval.bench import Benchmark, Row, by_kind, certainties_of, run, write_json
from eval.command import whole
from eval.data.files import check, check_unique, find_image, find_picture, read, text_at
from eval.data.haystacks import NEEDLE_TITLES, NEEDLES, haystack, layout_of, place_questions
from eval.data.mmneedle import ABSENT, NeedleTest, read_captions, read_needle_tests
from eval.figures import contact_sheet, draw_boxes, heatmaps, save
from eval.question import Question, parts_of
from model.common import UserError, quoted, run_command
from model.images import load_image

PROTOCOLS = ("paper", "constrained", "official")
PROTOCOL_HELP = (
    "paper: one exact word; constrained: the likelier word; "
    "official: MMNeedle's own prompt and parsing"
)
KIND_HELP = "; ".join(f"{kind}: {title}" for kind, title in NEEDLE_TITLES.items())
METADATA_HELP = (
    "folder of MMNeedle's N_N.json and annotations_M_N_N.json "
    "(default: 2×2 tests drawn from --captions)"
)
LIMIT = 200  # tests of each kind, by default
SEED = 42  # of their draw
FIRST_ABSENT_ID = 5000  # MMNeedle's ids from here on have no needle in the haystack
SUB_IMAGE = 256  # px along each side of a sub-image
COUNTED = r"(0, 0, 0|[1-9][0-9]?, [1-9][0-9]?, [1-9][0-9]?)"  # absent, or a place from 1
TRUTH = re.compile(f"{COUNTED}(; {COUNTED})*")


class Needle(Benchmark):
    """A `Row` is a test: its first question; its response record, with the answers to `asks_of` as
    "said"; and, if it has a response, whether all is right."""

    name = "needle"
    max_new_tokens = 64
    protocol = "paper"
    flags = {
        "--protocol": dict(help=PROTOCOL_HELP, default="paper", choices=PROTOCOLS),
        "--kind": dict(
            help=f"of embedded tests ({KIND_HELP}; default: all)",
            nargs="+",
            choices=NEEDLES,
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
        questions = []
        for kind, tests in tests_of(args).items():
            questions += asks_of(tests, args.protocol, kind)
        return questions

    def rows(self, questions, answers, sure: Mapping = {}):
        rows = []
        pairs = zip(questions, answers, strict=True)
        for _, group in groupby(pairs, key=lambda pair: id(pair[0].truth)):
            asked, said = zip(*group, strict=True)
            test = asked[0].truth
            record = response_record(test, respond(test, said, self.protocol))
            row = judged_row(asked[0], record | {"said": said})
            rows.append(row._replace(sure=certainties_of(sure, *asked)))
        return rows

    def read(self, file, args):
        rows = []
        for record in read_responses(file):
            question = Question(record["id"], str(record["id"]), (), "", kind=Path(file).stem)
            rows.append(judged_row(question, record))
        return rows

    def summary(self, rows):
        lines = {}
        for kind, of_kind in by_kind(rows).items():
            # 1. all tests
            records = [row.answer for row in of_kind if row.scores]
            by_place = accuracy_by_place(records)
            lines[kind] = score_responses(records) | {"exact, mean over places": None}
            if by_place:
                mean = sum(by_place.values()) / len(by_place)
                lines[kind]["exact, mean over places"] = 100 * mean
            test = of_kind[-1].question.truth
            if test is not None and ABSENT not in test.places:  # absent needles come last
                places = len(test.haystack) * test.side**2
                lines[kind]["chance"] = 100 * (1 / math.perm(places, len(test.places)))
            # 2. those whose needles are there, and absent
            halves = {"positives": [], "negatives": []}
            for record in records:
                is_absent = record["ground_truth"].startswith("0, ")
                halves["negatives" if is_absent else "positives"].append(record)
            if all(halves.values()):
                for half, of_half in halves.items():
                    lines[f"  {half}, {kind}"] = score_responses(of_half)
            # 3. by place
            for (row, column), accuracy in by_place.items():
                lines[f"  {kind}, row {row}, column {column}"] = {"exact": 100 * accuracy}
        return lines

    def write(self, rows, out, subject):
        grids = {}
        for kind, of_kind in by_kind(rows).items():
            # 1. the responses
            test = of_kind[0].question.truth
            records = [response_record(q.truth, record["response"]) for q, record, *_ in of_kind]
            write_json(out / f"responses-{kind}.json", records)
            # 2. accuracy by place
            size = f"{len(test.haystack)} picture(s) of {test.side}×{test.side}"
            title = NEEDLE_TITLES.get(kind, f"{len(test.places)} needle(s) in {size}")
            grid = np.full((test.side, test.side), np.nan)
            for (row, col), accuracy in accuracy_by_place(records).items():
                grid[row - 1, col - 1] = accuracy
            grids[title] = grid.tolist()
            # 3. hits and misses
            if scored := [row for row in of_kind if row.scores]:
                exact = score_responses(records)["exact"]
                heading = f"{subject.title}, {title}: {exact:.1f} % exact (blue: the needle)"
                save(draw_sheet(scored, heading), out / f"sheet-{kind}.png")
        heading = f"{subject.title}: needles found, {self.protocol} protocol"
        save(heatmaps(grids, heading), out / "heatmap.png")


# Tests


def tests_of(args: Namespace) -> dict[str, list[NeedleTest]]:
    """The tests that the flags ask for, by kind. Raises UserError."""
    is_coco = args.coco and args.captions
    if not is_coco and any((args.coco, args.captions, args.metadata)):
        raise UserError(
            "--coco, --captions and --metadata belong together: give at least the first two"
        )
    if args.metadata:
        return official_tests(args)
    has_more = args.needles > 1 or args.negatives
    has_own_size = args.pictures != 1 or args.side != 2
    if has_own_size or (is_coco and has_more):
        raise UserError(
            "--pictures, --side, and more or absent needles on COCO's pictures: give --metadata too"
        )
    if is_coco:
        return {"1_2_2": drawn_tests(args.coco, args.captions, args.limit)}
    tests = {}
    for kind in args.kind or NEEDLES:
        make = partial(embedded_tests, kind, args.limit, needles=args.needles)
        tests[kind] = make()
        if args.negatives:
            tests[kind] += make(absent=True)
    return tests


def embedded_tests(
    kind: str,
    count: int,
    split: str = "test",
    *,
    needles: int = 1,
    absent: bool = False,
) -> list[NeedleTest]:
    """`count` tests on the embedded scenes, of a kind in `NEEDLES`; first needles take all
    places in turn. Raises UserError for more needles than places."""
    side = range(layout_of(kind)[0])
    squares = list(product(side, side))
    if needles > len(squares):
        raise UserError(f"--needles {needles}: {kind} has {len(squares)} places")
    half = "-absent" if absent else ""
    first_id = FIRST_ABSENT_ID if absent else 0
    tests = []
    for number in range(count):
        drawn = haystack(kind, split, number, needles=needles, negative=absent)
        name = f"{kind}-{needles}{half}/{split}/{number}"
        grid = {(row, col): f"{name}/{row}_{col}" for row, col in squares}
        tests.append(
            NeedleTest(
                first_id + number,
                haystack=(tuple(grid.values()),),
                places=tuple(ABSENT if absent else (0, *target) for target in drawn.targets),
                targets=tuple(grid.get(target, f"{name}/absent") for target in drawn.targets),
                captions=drawn.captions,
                pictures=(drawn.scene.render,),
            )
        )
    return tests


def official_tests(args: Namespace) -> dict[str, list[NeedleTest]]:
    """MMNeedle's own tests on COCO's pictures that the flags ask for, under its name for their
    kind. Raises UserError."""
    few = f"{args.needles}_" if args.needles > 1 else ""
    size = f"{args.side}_{args.side}"
    metadata = Path(args.metadata, f"{size}.json")
    annotations = Path(args.metadata, f"{few}annotations_{args.pictures}_{size}.json")
    listed = read_needle_tests(metadata, annotations, args.captions)
    chosen = sampled([test for test in listed if ABSENT not in test.places], args.limit)
    if args.negatives:
        chosen += sampled([test for test in listed if ABSENT in test.places], args.limit)
    return {f"{few}{args.pictures}_{size}": [on_pictures(test, args.coco) for test in chosen]}


def drawn_tests(
    coco: str | Path,
    captions: str | Path,
    count: int,
) -> list[NeedleTest]:
    """`count` tests of one needle in 2×2 pictures, drawn from all captioned ones of a folder:
    needles take all places in turn, no picture occurs twice in a test. Raises UserError if pictures
    are few."""
    described = {}
    for name, caption in read_captions(captions).items():
        has_folder = Path(name).name != name
        described[name if has_folder else f"val2014/{name}"] = caption
    names = sorted(name for name in described if find_image(coco, name).is_file())
    if len(names) < 4:
        raise UserError(
            f"--captions: {len(names)} of its pictures are in --coco, too few for 2 by 2: give the "
            "folder that holds them"
        )
    draw = random.Random(SEED)
    tests = []
    for number in range(count):
        grid = tuple(draw.sample(names, 4))
        spot = number % 4
        target = grid[spot]
        place = (0, *divmod(spot, 2))
        test = NeedleTest(
            number,
            (grid,),
            (place,),
            (target,),
            (described[target],),
        )
        tests.append(on_pictures(test, coco))
    return tests


def on_pictures(test: NeedleTest, folder: str | Path) -> NeedleTest:
    """The test on stitched pictures of a folder. Raises UserError for one that is not there."""
    pictures = []
    files = []
    for names in test.haystack:
        grid = [find_picture(folder, name) for name in names]
        pictures.append(Stitched(grid))
        files += grid
    return test._replace(pictures=tuple(pictures), files=tuple(files))


def sampled(tests: Sequence[NeedleTest], count: int) -> list[NeedleTest]:
    """Up to `count` tests drawn at random, in the order of their ids. With one needle a test, and
    no more places than `count`, each place gets as many. Raises UserError if there are too few."""
    pools = defaultdict(list)
    for test in tests:
        pools[test.places].append(test)
    has_several = any(len(places) > 1 for places in pools)
    if has_several or not 0 < len(pools) <= count:
        pools = {(): tests}  # all are one pool
    each = count // len(pools)
    least = min(map(len, pools.values()))
    if least < each:
        raise UserError(
            f"--limit: {each} tests of a place are asked for, {least} are there: lower it"
        )
    draw = random.Random(SEED)
    chosen = []
    for places in sorted(pools):
        chosen += draw.sample(pools[places], each)
    return sorted(chosen, key=lambda test: test.id)


@dataclass(frozen=True)
class Stitched:
    """N² pictures, row-major, each resized to SUB_IMAGE (aspect not kept), as one. What it prints
    as names a cell of a study. Raises UserError."""

    pictures: Sequence[Path]

    def __call__(self) -> Image.Image:
        side = math.isqrt(len(self.pictures))
        canvas = Image.new("RGB", (side * SUB_IMAGE, side * SUB_IMAGE))
        for at, picture in enumerate(self.pictures):
            row, col = divmod(at, side)
            resized = load_image(picture).resize((SUB_IMAGE, SUB_IMAGE))
            canvas.paste(resized, (col * SUB_IMAGE, row * SUB_IMAGE))
        return canvas


# Prompts and answers


def official_prompt(captions: Sequence[str], pictures: int, side: int) -> str:
    """MMNeedle's own instruction for K captions, M `pictures` of `side`×`side` sub-images."""
    images = "images" if pictures > 1 else "image"
    parts = "subimages" if side > 1 else "subimage"
    head = (
        f"Given {pictures} {images} indexed from 1 to {pictures}, "
        f"each divided into {side}*{side} {parts}, identify the subimage"
    )
    example = (
        "For example, '1, 2, 3' indicates "
        "the subimage in the first image, second row, and third column. "
    )
    if len(captions) == 1:
        return (
            f"{head} that best matches the provided caption. "
            f"Respond with 'index, row, column' and nothing else. {example}"
            f"If no match is found, respond only with '-1'.\nCaption: {captions[0]}"
        )
    numbers = range(1, len(captions) + 1)
    layout = "; ".join(f"index_{i}, row_{i}, column_{i}" for i in numbers)
    prompt = (
        f"{head}s that best match the provided {len(captions)} captions. "
        f"Respond in the format: {layout}. Only provide this information. {example}"
        "If no subimage matches a caption, respond with '-1' for that caption."
    )
    for i, caption in enumerate(captions, 1):
        prompt += f"\nCaption_{i}: {caption}"
    return prompt


def asks_of(
    tests: Sequence[NeedleTest],
    protocol: str,
    kind: str = "",
) -> list[Question]:
    """All questions about the tests, caption by caption; without choices the answer is free. Raises
    UserError for a protocol that cannot ask them."""
    questions = []
    for test in tests:
        # 1. what is asked
        prompts = []
        for caption in test.captions:
            prompts += place_questions(caption, test.side)
        is_beyond = len(test.pictures) > 1 or test.side == 1
        if protocol == "official":
            prompts = [(official_prompt(test.captions, len(test.pictures), test.side), ())]
        elif is_beyond or protocol == "constrained" and ABSENT in test.places:
            raise UserError(
                f"--protocol {protocol} has no answer for several pictures, undivided ones, or "
                "(constrained) needles that are absent: take official"
            )
        # 2. of which pictures
        key = sha256(repr(test.haystack).encode()).hexdigest()  # several tests may share a haystack
        for number, (prompt, words) in enumerate(prompts):
            questions.append(
                Question(
                    f"{kind}/{test.id}/{number}".removeprefix("/"),
                    key,
                    test.pictures,
                    prompt,
                    choices=words if protocol == "constrained" else (),
                    files=test.files,
                    truth=test,
                    kind=kind,
                )
            )
    return questions


def respond(test: NeedleTest, answers: Sequence, protocol: str) -> str | None:
    """MMNeedle's response from the answers to `asks_of`; None if one is missing. An answer that is
    not exactly one of its words says that the needle is absent."""
    if None in answers:
        return None
    if protocol == "official":
        return answers[0]
    words = [words for _, words in place_questions("", test.side)]
    places = []
    for of_needle in parts_of(answers, len(words)):
        said = [answer.strip().lower() for answer in of_needle]
        pairs = list(zip(said, words, strict=True))
        place = "-1"
        if all(word in known for word, known in pairs):
            numbers = [known.index(word) for word, known in pairs]
            row, col = numbers if test.side == 2 else divmod(numbers[0], test.side)
            place = f"1, {row + 1}, {col + 1}"
        places.append(place)
    return "; ".join(places)


def judged_row(question: Question, record: dict) -> Row:
    """The row of a response record, with its exact score; without a response it has none."""
    verdict = judge(record)
    scores = {f"exact, {question.kind}": float(verdict[2])} if verdict else {}
    return Row(question, record, scores)


def evaluate_embedded(
    model,
    processor,
    kind: str,
    count: int,
    progress=None,
    *,
    ask_all,
) -> float:
    """Exact accuracy in percent on `count` tests of the embedded test split: all questions of a
    test must be right."""
    questions = asks_of(embedded_tests(kind, count), Needle.protocol)
    rows = Needle().rows(questions, ask_all(model, processor, questions, progress=progress))
    return score_responses(row.answer for row in rows)["exact"]


# Figures


def draw_sheet(rows: Sequence[Row], title: str) -> Image.Image:
    """A contact sheet of up to eight hits and eight misses: pictures with a frame around the
    needle, and answers."""
    hits = [row for row in rows if max(row.scores.values())][:8]
    misses = [row for row in rows if not max(row.scores.values())][:8]
    pictures = []
    captions = []
    for question, record, *_ in hits + misses:
        # 1. the picture of the first needle
        test = question.truth
        index = max(0, test.places[0][0])
        picture = load_image(question.images()[index]).resize((512, 512))
        # 2. frames around the needles in it
        size = 512 / test.side
        boxes = []
        labels = []
        for (number, row, col), caption in zip(test.places, test.captions, strict=True):
            if number == index:
                boxes.append((col * size, row * size, (col + 1) * size, (row + 1) * size))
                labels.append(caption if len(test.places) > 1 else "")
        pictures.append(draw_boxes(picture, boxes, labels, width=4))
        captions.append(f"said {', '.join(record['said'])} | {' | '.join(test.captions)}")
    are_hits = [True] * len(hits) + [False] * len(misses)
    return contact_sheet(pictures, captions, are_hits, title=title)


# Response files and measures


def response_record(test: NeedleTest, response: str | None) -> dict:
    """One record of a response file: the response and the truth, places counted from 1, 0 for an
    absent needle."""
    places = [f"{index + 1}, {row + 1}, {col + 1}" for index, row, col in test.places]
    targets = [Path(target).name for target in test.targets]
    is_single = len(test.captions) == 1
    return {
        "id": test.id,
        "response": response,
        "ground_truth": "; ".join(places),
        "target_path": targets[0] if is_single else targets,
        "caption": test.captions[0] if is_single else list(test.captions),
    }


def read_responses(path: str | Path) -> list[dict]:
    """Read a response file, MMNeedle's or ours. Raises UserError for a malformed record or an id
    that occurs twice."""

    def response(record: dict) -> dict:
        truth = text_at(record, "ground_truth")
        expected = "'index, row, column', each from 1 to 99, or '0, 0, 0', joined by '; '"
        check(bool(TRUTH.fullmatch(truth)), f"ground_truth is {quoted(truth)}, expected {expected}")
        id_ = record["id"]
        check(isinstance(id_, int | str), f"id is {quoted(id_)}, expected a number or a text")
        check(isinstance(record["response"], str | None), "response is no text")
        return record

    records = read(path, response)
    check_unique((record["id"] for record in records), path)
    return records


def answers_of(record: dict) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(true answers, given answers), one per needle, "-1" for an absent one; none for a record
    without response. A response is read without newlines, without spaces and periods at its ends,
    and split at ";". Of several needles MMNeedle reads these as "none is there": -1, -1; -1, -1,
    -1, -1-1, and -1, -1, -1; -1, -1, -1."""
    if record["response"] is None:
        return (), ()
    truth = tuple(record["ground_truth"].replace("0, 0, 0", "-1").split("; "))
    given = record["response"].replace("\n", "").strip().strip(".").strip()
    if len(truth) == 1:
        return truth, (given,)
    nothing = ("-1",) * len(truth)
    nowhere = ("-1, -1, -1",) * len(truth)
    none_is_there = ["-1", "".join(nothing), ", ".join(nothing), "; ".join(nowhere)]
    parts = tuple(part.strip() for part in given.split("; "))
    if "; ".join(parts) in none_is_there:
        return truth, nothing
    return truth, parts


def judge(record: dict) -> tuple[bool, bool, bool] | None:
    """Whether a response is right in (existence, index, exact); None if there is no response.
    Existence: the answer is "-1" exactly if no needle is there. Index: the parts before the first
    ", " agree. Exact: all agrees. With several needles the whole list must agree."""
    truth, given = answers_of(record)
    if not truth:
        return None
    nothing = ("-1",) * len(truth)
    existence = (truth == nothing) == (given == nothing)
    index = [part.split(", ")[0] for part in truth] == [part.split(", ")[0] for part in given]
    return existence, index, truth == given


def score_responses(records: Iterable[dict]) -> dict[str, float]:
    """Accuracies "existence", "index" and "exact", in percent of the responses that are not None; 0
    without any."""
    measures = "existence", "index", "exact"
    verdicts = [verdict for verdict in map(judge, records) if verdict]
    if not verdicts:
        return dict.fromkeys(measures, 0.0)
    shares = 100 * np.mean(verdicts, axis=0)
    return dict(zip(measures, shares.tolist(), strict=True))


def accuracy_by_place(records: Iterable[dict]) -> dict[tuple[int, int], float]:
    """Exact accuracy of the needles by their row and column, from 1. With one needle a test and
    side 2 these are the paper's quadrants, and their mean is its "index accuracy"."""
    hits = defaultdict(list)
    for record in records:
        truth, given = answers_of(record)
        for part, said in zip_longest(truth, given[: len(truth)]):
            if part != "-1":
                _, row, col = map(int, part.split(", "))
                hits[row, col].append(said == part)
    return {place: sum(hits[place]) / len(hits[place]) for place in sorted(hits)}


main = partial(run, Needle())

if __name__ == "__main__":
    run_command(main)

"""MMNeedle: find the sub-image that a caption describes in a stitched picture of N×N, or say that it is not there.

    python -m eval.needle                       the last run, or the embedded base, on the embedded scenes
    python -m eval.needle --coco DIR --captions file_to_caption.json --metadata DIR --model SRC --adapter RUN
    python -m eval.needle score --responses F

In: tests (`eval/datasets.py`) and a folder of COCO pictures. Out: stitched pictures, prompts, a response file in
MMNeedle's format, its accuracies, and a heatmap of accuracy by place. Next: `eval/pope.py`.

Source: Wang et al., "Multimodal Needle in a Haystack: Benchmarking Long-Context Capability of Multimodal Large Language
Models", NAACL 2025, arXiv 2406.11230 (its prompts, parsing and measures). The `paper` protocol is the adaptation of the
differential PaliGemma paper: M = 1, N = 2, and two questions with one word to answer.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from eval import scenes
from eval.datasets import (
    ABSENT,
    NeedleTest,
    check_images,
    check_unique,
    field,
    find_image,
    read_captions,
    read_json,
    read_needle_tests,
    records_of,
)
from model.common import UserError, run_command, write_text

SUB_IMAGE = 256  # px along each side of a sub-image
FIRST_ABSENT_ID = 5000  # MMNeedle's ids from here on have no needle in the haystack
WORDS = (("top", "bottom"), ("left", "right"))  # answers to the two questions: row 0 or 1, column 0 or 1

Place = tuple[int, int, int]  # (index, row, col), counted from 0, or ABSENT

# ---------------------------------------------------------------------------------------------------------------------
# Pictures and samples
# ---------------------------------------------------------------------------------------------------------------------


def stitch(images: Sequence[Image.Image], size: int = SUB_IMAGE) -> Image.Image:
    """N² pictures, row-major, each squeezed to size×size px (its aspect is not kept), as one of N·size×N·size px."""
    side = round(len(images) ** 0.5)
    assert side * side == len(images), f"{len(images)} pictures do not fill a square"
    canvas = Image.new("RGB", (side * size, side * size))
    for at, image in enumerate(images):
        row, col = divmod(at, side)
        canvas.paste(image.convert("RGB").resize((size, size)), (col * size, row * size))
    return canvas


def build_haystack(test: NeedleTest, coco: str | Path, size: int = SUB_IMAGE) -> list[Image.Image]:
    """The M stitched pictures of `test`. Raises UserError if a picture is absent or unreadable."""
    from model.images import load_image  # only here: scoring needs no torch

    return [stitch([load_image(find_image(coco, name)) for name in cells], size) for cells in test.haystack]


def check_haystacks(tests: Iterable[NeedleTest], coco: str | Path, metadata: str | Path) -> None:
    """Raise UserError that names pictures of `tests` absent from the folder `coco`; before a long run, not in it."""
    check_images((name for test in tests for cells in test.haystack for name in cells), coco, metadata)


def sample_by_place(tests: Iterable[NeedleTest], each: int = 50, seed: int = 42) -> list[NeedleTest]:
    """`each` single-needle tests for every place of the grid, drawn with `seed`, in the order of their ids.

    Raises UserError if a place has fewer.
    """
    places: dict[Place, list[NeedleTest]] = {}
    for test in tests:
        if len(test.places) == 1 and test.places[0] != ABSENT:
            places.setdefault(test.places[0], []).append(test)
    draw, chosen = random.Random(seed), []
    for place, found in sorted(places.items()):
        if len(found) < each:
            raise UserError(f"only {len(found)} tests have their needle at {place}, {each} are wanted: ask for fewer")
        chosen += draw.sample(found, each)
    return sorted(chosen, key=lambda test: test.id)


def draw_tests(
    captions: Mapping[str, str],
    count: int,
    pictures: int = 1,
    side: int = 2,
    needles: int = 1,
    *,
    absent: bool = False,
    seed: int = 42,
) -> list[NeedleTest]:
    """`count` tests over any captioned pictures (name to caption), of M `pictures` of `side`×`side` and K `needles`.

    First needles take all places in turn. No picture occurs twice in a test; with `absent` the needles are not in it.
    Raises UserError if pictures are few.
    """
    names, draw, tests = sorted(captions), random.Random(seed), []
    cells = pictures * side**2
    if needles > cells or len(names) < cells + needles * absent:
        raise UserError(
            f"{len(names)} captioned pictures are too few for {pictures} picture(s) of {side} by {side} with {needles} "
            f"needle(s) {'beside' if absent else 'among'} them: give more, or ask for less"
        )
    for number in range(count):
        names_drawn = draw.sample(names, cells + needles * absent)
        first = number % cells
        others = draw.sample([spot for spot in range(cells) if spot != first], needles - 1)
        spots = list(range(cells, cells + needles)) if absent else [first, *others]
        targets = tuple(names_drawn[spot] for spot in spots)
        tests.append(
            NeedleTest(
                id=number + FIRST_ABSENT_ID * absent,
                haystack=tuple(tuple(names_drawn[at : at + side**2]) for at in range(0, cells, side**2)),
                places=tuple(ABSENT if absent else (s // side**2, s % side**2 // side, s % side) for s in spots),
                targets=targets,
                captions=tuple(captions[name] for name in targets),
            )
        )
    return tests


# ---------------------------------------------------------------------------------------------------------------------
# Prompts and answers
# ---------------------------------------------------------------------------------------------------------------------


def paper_prompts(caption: str) -> tuple[str, str]:
    """The two questions of the protocols `paper` and `constrained`: for the row, and for the column."""
    return (
        f"Caption: {caption}. Where is the caption? Top or Bottom?",
        f"Caption: {caption}. Where is the caption? Left or Right?",
    )


def parse_words(vertical: str, horizontal: str) -> Place:
    """The place in a 2×2 grid from two one-word answers, which must be just the word; else `ABSENT` (`paper`)."""
    row, col = (
        words.index(word) if (word := answer.strip().lower()) in words else -1
        for words, answer in zip(WORDS, (vertical, horizontal), strict=True)
    )
    return (0, row, col) if row >= 0 and col >= 0 else ABSENT


def official_prompt(captions: Sequence[str], pictures: int, side: int) -> str:
    """MMNeedle's own instruction for K captions, M `pictures` of `side`×`side` sub-images."""
    prompt = (
        f"Given {pictures} image{'s' * (pictures > 1)} indexed from 1 to {pictures}, each divided into {side}*{side} "
        f"subimage{'s' * (side > 1)}, identify the "
    )
    example = "For example, '1, 2, 3' indicates the subimage in the first image, second row, and third column. "
    if len(captions) == 1:
        return (
            f"{prompt}subimage that best matches the provided caption. Respond with 'index, row, column' and nothing "
            f"else. {example}If no match is found, respond only with '-1'.\nCaption: {captions[0]}"
        )
    numbers = range(1, len(captions) + 1)
    return (
        f"{prompt}subimages that best match the provided {len(captions)} captions. Respond in the format: "
        + "; ".join(f"index_{i}, row_{i}, column_{i}" for i in numbers)
        + f". Only provide this information. {example}If no subimage matches a caption, respond with '-1' for that "
        + "caption."
        + "".join(f"\nCaption_{i}: {caption}" for i, caption in zip(numbers, captions, strict=True))
    )


def spell_place(place: Place) -> str:
    """How a model should answer: "index, row, column" counted from 1, or "-1"."""
    return "-1" if place == ABSENT else ", ".join(str(number + 1) for number in place)


def parse_response(text: str, needles: int = 1) -> tuple[str, ...]:
    """A response as the list of its answers: newlines out, spaces and periods off the ends, split at ";".

    With several needles, MMNeedle takes these as "none is there", here ("-1",) * needles: -1, -1; -1, -1, -1, -1-1,
    and -1, -1, -1; -1, -1, -1.
    """
    text = text.replace("\n", "").strip().strip(".").strip()
    if needles == 1:
        return (text,)
    parts = tuple(part.strip() for part in text.split("; "))
    none = {
        "-1",
        "-1" * needles,
        *(mark.join(["-1"] * needles) for mark in (", ", "; ")),
        "; ".join(["-1, -1, -1"] * needles),
    }
    return ("-1",) * needles if "; ".join(parts) in none else parts


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------

PROTOCOLS = ("paper", "constrained", "official")


class Trial(NamedTuple):
    """A test, and a function that gives its M pictures."""

    test: NeedleTest
    pictures: Callable[[], list]


def embedded_trials(
    kind: str, count: int, needles: int = 1, *, absent: bool = False, split: str = "test"
) -> list[Trial]:
    """`count` tests on the embedded scenes, of a kind in `scenes.NEEDLES`; first needles take all places in turn."""
    trials = []
    for number in range(count):
        found = scenes.needle(kind, split, number, needles=needles, negative=absent)
        name = f"{kind}-{needles}{'-absent' * absent}/{split}/{number}"
        cells = tuple(f"{name}/{row}_{col}" for row in range(found.n) for col in range(found.n))
        places = tuple(ABSENT if row < 0 else (0, row, col) for row, col in found.targets)
        targets = tuple(f"{name}/absent" if row < 0 else cells[row * found.n + col] for row, col in found.targets)
        test = NeedleTest(number + FIRST_ABSENT_ID * absent, (cells,), places, targets, found.captions)
        trials.append(Trial(test, lambda scene=found.scene: [scene.render()]))
    return trials


def place_questions(caption: str, side: int) -> list[tuple[str, tuple[str, ...]]]:
    """(prompt, words to choose from) of the protocols `paper` and `constrained`: two for a 2×2 grid, as in the paper;
    for a larger one a single question with answers like "row 2 column 3", counted from 1."""
    if side == 2:
        return list(zip(paper_prompts(caption), WORDS, strict=True))
    places = tuple(f"row {row} column {col}" for row in range(1, side + 1) for col in range(1, side + 1))
    return [(f"Caption: {caption}. Where is the caption? Row and Column?", places)]


def parse_place(answers: Sequence[str], side: int) -> Place:
    """The place from the answers to `place_questions`, each of which must be just the words; else `ABSENT`."""
    if side == 2:
        return parse_words(*answers)
    words, said = place_questions("", side)[0][1], answers[0].strip().lower()
    return (0, *divmod(words.index(said), side)) if said in words else ABSENT


def prompts_of(test: NeedleTest, protocol: str) -> list[tuple[str, tuple[str, ...]]]:
    """(prompt, choices) of everything that is asked about a test, caption by caption; no choices: a free answer.

    Raises UserError for a protocol that cannot ask it.
    """
    pictures = len(test.haystack)
    if protocol == "official":
        return [(official_prompt(test.captions, pictures, test.side), ())]
    if pictures > 1 or test.side == 1:
        raise UserError(
            f"protocol {protocol!r} asks for a place in one picture of 2 by 2 or more, not in {pictures} of "
            f"{test.side} by {test.side}: take official"
        )
    if protocol == "constrained" and ABSENT in test.places:
        raise UserError("protocol 'constrained' compares places and can say of none that it is empty: take another")
    asked = [question for caption in test.captions for question in place_questions(caption, test.side)]
    return asked if protocol == "constrained" else [(prompt, ()) for prompt, _ in asked]


def respond(test: NeedleTest, answers: Sequence[str | None], protocol: str) -> str | None:
    """MMNeedle's response from the answers to `prompts_of`; None if one is missing."""
    if None in answers:
        return None
    if protocol == "official":
        return answers[0]
    each = len(answers) // len(test.captions)
    parts = [answers[start : start + each] for start in range(0, len(answers), each)]
    return "; ".join(spell_place(parse_place(part, test.side)) for part in parts)


def answer(
    model, processor, trials: Sequence[Trial], protocol: str = "paper", *, ask_all: Callable | None = None, **options
) -> list[list[str | None]]:
    """A model's answers to `prompts_of` every trial; `options` are those of `eval.run.ask_all`, or of what is given in
    its place."""
    from eval.run import Ask  # only here: scoring needs no torch

    if ask_all is None:
        from eval.run import ask_all
    asks = [
        [
            Ask(f"{test.id}/{number}", sha256(repr(test.haystack).encode()).hexdigest(), pictures, prompt, choices)
            for number, (prompt, choices) in enumerate(prompts_of(test, protocol))
        ]
        for test, pictures in trials
    ]
    answers = iter(ask_all(model, processor, [ask for of_test in asks for ask in of_test], **options))
    return [[next(answers) for _ in of_test] for of_test in asks]


def responses_of(trials: Sequence[Trial], answers: Sequence[Sequence[str | None]], protocol: str) -> list[dict]:
    """A response record for each trial and its answers."""
    return [
        response_record(trial.test, respond(trial.test, said, protocol))
        for trial, said in zip(trials, answers, strict=True)
    ]


def evaluate_embedded(
    model,
    processor,
    kind: str,
    count: int,
    progress: str | None = None,
    *,
    constrained: bool = False,
    needles: int = 1,
    ask_all: Callable | None = None,
) -> float:
    """Exact accuracy in percent on `count` tests of the embedded test split: all questions of a test must be right.

    Answers must be the word alone, as in the paper; or, `constrained`, the likelier of the words counts.
    """
    trials, protocol = embedded_trials(kind, count, needles), "constrained" if constrained else "paper"
    answers = answer(model, processor, trials, protocol, ask_all=ask_all, progress=progress)
    return 100 * score_responses(responses_of(trials, answers, protocol))["exact_accuracy"]


# ---------------------------------------------------------------------------------------------------------------------
# Response files
# ---------------------------------------------------------------------------------------------------------------------


def response_record(test: NeedleTest, response: str | None) -> dict:
    """One record of a response file: the model's words beside the truth, places counted from 1, 0 for absent."""
    truth = "; ".join(", ".join(str(number + 1) for number in place) for place in test.places)
    targets, captions = [Path(target).name for target in test.targets], list(test.captions)
    return {
        "id": test.id,
        "response": response,
        "ground_truth": truth,
        "target_path": targets if len(targets) > 1 else targets[0],
        "caption": captions if len(captions) > 1 else captions[0],
    }


def write_responses(path: str | Path, records: Sequence[dict]) -> None:
    """Write a response file, a JSON list of `response_record`s."""
    write_text(path, json.dumps(records, ensure_ascii=False, indent=1) + "\n")


def read_responses(path: str | Path) -> list[dict]:
    """Read a response file, MMNeedle's or ours. Raises UserError for a malformed record or an id that occurs twice."""
    records = records_of(read_json(path), str(path))
    for where, record in records:
        field(record, "id", (int, str), where)
        truth = field(record, "ground_truth", str, where)
        if not re.fullmatch(r"\d+, \d+, \d+(; \d+, \d+, \d+)*", truth):
            raise UserError(
                f"{where}: ground_truth is {truth!r}, expected 'index, row, column' joined by '; ': correct the record"
            )
        field(record, "response", (str, type(None)), where)
    check_unique((record["id"] for _, record in records), path)
    return [record for _, record in records]


# ---------------------------------------------------------------------------------------------------------------------
# Measures
# ---------------------------------------------------------------------------------------------------------------------


def _answers(record: dict) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(true answers, given answers), one a needle; None for a record without response, which counts nowhere."""
    if record["response"] is None:
        return None
    truth = tuple("-1" if part.startswith("0, ") else part for part in record["ground_truth"].split("; "))
    return truth, parse_response(record["response"], len(truth))


def judge(record: dict) -> tuple[bool, bool, bool] | None:
    """Whether a response is right in (existence, index, exact); None if there is no response.

    Existence: says "-1" just where nothing is there. Index: the parts before the first ", " agree. Exact: all agree.
    With several needles the whole list must agree.
    """
    answers = _answers(record)
    if answers is None:
        return None
    truth, given = answers
    nothing = ("-1",) * len(truth)
    index = [part.split(", ")[0] for part in truth] == [part.split(", ")[0] for part in given]
    return (truth == nothing) == (given == nothing), index, truth == given


def score_responses(records: Iterable[dict]) -> dict[str, float]:
    """{"existence_accuracy", "index_accuracy", "exact_accuracy"} as fractions of the responses that are not None.

    Without any, all are 0.
    """
    verdicts = [verdict for record in records if (verdict := judge(record)) is not None]
    names = ("existence_accuracy", "index_accuracy", "exact_accuracy")
    totals = (sum(column) for column in zip(*verdicts, strict=True)) if verdicts else (0, 0, 0)
    return {name: total / max(len(verdicts), 1) for name, total in zip(names, totals, strict=True)}


def accuracy_by_place(records: Iterable[dict], side: int | None = None) -> list[list[float]]:
    """Exact accuracy of each needle by its row and column, side×side (by default the largest place); NaN: no needle.

    With one needle a test and side 2 these are the paper's quadrants, and their mean is its "index accuracy".
    """
    hits: dict[tuple[int, int], list[bool]] = {}
    for record in records:
        truth, given = _answers(record) or ((), ())
        for at, part in enumerate(truth):
            if part != "-1":
                _, row, col = map(int, part.split(", "))
                hits.setdefault((row - 1, col - 1), []).append(at < len(given) and given[at] == part)
    side = side or max((max(place) + 1 for place in hits), default=1)
    return [
        [sum(found) / len(found) if (found := hits.get((row, col))) else nan for col in range(side)]
        for row in range(side)
    ]


def mean_over_places(grid: list[list[float]]) -> float:
    """Unweighted mean over the places that had a needle; NaN if none had."""
    cells = [cell for row in grid for cell in row if not isnan(cell)]
    return sum(cells) / len(cells) if cells else nan


# ---------------------------------------------------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------------------------------------------------


def score(args: argparse.Namespace) -> None:
    """`python -m eval.needle score`: the accuracies of a response file."""
    records = read_responses(args.responses)
    summary, grid = score_responses(records), accuracy_by_place(records)
    empty = [record["id"] for record in records if record["response"] is None]
    if empty:
        print(f"{len(empty)} of {len(records)} responses are null and left out", file=sys.stderr)
    if args.heatmap:
        from eval.figures import heatmap, save  # only here: scoring needs no figure

        save(heatmap(grid, Path(args.responses).stem), args.heatmap)
    if args.json:
        print(json.dumps(summary))
        return
    print(f"MMNeedle accuracy (%), {len(records) - len(empty)} responses")
    for name, value in summary.items():
        print(f"{name.split('_')[0]:24}{100 * value:6.2f}")
    if not isnan(mean := mean_over_places(grid)):
        print(f"{'exact, mean over places':24}{100 * mean:6.2f}")
        print_places(grid)


def print_places(grid: list[list[float]], name: str = "") -> None:
    """Accuracy by row and column, in percent."""
    print(f"exact by row and column{', ' * bool(name)}{name}")
    for row in grid:
        print("  " + " ".join("     -" if isnan(cell) else f"{100 * cell:6.2f}" for cell in row))


def coco_trials(args: argparse.Namespace) -> dict[str, list[Trial]]:
    """The tests on COCO's pictures that the flags ask for, under MMNeedle's name for their kind.

    With --metadata MMNeedle's own tests; else drawn from all captioned pictures of the folder.
    """
    if args.captions is None:
        raise UserError("--coco needs --captions: MMNeedle's caption file, or COCO's captions_val2014.json")
    few = f"{args.needles}_" if args.needles > 1 else ""
    name = f"{few}{args.pictures}_{args.side}_{args.side}"
    if args.metadata is None:
        listed = read_captions(args.captions)
        captions = {
            name: text
            for bare, text in listed.items()
            for name in (f"val2014/{bare}", bare)
            if Path(args.coco, name).is_file()
        }
        if not captions:
            raise UserError(
                f"{args.captions}: none of its {len(listed)} pictures is in {args.coco} (nor in val2014 "
                "there): give the folder that holds them"
            )
        tests = [
            test
            for absent in (False, True)[: 1 + args.negatives]
            for test in draw_tests(
                captions, args.limit, args.pictures, args.side, args.needles, absent=absent, seed=args.seed
            )
        ]
    else:
        metadata = Path(args.metadata, f"{args.side}_{args.side}.json")
        annotations = Path(args.metadata, f"{few}annotations_{args.pictures}_{args.side}_{args.side}.json")
        found = read_needle_tests(metadata, annotations, args.captions)
        tests = choose([test for test in found if ABSENT not in test.places], args.limit, args.seed)
        if args.negatives:
            tests += choose([test for test in found if ABSENT in test.places], args.limit, args.seed)
        check_haystacks(tests, args.coco, metadata)
    return {name: [Trial(test, partial(build_haystack, test, args.coco)) for test in tests]}


def choose(tests: Sequence[NeedleTest], count: int, seed: int) -> list[NeedleTest]:
    """`count` tests, drawn; where each has one needle, every place of the grid gets as many as another.

    Raises UserError if they are too few.
    """
    places = {test.places for test in tests}
    if all(len(place) == 1 for place in places) and ((ABSENT,) not in places) and count >= len(places) > 0:
        return sample_by_place(tests, count // len(places), seed)
    if count > len(tests):
        raise UserError(f"{count} tests are asked for, but there are {len(tests)} of this kind: lower --limit")
    return sorted(random.Random(seed).sample(tests, count), key=lambda test: test.id)


def draw_sheet(trials: Sequence[Trial], records: Sequence[dict], answers: Sequence[Sequence[str]], title: str):
    """A contact sheet of up to eight hits and as many misses: the picture with its needle, framed, and the answers."""
    from eval.figures import contact_sheet, draw_boxes
    from model.images import load_image

    judged = [(judge(record), *rest) for record, *rest in zip(records, trials, answers, strict=True)]
    shown = [
        (right, trial, said)
        for wanted in (True, False)
        for right, trial, said in [(v[2], t, a) for v, t, a in judged if v and v[2] is wanted][:8]
    ]
    pictures, captions = [], []
    for _, (test, draw), said in shown:
        index, cell = max(0, test.places[0][0]), 512 / test.side
        here = [
            (row, col, caption)
            for (at, row, col), caption in zip(test.places, test.captions, strict=True)
            if at == index
        ]
        boxes = [(col * cell, row * cell, (col + 1) * cell, (row + 1) * cell) for row, col, _ in here]
        picture = load_image(draw()[index]).resize((512, 512))
        labels = [caption for *_, caption in here] if len(test.places) > 1 else None
        pictures.append(draw_boxes(picture, boxes, labels, width=4))
        captions.append(f"said {', '.join(said)} | {' | '.join(test.captions)}")
    return contact_sheet(pictures, captions, [right for right, *_ in shown], title=title)


def run(args: argparse.Namespace) -> None:
    """`python -m eval.needle`: ask, write responses and figures, and print the accuracies beside chance."""
    from eval.figures import heatmaps, save
    from eval.run import open_session  # only here: scoring needs no torch

    if args.coco is None:
        if args.captions or args.metadata or (args.pictures, args.side) != (1, 2):
            raise UserError("--captions, --metadata, --pictures and --side belong to --coco: give that too")
        cases = {
            kind: [
                trial
                for absent in (False, True)[: 1 + args.negatives]
                for trial in embedded_trials(kind, args.limit, args.needles, absent=absent)
            ]
            for kind in args.kind
        }
    else:
        cases = coco_trials(args)
    for trials in cases.values():
        for trial in trials:
            prompts_of(trial.test, args.protocol)  # what cannot be asked is told before a large model is read
    session = open_session(args, "needle")
    results, grids, files = {}, {}, []
    for name, trials in cases.items():
        options = session.options | {"progress": f"{name}, {session.title}"}
        answers = answer(session.model, session.processor, trials, args.protocol, **options)
        records = responses_of(trials, answers, args.protocol)
        write_responses(session.out / f"responses-{name}.json", records)
        side = trials[0].test.side
        grids[name] = accuracy_by_place(records, side)
        results[name] = {"tests": sum(record["response"] is not None for record in records)} | score_responses(records)
        if args.negatives:
            halves = {"positives": False, "negatives": True}
            results[name] |= {
                half: score_responses(r for r in records if r["ground_truth"].startswith("0, ") is absent)
                for half, absent in halves.items()
            }
        cells = len(trials[0].test.haystack) * side**2
        results[name] |= {"chance": cells**-args.needles, "places": grids[name]}
        files.append(f"responses-{name}.json")
        if results[name]["tests"]:
            title = f"{session.title}, {name}: exact {100 * results[name]['exact_accuracy']:.1f} %"
            save(draw_sheet(trials, records, answers, title), session.out / f"sheet-{name}.png")
            files.append(f"sheet-{name}.png")
    save(heatmaps(grids, f"{session.title}, {args.protocol}"), session.out / "heatmap.png")
    session.report_left_out()
    if args.json:
        for result in results.values():  # JSON has no NaN
            result["places"] = [[None if isnan(cell) else cell for cell in row] for row in result["places"]]
        print(json.dumps(results | ({"left_out": session.left_out} if session.left_out else {})))
        return
    print_table(f"needle accuracy (%), protocol {args.protocol}, {session.title}", results)
    print(f"in {session.out}: {', '.join(files)}, heatmap.png")


def print_table(title: str, results: Mapping[str, dict]) -> None:
    """A row for each kind of test, and accuracy by place below."""
    print(f"{title}\n{'':16}{'tests':>7}{'existence':>11}{'index':>8}{'exact':>8}{'chance':>8}")

    def row(name: str, tests, measures: Mapping[str, float], chance: float | None) -> None:
        print(
            f"{name:16}{tests:>7}{100 * measures['existence_accuracy']:11.2f}{100 * measures['index_accuracy']:8.2f}"
            f"{100 * measures['exact_accuracy']:8.2f}" + ("" if chance is None else f"{100 * chance:8.2f}")
        )

    for name, result in results.items():
        row(name, result["tests"], result, result["chance"])
        for half in ("positives", "negatives"):
            if half in result:
                row(f"  {half}", "", result[half], None)
    for name, result in results.items():
        print_places(result["places"], name)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.needle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--protocol",
        choices=PROTOCOLS,
        default="paper",
        help="paper: one-word answers, parsed strictly; constrained: the likelier of the words; "
        "official: MMNeedle's own prompt and parsing (default: %(default)s)",
    )
    parser.add_argument(
        "--kind",
        nargs="+",
        choices=list(scenes.NEEDLES),
        default=list(scenes.NEEDLES),
        help="embedded tests, sub-images a side and objects in each: n2o1 is 2 by 2 with one (default: all)",
    )
    parser.add_argument("--needles", type=int, default=1, metavar="K", help="needles a test (default: %(default)s)")
    parser.add_argument(
        "--negatives",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="add as many tests whose needles are not there; with `paper` any answer that is no "
        "place says so (default: --no-negatives)",
    )
    parser.add_argument("--coco", metavar="DIR", help="folder of COCO val2014 pictures (default: the embedded scenes)")
    parser.add_argument("--captions", metavar="FILE", help="with --coco: MMNeedle's or COCO's caption file")
    parser.add_argument(
        "--metadata",
        metavar="DIR",
        help="with --coco: folder of MMNeedle's N_N.json and annotations_M_N_N.json (default: tests "
        "are drawn from all captioned pictures that are there)",
    )
    parser.add_argument(
        "--pictures",
        type=int,
        default=1,
        metavar="M",
        help="with --coco: stitched pictures a test (default: %(default)s)",
    )
    parser.add_argument(
        "--side", type=int, default=2, metavar="N", help="with --coco: sub-images a side (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=42, help="of drawn tests, with --coco (default: %(default)s)")
    commands = parser.add_subparsers(dest="command")
    scorer = commands.add_parser("score", help="score a response file", description="Score a response file.")
    scorer.add_argument("--responses", required=True, help="response file in MMNeedle's format")
    scorer.add_argument("--heatmap", metavar="PNG", help="draw accuracy by place (default: no figure)")
    scorer.add_argument(
        "--json", action=argparse.BooleanOptionalAction, default=False, help="print JSON only (default: a table)"
    )
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] != ["score"]:
        from eval.run import add_answer_flags

        add_answer_flags(parser, "tests of each kind (default: 200)", 200, 64)
    args = parser.parse_args(argv)
    score(args) if args.command == "score" else run(args)


if __name__ == "__main__":
    run_command(main)

"""MMNeedle: find the sub-image that a caption describes in a stitched picture of N×N, or say that it is not there.

    python -m eval.needle                       the last run, or the embedded base, on the embedded scenes
    python -m eval.needle --coco DIR --captions file_to_caption.json --metadata DIR --model SRC --adapter RUN
    python -m eval.needle score --responses F

In: tests (`eval/data.py`) and a folder of COCO pictures. Out: stitched pictures, prompts, a response file in
MMNeedle's format, its accuracies (`eval/needle_scoring.py`), and a heatmap of accuracy by place.

Source: Wang et al., "Multimodal Needle in a Haystack: Benchmarking Long-Context Capability of Multimodal Large Language
Models", NAACL 2025, arXiv 2406.11230 (its prompts, parsing and measures). The `paper` protocol is the adaptation of the
differential PaliGemma paper: M = 1, N = 2, and two questions with one word to answer.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from eval import scenes
from eval.command import Ask, Command, Report, add_flag, whole
from eval.data import ABSENT, NeedleTest, find_image, find_images, read_captions, read_needle_tests
from eval.entry import ask_model, main_of
from eval.figures import contact_sheet, draw_boxes, heatmaps, save
from eval.haystacks import FIRST_ABSENT_ID, build_haystack, choose, draw_tests
from eval.needle_scoring import (
    accuracy_by_place,
    judge,
    mean_over_places,
    read_responses,
    response_record,
    score_responses,
    write_responses,
)
from model.common import UserError, run_command

Place = tuple[int, int, int]  # (index, row, col), counted from 0, or ABSENT

# Prompts and answers


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
    """The expected answer: "index, row, column" counted from 1, or "-1"."""
    return "-1" if place == ABSENT else ", ".join(str(number + 1) for number in place)


# Models

PROTOCOLS = ("paper", "constrained", "official")


class Trial(NamedTuple):
    """A test, a function that gives its M pictures, and the files that it reads."""

    test: NeedleTest
    pictures: Callable[[], list]
    files: Sequence[Path] = ()


def embedded_trials(
    kind: str, count: int, needles: int = 1, *, absent: bool = False, split: str = "test"
) -> list[Trial]:
    """`count` tests on the embedded scenes, of a kind in `scenes.NEEDLES`; first needles take all places in turn."""
    trials = []
    for number in range(count):
        found = scenes.needle(kind, split, number, needles=needles, negative=absent)
        name = f"{kind}-{needles}{'-absent' * absent}/{split}/{number}"
        names = tuple(f"{name}/{row}_{col}" for row in range(found.n) for col in range(found.n))
        places = tuple(ABSENT if row < 0 else (0, row, col) for row, col in found.targets)
        targets = tuple(f"{name}/absent" if row < 0 else names[row * found.n + col] for row, col in found.targets)
        test = NeedleTest(number + FIRST_ABSENT_ID * absent, (names,), places, targets, found.captions)
        trials.append(Trial(test, lambda scene=found.scene: [Image.fromarray(scene.render())]))
    return trials


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
    if pictures > 1 or test.side == 1:
        raise UserError(
            f"protocol {protocol!r} asks for a place in one picture of 2 by 2 or more, not in {pictures} of "
            f"{test.side} by {test.side}: take official"
        )
    if protocol == "constrained" and ABSENT in test.places:
        raise UserError(
            "protocol 'constrained' compares places and has none for an absent needle: take another protocol"
        )
    asked = [question for caption in test.captions for question in scenes.place_questions(caption, test.side)]
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
    """A model's answers to `prompts_of` every trial; arguments as for `ask_model`."""
    return by_trial(trials, protocol, ask_model(model, processor, asks_of(trials, protocol), ask_all, **options))


def asks_of(trials: Sequence[Trial], protocol: str) -> list[Ask]:
    """What is asked about the trials, one after the other. Raises UserError for a protocol that cannot ask them."""
    return [
        Ask(f"{test.id}/{number}", key_of(test), pictures, prompt, choices, files)
        for test, pictures, files in trials
        for number, (prompt, choices) in enumerate(prompts_of(test, protocol))
    ]


def key_of(test: NeedleTest) -> str:
    """Names the haystack, which several tests may share."""
    return sha256(repr(test.haystack).encode()).hexdigest()


def by_trial(trials: Sequence[Trial], protocol: str, answers: Iterable[str | None]) -> list[list[str | None]]:
    """The answers to `asks_of` in a list for each trial."""
    answers = iter(answers)
    return [[next(answers) for _ in prompts_of(trial.test, protocol)] for trial in trials]


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

    An answer must be exactly the word, as in the paper; or, `constrained`, the likelier of the words is the answer.
    """
    trials, protocol = embedded_trials(kind, count, needles), "constrained" if constrained else "paper"
    answers = answer(model, processor, trials, protocol, ask_all=ask_all, progress=progress)
    return 100 * score_responses(responses_of(trials, answers, protocol))["exact_accuracy"]


# Commands


def score(args: argparse.Namespace) -> Report:
    """`python -m eval.needle score`: the accuracies of a response file."""
    records = read_responses(args.responses)
    summary, grid = score_responses(records), accuracy_by_place(records)
    scored = sum(record["response"] is not None for record in records)
    if scored < len(records):
        print(f"{len(records) - scored} of {len(records)} responses are null and left out", file=sys.stderr)
    if args.heatmap:
        save(heatmaps({Path(args.responses).stem: grid}), args.heatmap)
    lines = [f"MMNeedle accuracy (%), {scored} responses"]
    lines += [f"{name.split('_')[0]:24}{100 * value:6.2f}" for name, value in summary.items()]
    if not isnan(mean := mean_over_places(grid)):
        lines += [f"{'exact, mean over places':24}{100 * mean:6.2f}", *place_lines(grid)]
    return Report(summary, lines)


def place_lines(grid: list[list[float]], name: str = "") -> list[str]:
    """Accuracy by row and column, in percent."""
    rows = ("  " + " ".join("     -" if isnan(value) else f"{100 * value:6.2f}" for value in row) for row in grid)
    return [f"exact by row and column{', ' * bool(name)}{name}", *rows]


def coco_trials(args: argparse.Namespace) -> dict[str, list[Trial]]:
    """The tests on COCO's pictures that the flags ask for, under MMNeedle's name for their kind.

    With --metadata MMNeedle's own tests; else drawn from all captioned pictures of the folder.
    """
    if args.captions is None:
        raise UserError("--coco needs --captions: MMNeedle's caption file, or COCO's captions_val2014.json")
    few = f"{args.needles}_" if args.needles > 1 else ""
    size = f"{args.side}_{args.side}"
    kinds = (False, True)[: 1 + args.negatives]
    if args.metadata is None:
        listed = read_captions(args.captions)
        listed = {name if Path(name).name != name else f"val2014/{name}": text for name, text in listed.items()}
        pictures = {name: find_image(args.coco, name) for name in listed}
        captions = {name: text for name, text in listed.items() if pictures[name].is_file()}
        if not captions:
            raise UserError(
                f"{args.captions}: none of its {len(listed)} pictures is in {args.coco} (nor in val2014 "
                "there): give the folder that holds them"
            )
        drawn = args.limit, args.pictures, args.side, args.needles
        tests = [test for absent in kinds for test in draw_tests(captions, *drawn, absent=absent, seed=args.seed)]
    else:
        metadata = Path(args.metadata, f"{size}.json")
        found = read_needle_tests(
            metadata, Path(args.metadata, f"{few}annotations_{args.pictures}_{size}.json"), args.captions
        )
        tests = [
            test
            for absent in kinds
            for test in choose([t for t in found if (ABSENT in t.places) is absent], args.limit, args.seed)
        ]
        names = (name for test in tests for grid in test.haystack for name in grid)
        pictures = find_images(names, args.coco, metadata)
    files = [[pictures[name] for grid in test.haystack for name in grid] for test in tests]
    trials = [Trial(test, partial(build_haystack, test, pictures), own) for test, own in zip(tests, files, strict=True)]
    return {f"{few}{args.pictures}_{size}": trials}


def draw_sheet(trials: Sequence[Trial], records: Sequence[dict], answers: Sequence[Sequence[str]], title: str):
    """A contact sheet of up to eight hits and eight misses: pictures with a frame around the needle, and answers."""
    judged = [(judge(record), *rest) for record, *rest in zip(records, trials, answers, strict=True)]
    shown = [
        (right, trial, said)
        for wanted in (True, False)
        for right, trial, said in [(v[2], t, a) for v, t, a in judged if v and v[2] is wanted][:8]
    ]
    pictures, captions = [], []
    for _, (test, draw, _), said in shown:
        index, size = max(0, test.places[0][0]), 512 / test.side
        here = [
            (row, col, caption)
            for (at, row, col), caption in zip(test.places, test.captions, strict=True)
            if at == index
        ]
        boxes = [(col * size, row * size, (col + 1) * size, (row + 1) * size) for row, col, _ in here]
        picture = draw()[index].resize((512, 512))
        labels = [caption for *_, caption in here] if len(test.places) > 1 else None
        pictures.append(draw_boxes(picture, boxes, labels, width=4))
        captions.append(f"said {', '.join(said)} | {' | '.join(test.captions)}")
    return contact_sheet(pictures, captions, [right for right, *_ in shown], title=title)


def load(args: argparse.Namespace) -> tuple[dict[str, list[Trial]], dict[str, list[Ask]]]:
    """The trials of each kind, on COCO's pictures or on the embedded scenes, and what to ask."""
    if args.negatives and args.limit > FIRST_ABSENT_ID:
        raise UserError(f"--limit {args.limit} with --negatives, whose ids begin at {FIRST_ABSENT_ID}: lower it")
    if args.coco is not None:
        cases = coco_trials(args)
    elif args.captions or args.metadata or (args.pictures, args.side) != (1, 2):
        raise UserError("--captions, --metadata, --pictures and --side belong to --coco: give that too")
    else:
        cases = {
            kind: [
                trial
                for absent in (False, True)[: 1 + args.negatives]
                for trial in embedded_trials(kind, args.limit, args.needles, absent=absent)
            ]
            for kind in args.kind
        }
    return cases, {name: asks_of(trials, args.protocol) for name, trials in cases.items()}


def finish(args, cases: dict[str, list[Trial]], answers: dict, session) -> Report:
    """A response file and a sheet of pictures for each kind, a heatmap for all, and the accuracies beside chance."""
    results, grids, files, scores, pictures, (out, title) = {}, {}, [], {}, {}, (session.out, session.title)
    for name, trials in cases.items():
        said = by_trial(trials, args.protocol, answers[name])
        records, side = responses_of(trials, said, args.protocol), trials[0].test.side
        write_responses(out / f"responses-{name}.json", records)
        files.append(f"responses-{name}.json")
        grids[name] = accuracy_by_place(records, side)
        result = {"tests": sum(record["response"] is not None for record in records)} | score_responses(records)
        if args.negatives:
            for half, absent in (("positives", False), ("negatives", True)):
                chosen = (r for r in records if r["ground_truth"].startswith("0, ") is absent)
                result[half] = score_responses(chosen)
        judged = {f"{name}/{r['id']}": verdict[2] for r in records if (verdict := judge(r)) is not None}
        scores[f"exact, {name}"] = judged
        pictures |= {f"{name}/{test.id}": key_of(test) for test, *_ in trials}
        places = len(trials[0].test.haystack) * side**2
        results[name] = result | {"chance": places**-args.needles, "places": grids[name]}
        if result["tests"]:
            heading = f"{title}, {words_of(name)}: {100 * result['exact_accuracy']:.1f} % exact (blue: the needle)"
            save(draw_sheet(trials, records, said, heading), out / f"sheet-{name}.png")
            files.append(f"sheet-{name}.png")
    trained = None if args.coco else session.trained_tasks()
    notes = {words_of(name): "not trained on" for name in grids if trained is not None and name not in trained}
    named = {words_of(name): grid for name, grid in grids.items()}
    save(heatmaps(named, f"{title}: needles found, {args.protocol} protocol", notes), out / "heatmap.png")
    lines = table(f"needle accuracy (%), protocol {args.protocol}, {title}", results)
    for result in results.values():  # JSON has no NaN
        result["places"] = [[None if isnan(value) else value for value in row] for row in result["places"]]
    return Report(results, lines, [*files, "heatmap.png"], scores, pictures=pictures)


def words_of(kind: str) -> str:
    """A kind of test in words: `2×2, one object each` for n2o1; of COCO's K_M_N_N the numbers of needles, pictures and
    sub-images."""
    if kind in scenes.NEEDLE_TITLES:
        return scenes.NEEDLE_TITLES[kind]
    *needles, pictures, side, _ = map(int, kind.split("_"))
    of_them = f"{pictures} picture{'s' * (pictures > 1)} of {side}×{side}"
    return ", ".join([*(f"{number} needles" for number in needles), of_them])


def table(title: str, results: Mapping[str, dict]) -> list[str]:
    """A row for each kind of test, and accuracy by place below."""
    lines = [title, f"{'':16}{'tests':>7}{'existence':>11}{'index':>8}{'exact':>8}{'chance':>8}"]

    def row(name: str, tests, measures: Mapping[str, float], chance: str = "") -> str:
        existence, index, exact = (100 * measures[f"{kind}_accuracy"] for kind in ("existence", "index", "exact"))
        return f"{name:16}{tests:>7}{existence:11.2f}{index:8.2f}{exact:8.2f}{chance}"

    for name, result in results.items():
        lines.append(row(name, result["tests"], result, f"{100 * result['chance']:8.2f}"))
        lines += [row(f"  {half}", "", result[half]) for half in ("positives", "negatives") if half in result]
    return lines + [line for name, result in results.items() for line in place_lines(result["places"], name)]


def add_flags(parser: argparse.ArgumentParser) -> None:
    protocols = (
        "paper: one-word answers, parsed strictly; constrained: the likelier of the words; official: MMNeedle's own "
        "prompt and parsing"
    )
    add_flag(parser, "--protocol", protocols, "paper", choices=PROTOCOLS)
    titles = "; ".join(f"{kind}: {title}" for kind, title in scenes.NEEDLE_TITLES.items())
    kinds = f"embedded tests, sub-images and the objects in them ({titles}; default: all)"
    every = list(scenes.NEEDLES)
    add_flag(parser, "--kind", kinds, every, nargs="+", choices=every)
    add_flag(parser, "--needles", "needles a test", 1, type=whole(1, 16), metavar="K")
    negatives = (
        "add as many tests whose needles are absent; with `paper`, any answer that is not a place counts as 'absent'"
    )
    add_flag(parser, "--negatives", negatives, False)
    add_flag(parser, "--coco", "folder of COCO val2014 pictures (default: the embedded scenes)", metavar="DIR")
    add_flag(parser, "--captions", "with --coco: MMNeedle's or COCO's caption file", metavar="FILE")
    metadata = (
        "with --coco: folder of MMNeedle's N_N.json and annotations_M_N_N.json (default: tests are drawn from all "
        "captioned pictures that are there)"
    )
    add_flag(parser, "--metadata", metadata, metavar="DIR")
    add_flag(parser, "--pictures", "with --coco: stitched pictures a test", 1, type=whole(1, 100), metavar="M")
    add_flag(parser, "--side", "with --coco: sub-images a side", 2, type=whole(1, 64), metavar="N")
    add_flag(parser, "--seed", "of drawn tests, with --coco", 42, type=whole(0, 2**63 - 1))


def add_score_flags(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--responses", "response file in MMNeedle's format", required=True)
    add_flag(parser, "--heatmap", "draw accuracy by place (default: no figure)", metavar="PNG")


LIMIT = "tests of each kind (default: 200)", 200
COMMAND = Command("needle", __doc__, add_flags, add_score_flags, load, finish, score, LIMIT, max_new_tokens=64)
main = main_of(COMMAND)

if __name__ == "__main__":
    run_command(main)

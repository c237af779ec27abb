"""`eval.ask`: many pictures and prompts are asked in batches, and each answer is of its picture and
prompt."""

import itertools
import json
import os
import re
from argparse import Namespace
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import tqdm

from eval import ask, demo
from eval.data import scenes
from eval.figures import SERIES
from eval.open import Subject, subject_of, subjects_of, toy_note
from eval.progress import Bar
from model import generate
from model.confidence import Certainty
from model.images import load_image
from model.masks import MaskCoder
from tests.files import draw, write_json
from tests.runs import refuses

pytestmark = pytest.mark.long


def test_many_pictures_are_asked_in_batches(workplace, monkeypatch, printed, told):
    """Breaks when `--image *.jpg` fills the memory, or an answer stands at another picture."""
    whole = Mock(wraps=generate.generate)
    monkeypatch.setattr(generate, "generate", whole)
    names = [f"{number}.png" for number in range(9)]
    for number, name in enumerate(names):
        scenes.sample("vqa", "test", 6 * number).image.save(name)
    flags = "--model embedded --draw drawn.png --image"
    prompts = ["count dog", "exist cat"]
    ask.main([*flags.split(), *names, "--prompt", *prompts, "--json"])
    answers = json.loads(printed())
    assert [len(call.args[1]) for call in whole.call_args_list] == [16, 2]
    asked = [(answer["image"], answer["prompt"]) for answer in answers]
    assert asked == [*itertools.product(names, prompts)]
    ask.main([*flags.split(), names[4], "--prompt", *prompts, "--json"])
    assert json.loads(printed()) == answers[8:10]
    sampled = []
    for seed in (0, 0, 1):
        said = told(ask, flags, names[4], "--prompt caption --temperature 3 --seed", seed)
        sampled.append(said[0]["answer"])
    assert sampled[0] == sampled[1] != sampled[2]


def test_masks_are_drawn_in_their_boxes(workplace, monkeypatch, told):
    """Breaks when codes are lost, a mask is drawn without being asked for, or outside of its box."""
    coder = MaskCoder(1, 2)
    torch.nn.init.zeros_(coder.decoder[-1].weight)
    torch.nn.init.ones_(coder.decoder[-1].bias)  # all of a box
    np.savez("coder.npz", **coder.state_dict())
    draw("black.png", size=(448, 448))
    place = "<loc0256><loc0512><loc0767><loc1023>"
    codes = list(range(100, 116))
    said = place + "".join(f"<seg{code:03}>" for code in codes) + f" cat ; {place}<seg001> dog"
    certain = Certainty(0.5, True, [0.25, 0.125])
    monkeypatch.setattr(ask, "ask", lambda *_, sure, **options: sure.append(certain) or [said])
    flags = "--model embedded --image black.png --prompt x"
    seen = []
    for more in ("--draw a.png --masks coder.npz", "--draw b.png"):
        cat, dog = told(ask, flags, more)[0]["boxes"]
        assert cat["codes"] == codes
        assert (cat["score"], dog["score"]) == (0.25, 0.125)
        assert "codes" not in dog
        drawn = load_image(more.split()[1])
        seen.append([drawn.getpixel((x, 224)) for x in (100, 336)])
    assert seen == [[(0, 0, 0), tuple(side // 2 for side in SERIES[0])], [(0, 0, 0)] * 2]
    refuses(ask, f"{flags} --masks coder.npz", "--draw")
    refuses(ask, f"{flags} --draw ../{Path.cwd().name}/black.png", "black.png", "another name")


def test_the_toy_and_no_other_says_what_it_knows(workplace):
    """Breaks when the embedded base answers a photograph without a warning, or a model of own data
    gets the warning."""
    add_run("toy", "embedded", "embedded")
    add_run("own", "embedded", "csv:a")
    add_run("big", "a/b", "embedded")
    for run in "toy toy/best own own/best big".split():
        is_noted = bool(toy_note(Subject("embedded", Path("runs", run), run)))
        assert is_noted == run.startswith("toy")
    for model, is_noted in {"embedded": 1, "runs/toy/model": 1, "runs/own/model": 0}.items():
        assert bool(toy_note(Subject(model, None, model))) == is_noted


def add_run(name, base, data):
    """What a finished run has learned, in its folder."""
    run = Path("runs", name)
    (run / "model").mkdir(parents=True)
    write_json(run / "config.json", {"base": base, "data": [data]})
    (run / "summary.json").write_text("{}")


def test_the_toy_s_questions_are_for_the_toy(workplace):
    """Breaks when the newest run is asked about the scenes, whatever it has learned, or the page
    shows other examples than it has held out."""
    draw("red.png", "red")
    answers = """{"images": ["gone.png"], "question": "a"}
{"images": ["red.png"], "question": "b"}"""
    for name, data in (("toy", "embedded"), ("own", "csv:a")):
        add_run(name, "embedded", data)
        Path("runs", name, "answers.jsonl").write_text(answers)
    os.utime("runs/toy/summary.json", (0, 1))
    flags = {"model": None, "adapter": None, "quantize": None}
    for asked, run in (({}, "toy"), ({"data": "embedded"}, "toy"), ({"data": "csv:b"}, "own")):
        (subject,) = subjects_of(Namespace(**flags, **asked))
        assert subject.source == f"runs/{run}/model"
    subject = subject_of(Namespace(**flags))
    assert subject_of(Namespace(model="a", adapter="b", quantize="none")).whole
    best = Subject("a", Path("runs/own/best"), "")
    for of in (subject, subject._replace(run=Path("runs/own")), best):
        assert demo.example_rows(of, workplace) == [[f"{workplace}/0.png", "b"]]
        assert load_image(workplace / "0.png").getpixel((0, 0)) == (255, 0, 0)
    toy = demo.example_rows(subject._replace(source="runs/toy/model"), workplace)
    assert toy[0] == [f"{workplace}/0.png", "answer en Where is the dog?"]
    assert len(toy) == 4
    Path("runs/own/answers.jsonl").write_text("{")
    assert demo.example_rows(subject, workplace) == []


@pytest.mark.parametrize("seconds, shares", [(1, range(10, 101, 10)), (0, [100])])
def test_a_log_file_gets_a_line_for_a_tenth(seconds, shares, monkeypatch):
    """Breaks when a log is filled by a bar, by lines of work that ends at once, or never says that
    work has ended."""
    file = StringIO()
    clock = itertools.count(step=seconds)
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setattr(tqdm.std, "time", lambda: next(clock))
    with Bar(total=40, desc="training") as bar:
        for number in range(40):
            bar.set_postfix({"loss": number}, refresh=False)
            bar.update()
    printed = file.getvalue()
    assert [int(share) for share in re.findall(r"^training: +(\d+) % ", printed, re.M)] == [*shares]
    assert "\r" not in printed
    assert "loss=39]" in printed.splitlines()[-1]
    monkeypatch.setattr(file, "isatty", lambda: True)
    for _ in Bar(range(40)):
        pass
    assert "\r" in file.getvalue()

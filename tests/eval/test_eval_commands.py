"""Asking random tiny models about drawn pictures: answers in batches, choices, the log, and the
models of flags."""

import os
from argparse import ArgumentParser
from copy import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch._dynamo.testing import CompileCounter

from eval import answer, needle, open, pope, vqa
from eval.command import add_model_flags
from eval.question import Question
from eval.systems import shift
from lora import adapter
from model.compiled import CompiledStep
from model.differential import graft
from model.generate import generate
from tests.eval.conftest import random_model
from tests.files import read_json, read_lines, table, write_json, write_lines
from tests.reference import inputs_of
from tests.runs import refused, refuses, words

FAST = "--max-new-tokens 3 --batch-size 8"


def noise(seed):
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((48, 40), Image.Resampling.NEAREST)


def one_by_one(model, processor, questions, max_new_tokens=6):
    """The reference: each picture encoded anew, each prompt alone."""
    said = []
    for question in questions:
        images = question.images()
        batch = processor.pad([answer.question_row(processor, question, len(images))], images)
        said.append(processor.decode(generate(model, *inputs_of(batch), max_new_tokens)[0]))
    return said


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [4, 64])
def test_batched_answers_are_those_of_one_by_one(model, processor, said_alone, batch_size):
    """An answer depends on its batch's rows, padding or pictures, or an earlier prompt."""
    asked, single = said_alone
    options = {"max_new_tokens": 6, "batch_size": batch_size}
    assert answer.ask_all(model, processor, asked, **options) == single
    assert len(set(single)) > 5  # a model that says always the same could not tell


@pytest.mark.long
def test_a_small_last_batch_compiles_nothing_anew(model, processor, said_alone, monkeypatch):
    """A compiled step is called with another number of rows, or its padding changes an answer."""
    asked, single = said_alone
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = CompiledStep(model, backend=counter)
    steps = []
    call = CompiledStep.__call__

    def watched(*args):
        steps.append(len(args[1]))
        return call(*args)

    monkeypatch.setattr(CompiledStep, "__call__", watched)
    options = {"max_new_tokens": 6, "batch_size": 8, "compiled": compiled}
    assert answer.ask_all(model, processor, asked, **options) == single
    assert set(steps) == {8}
    assert counter.frame_count == 1
    assert len(single) % 8


@pytest.fixture(scope="module")
def said_alone(model, processor):
    """Thirty questions, and the answers to each of them alone."""
    asked = vqa.embedded(30)
    return asked, one_by_one(model, processor, asked)


def test_several_pictures_in_one_prompt(model, processor):
    """MMNeedle's ten pictures are shuffled, or those of another test; or an id that occurs twice
    mixes up answers."""
    parts = [noise(number) for number in range(12)]
    pictures = [parts[first : first + 3] for first in range(0, 12, 3)]
    asked = [Question("same", str(n), p, f"count {'dog ' * n}cat") for n, p in enumerate(pictures)]
    for key, shown in {"one": pictures[0][0], "none": ()}.items():
        asked.append(Question("same", key, shown, "count cat"))
    single = one_by_one(model, processor, asked)
    assert answer.ask_all(model, processor, asked, max_new_tokens=6) == single
    assert len(set(single)) == 6


def test_a_picture_is_encoded_once_for_all_its_questions(model, processor, monkeypatch):
    """Six questions a picture cost six encodings: the vision tower is most of the work of a large
    model."""
    encode = Mock(wraps=model.encode_images)
    monkeypatch.setattr(model, "encode_images", encode)
    answer.ask_all(model, processor, vqa.embedded(42), max_new_tokens=1, batch_size=3)
    encoded = [len(call.args[0]) for call in encode.call_args_list]
    assert sum(encoded) <= 8
    assert max(encoded) <= 3  # one is in two windows of 24


def likelihood_by_hand(model, processor, picture, prefix, choice):
    """log p of a whole answer from one uncached forward pass, token by token."""
    batch = processor([picture], [prefix], [choice])
    each = model(*inputs_of(batch))[0].double().log_softmax(-1)
    labels = batch.labels[0].tolist()
    return sum(float(each[n, label]) for n, label in enumerate(labels[1:]) if label != -100)


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("kind", [None, "twin", "split"])
def test_the_likeliest_choice_is_the_answer(processor, kind, monkeypatch):
    """Likelihoods are of other tokens, without the end token, of another prompt; or the last of
    equals counts."""
    model = random_model(2)
    if kind is not None:
        graft(model, kind)
        for name, parameter in model.named_parameters():
            if ".q2.lora_B" in name or ".k2.lora_B" in name:
                parameter.normal_(std=0.3)
    choices = ("top", "bottom left", "row 2 column 3", "dog")
    asked = [Question(n, str(n), noise(n), f"count {'dog ' * n}cat", choices) for n in range(6)]
    pairs = product(asked, choices)
    hand = [likelihood_by_hand(model, processor, q.picture, q.prefix, c) for q, c in pairs]
    expected = torch.tensor(hand).view(6, 4)
    batch = processor.pad([processor.row_of(1, [(question.prefix, None)]) for question in asked])
    features = model.encode_images(processor([q.picture for q in asked], ["-"] * 6).pixel_values)
    ids = [[*processor.encode(choice), processor.config.eos_token_id] for choice in choices]
    found = answer.log_likelihoods(model, batch, [ids] * 6, features, torch.arange(6))
    torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-4)
    # of five rows a batch, one prompt's choices
    answers = answer.ask_all(model, processor, asked, batch_size=5)
    assert answers == [choices[row] for row in expected.argmax(1)]
    tie = [torch.tensor([-2.0, -1, -1, -1])]
    monkeypatch.setattr(answer, "log_likelihoods", lambda *args, **options: tie)
    assert answer.likeliest(model, processor, asked[:1], batch, {}) == ["bottom left"]


def count_asked(monkeypatch, batches=99):
    """The sizes of the batches that are generated; Ctrl-C arrives after so many."""
    sizes = []
    original = answer.generate_texts

    def interrupted(model, decode, input_ids, *args, **options):
        if len(sizes) == batches:
            raise KeyboardInterrupt
        sizes.append(len(input_ids))
        return original(model, decode, input_ids, *args, **options)

    monkeypatch.setattr(answer, "generate_texts", interrupted)
    return sizes


@pytest.mark.long
def test_an_interrupted_run_goes_on(source, workplace, printed, monkeypatch):
    """A resumed evaluation asks all again, or gives other answers than an uninterrupted one;
    --no-resume keeps some."""
    flags = f"--model {source} --limit 30 {FAST} --json"
    vqa.main(words(flags, "--out whole"))
    whole = printed()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        count_asked(patch, 2)
        vqa.main(words(flags, "--out parts"))
    log = workplace / "parts/answers.jsonl"
    assert len(read_lines(log)) == 16
    log.write_bytes(log.read_bytes()[:-7])  # the process was killed while it wrote
    sizes = count_asked(monkeypatch)
    for more, asked in (("", 15), ("", 15), ("--no-resume", 45)):
        vqa.main(words(flags, "--out parts", more))
        assert sum(sizes) == asked
    assert printed() == 3 * whole
    results = [(workplace / out / "results.json").read_bytes() for out in ("whole", "parts")]
    assert results[0] == results[1]


def test_answers_of_another_model_prompt_or_picture_are_not_taken(
    model, processor, tmp_path, monkeypatch
):
    """The log of one model is scored as another's, or that of another tokenizer, strength of LoRA,
    picture, choices or earlier turns."""
    log = tmp_path / "log.jsonl"
    file = tmp_path / "a.png"
    noise(3).save(file)
    asked = [Question(n, str(n), file, f"count {'dog ' * n}cat") for n in range(2)]
    asked.append(Question(2, "2", lambda: noise(9), "count cat", files=[file]))  # stitched of it
    sizes = count_asked(monkeypatch)
    other = random_model()
    other.language_model.layers[3].mlp.down_proj.weight.data += 0.5
    reverse = copy(processor)
    reverse.encode = lambda text: processor.encode(text)[::-1]
    longer = [replace(q, prefix=q.prefix + " now") for q in asked]
    models = [model, other]
    for alpha in (4.0, 8.0):
        torch.manual_seed(0)
        models.append(random_model())
        adapter.inject(models[-1], adapter.DECODER_TARGETS, 2, alpha)
    models.append(random_model())  # of equal weights, computed otherwise
    models[-1].config = replace(model.config, text=replace(model.config.text, rope_theta=5e3))
    calls = [(of, processor, asked) for of in models]
    calls += [(model, processor, longer), (model, reverse, asked)]
    for number, given in enumerate(calls * 2, start=1):
        answer.ask_all(*given, max_new_tokens=2, log=log)
        assert sum(sizes) == 3 * min(number, len(calls))
    answer.ask_all(*calls[0], max_new_tokens=3, log=log)
    os.utime(file, (0, 0))  # another picture may have the same size
    answer.ask_all(*calls[0], max_new_tokens=2, log=log)
    assert sum(sizes) == 3 * len(calls) + 6
    changes = [{}, {"choices": ("a", "b")}, {"choices": ("a",)}, {"before": (("a", "b"),)}]
    changes.append({"wants_log_probs": True})
    variants = [replace(asked[0], **change) for change in changes]
    assert len({*answer.marks_of(model, processor, variants, 2)}) == len(variants)


def test_a_log_has_one_writer_and_is_no_other_file(model, processor, source, tmp_path):
    """Two commands mix their lines, a file of something else is overwritten, or likelihoods come
    back as text."""
    log = tmp_path / "log.jsonl"
    asked = [Question(1, "1", noise(1), "count", ("top", "dog"), wants_log_probs=True)]

    def ask(count=1):
        return answer.ask_all(model, processor, asked[:count], log=log)

    first = ask()
    assert isinstance(first[0], list)
    assert ask() == first
    with answer.open_log(log):
        refused(ask, "log.jsonl", "--out")
    # nor is it taken away from a command that writes to it
    with answer.open_log(tmp_path / "answers.jsonl"):
        flags = f"--model {source} --limit 1 --no-resume --out {tmp_path}"
        refuses(vqa, flags, "answers.jsonl", "--out")
    # nor is a file of another kind changed, whole or with an open end
    for content in (b'{"a": 1}\n{"b": 2}', b'{"a": 1}', b'{"a": 1}\n'):
        log.write_bytes(content)
        for anew in (False, True):
            refused(answer.open_log(log, anew).__enter__, "log.jsonl:1: ", "no log of answers")
        assert log.read_bytes() == content
    for line in ("7", "{"):
        log.write_text(f'{{"mark": "x", "answer": "y"}}\n{line}\n')
        refused(ask, "log.jsonl:2: ")
    asked.append(replace(asked[0], id=2, wants_log_probs=False))
    scored, plain = answer.marks_of(model, processor, asked, 32)
    nan = float("nan")
    wrong = [(scored, said) for said in (5, "dog", [-1.0], ["top", "dog"], [nan, -1.0], {})]
    for mark, said in [*wrong, (plain, 5), (plain, first[0])]:
        write_lines(log, [{"mark": mark, "answer": said}])
        refused(lambda: ask(2), "log.jsonl: ", "anew")
    write_lines(log, [{"mark": scored, "answer": None}])  # is no answer
    assert ask() == first


def subjects(flags):
    parser = ArgumentParser()
    add_model_flags(parser, many=True)
    return open.subjects_of(parser.parse_args(flags.split()))


@pytest.mark.long
def test_default_is_the_newest_run_or_the_embedded_base(source, workplace, monkeypatch, capsys):
    """Without flags another model than the last one trained is measured, or nobody says which one
    it was."""
    monkeypatch.setattr("model.source.BUNDLED_FOLDER", Path(source))
    assert subjects("") == [open.Subject("embedded", None, "embedded")]
    model = random_model()
    adapter.inject(model, adapter.DECODER_TARGETS, 2, 4.0)
    bases = dict.fromkeys("first old other unfinished".split(), "embedded")
    bases["other"] = "somewhere/else"
    for name, base in bases.items():
        folder = workplace / "runs" / name
        adapter.save(model, folder, base=base)
        write_json(folder / "config.json", {"base": base, "data": ["embedded"]})
        (folder / "summary.json").write_text("{}")
    (workplace / "runs/unfinished/summary.json").unlink()
    assert subjects("")[0].title == "old"
    assert subjects("--adapter none")[0].source == "embedded"
    assert subjects(f"--model {source}")[0].run is None
    assert subjects("--adapter runs/other")[0].source == "somewhere/else"
    (workplace / "full/model").mkdir(parents=True)
    assert subjects("--adapter full") == [open.Subject("full/model", None, "full")]
    assert subjects("--model full/model")[0].title == "full"
    refused(lambda: subjects("--adapter full --model embedded"), "full is a whole model", "--model")
    pope.main(words("--limit 6", FAST))
    printed = capsys.readouterr()
    newest = "runs/old on embedded (the newest run in ./runs; --adapter takes another)"
    assert printed.out.startswith(f"pope: {newest}\n")
    assert "newest" not in printed.err
    scores = read_json(Path("runs/eval/old/pope/scores.json"))
    assert scores["model"] == "runs/old on embedded"
    assert set(scores["results"]) == {"old"}


def test_bad_input_is_one_line(source, workplace):
    """A mistake ends in a traceback, or in a line that names neither the file nor the remedy."""
    (workplace / "Q").write_text('[{"question_id": 1, "image": "gone.jpg", "question": "Is it?"}]')
    wrong = """--questions Q | --images go together
        --questions Q --images . | 'gone.jpg' is not in .
        --prompt answer --limit 1 | 'answer'
        --device nowhere | --device nowhere
        --adapter gone | adapter_config.json: not found"""
    for flags, part in table(wrong):
        refuses(vqa, f"--model {source} {flags}", part)


@pytest.mark.parametrize("command", [vqa, pope, needle, shift])
def test_an_output_that_cannot_be_written_is_refused_at_once(command, workplace, monkeypatch):
    """Breaks when a path costs an hour of asking before it is refused, or ends in a traceback."""
    Path("file").touch()
    Path("dangling").symlink_to("nowhere/at/all")
    monkeypatch.setattr("eval.open.load_model", None)
    for path in ("file/a", "x" * 300, "dangling"):
        refuses(command, f"--model embedded --limit 2 --out {path}")

"""Asking random tiny models about drawn pictures: answers in batches, choices, the log, and the models of flags."""

import json
from argparse import ArgumentParser
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch._dynamo.testing import CompileCounter

from eval import answer, open, pope, scenes, vqa
from eval.question import Question
from lora import adapter
from model.common import UserError
from model.differential import graft
from model.generate import CompiledStep, generate
from tests.eval.conftest import random_model

FAST = "--max-new-tokens 3 --batch-size 8".split()


def questions_on(pictures: int = 5) -> list[Question]:
    return vqa.embedded(6 * pictures)


def noise(seed: int) -> Image.Image:
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((48, 40), Image.Resampling.NEAREST)


def one_by_one(model, processor, questions, max_new_tokens=6) -> list[str]:
    """The reference: each picture encoded anew, each prompt alone."""
    said = []
    for question in questions:
        images = question.images()
        batch = processor.pad([answer.layout(processor, question, len(images))], images)
        inputs = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask
        said.append(processor.decode(generate(model, *inputs, max_new_tokens)[0]))
    return said


# Asking


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [4, 64])
def test_batched_answers_are_those_of_one_by_one(model, processor, batch_size):
    """An answer depends on the other rows of its batch, on its padding, or on another row's picture."""
    single = one_by_one(model, processor, questions_on())
    assert answer.ask_all(model, processor, questions_on(), max_new_tokens=6, batch_size=batch_size) == single
    assert len(set(single)) > 5  # a model that says always the same could not tell


@pytest.mark.long
def test_compiled_answers_are_those_of_one_by_one(model, processor, monkeypatch):
    """The compiled step sees another prompt, or the last, smaller batch is compiled anew."""
    single = one_by_one(model, processor, questions_on())
    torch._dynamo.reset()
    counter, steps = CompileCounter(), []
    compiled, step = CompiledStep(model, backend=counter), CompiledStep.__call__
    monkeypatch.setattr(CompiledStep, "__call__", lambda *args: steps.append(len(args[1])) or step(*args))
    options = {"max_new_tokens": 6, "batch_size": 8, "compiled": compiled}
    assert answer.ask_all(model, processor, questions_on(), **options) == single
    assert set(steps) == {8} and counter.frame_count == 1 and len(single) % 8


def test_several_pictures_in_one_prompt(model, processor):
    """MMNeedle's ten pictures are shuffled, or those of another test; or an id that occurs twice mixes up answers."""
    pictures = [[noise(3 * number + part) for part in range(3)] for number in range(4)]
    asked = [Question("same", str(n), lambda p=p: p, f"count {'dog ' * n}cat") for n, p in enumerate(pictures)]
    asked.append(Question("same", "one", pictures[0][0], "count cat"))
    single = one_by_one(model, processor, asked)
    assert answer.ask_all(model, processor, asked, max_new_tokens=6) == single
    assert len(set(single)) == 5


def test_a_picture_is_encoded_once_for_all_its_questions(model, processor, monkeypatch):
    """Six questions a picture cost six encodings: the vision tower is most of the work of a large model."""
    encoded, drawn = [], []
    encode = model.encode_images
    monkeypatch.setattr(model, "encode_images", lambda pixels: encoded.append(len(pixels)) or encode(pixels))
    asked = [Question(q.id, q.key, lambda q=q: drawn.append(q.key) or q.picture(), q.prefix) for q in questions_on(7)]
    answer.ask_all(model, processor, asked, max_new_tokens=1, batch_size=3)
    assert len(drawn) == sum(encoded) <= 8 and max(encoded) <= 3  # one is in two windows of 24


def test_generation_stops_with_the_last_row(model, processor, monkeypatch):
    """A batch whose answers have all ended goes on to the maximum: most answers have two tokens, the maximum is 32."""
    calls, head = [], model.language_model.head

    def ends(hidden):
        calls.append(1)
        return head(hidden).index_fill(-1, torch.tensor(processor.config.eos_token_id), 1e9)

    monkeypatch.setattr(model.language_model, "head", ends)
    assert answer.ask_all(model, processor, questions_on(1)) == [""] * 6 and len(calls) == 1


def likelihood_by_hand(model, processor, picture, prefix, choice) -> float:
    """log p of a whole answer from one uncached forward pass, token by token."""
    batch = processor([picture], [prefix], [choice])
    logits = model(batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask)[0].double()
    labels = batch.labels[0]
    places = [place for place in range(1, len(labels)) if labels[place] != -100]
    return sum(float(logits[p - 1][labels[p]] - logits[p - 1].exp().sum().log()) for p in places)


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("kind", [None, "twin", "split"])
def test_the_likeliest_choice_is_the_answer(processor, kind):
    """Likelihoods are of other tokens, leave out the end token, or read another prompt's cache."""
    model = random_model(2)
    if kind is not None:
        graft(model, kind)
        for name, parameter in model.named_parameters():
            if ".q2.lora_B" in name or ".k2.lora_B" in name:
                parameter.normal_(std=0.3)
    choices = ("top", "bottom left", "row 2 column 3", "dog")
    asked = [Question(n, str(n), noise(n), f"count {'dog ' * n}cat", choices) for n in range(6)]
    expected = [[likelihood_by_hand(model, processor, q.picture, q.prefix, c) for c in choices] for q in asked]
    batch = processor.pad([processor.layout(1, question.prefix) for question in asked])
    features = model.encode_images(processor([q.picture for q in asked], ["-"] * len(asked)).pixel_values)
    ids = [[*processor.encode(choice), processor.config.eos_token_id] for choice in choices]
    found = torch.stack(answer.log_likelihoods(model, batch, [ids] * len(asked), features, torch.arange(len(asked))))
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=0, atol=1e-4)
    # of five rows a batch, one prompt's choices
    answers = answer.ask_all(model, processor, asked, batch_size=5)
    assert answers == [choices[row.index(max(row))] for row in expected]


# The log


def count_asked(monkeypatch, batches: int = 99) -> list[int]:
    """The sizes of the batches that are generated; Ctrl-C arrives after so many."""
    sizes, original = [], answer.generate

    def interrupted(model, input_ids, *args, **options):
        if len(sizes) == batches:
            raise KeyboardInterrupt
        sizes.append(len(input_ids))
        return original(model, input_ids, *args, **options)

    monkeypatch.setattr(answer, "generate", interrupted)
    return sizes


@pytest.mark.long
@pytest.mark.parametrize("cut", [0, 7])
def test_an_interrupted_run_goes_on(source, workplace, capsys, monkeypatch, cut):
    """A resumed evaluation asks all again, or gives other answers than an uninterrupted one; --no-resume keeps some."""
    flags = ["--model", source, "--limit", "30", *FAST, "--json"]
    vqa.main([*flags, "--out", "whole"])
    whole = capsys.readouterr().out
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        count_asked(patch, 2)
        vqa.main([*flags, "--out", "parts"])
    log = workplace / "parts" / "answers.jsonl"
    assert len(log.read_text().splitlines()) == 16
    if cut:  # the process was killed while it wrote
        log.write_bytes(log.read_bytes()[:-cut])
    with monkeypatch.context() as patch:
        sizes = count_asked(patch)
        for more, asked in (([], 14 + bool(cut)), ([], 14 + bool(cut)), (["--no-resume"], 44 + bool(cut))):
            vqa.main([*flags, "--out", "parts", *more])
            assert sum(sizes) == asked
    assert capsys.readouterr().out == 3 * whole
    assert (workplace / "whole/results.json").read_bytes() == (workplace / "parts/results.json").read_bytes()


def test_answers_of_another_model_or_prompt_are_not_taken(model, processor, tmp_path, monkeypatch):
    """The log of one model is scored as another's, or that of another tokenizer or strength of LoRA."""
    log, asked = tmp_path / "log.jsonl", questions_on(2)
    first, sizes = answer.ask_all(model, processor, asked, max_new_tokens=2, log=log), count_asked(monkeypatch)
    other = random_model()
    with torch.no_grad():
        other.language_model.layers[3].mlp.down_proj.weight += 0.5
    longer = [Question(q.id, q.key, q.picture, q.prefix + " now") for q in asked]
    reverse = copy(processor)
    reverse.encode = lambda text: processor.encode(text)[::-1]
    strong = []
    for alpha in (4.0, 8.0):
        torch.manual_seed(0)
        strong.append(random_model())
        adapter.inject(strong[-1], adapter.DECODER_TARGETS, 2, alpha)
    calls = ((other, processor, asked, 2), (model, processor, longer, 2), (model, processor, asked, 3))
    calls += ((model, reverse, asked, 2), *((one, processor, asked, 2) for one in strong))
    for number, (*given, tokens) in enumerate(calls, start=1):
        assert answer.ask_all(*given, max_new_tokens=tokens, log=log) != first or number > 2
        assert sum(sizes) == 12 * number
    assert answer.ask_all(model, processor, asked, max_new_tokens=2, log=log) == first and sum(sizes) == 12 * len(calls)


def test_a_replaced_picture_is_asked_anew(model, processor, tmp_path, monkeypatch):
    """The log answers about a picture that is no longer the one of that name, or that lies in another folder."""
    sizes, log = count_asked(monkeypatch), tmp_path / "log.jsonl"
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in range(4):
            noise(number).save(tmp_path / folder / f"{number}.png")

    def ask(folder) -> int:
        files = [tmp_path / folder / f"{number}.png" for number in range(4)]
        asked = [Question(file.name, file.name, file, "count cat") for file in files]
        asked.append(Question("all", "all", lambda: noise(9), "count cat", files=files))  # stitched of all four
        answer.ask_all(model, processor, asked, max_new_tokens=1, log=log)
        return sum(sizes)

    assert [ask(folder) for folder in "aab"] == [5, 5, 10]
    noise(7).save(tmp_path / "a" / "2.png")
    assert ask("a") == 12


def test_a_log_has_one_writer_and_is_no_other_file(model, processor, tmp_path):
    """Two commands mix their lines, a file of something else is overwritten, or likelihoods come back as text."""
    log, asked = tmp_path / "log.jsonl", [Question(1, "1", noise(1), "count", ("top", "dog"), scored=True)]
    first = answer.ask_all(model, processor, asked, log=log)
    assert isinstance(first[0], list) and answer.ask_all(model, processor, asked, log=log) == first
    with answer.open_log(log), pytest.raises(UserError, match=r"log\.jsonl: another command writes .*--out"):
        answer.ask_all(model, processor, asked, log=log)
    for line in ('{"answer": "y"}', "[]", "7", "{", "[" * 100_000):
        log.write_text(f'{{"mark": "x", "answer": "y"}}\n{line}\n')
        with pytest.raises(UserError, match=r"log\.jsonl:2: .*delete"):
            answer.ask_all(model, processor, asked, log=log)


# The models that flags name


def subjects(*flags: str) -> list[open.Subject]:
    parser = ArgumentParser()
    open.add_model_flags(parser, many=True)
    return open.models_of(parser.parse_args(flags))


@pytest.mark.long
def test_default_is_the_newest_run_or_the_embedded_base(source, workplace, monkeypatch, capsys):
    """Without flags another model than the last one trained is measured, or nobody says which one it was."""
    monkeypatch.setattr("model.source.BUNDLED_FOLDER", Path(source))
    assert subjects() == [open.Subject("embedded", None, "embedded")]
    for name, base in (("old", "embedded"), ("other", "somewhere/else"), ("unfinished", "embedded")):
        folder, model = workplace / "runs" / name, random_model()
        adapter.inject(model, adapter.DECODER_TARGETS, 2, 4.0)
        adapter.save(model, folder, base=base)
        (folder / "config.json").write_text(json.dumps({"base": base}))
        if name != "unfinished":
            (folder / "summary.json").write_text("{}")
    assert subjects()[0].title == "old" and subjects("--adapter", "none")[0].source == "embedded"
    assert subjects("--model", source)[0].run is None
    assert subjects("--adapter", "runs/other")[0].source == "somewhere/else"
    capsys.readouterr()
    pope.main(["--limit", "6", *FAST])
    printed = capsys.readouterr().out
    assert printed.startswith("pope: runs/old on embedded (the newest run in ./runs; --adapter takes another)\n")
    scores = json.loads(Path("runs/eval/old/pope/scores.json").read_text())
    assert scores["model"] == "runs/old on embedded" and set(scores["results"]) == {"old"}


def test_a_whole_model_takes_no_base(workplace):
    """--model is ignored beside the adapter of a --full run, and the results of one model bear the other's name."""
    (workplace / "full" / "model").mkdir(parents=True)
    assert subjects("--adapter", "full") == [open.Subject("full/model", None, "full")]
    with pytest.raises(UserError, match="full is a whole model.*leave --model out"):
        subjects("--adapter", "full", "--model", "embedded")


def test_what_a_model_was_trained_on(workplace):
    """A needle that a model never saw is drawn as one that it fails; of a published model nobody knows."""
    for name, config in (
        ("scenes", {"base": "embedded", "data": ["embedded"], "tasks": "vqa,n2o1"}),
        ("own", {"base": "embedded", "data": ["jsonl:a.jsonl"], "tasks": "vqa,n2o1"}),
        ("other", {"base": "google/x", "data": ["embedded"], "tasks": "vqa,n2o1"}),
    ):
        (workplace / name / "best").mkdir(parents=True)
        (workplace / name / "config.json").write_text(json.dumps(config))
    both = {"vqa", "n2o1"}
    for run, tasks in (("scenes", both), ("scenes/best", both), ("own", set()), ("other", None), ("peft", None)):
        assert open.Subject("embedded", Path(run), "").trained_tasks() == tasks
    for source, tasks in (("embedded", set()), ("google/x", None), ("scenes/model", both)):
        assert open.Subject(source, None, "").trained_tasks() == tasks


BAD = [
    (vqa, "--questions Q", "go together"),
    (vqa, "--annotations A", "go together"),
    (vqa, "--questions Q --images .", r"Q: 1 of its 1 pictures are not in \."),
    (vqa, "--questions gone --images .", "gone: not found"),
    (vqa, "--questions Q --annotations A --images .", r"A: 1 question\(s\) of Q have no annotation"),
    (vqa, "--prompt answer --limit 1", "prompt template 'answer'"),
    (vqa, "--device nowhere", "--device nowhere"),
    (vqa, "--adapter gone", "adapter_config.json: not found"),
    (vqa, "--out Q", "Q: "),
    (pope, "--questions Q", "--questions and --images go together"),
    (pope, "--questions L --images .", "L:2: label is 'maybe'"),
]


@pytest.mark.parametrize(("command", "flags", "message"), BAD)
def test_bad_input_is_one_line(command, flags, message, source, workplace):
    """A mistake ends in a traceback, or in a line that names neither the file nor the remedy."""
    (workplace / "Q").write_text(json.dumps([{"question_id": 1, "image": "gone.jpg", "question": "Is it?"}]))
    (workplace / "A").write_text(json.dumps([{"question_id": 2, "answers": ["yes"]}]))
    line = {"question_id": 1, "image": "gone.jpg", "text": "Is it?", "label": "yes"}
    (workplace / "L").write_text(json.dumps(line) + "\n" + json.dumps(line | {"label": "maybe"}))
    with pytest.raises(UserError, match=message) as caught:
        command.main([*([] if "--adapter" in flags else ["--model", source]), *flags.split()])
    assert "\n" not in str(caught.value)


def test_embedded_questions_are_those_of_training():
    """Two ways to the same questions differ: the command would not score what training learned."""
    asked = vqa.embedded(60)
    samples = [s for number in range(10) for s in scenes.vqa_picture("test", number)]
    assert [(q.id, q.prefix) for q in asked] == [(s.question_id, s.prefix) for s in samples]
    for ours, s in zip((q.truth for q in asked), samples, strict=True):
        assert (ours.question_id, ours.answer, len(ours.answers)) == (s.question_id, s.suffix, 10)
        assert (ours.answer_type, ours.question_type) == (s.answer_type, s.question_type)

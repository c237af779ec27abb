"""The evaluation commands on random tiny models and drawn pictures: what is asked, resumed, left out, and scored."""

import json
import re
from collections import Counter
from copy import copy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch._dynamo.testing import CompileCounter

from eval import attention, haystacks, needle, needle_scoring, pictures, pope, run, scenes, session, vqa
from eval.command import Ask, command_parser
from eval.needle_files import ABSENT, NeedleTest, read_needle_tests
from lora import adapter
from model.attention import attention_modules
from model.common import UserError
from model.differential import graft
from model.generate import CompiledStep
from model.processor import Processor
from tests.eval.conftest import random_model
from tests.files import write_mmneedle


def questions_on(pictures: int = 5):
    return vqa.asks_of(vqa.embedded(6 * pictures))


def noise(seed: int) -> Image.Image:
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((48, 40), Image.Resampling.NEAREST)


FAST = ["--max-new-tokens", "3", "--batch-size", "8"]


# Asking


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [4, 64])
def test_batched_answers_are_those_of_one_by_one(model, processor, batch_size):
    """An answer depends on the other rows of its batch, on its padding, or on another row's picture."""
    asks = questions_on()
    single = run.ask_one_by_one(model, processor, asks, max_new_tokens=6)
    assert run.ask_all(model, processor, asks, max_new_tokens=6, batch_size=batch_size) == single
    assert len(set(single)) > 5  # a model that says always the same could not tell


@pytest.mark.long
def test_compiled_answers_are_those_of_one_by_one(model, processor, monkeypatch):
    """The compiled step sees another prompt, or the last, smaller batch is compiled anew."""
    asks = questions_on()
    single = run.ask_one_by_one(model, processor, asks, max_new_tokens=6)
    torch._dynamo.reset()
    counter, steps = CompileCounter(), []
    compiled = CompiledStep(model, backend=counter)
    step = CompiledStep.__call__
    monkeypatch.setattr(CompiledStep, "__call__", lambda *args: steps.append(len(args[1])) or step(*args))
    assert run.ask_all(model, processor, asks, max_new_tokens=6, batch_size=8, compiled=compiled) == single
    assert set(steps) == {8} and counter.frame_count == 1 and len(asks) % 8


def test_several_pictures_in_one_prompt(model, processor):
    """MMNeedle's ten pictures are shuffled, or those of another test."""
    pictures = [[noise(3 * number + part) for part in range(3)] for number in range(4)]
    asks = [
        Ask(str(n), str(n), lambda three=three: three, f"count {'dog ' * n}cat") for n, three in enumerate(pictures)
    ]
    asks.append(Ask("one", "one", pictures[0][0], "count cat"))
    single = run.ask_one_by_one(model, processor, asks, max_new_tokens=6)
    assert run.ask_all(model, processor, asks, max_new_tokens=6) == single
    assert len(set(single)) == 5


def test_a_picture_is_encoded_once_for_all_its_questions(model, processor, monkeypatch):
    """Six questions a picture cost six encodings: the vision tower is most of the work of a large model."""
    encoded, drawn = [], []
    encode = model.encode_images
    monkeypatch.setattr(model, "encode_images", lambda pixels: encoded.append(len(pixels)) or encode(pixels))
    asks = [Ask(q.id, q.key, lambda q=q: drawn.append(q.key) or q.picture(), q.prefix) for q in questions_on(7)]
    run.ask_all(model, processor, asks, max_new_tokens=1, batch_size=3)
    assert sum(encoded) == 7 and len(drawn) == 7 and max(encoded) <= 3


def test_generation_stops_with_the_last_row(model, processor, monkeypatch):
    """A batch whose answers have all ended goes on to the maximum: most answers have two tokens, the maximum is 32."""
    eos, calls = processor.config.eos_token_id, []
    forward = model.language_model.head

    def ends(hidden):
        calls.append(1)
        logits = forward(hidden)
        logits[..., eos] = 1e9
        return logits

    monkeypatch.setattr(model.language_model, "head", ends)
    assert run.ask_all(model, processor, questions_on(1), max_new_tokens=32) == [""] * 6
    assert len(calls) == 1


def choices_by_hand(model, processor, picture, prefix, choices):
    """log p of each whole answer, from one uncached forward pass each, token by token."""
    result = []
    for choice in choices:
        batch = processor([picture], [prefix], [choice])
        logits = model(batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask)[0].double()
        total = 0.0
        for position in range(1, logits.shape[0]):
            if batch.labels[0, position] != -100:
                row = logits[position - 1]
                total += float(row[batch.labels[0, position]] - row.exp().sum().log())
        result.append(total)
    return result


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("kind", [None, "twin", "split"])
def test_constrained_mode_takes_the_likelier_word(processor, kind):
    """Likelihoods are of other tokens, leave out the end token, or read another prompt's cache."""
    model = random_model(2)
    if kind is not None:
        graft(model, kind)
        for name, parameter in model.named_parameters():
            if ".q2.lora_B" in name or ".k2.lora_B" in name:
                parameter.normal_(std=0.3)
    choices = ("top", "bottom left", "row 2 column 3", "dog")
    asks = [Ask(str(n), str(n), noise(n), f"count {'dog ' * n}cat", choices) for n in range(6)]
    expected = [choices_by_hand(model, processor, ask.picture, ask.prefix, choices) for ask in asks]
    batch = processor.pad([processor.layout(1, ask.prefix) for ask in asks])
    features = model.encode_images(processor([ask.picture for ask in asks], ["-"] * len(asks)).pixel_values)
    ids = [[*processor.encode(choice), processor.config.eos_token_id] for choice in choices]
    found = run.log_likelihoods(model, batch, [ids] * len(asks), features, torch.arange(len(asks)))
    torch.testing.assert_close(
        torch.stack(found).double(), torch.tensor(expected, dtype=torch.double), rtol=0, atol=1e-4
    )
    answers = run.ask_all(model, processor, asks, batch_size=5)  # of which five rows make one prompt's choices
    assert answers == [choices[row.index(max(row))] for row in expected]
    # without its end token a short answer beats a long one that begins with it
    assert [row[0] for row in expected] != [row[1] for row in expected]


# The log


def interrupt_after(monkeypatch, batches: int):
    """Ctrl-C arrives in the generation after so many batches; returns the list of the batches' sizes."""
    generate, sizes = run.generate, []

    def interrupted(model, input_ids, *args, **options):
        if len(sizes) == batches:
            raise KeyboardInterrupt
        sizes.append(len(input_ids))
        return generate(model, input_ids, *args, **options)

    monkeypatch.setattr(run, "generate", interrupted)
    return sizes


@pytest.mark.long
@pytest.mark.parametrize("cut", [0, 7])
def test_an_interrupted_run_goes_on(source, workplace, capsys, monkeypatch, cut):
    """A resumed evaluation asks all again, or gives other answers than an uninterrupted one."""
    arguments = ["--model", source, "--limit", "30", *FAST, "--json"]
    vqa.main([*arguments, "--out", "whole"])
    whole = capsys.readouterr().out
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 2)
        vqa.main([*arguments, "--out", "parts"])
    log = workplace / "parts" / "answers.jsonl"
    assert len(log.read_text().splitlines()) == 16
    if cut:  # the process was killed while it wrote
        log.write_bytes(log.read_bytes()[:-cut])
    with monkeypatch.context() as patch:
        sizes = interrupt_after(patch, 99)
        vqa.main([*arguments, "--out", "parts"])
        assert sum(sizes) == 14 + bool(cut)
        vqa.main([*arguments, "--out", "parts"])  # the log is whole again
        assert sum(sizes) == 14 + bool(cut)
    assert capsys.readouterr().out.endswith(whole)
    results = [(workplace / name / "results.json").read_bytes() for name in ("whole", "parts")]
    assert results[0] == results[1]


def test_answers_of_another_model_or_prompt_are_not_taken(model, processor, tmp_path, monkeypatch):
    """The log of one model is scored as another's."""
    log, asks = tmp_path / "log.jsonl", questions_on(2)
    first = run.ask_all(model, processor, asks, max_new_tokens=2, log=log)
    other = random_model()
    with torch.no_grad():
        other.language_model.layers[3].mlp.down_proj.weight += 0.5
    sizes = interrupt_after(monkeypatch, 99)
    assert run.ask_all(other, processor, asks, max_new_tokens=2, log=log) != first and sum(sizes) == 12
    longer = [Ask(q.id, q.key, q.picture, q.prefix + " now") for q in asks]
    run.ask_all(model, processor, longer, max_new_tokens=2, log=log)
    run.ask_all(model, processor, asks, max_new_tokens=3, log=log)
    assert sum(sizes) == 36
    assert run.ask_all(model, processor, asks, max_new_tokens=2, log=log) == first and sum(sizes) == 36
    other = copy(processor)
    other.encode = lambda text: processor.encode(text)[::-1]
    run.ask_all(model, other, asks, max_new_tokens=2, log=log)
    assert sum(sizes) == 48


def test_answers_of_another_strength_of_lora_are_not_taken(processor, tmp_path, monkeypatch):
    """The log answers for an adapter whose lora_alpha was changed: its weights are the same."""
    sizes, asks = interrupt_after(monkeypatch, 99), questions_on(1)
    for alpha, asked in ((4.0, 6), (8.0, 12), (4.0, 12)):
        torch.manual_seed(0)
        adapter.inject(strong := random_model(), adapter.DECODER_TARGETS, 2, alpha)
        run.ask_all(strong, processor, asks, max_new_tokens=1, log=tmp_path / "log.jsonl")
        assert sum(sizes) == asked


def test_a_replaced_picture_is_asked_anew(model, processor, tmp_path, monkeypatch):
    """The log answers about a picture that is no longer the one of that name, or that lies in another folder."""
    log, folders = tmp_path / "log.jsonl", [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        for number in range(4):
            noise(number).save(folder / f"{number}.png")

    def asks(folder):
        files = [folder / f"{number}.png" for number in range(4)]
        test = NeedleTest(0, (tuple(map(str, range(4))),), ((0, 0, 0),), ("0",), ("a cat",))
        trial = needle.Trial(test, lambda: [noise(9)], files)  # stitched of all four
        return [Ask(file.name, file.name, file, "count cat") for file in files] + needle.asks_of([trial], "official")

    sizes, log_options = interrupt_after(monkeypatch, 99), {"max_new_tokens": 1, "log": log}
    for folder, asked in ((folders[0], 5), (folders[0], 5), (folders[1], 10)):
        run.ask_all(model, processor, asks(folder), **log_options)
        assert sum(sizes) == asked
    noise(7).save(folders[0] / "2.png")  # its question, and the haystack with it
    run.ask_all(model, processor, asks(folders[0]), **log_options)
    assert sum(sizes) == 12


def test_choices_are_scored_one_by_one_too(model, processor, monkeypatch):
    """The speed comparison decodes questions whose answer is the likeliest of their choices."""
    choices = ("bottom left", "top")
    asks = [Ask(str(n), str(n), noise(n), f"count {'dog ' * n}cat", choices) for n in range(3)]
    decoded = interrupt_after(monkeypatch, 0)
    assert run.ask_one_by_one(model, processor, asks) == run.ask_all(model, processor, asks) and not decoded
    assert set(run.ask_one_by_one(model, processor, asks)) <= set(choices)


@pytest.mark.long
def test_no_resume_asks_anew(source, workplace, monkeypatch, capsys):
    """--no-resume keeps old answers."""
    sizes = interrupt_after(monkeypatch, 99)
    for flags, asked in (([], 6), (["--resume"], 6), (["--no-resume"], 12)):
        vqa.main(["--model", source, "--limit", "6", "--out", "out", *FAST, *flags])
        assert sum(sizes) == asked


def test_a_foreign_log_is_refused(model, processor, tmp_path):
    """A file of something else is overwritten or ends in a traceback."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"mark": "x", "answer": "y"}\n[]\n')
    with pytest.raises(UserError, match=r"log\.jsonl:2: .*delete"):
        run.ask_all(model, processor, questions_on(1), log=log)


# VQA


def test_embedded_results_are_valid_for_the_scorer(source, workplace, capsys):
    """The results file, or the score of the run, is not what the official scorer makes of it."""
    vqa.main(["--model", source, "--limit", "20", *FAST, "--json"])
    printed = json.loads(capsys.readouterr().out)
    out = workplace / "runs" / "eval" / "random" / "vqa"
    files = [f"--{name}={out / name}.json" for name in ("questions", "annotations", "results")]
    vqa.main(["score", *files, "--json"])
    scored = json.loads(capsys.readouterr().out)
    assert scored == {name: printed[name] for name in ("overall", "per_answer_type", "per_question_type")}
    assert set(printed["blind"]["per_answer_type"]) == {"yes/no", "number", "other"}
    assert len(json.loads((out / "results.json").read_text())) == 20


def test_embedded_questions_are_those_of_the_published_layout():
    """Two ways to the same questions differ: the command would not score what the files hold."""
    benchmark, (questions, annotations) = vqa.embedded(60), scenes.vqav2_files("test", 10)
    assert [(q.question_id, q.question) for q in benchmark.questions] == [
        (q["question_id"], q["question"]) for q in questions["questions"]
    ]
    for ours, theirs in zip(benchmark.annotations, annotations["annotations"], strict=True):
        assert (ours.question_id, ours.answer) == (theirs["question_id"], theirs["multiple_choice_answer"])
        assert (ours.answer_type, ours.question_type) == (theirs["answer_type"], theirs["question_type"])
        assert len(ours.answers) == len(theirs["answers"]) == 10
    samples = [s for number in range(10) for s in scenes.vqa_picture("test", number)]
    assert [ask.prefix for ask in vqa.asks_of(benchmark)] == [s.prefix for s in samples]  # as in training


def test_right_answers_score_100():
    """Questions, annotations and answers are out of step."""
    benchmark = vqa.embedded(60)
    right = {a.question_id: a.answer for a in benchmark.annotations}
    assert vqa.score_answers(benchmark, right)["overall"] == 100
    (first, *_), one_wrong = benchmark.annotations, dict(right)
    one_wrong[first.question_id] = "nothing"
    assert vqa.score_answers(benchmark, one_wrong)["overall"] == pytest.approx(100 * 59 / 60, abs=0.005)


@pytest.mark.long
def test_embedded_evaluation_for_training(model, processor, capsys):
    """Fine-tuning reports another accuracy than the command."""
    found = vqa.evaluate_embedded(model, processor, 12)
    assert found == vqa.score_answers(vqa.embedded(12), vqa.answer(model, processor, vqa.embedded(12)))
    assert set(found) == {"overall", "per_answer_type", "per_question_type"} and capsys.readouterr().err == ""
    assert set(vqa.blind_embedded(600)) == {"overall", "yes/no", "number", "other"}
    assert 25 < vqa.blind_embedded(600)["overall"] < 45


@pytest.fixture
def official(tmp_path):
    """A folder in VQAv2's layout: three pictures with two questions each; the second picture is cut off."""
    folder = tmp_path / "val2014"
    folder.mkdir()
    for number in (1, 2, 3):
        noise(number).save(folder / f"COCO_val2014_{number:012d}.jpg")
    broken = folder / "COCO_val2014_000000000002.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:300])
    questions = [{"image_id": n // 2 + 1, "question": f"What is {n}?", "question_id": n} for n in range(6)]
    annotations = [
        {
            "question_id": n,
            "image_id": n // 2 + 1,
            "question_type": "what is",
            "answer_type": "other",
            "multiple_choice_answer": "cat",
            "answers": [{"answer": "cat", "answer_id": i} for i in range(10)],
        }
        for n in range(6)
    ]
    (tmp_path / "Q").write_text(json.dumps({"data_subtype": "val2014", "questions": questions}))
    (tmp_path / "A").write_text(json.dumps({"annotations": annotations}))
    return tmp_path, broken, whole


def official_flags(folder, source):
    files = {"questions": "Q", "annotations": "A", "images": "", "out": "out"}
    return ["--model", source, *chain(*((f"--{flag}", str(folder / name)) for flag, name in files.items())), *FAST]


def test_unreadable_pictures_are_named_and_asked_when_repaired(official, source, capsys, monkeypatch):
    """One broken file of 40,000 ends a run of hours, or is passed over in silence."""
    folder, broken, whole = official
    vqa.main([*official_flags(folder, source), "--json"])
    printed, report = capsys.readouterr()
    assert set(json.loads(printed)["left_out"]) == {"2", "3"}
    assert "left out 2 questions" in report and "COCO_val2014_000000000002.jpg" in report and "(2 questions)" in report
    ids = [record["question_id"] for record in json.loads((folder / "out" / "results.json").read_text())]
    assert ids == [0, 1, 4, 5]
    assert set(json.loads((folder / "out" / "left_out.json").read_text())) == {"2", "3"}
    broken.write_bytes(whole)
    sizes = interrupt_after(monkeypatch, 99)
    vqa.main([*official_flags(folder, source), "--json"])
    printed, report = capsys.readouterr()
    assert sum(sizes) == 2 and "left_out" not in json.loads(printed) and "left out" not in report
    assert not (folder / "out" / "left_out.json").exists()
    assert len(json.loads((folder / "out" / "results.json").read_text())) == 6


def test_no_picture_can_be_read(official, source):
    """A run whose pictures are all broken reports an accuracy."""
    folder, broken, _ = official
    for path in broken.parent.iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none of the 6 questions could be asked"):
        vqa.main(official_flags(folder, source))


def test_each_set_has_its_own_results_or_none(official, source):
    """A set that nobody could be asked has an accuracy of 0, which enters the mean; or two of one name are one."""
    folder = official[0]
    for name in ("1.json", "2.json", "x/1.json", "mean.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        image = f"COCO_val2014_{1 + (name == '2.json'):012d}.jpg"  # the second is cut off
        (folder / name).write_text(json.dumps({"question_id": 1, "image": image, "text": "A cat?", "label": "yes"}))
    for names, message in (("1 2", "2: none of the 1 questions could be"), ("1 x/1", "taken"), ("1 mean", "taken")):
        files = [str(folder / f"{name}.json") for name in names.split()]
        flags = ["--images", str(folder / "val2014"), "--out", str(folder / "out"), *FAST]
        with pytest.raises(UserError, match=message):
            pope.main(["--model", source, "--questions", *files, *flags])


def test_files_for_studies(official, model, processor):
    """A study asks other questions than the held-out ones, or counts those that it left out."""
    folder, _, _ = official
    files, left_out = (folder / "Q", folder / "A", folder), {}
    benchmark = vqa.from_files(*files, only={"1", "2", "4", "5"}, limit=3)
    said = vqa.answer(model, processor, benchmark, "answer {question}", left_out=left_out)
    assert list(left_out) == ["2"] and list(said) == [1, 4]
    assert vqa.score_answers(benchmark, said)["per_question_type"].keys() == {"what is"}


def test_a_test_split_without_annotations_is_answered(official, source, capsys):
    """VQAv2's test split has no annotations: its answers go to the evaluation server."""
    folder, broken, whole = official
    broken.write_bytes(whole)
    flags = official_flags(folder, source)
    del flags[flags.index("--annotations") : flags.index("--annotations") + 2]
    vqa.main(flags)
    assert len(json.loads((folder / "out" / "results.json").read_text())) == 6
    assert capsys.readouterr().out == f"in {folder / 'out'}: results.json, answers.jsonl\n"


def test_the_prompt_is_the_template(official, source, processor, monkeypatch):
    """The paper's bare question and the authors' prompt are confused."""
    folder, *_ = official
    asked, layout = [], Processor.layout
    monkeypatch.setattr(Processor, "layout", lambda self, n, *text: asked.append(text[0]) or layout(self, n, *text))
    vqa.main([*official_flags(folder, source), "--limit", "1"])
    vqa.main([*official_flags(folder, source), "--limit", "1", "--prompt", "{question}"])
    assert set(asked) == {"answer en What is 0?", "What is 0?"}


@pytest.mark.long
def test_one_by_one_is_measured(source, workplace, capsys):
    """The promised speed is printed with the share of equal answers."""
    vqa.main(["--model", source, "--limit", "12", "--one-by-one", "6", *FAST])
    assert re.search(
        r"6 questions: [\d.]+ a second one by one, [\d.]+ batched, [\d.]+ times as fast; 100.0 % of the "
        r"answers agree\n",
        capsys.readouterr().out,
    )


def questions_and_answers(*rows):
    """A benchmark from (question, question type, answer)s."""
    return vqa.Benchmark(
        [vqa.Question(n, "", text) for n, (text, *_) in enumerate(rows)],
        [vqa.Annotation(n, ({"answer": answer},), answer, "other", kind) for n, (_, kind, answer) in enumerate(rows)],
        {},
    )


def test_blind_answers_by_hand():
    """The baseline knows more than the training questions, or less than their words."""
    train = questions_and_answers(
        ("Is it?", "is", "yes"),
        ("Is it?", "is", "yes"),
        ("Is it?", "is", "no"),
        ("Is he?", "is", "no"),
        ("Is he?", "is", "no"),
        ("How many?", "how", "2"),
        ("How many?", "how", "1"),
    )
    test = questions_and_answers(
        ("Is it?", "is", "x"), ("Is she?", "is", "x"), ("How many?", "how", "x"), ("Why?", "why", "x")
    )
    # the question; its type (no 3, yes 2); a tie goes to the first in the alphabet; all (no 3, yes 2, …)
    assert vqa.blind_answers(test, train) == {0: "yes", 1: "no", 2: "1", 3: "no"}
    # without training questions the best constant of each type
    assert vqa.blind_answers(train) == {0: "no", 1: "no", 2: "no", 3: "no", 4: "no", 5: "1", 6: "1"}


def test_blind_of_files(official, source, capsys):
    """--blind without files, with two, and with one."""
    folder, *_ = official
    vqa.write_results(folder / "R", dict.fromkeys(range(6), "dog"))
    score = ["score", *(f"--{name}={folder / name[0].upper()}" for name in ("questions", "annotations", "results"))]
    for files in ([], [f"{folder / 'Q'}", f"{folder / 'A'}"]):
        vqa.main([*score, "--json", "--blind", *files])
        printed = json.loads(capsys.readouterr().out)
        assert printed["overall"] == 0 and printed["blind"]["overall"] == 100
    vqa.main([*score, "--blind"])
    assert "official   blind" in capsys.readouterr().out
    questions = json.loads((folder / "Q").read_text())
    (folder / "Q").write_text(json.dumps(questions | {"questions": questions["questions"][1:]}))
    with pytest.raises(UserError, match=r"Q: 1 missing id\(s\) \(0\)"):
        vqa.main([*score, "--blind"])
    with pytest.raises(UserError, match="--blind takes no file or two"):
        vqa.main([*official_flags(folder, source), "--blind", "one"])


# Needles

CASES = [(kind, needles, absent) for kind in scenes.NEEDLES for needles, absent in ((1, False), (2, False), (2, True))]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "needles", "absent"), CASES)
def test_embedded_trials_ask_what_is_trained(kind, needles, absent):
    """A model is asked in other words than it was trained on, or right answers do not count as right."""
    for number, (test, stitched, _) in enumerate(needle.embedded_trials(kind, 20, needles, absent=absent)):
        samples = scenes.needle(kind, "test", number, needles=needles, negative=absent).samples()
        assert [prompt for prompt, _ in needle.prompts_of(test, "paper")] == [s.prefix for s in samples]
        assert np.array_equal(stitched()[0], samples[0].scene.render())
        right = needle_scoring.response_record(test, needle.respond(test, [s.suffix for s in samples], "paper"))
        assert needle_scoring.judge(right) == (True, True, True)
        if not absent:
            wrong = needle.respond(test, [samples[0].suffix] * (len(samples) - 1) + ["here"], "paper")
            assert needle_scoring.judge(needle_scoring.response_record(test, wrong))[2] is False
            choices = [choices for _, choices in needle.prompts_of(test, "constrained")]
            assert all(s.suffix in words for s, words in zip(samples, choices, strict=True))


def test_embedded_trials_are_of_the_test_split_and_take_turns():
    """Needles are looked for in training scenes, or some places are asked about more often."""
    trials = needle.embedded_trials("n4o1", 32)
    places = [trial.test.places[0][1:] for trial in trials]
    assert sorted(places) == sorted(2 * [(row, col) for row in range(4) for col in range(4)])
    assert all(pictures.split_of(scenes.needle("n4o1", "test", n).scene.squares) == "test" for n in range(32))


def test_places_of_larger_grids_are_parsed_strictly():
    """A sentence around the place counts as the place."""
    assert needle.parse_place(["row 2 column 3"], 4) == (0, 1, 2)
    assert needle.parse_place([" Row 4 Column 1\n"], 4) == (0, 3, 0)
    for said in ("row 2 column 5", "row 2, column 3", "it is row 2 column 3", "none", ""):
        assert needle.parse_place([said], 4) == ABSENT
    assert needle.parse_place(["top", "right"], 2) == (0, 0, 1)


def test_accuracy_needs_all_questions_of_a_test(model, processor, monkeypatch):
    """Half a place counts as a hit, or the two modes are confused."""

    def answers(wrong_every):
        def ask(model, processor, asks, **options):
            told = []
            for at, question in enumerate(asks):
                number, part = map(int, question.id.split("/"))
                suffix = scenes.needle("n2o1", "test", number).samples()[part].suffix
                told.append("neither" if at % wrong_every == 0 else suffix)
            return told

        monkeypatch.setattr(run, "ask_all", ask)
        return needle.evaluate_embedded(model, processor, "n2o1", 20)

    assert answers(10**6) == 95.0  # the very first is wrong
    assert answers(2) == 0.0  # one of two, in every test
    assert answers(4) == 50.0


def test_the_constrained_mode_of_training_always_names_a_place(model, processor, monkeypatch):
    """Fine-tuning's needle accuracy counts format failures although it is asked not to."""
    asked, ask_all = [], run.ask_all
    monkeypatch.setattr(run, "ask_all", lambda m, p, asks, **more: asked.extend(asks) or ask_all(m, p, asks, **more))
    assert needle.evaluate_embedded(model, processor, "n2o1", 4) == 0  # a random model never says just the word
    assert {ask.choices for ask in asked} == {()}
    asked.clear()
    found = needle.evaluate_embedded(model, processor, "n2o1", 4, constrained=True)
    assert {ask.choices for ask in asked} == {("top", "bottom"), ("left", "right")} and found in (0, 25, 50, 75, 100)


@pytest.mark.long
@pytest.mark.parametrize("protocol", needle.PROTOCOLS)
def test_needle_command(source, workplace, capsys, protocol):
    """The response file scores otherwise than the command printed, or a figure is missing."""
    flags = ["--model", source, "--protocol", protocol, "--limit", "8", "--kind", "n2o1", "n4o1", *FAST]
    if protocol != "constrained":
        flags += ["--negatives"]
    needle.main([*flags, "--json"])
    text = capsys.readouterr().out
    assert "NaN" not in text  # eight tests leave places without a needle, and JSON has no NaN
    printed = json.loads(text)
    out = workplace / "runs" / "eval" / "random" / "needle"
    for kind, side in (("n2o1", 2), ("n4o1", 4)):
        needle.main(["score", "--responses", str(out / f"responses-{kind}.json"), "--json"])
        scored = json.loads(capsys.readouterr().out)
        assert scored == {name: printed[kind][name] for name in scored}
        assert printed[kind]["chance"] == 1 / side**2 and len(printed[kind]["places"]) == side
        assert printed[kind]["tests"] == 8 * (1 + ("--negatives" in flags))
        assert ("positives" in printed[kind]) == ("--negatives" in flags)
        assert Image.open(out / f"sheet-{kind}.png").width > 500
    if protocol == "paper":  # a random model names no place
        halves = [printed["n2o1"][half]["existence_accuracy"] for half in ("positives", "negatives")]
        assert halves == [0, 1]
    if protocol == "constrained":  # a place is always named
        assert printed["n2o1"]["existence_accuracy"] == 1
    assert Image.open(out / "heatmap.png").width > 1000
    needle.main(flags)
    assert f"protocol {protocol}, random" in capsys.readouterr().out


def test_what_a_model_was_trained_on(workplace):
    """A needle that a model never saw is drawn as one that it fails; or one of a published model, which nobody knows,
    is said to be new to it."""

    def tasks(subject):
        return session.Session(None, None, "", workplace, session.Subject(*subject, "")).trained_tasks()

    for name, config in (
        ("scenes", {"base": "embedded", "data": ["embedded"], "tasks": "vqa,n2o1"}),
        ("old", {"base": "embedded", "data": "embedded", "tasks": "vqa,n2o1"}),
        ("own", {"base": "embedded", "data": ["jsonl:a.jsonl"], "tasks": "vqa,n2o1"}),
        ("other", {"base": "google/x", "data": ["embedded"], "tasks": "vqa,n2o1"}),
    ):
        (workplace / name / "best").mkdir(parents=True)
        (workplace / name / "config.json").write_text(json.dumps(config))
    (workplace / "peft").mkdir()
    runs = {name: tasks(("embedded", Path(name))) for name in ("scenes", "scenes/best", "old", "own", "other", "peft")}
    both = {"vqa", "n2o1"}
    assert runs.pop("old") == both
    assert runs == {"scenes": both, "scenes/best": both, "own": set(), "other": None, "peft": None}
    assert tasks(("embedded", None)) == set() and tasks(("google/x", None)) is None
    assert tasks(("scenes/model", None)) == both
    assert (
        needle.words_of("n4o1") == "4×4, one object each"
        and needle.words_of("3_1_2_2") == "3 needles, 1 picture of 2×2"
    )


@pytest.fixture
def coco(tmp_path):
    return write_mmneedle(tmp_path)


def coco_flags(coco, source, *more):
    files = ["--coco", str(coco), "--captions", str(coco / "C"), "--out", str(coco / "out")]
    return ["--model", source, *files, *FAST, "--json", *more]


@pytest.mark.long
def test_official_metadata(coco, source, capsys):
    """MMNeedle's own tests are read, sampled or written otherwise than published."""
    needle.main(coco_flags(coco, source, "--metadata", str(coco), "--limit", "4"))
    printed = json.loads(capsys.readouterr().out)["1_2_2"]
    records = json.loads((coco / "out" / "responses-1_2_2.json").read_text())
    assert printed["tests"] == 4 and sorted(r["ground_truth"] for r in records) == [
        "1, 1, 1",
        "1, 1, 2",
        "1, 2, 1",
        "1, 2, 2",
    ]
    for record in records:
        number = int(record["target_path"][-6:-4])
        assert record["caption"] == f"picture {number}" and record["id"] == number
    needle.main(coco_flags(coco, source, "--limit", "8", "--negatives"))  # drawn tests are as balanced
    records = json.loads((coco / "out" / "responses-1_2_2.json").read_text())
    assert [r["id"] for r in records] == [*range(8), *range(5000, 5008)]
    records = records[:8]
    assert Counter(r["ground_truth"] for r in records) == dict.fromkeys(("1, 1, 1", "1, 1, 2", "1, 2, 1", "1, 2, 2"), 2)
    needle.main(coco_flags(coco, source, "--metadata", str(coco), "--limit", "2", "--negatives", "--protocol=official"))
    records = json.loads((coco / "out" / "responses-1_2_2.json").read_text())
    assert [r["id"] for r in records][2:] == [5000, 5001] and len(records) == 4


def test_pictures_and_haystacks_are_counted_once(coco, monkeypatch):
    """A picture that lies flat and in val2014 is drawn as two, or tests of one haystack count as independent."""
    name = "COCO_val2014_000000000001.jpg"
    (coco / name).write_bytes((coco / "val2014" / name).read_bytes())
    drawn, parser = [], command_parser("x", "")
    needle.add_flags(parser)
    args = parser.parse_args(["--coco", str(coco), "--captions", str(coco / "C")])
    args.limit, args.allow_outside = 8, False
    with monkeypatch.context() as patch:
        patch.setattr(needle, "draw_tests", lambda captions, *_, **options: drawn.extend(captions) or [])
        needle.load(args)
    assert sorted(drawn) == sorted(f"val2014/{path.name}" for path in (coco / "val2014").iterdir())
    args.metadata = str(coco)
    trials, asks = needle.load(args)
    monkeypatch.setattr(needle, "save", lambda figure, path: None)
    answers = {kind: ["top"] * len(of_kind) for kind, of_kind in asks.items()}
    report = needle.finish(args, trials, answers, SimpleNamespace(out=coco / "out", title="x"))
    assert len(report.pictures) == 8 and len(set(report.pictures.values())) == 2


@pytest.mark.long
def test_drawn_tests_of_many_pictures_and_needles(coco, source, capsys, monkeypatch):
    """M pictures and K needles: the prompt, the pictures and the truth do not belong together."""
    seen, layout = [], Processor.layout
    monkeypatch.setattr(Processor, "layout", lambda self, n, *text: seen.append((n, text[0])) or layout(self, n, *text))
    more = ["--pictures", "2", "--needles", "2", "--limit", "3", "--protocol", "official"]
    needle.main(coco_flags(coco, source, *more))
    assert json.loads(capsys.readouterr().out)["2_2_2_2"]["chance"] == 1 / 64
    records = json.loads((coco / "out" / "responses-2_2_2_2.json").read_text())
    assert {n for n, _ in seen} == {2} and len(records) == 3
    for record in records:
        assert len(record["caption"]) == 2 and record["ground_truth"].count(";") == 1
        assert any(all(caption in prompt for caption in record["caption"]) for _, prompt in seen)


@pytest.mark.long
def test_a_needle_test_without_its_picture_has_no_response(coco, source, capsys):
    """A test on an unreadable picture counts as wrong, or ends the run."""
    (coco / "val2014" / "COCO_val2014_000000000005.jpg").write_bytes(b"not a picture")
    needle.main(coco_flags(coco, source, "--metadata", str(coco), "--limit", "8"))
    printed, report = capsys.readouterr()
    printed = json.loads(printed)
    assert printed["1_2_2"]["tests"] == 4 and len(printed["left_out"]) == 8  # two questions each
    assert "COCO_val2014_000000000005.jpg" in report
    records = json.loads((coco / "out" / "responses-1_2_2.json").read_text())
    assert [r["response"] is None for r in records] == [False] * 4 + [True] * 4


def test_choose_is_balanced_over_places_or_drawn(coco):
    """The paper's 50 tests a quadrant; of other grids, and of negatives, a plain sample."""
    tests = read_needle_tests(coco / "2_2.json", coco / "annotations_1_2_2.json", coco / "C")
    positives, negatives = tests[:8], tests[8:]
    assert [t.places[0][1:] for t in haystacks.choose(positives, 4, 1)] != []
    assert sorted(t.places[0][1:] for t in haystacks.choose(positives, 5, 1)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(haystacks.choose(positives, 3, 1)) == 3 and len(haystacks.choose(negatives, 2, 1)) == 2
    with pytest.raises(UserError, match="but 2 are of this kind"):
        haystacks.choose(negatives, 3, 1)


# POPE


@pytest.mark.long
def test_pope_on_the_embedded_scenes(source, workplace, capsys):
    """A strategy is missing, or its measures are not those of its answers file."""
    pope.main(["--model", source, "--limit", "18", *FAST, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["random", "popular", "adversarial"]
    asked = {tuple(q.question for q in pope.embedded(strategy, 18)[0]) for strategy in printed}
    assert len(asked) == 3  # each has other absent objects
    for strategy, found in printed.items():
        questions, _ = pope.embedded(strategy, 18)
        lines = [
            {"question_id": q.question_id, "image": q.image, "text": q.question, "label": q.label} for q in questions
        ]
        (workplace / "Q").write_text("\r\n".join(map(json.dumps, lines)))
        answers = workplace / "runs" / "eval" / "random" / "pope" / f"answers-{strategy}.jsonl"
        pope.main(["score", "--questions", "Q", "--answers", str(answers), "--json"])
        assert json.loads(capsys.readouterr().out) | {"questions": 18} == found


def test_pope_on_files(official, source, capsys, monkeypatch):
    """POPE's own file is asked in other words or about other pictures."""
    folder, broken, whole = official
    broken.write_bytes(whole)
    lines = [
        {
            "question_id": n,
            "image": f"COCO_val2014_{n // 2 + 1:012d}.jpg",
            "text": f"Is there a cat {n}?",
            "label": ("yes", "no")[n % 2],
        }
        for n in range(6)
    ]
    (folder / "pope.json").write_text("\r\n".join(map(json.dumps, lines)) + "\r\n")
    files = {"questions": "pope.json", "images": "val2014", "out": "out"}
    flags = ["--model", source, *(f"--{flag}={folder / name}" for flag, name in files.items()), *FAST]
    asked, layout = [], Processor.layout
    monkeypatch.setattr(Processor, "layout", lambda self, n, *text: asked.append(text[0]) or layout(self, n, *text))
    pope.main([*flags, "--prompt", "Look. {question}"])
    assert set(asked) == {f"Look. Is there a cat {n}?" for n in range(6)}
    pope.main(flags)
    assert set(asked[-6:]) == {f"answer en Is there a cat {n}?" for n in range(6)}
    table = capsys.readouterr().out
    assert re.search(r"^pope +6 +\d", table, re.MULTILINE)
    answers = (folder / "out" / "answers-pope.jsonl").read_text().splitlines()
    assert [json.loads(line)["question_id"] for line in answers] == list(range(6))


# Attention


def whole_maps(model, inputs):
    """Every decoder layer's attention weights (N, S, S), in the order of the calls."""
    maps = []
    for path, module in attention_modules(model).items():
        if path.startswith("language_model"):
            module.tap = lambda weights, path=path: maps.append((path, weights[0].double()))
    model(**inputs)
    for module in attention_modules(model).values():
        module.tap = None
    return maps


@torch.no_grad()
def test_laws_by_hand(model, processor):
    """LAWS are summed over the wrong axis or group: then the groups do not add up to the number of queries."""
    batch = processor([noise(1)], ["answer en Where is the dog?"])
    inputs = {"input_ids": batch.input_ids, "pixel_values": batch.pixel_values, "token_type_ids": batch.token_type_ids}
    is_picture = batch.input_ids[0] == processor.config.image_token_id
    layers = attention.look(model, "it", **inputs)
    assert not any(module.tap for module in attention_modules(model).values())  # all is as it was
    queries = len(is_picture)
    (found,) = (attention.laws(maps, is_picture) for maps in zip(*layers, strict=True))
    for (_, weights), (picture, text), (map_,) in zip(whole_maps(model, inputs), found, layers, strict=True):
        heads = len(weights)
        by_hand = sum(float(weights[n, i, j]) for n in range(heads) for i in range(queries) for j in range(16)) / heads
        assert picture == pytest.approx(by_hand, rel=1e-5) and picture + text == pytest.approx(queries, rel=1e-5)
        assert 0.1 < picture / queries < 0.95
        torch.testing.assert_close(map_.last.double(), weights.mean(0)[-1], rtol=1e-5, atol=1e-7)


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("kind", ["shared", "split", "twin", "v2", "dex"])
def test_maps_of_every_variant(processor, kind):
    """A variant's second map is lost, or the two are swapped."""
    other = random_model()
    graft(other, kind)
    for name, parameter in other.named_parameters():
        if "q2.lora_B" in name:
            parameter.normal_(std=0.3)
    batch = processor([noise(1)], ["count dog"])
    inputs = {"input_ids": batch.input_ids, "pixel_values": batch.pixel_values, "token_type_ids": batch.token_type_ids}
    layers = attention.look(other, "it", **inputs)
    maps = iter(whole_maps(other, inputs))
    for number, of_layer in enumerate(layers):
        assert len(of_layer) == (2 if kind in ("split", "twin", "v2") else 1)
        for map_ in of_layer:
            path, weights = next(maps)
            assert path == f"language_model.layers.{number}.self_attn"
            torch.testing.assert_close(map_.received.double(), weights.mean(0).sum(0), rtol=1e-5, atol=1e-6)
        if len(of_layer) == 2:
            assert not torch.allclose(of_layer[0].last, of_layer[1].last, atol=1e-4)


@pytest.mark.long
def test_attention_command(source, twin, workplace, capsys):
    """Plain and differential maps are of different models, prompts or answers."""
    noise(5).save("p.png")
    flags = ["--image", "p.png", "--prompt", "answer en Where is the dog?", "--json"]
    attention.main(["--model", source, *flags])
    alone = json.loads(capsys.readouterr().out)
    attention.main(["--adapter", twin, *flags])
    both = json.loads(capsys.readouterr().out)
    assert list(alone["laws"]) == ["random"] and list(both["laws"]) == ["plain", "A1", "A2"]
    # the base sees the same prompt: the first token is decided by the same query
    of_picture = {name: [layer["picture"] for layer in layers] for name, layers in both["laws"].items()}
    assert of_picture["plain"] == pytest.approx([layer["picture"] for layer in alone["laws"]["random"]], rel=1e-5)
    assert of_picture["A1"] != pytest.approx(of_picture["A2"], rel=1e-3)
    assert sum(both["laws"]["A1"][0].values()) == pytest.approx(both["queries"], rel=1e-5)
    assert both["queries"] == alone["queries"]
    out = workplace / "runs" / "eval" / "twin" / "attention"
    assert Image.open(out / "laws.png").width > 1000
    sheet = Image.open(out / "attention.png")
    assert min(sheet.size) > 1800  # four layers below each other, four maps beside each other
    pixels = np.asarray(sheet).astype(int)
    red, _, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    maps, right = slice(sheet.width // 5, 4 * sheet.width // 5), slice(4 * sheet.width // 5, None)
    assert (blue - red)[:, right].max() > 60 and (red - blue)[:, right].max() > 60  # the difference has both signs
    assert (blue - red)[:, maps].max() < 3 < 60 < (red - blue)[:, maps].max()  # attention is never negative
    attention.main(["--adapter", twin, *flags[:-1], "--token", "1", "--layers", "2"])
    table = capsys.readouterr().out
    assert f"of all {both['queries'] + 1} queries" in table and "plain" in table


# Without flags, and with wrong ones


@pytest.mark.long
def test_default_is_the_last_run_or_the_embedded_base(source, twin, workplace, monkeypatch, capsys):
    """Without flags another model than the last one trained is measured."""
    monkeypatch.setattr("model.source.BUNDLED_FOLDER", Path(source))
    parser = command_parser("test", "")
    session.add_model_flags(parser)
    assert session.model_of(parser.parse_args([])) == session.Subject("embedded", None, "embedded")
    for name, base in (("old", "embedded"), ("other", "somewhere/else"), ("unfinished", "embedded")):
        folder = workplace / "runs" / name
        model = random_model()
        adapter.inject(model, adapter.DECODER_TARGETS, 2, 4.0)
        adapter.save(model, folder, base=base)
        (folder / "config.json").write_text(json.dumps({"base": base}))
        if name != "unfinished":
            (folder / "summary.json").write_text("{}")
    assert session.model_of(parser.parse_args([]))[2] == "old"
    assert session.model_of(parser.parse_args(["--adapter", "none"])) == session.Subject("embedded", None, "embedded")
    assert session.model_of(parser.parse_args(["--model", source]))[1] is None
    assert session.model_of(parser.parse_args(["--adapter", "runs/other"]))[0] == "somewhere/else"
    pope.main(["--limit", "6", *FAST])
    printed = capsys.readouterr()
    assert "POPE (%), old" in printed.out and "the last run is asked: runs/old; --adapter" in printed.err


BAD = [
    (vqa, ["--questions", "Q"], "--questions, --images and --annotations go together"),
    (vqa, ["--annotations", "A"], "go together"),
    (vqa, ["--questions", "Q", "--images", "."], r"Q: 1 of its 1 pictures are not in \."),
    (vqa, ["--questions", "gone", "--images", "."], "gone: not found"),
    (vqa, ["--questions", "Q", "--annotations", "A", "--images", "."], r"A: 1 question\(s\) of Q have no annotation"),
    (vqa, ["--prompt", "answer en", "--limit", "1"], "prompt template 'answer en'"),
    (vqa, ["--device", "nowhere"], "--device nowhere"),
    (vqa, ["--adapter", "gone"], "adapter_config.json: not found"),
    (pope, ["--questions", "Q"], "--questions and --images go together"),
    (pope, ["--questions", "L", "--images", "."], "L:2: label is 'maybe'"),
    (needle, ["--coco", "."], "--coco needs --captions"),
    (needle, ["--captions", "C"], "belong to --coco"),
    (needle, ["--side", "4"], "belong to --coco"),
    (needle, ["--needles", "5", "--kind", "n2o1"], "5 needles in 2×2"),
    (needle, ["--negatives", "--protocol", "constrained"], "constrained"),
    (needle, ["--negatives", "--limit", "5001"], "--limit 5001 with --negatives, whose ids begin at 5000"),
    (needle, ["--coco", ".", "--captions", "C"], r"C: none of its 1 pictures is in \."),
    (needle, ["--coco", ".", "--captions", "C", "--metadata", "."], "2_2.json: not found"),
    (attention, ["--image", "gone.png", "--prompt", "x"], "gone.png: not found"),
    (attention, ["--image", "p.png", "--prompt", "x", "--layers", "5"], "--layers 5: expected numbers from 1 to 4"),
    (attention, ["--image", "p.png", "--prompt", "x", "--token", "-1"], "--token -1: the answer"),
]


@pytest.mark.long
@pytest.mark.parametrize(("command", "flags", "message"), BAD)
def test_bad_input_is_one_line(command, flags, message, source, workplace):
    """A mistake ends in a traceback, or in a line that names neither the file nor the remedy."""
    (workplace / "Q").write_text(json.dumps([{"question_id": 1, "image": "gone.jpg", "question": "Is it?"}]))
    (workplace / "A").write_text(json.dumps([{"question_id": 2, "answers": ["yes"]}]))
    (workplace / "C").write_text(json.dumps({"gone.jpg": "A cat."}))
    line = {"question_id": 1, "image": "gone.jpg", "text": "Is it?", "label": "yes"}
    (workplace / "L").write_text(json.dumps(line) + "\n" + json.dumps(line | {"label": "maybe"}))
    noise(0).save("p.png")
    with pytest.raises(UserError, match=message) as caught:
        command.main([*([] if "--adapter" in flags else ["--model", source]), *flags])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("protocol", ["paper", "constrained"])
def test_a_protocol_that_cannot_ask_says_so(protocol):
    """Several pictures are asked about with a question for one."""
    test = NeedleTest(0, (("a",) * 4, ("b",) * 4), ((1, 0, 0),), ("b",), ("a cat",))
    with pytest.raises(UserError, match="take official"):
        needle.prompts_of(test, protocol)
    assert len(needle.prompts_of(test, "official")) == 1


@pytest.mark.parametrize("command", [vqa, needle, pope, attention])
def test_help_and_impossible_numbers(command, capsys):
    """--help fails on a % sign, or a limit of 0 asks nothing and divides by it."""
    with pytest.raises(SystemExit) as caught:
        command.main(["--help"])
    assert caught.value.code == 0 and "--adapter RUN" in capsys.readouterr().out
    if command is not attention:
        with pytest.raises(SystemExit) as caught:
            command.main(["--limit", "0"])
        assert caught.value.code == 2 and "--limit: '0', expected" in capsys.readouterr().err

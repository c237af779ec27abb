"""Prompt templates are filled literally, and a model is asked with the prompt that it was trained with."""

import json

import pytest

from eval import ask, pope, vqa
from eval.datasets import check_prompt, fill_prompt
from lora import adapter
from model.common import UserError
from model.processor import Processor
from weights.load import load_model

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("answer {question}", "answer Is {it}?"),
        ("{question}", "Is {it}?"),
        ("{question} {question.__class__.__mro__}", "Is {it}? {question.__class__.__mro__}"),
        ("{ {question} } {0} {question:>10000000000}", "{ Is {it}? } {0} {question:>10000000000}"),
        ("{{question}}", "{Is {it}?}"),
        ("%s {question!r} {question}", "%s {question!r} Is {it}?"),
    ],
)
def test_templates_are_filled_literally(template, filled):
    """Breaks when a template reads attributes, takes 4 GiB, or a brace in it is a traceback."""
    assert fill_prompt(template, "Is {it}?") == filled
    assert fill_prompt("a {question}", "{question}") == "a {question}"


@pytest.mark.parametrize(
    "template",
    ["", "answer", "{", "{0}", "{Question}", "{question:>10000000000}", "{question.__class__}", "{ question }"],
)
def test_a_template_without_question_is_refused(template):
    """Breaks when every question becomes the same prompt."""
    with pytest.raises(UserError, match="must contain {question}") as caught:
        check_prompt(template)
    assert "\n" not in str(caught.value)


@pytest.fixture
def asked(tmp_path, monkeypatch) -> set[str]:
    """The prompts that are asked, in an empty working directory."""
    prompts, layout = set(), Processor.layout

    def record(self, pictures, prefix, *more):
        prompts.add(prefix)
        return layout(self, pictures, prefix, *more)

    monkeypatch.setattr(Processor, "layout", record)
    monkeypatch.chdir(tmp_path)
    return prompts


@pytest.fixture
def run(tmp_path):
    """A function that writes a run with a config.json of these settings, and returns its folder."""
    model = load_model("embedded")
    adapter.inject(model, adapter.DECODER_TARGETS, 2, 4.0)

    def write(settings: dict | None, name: str = "run", **stored) -> str:
        folder = tmp_path / "runs" / name
        adapter.save(model, folder, base="embedded")
        if settings is not None:
            (folder / "config.json").write_text(json.dumps({"base": "embedded"} | settings))
            (folder / "summary.json").write_text("{}")
        if stored:
            path = folder / "adapter_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | stored))
        return str(folder)

    return write


FAST = ["--limit", "1", "--max-new-tokens", "1", "--json"]
QUESTION = vqa.embedded(1).questions[0].question


@pytest.mark.parametrize(
    ("settings", "stored", "prompt"),
    [
        ({"data": "vqav2:folder", "prompt": "answer {question}"}, {}, "answer {question}"),
        ({"data": "shards:a-{000..003}.tar", "prompt": "Q: {question}"}, {}, "Q: {question}"),
        # questions of the embedded scenes and of JSONL files are complete prompts
        ({"data": "embedded", "prompt": "answer {question}"}, {}, "answer en {question}"),
        ({"data": "jsonl:file", "prompt": "answer {question}"}, {}, "answer en {question}"),
        ({}, {}, "answer en {question}"),
        (None, {"prompt": "say {question}"}, "say {question}"),
        (None, {}, "answer en {question}"),
        (None, {"prompt": 7}, None),
        ({"data": "vqav2:folder", "prompt": "answer"}, {}, None),
        ({"data": "vqav2:folder", "prompt": None}, {}, None),
    ],
)
@pytest.mark.parametrize("command", [vqa, pope])
def test_a_run_is_asked_as_it_was_trained(command, settings, stored, prompt, run, asked):
    """Breaks when a recipe trains on `answer {question}` and is asked `answer en {question}`."""
    folder = run(settings, **stored)
    if prompt is None:
        with pytest.raises(UserError, match="prompt"):
            command.main(["--adapter", folder, *FAST])
        return
    command.main(["--adapter", folder, *FAST])
    question = QUESTION if command is vqa else pope.embedded("random", 1)[0][0].question
    assert fill_prompt(prompt, question) in asked
    asked.clear()
    command.main(["--adapter", folder, *FAST, "--prompt", "{question}", "--out", "other"])
    assert question in asked and fill_prompt(prompt, question) not in asked


def test_ask_fills_questions_into_the_stored_prompt(run, asked, capsys):
    """Breaks when the question of a user is asked otherwise than those of the training."""
    vqa.embedded(1)
    scene = vqa.embedded(1).pictures["test/0"]
    from PIL import Image

    Image.fromarray(scene()).save("p.png")
    flags = ["--image", "p.png", "--max-new-tokens", "1"]
    folder = run({"data": "vqav2:x", "prompt": "Q: {question}"})
    ask.main(["--adapter", folder, *flags, "--question", "Is it?", "--prompt", "caption en"])
    assert asked == {"caption en", "Q: Is it?"}
    assert [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines()] == ["caption en", "Q: Is it?"]
    asked.clear()
    ask.main(["--adapter", "none", *flags, "--question", "Is it?"])
    assert asked == {"answer en Is it?"}
    for bad in ([], ["--question", " "]):
        with pytest.raises(UserError, match="--prompt"):
            ask.main(["--adapter", folder, *flags, *bad])


def test_a_whole_model_of_a_run_is_asked_as_it_was_trained(run, asked, tmp_path):
    """Breaks when --full loses its prompt, which stands beside the model's folder."""
    from weights.export import companions, export_model

    folder = tmp_path / "runs" / "whole"
    export_model(load_model("embedded"), folder / "model", companions=companions("embedded"))
    (folder / "config.json").write_text(json.dumps({"data": "vqav2:x", "prompt": "W: {question}"}))
    for flags in (["--adapter", str(folder)], ["--model", str(folder / "model"), "--out", "b"]):
        asked.clear()
        vqa.main([*flags, *FAST])
        assert asked == {f"W: {QUESTION}"}

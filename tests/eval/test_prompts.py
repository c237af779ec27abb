"""Prompt templates are filled literally, and a model is asked with the prompt that it was trained with."""

import json

import pytest
from PIL import Image

from eval import ask, pope, vqa
from eval.data import check_prompt, fill_prompt
from lora import adapter
from model.common import UserError
from model.processor import Processor
from weights.export import companions, export_model
from weights.load import load_model

FAST = "--limit 1 --max-new-tokens 1 --json".split()


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{question} {question.__class__.__mro__}", "Is {it}? {question.__class__.__mro__}"),
        ("{ {question} } {0} {question:>10000000000}", "{ Is {it}? } {0} {question:>10000000000}"),
        ("%s {question!r} {{question}}", "%s {question!r} {Is {it}?}"),
    ],
)
def test_templates_are_filled_literally(template, filled):
    """Breaks when a template reads attributes, takes 4 GiB, or without {question} makes all prompts one."""
    assert fill_prompt(check_prompt(template), "Is {it}?") == filled
    with pytest.raises(UserError, match="must contain {question}"):
        check_prompt(template.replace("{question}", "{ question }"))


@pytest.fixture
def asked(workplace, monkeypatch) -> set[str]:
    """The prompts that are asked, in an empty working directory."""
    prompts, layout = set(), Processor.layout
    monkeypatch.setattr(Processor, "layout", lambda self, n, *text: prompts.add(text[0]) or layout(self, n, *text))
    return prompts


def write_run(folder, settings: dict | None, **stored) -> str:
    """A run with a config.json of these settings, and these fields of adapter_config.json."""
    model = load_model("embedded")
    adapter.inject(model, adapter.DECODER_TARGETS, 2, 4.0)
    adapter.save(model, folder, base="embedded")
    if settings is not None:
        (folder / "config.json").write_text(json.dumps({"base": "embedded"} | settings))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | stored))
    return str(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "stored", "prompt"),
    [
        ({"data": ["vqav2:folder"], "prompt": "answer {question}"}, {}, "answer {question}"),
        ({"data": ["shards:a-{000..003}.tar"], "prompt": "Q: {question}"}, {}, "Q: {question}"),
        # questions of the embedded scenes and of JSONL files are complete prompts
        ({"data": ["embedded"], "prompt": "answer {question}"}, {}, "answer en {question}"),
        ({"data": ["jsonl:file"], "prompt": "answer {question}"}, {}, "answer en {question}"),
        (None, {"prompt": "say {question}"}, "say {question}"),
        (None, {}, "answer en {question}"),
        (None, {"prompt": 7}, None),
        ({"data": ["vqav2:folder"], "prompt": "answer"}, {}, None),
    ],
)
def test_a_run_is_asked_as_it_was_trained(settings, stored, prompt, workplace, asked):
    """Breaks when a recipe trains on `answer {question}` and is asked `answer en {question}`."""
    flags = ["--adapter", write_run(workplace / "run", settings, **stored), *FAST]
    if prompt is None:
        with pytest.raises(UserError, match="prompt"):
            vqa.main(flags)
        return
    questions = vqa.embedded(1, template="{question}")[0].prefix, pope.embedded("random", 1)[0][0].question
    for command, question in zip((vqa, pope), questions, strict=True):
        command.main(flags)
        assert fill_prompt(prompt, question) in asked
        asked.clear()
        command.main([*flags, "--prompt", "{question}", "--out", "other"])
        assert question in asked and fill_prompt(prompt, question) not in asked


@pytest.mark.long
def test_ask_and_a_whole_model_take_the_stored_prompt(workplace, asked):
    """Breaks when a user's question is asked otherwise than those of the training, or --full loses its prompt."""
    Image.new("RGB", (112, 112), (10, 200, 90)).save("p.png")
    folder = write_run(workplace / "run", {"data": ["vqav2:x"], "prompt": "Q: {question}"})
    flags = "--image p.png --max-new-tokens 1 --question Really?".split()
    ask.main(["--adapter", folder, *flags, "--prompt", "caption en"])
    assert asked == {"caption en", "Q: Really?"}
    export_model(load_model("embedded"), workplace / "run/model", companions=companions("embedded"))
    for flags in ("--adapter run", "--model run/model --out b"):
        asked.clear()
        vqa.main([*flags.split(), *FAST])
        assert asked == {f"Q: {vqa.embedded(1, template='{question}')[0].prefix}"}

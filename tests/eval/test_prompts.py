"""Prompt templates are filled literally, and a model is asked with the prompt that it was trained
with."""

import json

import pytest

from eval import ask, vqa
from eval.data.record import check_prompt, fill_prompt
from lora import adapter
from model.processor import Processor
from tests.files import draw, read_json, table, write_json
from tests.runs import refused, refuses, words
from weights.export import companions, export_model
from weights.load import load_model

# the data of a run, what its adapter's config says, and how it is asked
RUNS = """
    vqav2:folder | {} | answer {question}
    jsonl:file | {} | answer en {question} | complete prompts
    vqa:file | {} | answer {question}
    | {"prompt": "say {question}"} | say {question}
    | {"prompt": 7} | | refused
    | {} | answer en {question}"""
FAST = "--limit 1 --max-new-tokens 1 --json"


def test_templates_are_filled_literally(processor):
    """Breaks when a template reads attributes, takes 4 GiB, or without {question} makes all prompts
    one, or a byte that is not UTF-8 ends in the tokenizer's traceback."""
    rest = " {question.__class__} { {0} {question:>10000000000}"
    assert fill_prompt(check_prompt("{question}" + rest), "Is {it}?") == "Is {it}?" + rest
    refused(lambda: check_prompt("{ question }"), "{question}")
    refused(lambda: check_prompt("caf\udce9 {question}"), "UTF-8")
    refused(lambda: processor.row_of(1, [("caf\udce9", None)]), "udce9", "UTF-8")


@pytest.mark.long
@pytest.mark.parametrize("case", table(RUNS))
def test_a_run_is_asked_as_it_was_trained(case, workplace, monkeypatch):
    """Breaks when a run is asked in other words than it learned, by a benchmark, a question, or as
    a whole model."""
    data, stored, prompt, *_ = case
    asked = set()
    layout = Processor.layout

    def watched(self, n, turns, marks):
        asked.add(turns[-1][0])
        return layout(self, n, turns, marks)

    monkeypatch.setattr(Processor, "layout", watched)
    model = load_model("embedded")
    run = workplace / "run"
    file = workplace / "run/adapter_config.json"
    adapter.inject(model, adapter.DECODER_TARGETS, 2, 4.0)
    adapter.save(model, run, base="embedded")
    if data:
        settings = {"base": "embedded", "data": [data], "prompt": "answer {question}"}
        write_json(run / "config.json", settings)
    write_json(file, read_json(file) | json.loads(stored))
    question = vqa.embedded(1, template="{question}")[0].prefix
    if not prompt:
        refuses(vqa, "--adapter run", "prompt")
        return
    vqa.main(words("--adapter run", FAST))
    assert asked == {fill_prompt(prompt, question)}
    vqa.main(words("--adapter run", FAST, "--prompt {question}"))
    assert question in asked
    draw("p.png", size=(9, 9))
    ask.main(words("--adapter run --image p.png --question Really? --prompt caption"))
    assert asked >= {"caption", fill_prompt(prompt, "Really?")}
    asked.clear()
    export_model(load_model("embedded"), run / "model", companions=companions("embedded"))
    vqa.main(words("--model run/model", FAST))
    assert asked == {fill_prompt(prompt, question)}
    (run / "model").rename(run / "best")
    vqa.main(words("--model run/best", FAST))
    assert asked == {fill_prompt(prompt, question)}

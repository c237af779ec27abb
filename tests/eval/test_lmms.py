"""The plugin for lmms-eval, which is no requirement: without it its two names are stood in for, and
the test that runs its evaluator is skipped."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

from eval.answer import ask_all
from eval.data import scenes
from eval.question import Question
from tests.files import write_lines
from tests.runs import refused
from weights.load import load_model

SCENES = 12
TASK = """
task: scenes
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/scenes.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function asked.visual
doc_to_text: question
doc_to_target: answer
process_results: !function asked.score
metric_list: [{{metric: exact, aggregation: mean, higher_is_better: true}}]
"""
ASKED = """
from PIL import Image

def visual(doc):
    return [Image.open(doc["image"])]

def score(doc, results):
    return {"exact": float(results[0] == doc["answer"])}
"""


def has_lmms() -> bool:
    return importlib.util.find_spec("lmms_eval") is not None


@pytest.fixture
def plugin(monkeypatch):
    """`eval.lmms`, above lmms-eval or two names that stand for it."""
    if not has_lmms():
        base = ModuleType("lmms_eval.api.model")
        base.lmms = type("lmms", (), {"__init__": lambda self: setattr(self, "task_dict", {})})
        registry = ModuleType("lmms_eval.models.registry_v2")
        registry.ModelManifest = lambda name, **paths: SimpleNamespace(model_id=name, **paths)
        for module in (base, registry):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for name in ("lmms_eval", "lmms_eval.api", "lmms_eval.models"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delitem(sys.modules, "eval.lmms", raising=False)
    yield importlib.import_module("eval.lmms")
    sys.modules.pop("eval.lmms", None)


@pytest.fixture
def docs(tmp_path):
    """Questions about toy scenes, as rows of a data set."""
    rows = []
    for number in range(SCENES):
        sample = scenes.sample("vqa", "test", number)
        path = tmp_path / f"{number}.png"
        sample.image.save(path)
        rows.append({"image": str(path), "question": sample.question, "answer": sample.suffix})
    return rows


def visual(doc):
    return [Image.open(doc["image"])]


def requests(docs, **options):
    """The rows as lmms-eval asks them."""
    asked = []
    for number, doc in enumerate(docs):
        given = doc["question"], options, visual, number, "scenes", "test"
        asked.append(SimpleNamespace(args=given))
    return asked


def expected(docs, processor, prompt="answer en ", limit=32):
    questions = []
    for number, doc in enumerate(docs):
        (picture,) = visual(doc)
        questions.append(Question(number, doc["image"], picture, prompt + doc["question"]))
    return ask_all(load_model("embedded"), processor, questions, max_new_tokens=limit)


@pytest.mark.long
def test_answers_are_those_of_every_evaluation(plugin, docs, processor):
    """Breaks when lmms-eval gets other answers than `ask_all` gives, or in another order: from the
    prompt of the training or a given one, in windows, cut at its ends and its limit."""
    model = plugin.Model("embedded", "none", device="cpu", batch_size="1")
    model.task_dict["scenes"] = {"test": docs}
    answers = expected(docs, processor)
    assert len(set(answers)) > 4 and SCENES > plugin.WINDOW
    assert model.generate_until(requests(docs)) == answers
    cut = [answer.split("t")[0].split("e")[0] for answer in answers]
    assert model.generate_until(requests(docs, until=["t", "e"])) == cut != answers
    short = expected(docs, processor, limit=1)
    assert model.generate_until(requests(docs, max_new_tokens=1, until="\n")) == short != answers
    mixed = requests(docs[:3], max_new_tokens=1) + requests(docs)[3:]
    assert model.generate_until(mixed) == short[:3] + answers[3:]
    bare = plugin.Model("embedded", "none", "{question}", device="cpu", batch_size=8)
    bare.task_dict = model.task_dict
    assert bare.generate_until(requests(docs)) == expected(docs, processor, prompt="") != answers


@pytest.mark.long
def test_what_it_does_not_do_is_refused(plugin, docs):
    """Breaks when a task that samples, scores or talks gets a number all the same."""
    refused(lambda: plugin.Model("embedded", "none", "no place"), "must contain {question}")
    model = plugin.Model("embedded", "none", device="cpu")
    for options in ({"do_sample": True}, {"temperature": 0.7}, {"num_beams": 4}):
        asked = requests(docs, **options)
        refused(lambda asked=asked: model.generate_until(asked), "answers greedily")
    refused(lambda: model.loglikelihood([]), "eval.systems.choices")
    refused(lambda: model.generate_until_multi_round([]), "one question at a time")


def test_the_entry_point_leads_to_the_model(plugin, request):
    """Breaks when lmms-eval looks for the plugin where it is not."""
    project = (request.config.rootpath / "pyproject.toml").read_text()
    assert '[project.entry-points."lmms_eval.models"]' in project
    assert 'dmt = "eval.lmms:manifest"' in project
    manifest = plugin.manifest()
    assert manifest.model_id == plugin.NAME == "dmt"
    module, name = manifest.simple_class_path.rsplit(".", 1)
    assert getattr(importlib.import_module(module), name) is plugin.Model


@pytest.mark.long
@pytest.mark.skipif(not has_lmms(), reason="no lmms-eval")
def test_its_evaluator_runs_a_task(docs, processor, tmp_path, monkeypatch):
    """Breaks when lmms-eval calls the model otherwise than it is written."""
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.models import MODEL_REGISTRY_V2
    from lmms_eval.tasks import TaskManager

    from eval.lmms import manifest

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    MODEL_REGISTRY_V2.register_manifest(manifest(), overwrite=True)
    write_lines(tmp_path / "scenes.jsonl", docs)
    (tmp_path / "scenes.yaml").write_text(TASK.format(folder=tmp_path))
    (tmp_path / "asked.py").write_text(ASKED)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False, model_name="dmt")
    results = simple_evaluate(
        "dmt",
        "pretrained=embedded,adapter=none",
        tasks=["scenes"],
        batch_size=4,
        device="cpu",
        task_manager=manager,
        log_samples=True,
    )
    said = {row["doc_id"]: row["filtered_resps"][0] for row in results["samples"]["scenes"]}
    answers = expected(docs, processor)
    assert [said[number] for number in range(SCENES)] == answers
    right = [answer == doc["answer"] for answer, doc in zip(answers, docs, strict=True)]
    assert results["results"]["scenes"]["exact,none"] == pytest.approx(sum(right) / SCENES)

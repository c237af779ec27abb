"""How sure a model is of its answers: beside a forward pass over the whole answer, through the log
and files of results, and its calibration, by Guo et al.'s definition in NumPy."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from eval import answer, detect, needle, pope, vqa
from eval.bench import AT_LIMIT, ECE, read_rows
from eval.question import Question
from eval.report import calibration
from model.boxes import location_scores, parse_objects
from model.confidence import Certainty, certainty
from model.generate import generate
from tests.eval.conftest import random_model
from tests.eval.test_detection import by_pycocotools
from tests.eval.test_eval_commands import FAST, noise
from tests.files import read_json, read_lines, write_json, write_lines
from tests.reference import inputs_of
from tests.runs import refused, refuses, words

# --- one answer ---

PLACE = "<loc0001>"


def test_a_box_has_the_probability_of_its_four_locations(processor):
    """Breaks when a name, a blank or another box is in the product, or a part without four locations
    shifts the rest."""
    text = f"{PLACE * 4} cat ; no {PLACE * 3} ; {PLACE * 4}dog ;"
    ids = [*processor.encode(text), processor.config.eos_token_id]
    log_probs = [-0.01 * number for number in range(1, len(ids) + 1)]
    places = [-0.01 * at for at, id_ in enumerate(ids, 1) if processor.decode([id_]) == PLACE]
    assert len(places) == 11
    found = certainty(ids, log_probs, {ids[-1]}, processor.decode)
    expected = [math.exp(sum(places[:4])), 0.0, math.exp(sum(places[7:])), 0.0]
    assert found.scores == pytest.approx(expected, rel=1e-12)
    assert found.confidence == pytest.approx(math.exp(-0.005 * (len(ids) + 1)), rel=1e-12)
    assert [said.part for said in parse_objects(text, 9, 9)] == [0, 2]
    # a place that is spelled in other tokens has no score, instead of 1
    assert location_scores(["<loc", "0001>", *[PLACE] * 3, "cat;;", "a"], [-1.0] * 7) == [0.0] * 3
    assert certainty(ids, log_probs, set(), processor.decode).ended is False


@torch.no_grad()
def alone(model, processor, question):
    """The tokens of an answer that is decoded alone, and its confidence, from one uncached forward
    pass in fp64."""
    batch = processor([question.images()[0]], [question.prefix])
    (ids,) = generate(model, *inputs_of(batch), 6)
    whole = torch.cat((batch.input_ids, ids[None]), dim=1)
    types = torch.cat((batch.token_type_ids, torch.ones_like(ids[None])), dim=1)
    logits = model(whole, batch.pixel_values, types, torch.ones_like(whole))[0].double()
    own = logits.log_softmax(-1)[-len(ids) - 1 : -1]
    return ids.tolist(), math.exp(own[range(len(ids)), ids].mean())


def test_confidences_are_those_of_a_forward_pass(processor, tmp_path, monkeypatch):
    """Breaks when an answer has the confidence of another row or step, the end token is left out, a
    resumed run tells others, or a log of an earlier version gives none without a word."""
    model = random_model()
    asked = [Question(n, str(n), noise(n), f"count {'dog ' * (n % 3)}cat") for n in range(7)]
    asked.append(Question(7, "7", noise(7), "count cat", choices=("top", "dog")))
    # some answers reach this end token
    end = alone(model, processor, asked[0])[0][3]
    monkeypatch.setattr("model.generate.end_tokens", lambda *_: torch.tensor([end]))
    log = tmp_path / "log.jsonl"
    options = {"max_new_tokens": 6, "batch_size": 4, "log": log}
    given = model, processor, asked
    sure = {}
    found = answer.ask_all(*given, sure=sure, **options)
    assert sorted(sure) == list(range(7))  # a choice is not decoded
    assert {certain.ended for certain in sure.values()} == {True, False}
    for number, certain in sure.items():
        ids, confidence = alone(model, processor, asked[number])
        assert found[number] == processor.decode(ids)
        assert certain.confidence == pytest.approx(confidence, abs=1e-5)
        assert certain.ended == (ids[-1] == end)
    # from the log
    monkeypatch.setattr(answer, "generate_texts", None)
    again = {}
    assert answer.ask_all(*given, sure=again, **options) == found
    assert again == sure
    records = read_lines(log)

    def refuse(change, part):
        write_lines(log, [record | change for record in records])
        refused(lambda: answer.ask_all(*given, sure={}, **options), "log.jsonl: ", part, "anew")

    for change in ({"confidence": 1.5}, {"ended": "no"}, {"scores": [0.1] * 9}, {"scores": "a"}):
        refuse(change, "")
    for name in ("confidence", "ended", "scores"):  # as in an earlier version
        for record in records:
            record.pop(name, None)
    refuse({}, "has no confidence")
    assert answer.ask_all(*given, **options) == found


# --- calibration ---


def test_calibration_is_that_of_guo():
    """Breaks when the error is another than Σ |B_m| / n · |acc(B_m) − conf(B_m)|, M = 10, an edge is
    in the wrong bin, or the bins that are shown are others; 0 is in the first one."""
    draw = np.random.default_rng(0)
    for n in (1, 7, 500):
        confidence = np.concatenate([[0.0], draw.random(n), draw.integers(1, 11, n) / 10])
        right = (draw.random(2 * n + 1) < confidence**2).astype(float)
        error, bins = calibration(list(zip(confidence.tolist(), right.tolist(), strict=True)))
        expected = 0.0
        for m, shown in enumerate(bins, 1):
            inside = (confidence > (m - 1) / 10) & (confidence <= m / 10)
            inside[0] = m == 1
            means = None, None
            if inside.any():
                means = confidence[inside].mean(), right[inside].mean()
                expected += inside.mean() * abs(means[1] - means[0])
            assert (*shown.values(),) == pytest.approx((m / 10, inside.sum(), *means))
        assert error == pytest.approx(expected, rel=1e-12)
        assert len(bins) == 10


# --- the commands ---


def test_own_data_has_a_table_of_calibration(source, workplace, printed, told_of_one):
    """Breaks when the line or the bins are of other answers, a file of results scores otherwise than
    the run, or one without confidence, or with a part, is taken for whole."""
    lines = []
    for number in range(6):
        noise(90 + number).save(f"{number}.png")
        lines.append({"image": f"{number}.png", "prefix": "count cat", "suffix": "?"})
    write_lines(workplace / "own.jsonl", lines)
    asked = words("--model", source, FAST, "--data jsonl:own.jsonl --out out")
    vqa.main(asked)
    first = read_json(workplace / "out/results.json")[:3]
    for line, said in zip(lines, first, strict=False):
        line["suffix"] = said["answer"]
    write_lines(workplace / "own.jsonl", lines)
    printed()
    vqa.main(asked)
    table = printed()
    results = read_json(workplace / "out/results.json")
    (scores,) = read_json(workplace / "out/scores.json")["results"].values()
    pairs = [(r["confidence"], r["exact_match"]) for r in results]
    assert {0.0, 1.0} == {right for _, right in pairs}
    error, bins = calibration(pairs)
    assert scores[ECE] == pytest.approx(100 * error)
    assert scores["calibration"] == bins
    share = 100 * sum(not r["ended"] for r in results) / 6
    assert scores[AT_LIMIT] == pytest.approx(share)
    for name, value in ((ECE, 100 * error), (AT_LIMIT, share)):
        (line,) = [row for row in table.splitlines() if f"| {name} " in row]
        assert f"{value:.2f}" in line

    again = "--data jsonl:own.jsonl --results out/results.json"
    assert told_of_one(vqa, again) == scores
    old = [{"question_id": r["question_id"], "answer": r["answer"]} for r in results]
    for records in (old, [*results[1:], old[0]]):
        write_json(workplace / "out/results.json", records)
        without = told_of_one(vqa, again)
        assert without["summary"] == scores["summary"]
        assert not {ECE, AT_LIMIT, "calibration"} & without.keys()
    for wrong in ({"confidence": 2}, {"confidence": "much"}, {"ended": None}):
        write_json(workplace / "out/results.json", [results[0] | wrong, *results[1:]])
        refuses(vqa, again, "out/results.json[0]: ")


@pytest.mark.long
@pytest.mark.parametrize("command", [vqa, pope, needle, detect])
def test_every_table_says_how_many_answers_were_cut_off(command, source, workplace, printed):
    """Breaks when a benchmark's line is missing, or counts other than the answers that were
    decoded."""
    more = "--probability" if command is pope else "--blind"
    command.main(words("--model", source, FAST, "--limit 6", more))
    assert f"| {AT_LIMIT} " in printed()
    folder = next(Path("runs/eval/random").iterdir())
    logged = read_lines(folder / "answers.jsonl")
    ended = [record["ended"] for record in logged if "ended" in record]
    results = read_json(folder / "scores.json")["results"]
    shares = [of_model[AT_LIMIT] for of_model in results.values() if AT_LIMIT in of_model]
    assert len(ended) > 6
    assert sum(shares) / len(shares) == pytest.approx(100 * ended.count(False) / len(ended))


def test_a_needle_test_has_all_its_answers():
    """Breaks when only the first of a test's two words counts among those that were cut off."""
    asked = needle.asks_of(needle.embedded_tests("n2o1", 1), "paper")
    sure = {question.id: Certainty(1.0, at == 0, []) for at, question in enumerate(asked)}
    (row,) = needle.Needle().rows(asked, ["top", "left"], sure)
    assert [certain.ended for certain in row.sure] == [True, False]


@pytest.mark.long
def test_boxes_are_ranked_by_their_locations(workplace, told_of_one):
    """Breaks when the score of a box is another's, does not come back from results.json, or COCO's
    own code ranks the boxes otherwise."""
    values = told_of_one(detect, "--model embedded --limit 60 --out out")
    results = read_json(workplace / "out/results.json")
    of_log = {record["id"]: record["scores"] for record in read_lines(Path("out/answers.jsonl"))}
    for record in results:
        scores = record["scores"]
        assert scores == of_log[record["question_id"]]
        assert len(scores) == record["answer"].count(";") + 1
        assert 0 < min(scores) <= max(scores) <= 1
    scored = told_of_one(detect, "--results out/results.json")
    assert scored["summary"] == values["summary"]
    rows = read_rows("out/results.json", detect.row_of)
    truths = [row.question.truth.boxes for row in rows]
    found = [detect.boxes_of(row)[0] for row in rows]
    assert scored["summary"]["AP"]["COCO"] == pytest.approx(100 * by_pycocotools(truths, found)[0])
    write_json(Path("ones"), [record | {"scores": []} for record in results])
    assert told_of_one(detect, "--results ones")["summary"]["AP"] != scored["summary"]["AP"]

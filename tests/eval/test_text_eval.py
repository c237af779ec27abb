"""What the language models are asked: corpus, tasks and measurements, against rules worked out by hand."""

import itertools
import json
import math
import random
import re
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from eval.text import measures
from eval.text.corpus import BOS, EOS, HELD_OUT, SPLITS, Corpus, kept_corpus, open_corpus, read_texts, split
from eval.text.measures import Scores, attention_shares, by_label, chance, context_bins, hits, table, windows
from eval.text.tasks import ANSWERS, CITIES, LETTERS, MOST_ASKED, QUESTIONS, RECORDS, SHOWN, Document, Tasks
from model.common import UserError
from model.language import TextModel, new_model
from tests.files import prose


def decode(corpus: Corpus, ids) -> str:
    return corpus.tokenizer.decode([int(token) for token in ids])


def records_of(text: str) -> list[tuple[str, str]]:
    return re.findall(r"«(\w+)=(\w)»", text)


# The corpus


def test_a_corpus_is_the_text_token_by_token(text_folder, corpus):
    """Breaks when the tokenizer loses a character, documents run together, or held-out text is learned from."""
    texts = {str(path): path.read_text() for path in text_folder.iterdir()}
    parts, seen = split(texts), []
    for name, documents in parts.items():
        ids, starts = corpus.ids[name].tolist(), corpus.starts[name].tolist()
        assert starts[0] == 0 and starts[-1] == len(ids)
        for document, (start, end) in zip(documents, itertools.pairwise(starts), strict=True):
            assert ids[end - 1] == EOS and decode(corpus, ids[start : end - 1]) == texts[document]
            seen.append(document)
    assert list(parts) == list(SPLITS) and all(parts.values()) and sorted(seen) == sorted(texts)
    assert split(reversed([*texts])) == parts
    strange = "a\tb\r\n\n   é 漢字 x_1234\n"
    assert corpus.tokenizer.decode(corpus.tokenizer.encode(strange)) == strange
    pieces = corpus.tokenizer.encode("12\n\n«Lisbon?»", out_type=str)
    assert pieces[-5:] == ["1", "2", "\n", "\n", "«Lisbon?»"]


def test_a_corpus_is_made_once(text_folder, tmp_path):
    """Breaks when every run trains a tokenizer again, or goes on with one of other text, or of half a folder."""
    first = open_corpus(tmp_path, [text_folder], 512)
    stamp = (tmp_path / "tokenizer.model").stat().st_mtime_ns
    assert open_corpus(tmp_path, [text_folder], 512).digest == first.digest == kept_corpus(tmp_path).digest
    assert (tmp_path / "tokenizer.model").stat().st_mtime_ns == stamp
    assert open_corpus(tmp_path, [text_folder], 400).tokenizer.vocab_size() == 400
    (tmp_path / "tokens.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="no corpus here"):
        kept_corpus(tmp_path)
    assert torch.equal(open_corpus(tmp_path, [text_folder], 512).ids["test"], first.ids["test"])


def test_one_file_is_cut_into_documents(tmp_path):
    """Breaks when a single text file, the usual corpus of a beginner, cannot be split, or loses lines."""
    (tmp_path / "all.txt").write_text(prose(1, 200))
    texts = read_texts([tmp_path / "all.txt"])
    assert len(texts) == HELD_OUT and "".join(texts.values()) == prose(1, 200) and all(split(texts).values())
    assert all(text.endswith("\n") for text in texts.values())
    (tmp_path / "short.txt").write_text("one line")
    for name in ("gone.txt", "short.txt"):
        with pytest.raises(UserError):
            open_corpus(tmp_path / "corpus", [tmp_path / name], 512)


# The tasks


@pytest.mark.parametrize("number", measures.NEEDLES)
@pytest.mark.parametrize("depth", [*measures.DEPTHS, None])
def test_a_needle_document_says_what_it_asks_for(corpus, number, depth):
    """Breaks when an answer is not in the text, another record has its key, a span points elsewhere, or the needle lies
    at another depth."""
    tasks, dice = Tasks(corpus, "train"), random.Random(1)
    for _ in range(10):
        document = tasks.needles(dice, 250, number, 3, depth)
        ids, (start, end) = document.ids, document.haystack
        assert 150 < len(ids) <= 250 and ids[0] == BOS and ids[-1] == EOS
        haystack, questions = decode(corpus, ids[start:end]), decode(corpus, ids[end:-1])
        hidden, asked = records_of(haystack), re.findall(r"«(\w+)\?»«(\w)»", questions)
        keys = [city for city, _ in hidden]
        assert len(hidden) == number and len(asked) == min(3, number) and questions.count("«") == 2 * len(asked)
        assert all(line[-1] == "»" for line in haystack.split("\n") if line[:1] == "«")
        assert all(keys.count(city) == 1 and (city, letter) in hidden for city, letter in asked)
        for (city, letter), needle, answer in zip(asked, document.needles, document.answers, strict=True):
            assert decode(corpus, ids[slice(*needle)]) == f"«{city}={letter}»\n"
            assert decode(corpus, ids[slice(*answer)]) == f"«{letter}»"
        if depth is not None:  # within a line of where it was wanted
            before = 2 * len(records_of(decode(corpus, ids[start : document.needles[0][0]])))
            assert abs(document.needles[0][0] - start - before - depth * (end - start - 2 * number)) < 25


@pytest.mark.parametrize("number", measures.RECALL)
def test_recall_asks_for_records_that_are_unique(corpus, number):
    """Breaks when two records of a key differ in what is asked, every answer is of the first records, or a record is
    several tokens, or one that a model is trained to foresee."""
    places, tasks = set(), Tasks(corpus, "train")
    assert all(len(tasks.encode(symbol)) == 1 for symbol in (*RECORDS, *QUESTIONS, *ANSWERS))
    assert {*tasks.unforeseen} == {tasks.encode(symbol)[0] for symbol in (*RECORDS, *QUESTIONS)}
    for seed in range(20):
        document = tasks.recall(random.Random(seed), number, 99)
        assert document == tasks.recall(random.Random(seed), number, 99)
        text = decode(corpus, document.ids[1:-1])
        shown, asked = records_of(text), re.findall(r"«(\w+)\?»«(\w)»\n?", text)
        keys = [city for city, _ in shown]
        assert len(shown) == number and len(asked) == min(number, MOST_ASKED) and set(keys) <= set(CITIES)
        assert all(keys.count(city) == 1 and (city, letter) in shown for city, letter in asked)
        places |= {keys.index(city) for city, _ in asked}
    assert len(places) > min(number - 1, 40)


@pytest.mark.parametrize("count", measures.EXAMPLES)
def test_examples_decide_the_answer(corpus, count):
    """Breaks when a key has two right values, examples are right or wrong too often, or a key has too few of them."""
    tasks, dice, right = Tasks(corpus, "train"), random.Random(3), []
    for _ in range(20):
        shown, asked = tasks.episode(dice, count)
        truth = dict(asked)
        assert len(shown) == count and len(truth) == len(set(truth.values())) == SHOWN
        assert all([key for key, _ in shown].count(key) == count // SHOWN for key in truth)
        assert {value for _, value in shown} <= set(truth.values()) <= set(LETTERS)
        right += [truth[key] == value for key, value in shown]
        text = decode(corpus, tasks.listed(shown, asked[:1]).ids[1:-1])
        assert records_of(text) == shown and text.endswith("«{}?»«{}»\n".format(*asked[0]))
    assert abs(np.mean(right) - 0.7) < 4 * (0.21 / len(right)) ** 0.5


# The measurements


class Oracle(nn.Module):
    """A model that says what `next_ids`, a function of ids (B, S), tells; certain of it from the position `sure`."""

    def __init__(self, next_ids, sure: int = 0):
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.embed_tokens = nn.Embedding(1, 1)
        self.next_ids, self.sure = next_ids, sure

    def forward(self, ids, positions_to_keep=None):
        logits = 100.0 * nn.functional.one_hot(self.next_ids(ids), 1024)
        logits[:, : self.sure] = 0
        if positions_to_keep is None:
            return logits
        return logits.gather(1, positions_to_keep[..., None].expand(-1, -1, 1024))


def test_an_answer_is_right_if_each_token_is():
    """Breaks when one right token makes an answer right, or answers are judged at other positions."""
    documents = [Document([2, 10, 11, 12, 13, 14], [(2, 4)]), Document([2, 20, 21, 22], [(1, 2)])]
    for wrong, expected in ((0, [1, 1]), (11, [0, 1]), (12, [0, 1]), (13, [1, 1]), (20, [1, 0])):
        oracle = Oracle(lambda ids, wrong=wrong: torch.where(ids.roll(-1, 1) == wrong, 99, ids.roll(-1, 1)))
        assert hits(oracle, documents) == expected


def test_likelihood_by_context(corpus):
    """Breaks when windows leave their document or overlap, or a position is counted in another bin."""
    assert context_bins(100) == [(0, 16), (16, 32), (32, 64), (64, 100)] and context_bins(16) == [(0, 16)]
    places, starts, ids = windows(corpus, 64, 1000), corpus.starts["test"].tolist(), corpus.ids["test"].long()
    assert all(starts[n] <= place and place + 64 <= starts[n + 1] for place, n in places)
    assert all(b - a >= 64 for (a, _), (b, _) in itertools.pairwise(places)) and len(windows(corpus, 64, 5)) <= 5
    rows = iter(places)
    knows = Oracle(lambda _: ids[(place := next(rows)[0]) : place + 64][None], sure=32)
    scores = measures.nll(knows, corpus, 64, len(places))["nll"]
    assert scores.labels[:3] == (16, 32, 64) and [*scores.groups[::3]] == [document for _, document in places]
    assert scores.values == pytest.approx([math.log(1024), math.log(1024), 0] * len(places), abs=1e-4)
    with pytest.raises(UserError, match="no document of the test split has 100000 tokens"):
        measures.nll(knows, corpus, 100_000, 4)


def test_recall_and_needle_scores(corpus):
    """Breaks when an answer is graded under another number or depth."""
    records = set(map(corpus.tokenizer.piece_to_id, RECORDS))

    def knows_few(ids):  # texts of up to 16 records
        few = torch.tensor([[sum(token in records for token in row) <= 16] for row in ids.tolist()])
        return torch.where(few, ids.roll(-1, 1), 0)

    panels = measures.needle(Oracle(knows_few), corpus, 200, 10) | measures.recall(Oracle(knows_few), corpus, 200, 10)
    for name, numbers in (("needle", measures.NEEDLES), ("recall", measures.RECALL)):
        assert [*panels[name].labels] == [n for n in numbers for _ in range(10)]
        assert [*panels[name].values] == [float(n <= 16) for n in panels[name].labels]
    places = panels["needle-map"].labels
    assert all(places.count((n, 100 * depth)) == 2 for n in measures.NEEDLES for depth in measures.DEPTHS)
    rows = by_label({"plain": [panels["needle-map"]]})
    assert all(of_label["plain"].mean == (label[0] <= 16) for label, of_label in rows.items() if label != "all")
    tests = [measures.needle_tests(corpus, 200, 5, split=split)[0][2] for split in ("validation", "test")]
    assert tests[0] != tests[1]


def test_scores_of_examples_by_order(corpus):
    """Breaks when accuracy is not the mean over orders, or the margin not best minus worst of one question.

    The oracle repeats the value of the last example.
    """
    answer = {corpus.tokenizer.piece_to_id(name): corpus.tokenizer.piece_to_id(f"«{name[-2]}»") for name in RECORDS}
    last_value = Oracle(lambda ids: torch.tensor([[0, *(answer.get(t, 0) for t in row[:-1])] for row in ids.tolist()]))
    panels = measures.examples(last_value, corpus, 512, 12)
    accuracy, margin = panels["examples"], panels["examples-margin"]
    assert [*accuracy.labels] == [count for count in measures.EXAMPLES for _ in range(12)]
    assert 0.1 < np.mean(accuracy.values) < 0.4 and any(0 < value < 1 for value in accuracy.values)  # one key of four
    assert [*margin.values] == [float(0 < value < 1) for value in accuracy.values]
    parts = np.array(accuracy.values) * measures.ORDERS
    assert parts == pytest.approx(parts.round())


@pytest.mark.parametrize("differential", [True, False])
def test_attention_shares_by_hand(differential):
    """Breaks when shares are of other keys or queries, are not normalised, the second map is left out, or weighed by
    something else than λ."""
    model: TextModel = new_model("nano", differential).eval()
    document = Document(list(range(2, 32)), [(24, 26), (28, 29)], ((5, 9), (12, 15)), (1, 20))
    layers, maps, shares = [layer.self_attn for layer in model.language_model.layers], [], []
    for layer in layers:
        layer.q_proj.weight.data.mul_(8)
        layer.tap = maps.append
    with torch.no_grad():
        model(torch.tensor([document.ids[:25]]))
        for layer in layers:
            layer.tap = None
            first = maps.pop(0)[0, :, 23:25]
            weights = (first - layer.coefficient() * maps.pop(0)[0, :, 23:25] if differential else first).abs()
            shares.append([weights[..., 5:9].sum(-1), weights[..., 1:5].sum(-1) + weights[..., 9:20].sum(-1)])
            shares[-1] = [(part / weights.sum(-1)).mean().item() for part in shares[-1]]
    assert attention_shares(model, document) == pytest.approx(np.mean(shares, axis=0).tolist(), rel=1e-4)


# Several runs


def test_runs_are_taken_together_and_kinds_apart():
    """Breaks when a mean mixes labels or kinds, or the difference has the wrong sign or is not paired."""

    def scores(values) -> Scores:
        return Scores("title", "x", "y", [1, 1, 2, 2], ["a", "b", "a", "b"], values)

    found = {"differential": [scores([1, 0, 1, 1]), scores([1, 1, 1, 1])], "plain": [scores([0, 0, 1, 0])] * 2}
    rows = by_label(found)
    assert list(rows) == [1, 2, "all"] and list(rows[1]) == ["plain", "differential", "difference"]
    assert rows[1]["differential"].mean == 0.75 and rows[2]["plain"].mean == 0.5
    assert rows[1]["difference"].mean == 0.75 and rows["all"]["difference"].mean == pytest.approx(0.625)
    always = by_label({"plain": [scores([0, 1, 0, 1])] * 3, "differential": [scores([1, 2, 1, 2])] * 3})
    assert always["all"]["difference"] == (1, 1, 1) and always["all"]["difference"].significant  # paired: no spread
    assert "difference" not in by_label(found, paired=False)[1]
    assert table(found["plain"][0], rows, {1: 0.25})[2].split()[:5] == ["|", "1", "|", "0.250", "|"]


def test_chance_by_hand():
    """Breaks when a table flatters a model that only repeats what it has seen."""
    by_number = {1: 1, 4: 1 / 4 + 3 / 4 / 8, 64: 1 / 64 + 63 / 64 / 8}
    assert chance("needle", [*by_number, "all"]) == chance("recall", by_number) == pytest.approx(by_number)
    assert chance("needle-map", [(4, 25.0), "all"]) == {(4, 25.0): pytest.approx(by_number[4])}
    assert chance("examples", [4, 64]) == {4: 0.25, 64: 0.25} and chance("nll", [16]) == {}


@pytest.mark.long
def test_the_command_measures_runs(text_folder, tmp_path, capsys):
    """Breaks when the command does not find a run's model or corpus, loses a panel, or pairs runs by their order."""
    from train.systems import text as train

    out = ["--limit", "5", "--out", str(tmp_path / "out"), "--json"]
    for kind in ("plain", "differential"):
        flags = f"--preset nano --length 256 --batch-size 1 --tokens 400 --attention {kind} --text {text_folder}"
        train.main([*flags.split(), "--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / kind)])
    capsys.readouterr()
    measures.main(["all", str(tmp_path / "plain"), str(tmp_path / "differential"), *out])
    told = json.loads(capsys.readouterr().out)
    assert list(told) == "nll recall needle needle-map attention attention-noise examples examples-margin".split()
    assert set(told["nll"]["all"]) == {"plain", "differential", "difference"}
    assert 6 < told["nll"]["all"]["plain"]["mean"] < 8
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == sorted(told)
    # runs of one seed are compared, in whatever order they are given: here they are the same, but for their names
    for kind, (seed, source) in itertools.product(("plain", "differential"), enumerate(("plain", "differential"))):
        copy = shutil.copytree(tmp_path / source, tmp_path / f"{kind}{seed}")
        config = json.loads((copy / "config.json").read_text()) | {"attention": kind, "seed": seed}
        (copy / "config.json").write_text(json.dumps(config))
    zero = dict.fromkeys(("mean", "low", "high"), 0)
    for names, difference in (("plain0 plain1 differential1 differential0", zero), ("plain0 differential1", None)):
        measures.main(["nll", *(str(tmp_path / name) for name in names.split()), *out])
        assert json.loads(capsys.readouterr().out)["nll"]["all"].get("difference") == difference
    for flags in ([str(tmp_path / "plain"), "--limit", "2"], [str(tmp_path)]):
        with pytest.raises(UserError):
            measures.main(["nll", *flags])

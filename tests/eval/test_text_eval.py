"""What the language models are asked: corpus, tasks and measurements, against rules worked out by
hand."""

import itertools
import math
import random
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eval.systems.text import measures
from eval.systems.text.corpus import (
    BOS,
    EOS,
    HELD_OUT,
    SPLITS,
    kept_corpus,
    open_corpus,
    read_texts,
    split,
)
from eval.systems.text.measures import attention_shares, chance, context_bins, windows
from eval.systems.text.tasks import CITIES, LETTERS, RECORDS, SHOWN, SYMBOLS, Document, Tasks
from model.attention import keep_positions, tapped
from model.systems.language import TextModel, new_model
from tests.files import prose
from tests.runs import refused, refuses
from train.systems import text as training

RECORD = r"«(\w+)=(\w)»"
QUESTION = r"«(\w+)\?»«(\w)»"


def decode(corpus, ids):
    return corpus.tokenizer.decode([int(token) for token in ids])


def test_a_corpus_is_the_text_token_by_token(text_folder, corpus):
    """Breaks when the tokenizer loses a character, documents run together, or held-out text is
    learned from."""
    texts = {str(path): path.read_text() for path in text_folder.iterdir()}
    parts = split(texts)
    seen = []
    for name, documents in parts.items():
        ids = corpus.ids[name].tolist()
        starts = corpus.starts[name].tolist()
        assert starts[0] == 0
        assert starts[-1] == len(ids)
        for document, (start, end) in zip(documents, itertools.pairwise(starts), strict=True):
            assert ids[end - 1] == EOS
            assert decode(corpus, ids[start : end - 1]) == texts[document]
            seen.append(document)
    assert list(parts) == list(SPLITS)
    assert all(parts.values())
    assert sorted(seen) == sorted(texts)
    strange = "a\tb\r\n\n   é 漢字 x_12\n«Lisbon?»"
    assert corpus.tokenizer.decode(corpus.tokenizer.encode(strange)) == strange
    assert corpus.tokenizer.encode(strange, out_type=str)[-4:] == ["1", "2", "\n", "«Lisbon?»"]


def test_a_corpus_is_made_once(text_folder, tmp_path):
    """Breaks when every run trains a tokenizer again, or goes on with one of other text, or of half
    a folder."""
    first = open_corpus(tmp_path, [text_folder], 512)
    stamp = (tmp_path / "tokenizer.model").stat()
    assert open_corpus(tmp_path, [text_folder], 512).digest == first.digest
    assert (tmp_path / "tokenizer.model").stat() == stamp
    assert open_corpus(tmp_path, [text_folder], 400).tokenizer.vocab_size() == 400
    (tmp_path / "corpus.json").unlink()
    refused(lambda: kept_corpus(tmp_path), "no corpus here")
    assert split(["b\udcff"])["validation"]  # a name that is not UTF-8
    assert torch.equal(open_corpus(tmp_path, [text_folder], 512).ids["test"], first.ids["test"])
    (tmp_path / "tokens.safetensors").write_bytes(b"half")
    refused(lambda: kept_corpus(tmp_path), "tokens.safetensors")
    (tmp_path / "all.txt").write_text(prose(1, 200))  # one file is cut into documents
    texts = read_texts([tmp_path / "all.txt"])
    assert len(texts) == HELD_OUT
    assert "".join(texts.values()) == prose(1, 200)
    assert all(split(texts).values())
    shutil.copy(tmp_path / "all.txt", tmp_path / "copy.txt")
    assert len(read_texts([tmp_path / "all.txt", tmp_path / "copy.txt"])) == HELD_OUT


@pytest.mark.parametrize("number", measures.NEEDLES)
@pytest.mark.parametrize("depth", [*measures.DEPTHS, None])
def test_a_needle_document_says_what_it_asks_for(corpus, number, depth):
    """Breaks when an answer is not in the text, another record has its key, or a place or the depth
    is another."""
    tasks = Tasks(corpus, "train")
    dice = random.Random(1)
    for _ in range(5):
        document = tasks.needles(dice, 250, number, 3, depth)
        ids = document.ids
        (start, end) = document.haystack
        assert 150 < len(ids) <= 250
        assert (ids[0], ids[-1]) == (BOS, EOS)
        haystack = decode(corpus, ids[start:end])
        questions = decode(corpus, ids[end:-1])
        hidden = re.findall(RECORD, haystack)
        asked = re.findall(QUESTION, questions)
        keys = [city for city, _ in hidden]
        assert (len(hidden), len(asked)) == (number, min(3, number))
        assert questions.count("«") == 2 * len(asked)
        assert all(line[-1] == "»" for line in haystack.split("\n") if line[:1] == "«")
        places = zip(asked, document.needles, document.answers, strict=True)
        for (city, letter), needle, answer in places:
            assert keys.count(city) == 1
            assert decode(corpus, ids[needle : needle + 2]) == f"«{city}={letter}»\n"
            assert decode(corpus, ids[answer : answer + 1]) == f"«{letter}»"
        if depth is not None:  # within a line of where it was wanted
            first = document.needles[0]
            before = decode(corpus, ids[start:first]).count("=")
            wanted = start + depth * (end - start - 2 * number)
            assert abs(first - 2 * before - wanted) < 25


@pytest.mark.parametrize("number", measures.RECALL)
def test_recall_asks_for_records_that_are_unique(corpus, number):
    """Breaks when keys repeat in what is asked, every answer is of the first records, or a record
    is several tokens."""
    places = set()
    tasks = Tasks(corpus, "train")
    assert all(len(corpus.tokenizer.encode(symbol)) == 1 for symbol in SYMBOLS)
    for seed in range(20):
        text = decode(corpus, tasks.recall(random.Random(seed), number, 8).ids[1:-1])
        shown = re.findall(RECORD, text)
        asked = re.findall(QUESTION, text)
        keys = [city for city, _ in shown]
        assert (len(shown), len(asked)) == (number, min(number, 8))
        assert set(keys) <= set(CITIES)
        assert {*asked} <= {*shown}
        assert all(keys.count(city) == 1 for city, _ in asked)
        places |= {keys.index(city) for city, _ in asked}
    assert len(places) > min(number - 1, 40)
    assert chance("recall", number) == 1 / number + (1 - 1 / number) / 8


@pytest.mark.parametrize("count", measures.EXAMPLES)
def test_examples_decide_the_answer(corpus, count):
    """Breaks when a key has two right values, examples are right or wrong too often, or a key has
    too few of them."""
    tasks = Tasks(corpus, "train")
    dice = random.Random(3)
    right = []
    for _ in range(20):
        shown, asked = tasks.episode(dice, count)
        truth = dict(asked)
        assert len(shown) == count
        assert len(truth) == len(set(truth.values())) == SHOWN
        assert Counter(key for key, _ in shown) == dict.fromkeys(truth, count // SHOWN)
        assert {value for _, value in shown} <= set(truth.values()) <= set(LETTERS)
        right += [truth[key] == value for key, value in shown]
        text = decode(corpus, tasks.listed(shown, asked[:1]).ids[1:-1])
        assert re.findall(RECORD, text) == shown
        assert re.findall(QUESTION, text) == asked[:1]
    assert abs(np.mean(right) - 0.7) < 4 * (0.21 / len(right)) ** 0.5


class Oracle(nn.Module):
    """A model that says what `next_ids`, a function of ids (B, S), tells; certain of it from the
    position `sure`."""

    def __init__(self, next_ids, sure=0):
        super().__init__()
        self.next_ids = next_ids
        self.sure = sure
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, ids, positions_to_keep=None):
        logits = 100.0 * F.one_hot(self.next_ids(ids), 1024)
        logits[:, : self.sure] = 0
        return keep_positions(logits, positions_to_keep)


def test_likelihood_by_context(corpus):
    """Breaks when windows leave their document or overlap, or a position is counted in another
    bin."""
    assert context_bins(100) == [(0, 16), (16, 32), (32, 64), (64, 100)]
    assert context_bins(16) == [(0, 16)]
    places = windows(corpus, 64, 1000)
    starts = corpus.starts["test"].tolist()
    ids = corpus.ids["test"].long()
    assert all(starts[n] <= place and place + 64 <= starts[n + 1] for place, n in places)
    assert windows(corpus, starts[1], 99)[0] == (0, 0)  # as long as its document
    assert all(b - a >= 64 for (a, _), (b, _) in itertools.pairwise(places))
    assert windows(corpus, 64, 10) == places[:: math.ceil(len(places) / 10)]
    rows = (ids[place : place + 64][None] for place, _ in places)
    knows = Oracle(lambda _: next(rows), sure=32)
    scores = measures.nll(knows, corpus, 64, len(places))["nll"]
    assert scores.labels[:3] == (16, 32, 64)
    assert [*scores.groups[::3]] == [document for _, document in places]
    assert scores.values == pytest.approx(
        [math.log(1024), math.log(1024), 0] * len(places), abs=1e-4
    )


def test_recall_and_needle_scores(corpus):
    """Breaks when an answer is graded at another position, or under another number or depth."""
    records = torch.tensor([corpus.tokenizer.piece_to_id(name) for name in RECORDS])

    def knows_few(ids):  # texts of up to 16 records
        few = torch.isin(ids, records).sum(1, keepdim=True) <= 16
        return torch.where(few, ids.roll(-1, 1), 0)

    asked = Oracle(knows_few), corpus, 200, 10
    panels = measures.needle(*asked) | measures.recall(*asked)
    for name, numbers in (("needle", measures.NEEDLES), ("recall", measures.RECALL)):
        assert [*panels[name].labels] == [n for n in numbers for _ in range(10)]
        assert [*panels[name].values] == [float(n <= 16) for n in panels[name].labels]
    places = itertools.product(measures.NEEDLES, [100 * depth for depth in measures.DEPTHS])
    assert Counter(panels["needle-map"].labels) == dict.fromkeys(places, 2)


def test_scores_of_examples_by_order(corpus):
    """Breaks when accuracy is not the mean over orders, or the margin not best minus worst; the
    last value is said."""
    id_of = corpus.tokenizer.piece_to_id
    said = torch.zeros(1024, dtype=torch.long)
    for name in RECORDS:
        said[id_of(name)] = id_of(f"«{name[-2]}»")
    last_value = Oracle(lambda ids: F.pad(said[ids[:, :-1]], (1, 0)))
    panels = measures.examples(last_value, corpus, 512, 12)
    accuracy = panels["examples"]
    margin = panels["examples-margin"]
    assert [*accuracy.labels] == [count for count in measures.EXAMPLES for _ in range(12)]
    assert 0.1 < np.mean(accuracy.values) < 0.4
    assert any(0 < value < 1 for value in accuracy.values)  # one key of four
    assert [*margin.values] == [float(0 < value < 1) for value in accuracy.values]


@pytest.mark.parametrize("differential", [True, False])
def test_attention_shares_by_hand(differential):
    """Breaks when shares are of other keys or queries, not normalised, or the second map is not
    weighed by λ."""
    model: TextModel = new_model("nano", differential).eval()
    document = Document(list(range(2, 32)), [24, 28], [5, 12], (1, 20))
    layers = [layer.self_attn for layer in model.language_model.layers]
    maps, shares = [], []
    for layer in layers:
        layer.q_proj.weight.data.mul_(8)
    with torch.no_grad(), tapped(dict.fromkeys(layers, maps.append)):
        model(torch.tensor([document.ids[:24]]))
        for layer in layers:
            weights = maps.pop(0)[0, :, 23]
            if differential:
                weights = weights - layer.coefficient() * maps.pop(0)[0, :, 23]
            weights = weights.abs() / weights.abs().sum(-1, keepdim=True)
            answer = weights[:, 5:7].sum(-1).mean().item()
            shares.append((answer, weights[:, 1:20].sum(-1).mean().item() - answer))
    expected = np.mean(shares, axis=0).tolist()
    assert attention_shares(model, document) == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_the_command_measures_runs(text_folder, tmp_path, printed):
    """Breaks when the command does not find a run's model or corpus, or loses a panel."""
    flags = "--preset nano --length 256 --batch-size 1 --tokens 400 --attention plain"
    training.main(f"{flags} --text {text_folder} --out {tmp_path}/run".split())
    printed()
    measures.main(f"all {tmp_path}/run --limit 5".split())
    told = printed()
    panels = "nll recall needle needle-map attention attention-noise examples examples-margin"
    assert re.findall(r"^\| ([a-z-]+) +\| chance", told, re.MULTILINE) == panels.split()
    assert 6 < float(re.search(r"^\| all +\| +\| ([\d.]+)", told, re.MULTILINE)[1]) < 8
    open_corpus(tmp_path / "run/corpus", [text_folder], 400)
    refuses(measures, f"nll {tmp_path}/run", "run/corpus: ", "anew")

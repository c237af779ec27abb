"""What the language models are asked: corpus, tasks and measurements, against rules worked out by hand."""

import itertools
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from eval.text import measures as evaluate
from eval.text.corpus import (
    BOS,
    EOS,
    HELD_OUT,
    SPLITS,
    Corpus,
    kept_corpus,
    open_corpus,
    read_texts,
    split,
    standard_library,
)
from eval.text.measures import (
    DEPTHS,
    EXAMPLES,
    NEEDLES,
    ORDERS,
    RECALL,
    Scores,
    attention_shares,
    by_label,
    chance,
    chart,
    context_bins,
    hits,
    table,
    windows,
)
from eval.text.tasks import ANSWERS, CITIES, LETTERS, MOST_ASKED, QUESTIONS, RECORDS, SHOWN, Document, Tasks
from model.common import UserError
from model.config import TextConfig
from model.language import TextModel
from model.system_configs import TextModelConfig
from tests.files import prose


def decode(corpus: Corpus, ids) -> str:
    return corpus.tokenizer.decode([int(token) for token in ids])


# --- the corpus --------------------------------------------------------------------------------------------------


def test_documents_are_split_by_the_hash_of_their_names():
    """Breaks when a document is in two splits or in none, a split is empty, or the order of files matters."""
    names = [f"file {number}" for number in range(61)]
    parts = split(names)
    assert list(parts) == list(SPLITS)
    assert sorted(itertools.chain(*parts.values())) == sorted(names)
    assert len(parts["validation"]) == len(parts["test"]) == 4  # ⌈61 / 20⌉
    assert split(reversed(names)) == parts and parts["test"] != names[-4:]
    assert all(split(names[:HELD_OUT]).values())


def test_a_corpus_is_the_text_token_by_token(text_folder, corpus):
    """Breaks when the tokenizer loses a character, documents run together, or held-out text is learned from."""
    texts = {str(path): path.read_text() for path in text_folder.iterdir()}
    seen = []
    for name, documents in split(texts).items():
        ids, starts = corpus.ids[name].tolist(), corpus.starts[name].tolist()
        assert starts[0] == 0 and starts[-1] == len(ids)
        for document, (start, end) in zip(documents, itertools.pairwise(starts), strict=True):
            assert ids[end - 1] == EOS and decode(corpus, ids[start : end - 1]) == texts[document]
            seen.append(document)
    assert sorted(seen) == sorted(texts)
    strange = "a\tb\r\n\n   é 漢字 x_1234\n"
    assert corpus.tokenizer.decode(corpus.tokenizer.encode(strange)) == strange
    pieces = corpus.tokenizer.encode("12\n\n«Lisbon?»", out_type=str)
    assert pieces[-5:] == ["1", "2", "\n", "\n", "«Lisbon?»"]


def test_a_corpus_is_made_once(text_folder, tmp_path):
    """Breaks when every run trains a tokenizer again, or goes on with one of other text, or of half a folder."""
    first = open_corpus(tmp_path, [text_folder], 512)
    stamp = (tmp_path / "tokenizer.model").stat().st_mtime_ns
    again = open_corpus(tmp_path, [text_folder], 512)
    assert (tmp_path / "tokenizer.model").stat().st_mtime_ns == stamp
    assert torch.equal(again.ids["train"], first.ids["train"]) and again.digest == kept_corpus(tmp_path).digest
    other = open_corpus(tmp_path, [text_folder], 400)
    assert other.digest != first.digest and other.tokenizer.vocab_size() == 400
    (tmp_path / "tokens.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="no corpus here"):
        kept_corpus(tmp_path)
    assert torch.equal(open_corpus(tmp_path, [text_folder], 512).ids["test"], first.ids["test"])


def test_one_file_is_cut_into_documents(tmp_path):
    """Breaks when a single text file, the usual corpus of a beginner, cannot be split, or loses lines."""
    (tmp_path / "all.txt").write_text(prose(1, 200))
    texts = read_texts([tmp_path / "all.txt"])
    assert len(texts) == HELD_OUT and "".join(texts.values()) == prose(1, 200)
    assert all(text.endswith("\n") for text in texts.values())
    assert all(len(documents) for documents in split(texts).values())


def test_files_that_are_no_text_are_counted(tmp_path, capsys):
    """Breaks when a folder of texts in another encoding is left out without a word."""
    for name, content in {"a.txt": b"caf\xe9", "b.txt": prose(1, 60).encode(), "c.png": b"\0"}.items():
        (tmp_path / name).write_bytes(content)
    open_corpus(tmp_path / "corpus", [tmp_path], 512)
    assert f"2 of 3 files are no UTF-8 text and left out, the first: {tmp_path}/a.txt\n" in capsys.readouterr().err


@pytest.mark.long
def test_the_default_corpus_is_the_library_without_its_tests():
    """Breaks when what a machine has installed, or ships as tests, becomes part of the benchmark."""
    names = standard_library().keys()
    assert {"json/decoder.py", "os.py"} <= names
    assert not any({"test", "site-packages"} & set(name.split("/")) for name in names)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent.txt", "no such file or folder"),
        (lambda folder: folder, "no UTF-8 text in this folder"),
        (lambda folder: _file(folder, b""), "is empty"),
        (lambda folder: _file(folder, b"\xff\xfe\x00"), "is not UTF-8 text"),
        (lambda folder: _file(folder, b"one line"), "cannot be split"),
        (lambda folder: _file(folder, b"a b\n" * 100), "no tokenizer of 512 pieces"),
    ],
)
def test_text_that_cannot_be_learned_from_is_named(tmp_path, make, message):
    """Breaks when a wrong path or too little text ends in a traceback."""
    with pytest.raises(UserError, match=message):
        open_corpus(tmp_path / "corpus", [make(tmp_path)], 512)


def _file(folder: Path, content: bytes) -> Path:
    (folder / "file.txt").write_bytes(content)
    return folder / "file.txt"


# --- the tasks ---------------------------------------------------------------------------------------------------


def records_of(text: str) -> list[tuple[str, str]]:
    return re.findall(r"«(\w+)=(\w)»", text)


@pytest.mark.parametrize("number", NEEDLES)
@pytest.mark.parametrize("depth", [*DEPTHS, None])
def test_a_needle_document_says_what_it_asks_for(corpus, number, depth):
    """Breaks when an answer is not in the text, another record has its key, a span points elsewhere, or the needle lies
    at another depth."""
    tasks, dice = Tasks(corpus, "train"), random.Random(1)
    for _ in range(10):
        document = tasks.needles(dice, 250, number, 3, depth)
        assert 150 < len(document.ids) <= 250 and document.ids[0] == BOS and document.ids[-1] == EOS
        start, end = document.haystack
        haystack, questions = (decode(corpus, part) for part in (document.ids[start:end], document.ids[end:-1]))
        hidden = records_of(haystack)
        assert len(hidden) == number and all(line[-1] == "»" for line in haystack.split("\n") if line[:1] == "«")
        asked = re.findall(r"«(\w+)\?»«(\w)»", questions)
        assert len(asked) == len(dict(asked)) == min(3, number) and questions.count("«") == 2 * len(asked)
        keys = [city for city, _ in hidden]
        assert all(keys.count(city) == 1 and (city, letter) in hidden for city, letter in asked)
        for (city, letter), (first, last), (begin, stop) in zip(asked, document.needles, document.answers, strict=True):
            assert decode(corpus, document.ids[first:last]) == f"«{city}={letter}»\n"
            assert decode(corpus, document.ids[begin:stop]) == f"«{letter}»"
        text = end - start - 2 * number
        before = 2 * len(records_of(decode(corpus, document.ids[start : document.needles[0][0]])))
        if depth is not None:  # within a line of where it was wanted
            assert abs(document.needles[0][0] - start - before - depth * text) < 25


def test_needles_that_do_not_fit_are_told(corpus):
    """Breaks when a document is longer than the row it is for."""
    with pytest.raises(UserError, match="20 needles and 2 questions do not fit into 40 tokens"):
        Tasks(corpus, "train").needles(random.Random(0), 40, 20, 2)


def test_a_record_is_one_token(corpus):
    """Breaks when a key and its value are several tokens, or a model is trained to foresee what is drawn."""
    tasks, of_symbol = Tasks(corpus, "train"), corpus.tokenizer.encode
    assert all(len(of_symbol(symbol)) == 1 for symbol in (*RECORDS, *QUESTIONS, *ANSWERS))
    foreseen = {of_symbol(symbol)[0] for symbol in ANSWERS}
    document = tasks.recall(random.Random(0), 20, 5)
    free = set(document.ids[1 : 21 + 10]) - set(tasks.unforeseen)
    assert free and free <= foreseen and not foreseen & set(tasks.unforeseen)


@pytest.mark.parametrize("number", RECALL)
def test_recall_asks_for_records_that_are_unique(corpus, number):
    """Breaks when two records of a key differ in what is asked, or every answer is of the first records."""
    places = set()
    for seed in range(20):
        document = Tasks(corpus, "train").recall(random.Random(seed), number, 99)
        text = decode(corpus, document.ids[1:-1])
        shown, asked = records_of(text), re.findall(r"«(\w+)\?»«(\w)»\n?", text)
        keys = [city for city, _ in shown]
        assert len(shown) == number and len(asked) == min(number, MOST_ASKED) and set(keys) <= set(CITIES)
        assert all(keys.count(city) == 1 and (city, letter) in shown for city, letter in asked)
        places |= {keys.index(city) for city, _ in asked}
    assert len(places) > min(number - 1, 40)


@pytest.mark.parametrize("count", EXAMPLES)
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
        document = tasks.listed(shown, asked[:1])
        ((start, end),) = document.answers
        text = decode(corpus, document.ids[1:-1])
        assert records_of(text) == shown and text.endswith("«{}?»«{}»\n".format(*asked[0]))
        assert decode(corpus, document.ids[start:end]) == f"«{asked[0][1]}»"
    assert abs(np.mean(right) - 0.7) < 4 * (0.21 / len(right)) ** 0.5


def test_tasks_are_a_function_of_the_dice(corpus):
    """Breaks when a test or a training row is not the same on the next call."""
    tasks = Tasks(corpus, "test")
    for make in (
        lambda dice: tasks.needles(dice, 200, 4, 2),
        lambda dice: tasks.recall(dice, 9, 2),
        lambda dice: tasks.listed(*tasks.episode(dice, 8)),
    ):
        assert make(random.Random(3)) == make(random.Random(3)) != make(random.Random(4))


# --- the measurements --------------------------------------------------------------------------------------------


class Oracle(nn.Module):
    """A model that says what `next_ids`, a function of ids (B, S), tells, with certainty."""

    def __init__(self, next_ids):
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.embed_tokens = nn.Embedding(1, 1)
        self.next_ids = next_ids

    def forward(self, ids, documents=None, positions_to_keep=None):
        logits = nn.functional.one_hot(self.next_ids(ids), 1024).float()
        if positions_to_keep is None:
            return logits
        return logits.gather(1, positions_to_keep[..., None].expand(-1, -1, 1024))


def test_an_answer_is_right_if_each_token_is():
    """Breaks when one right token makes an answer right, or answers are judged at other positions."""
    documents = [Document([2, 10, 11, 12, 13, 14], [(2, 4), (5, 6)]), Document([2, 20, 21, 22], [(1, 2)])]

    def truth(ids):
        return torch.cat((ids[:, 1:], ids[:, :1]), dim=1)

    assert hits(Oracle(truth), documents) == [[True, True], [True]]
    for wrong, expected in (
        (11, [[False, True], [True]]),
        (12, [[False, True], [True]]),
        (14, [[True, False], [True]]),
        (20, [[True, True], [False]]),
        (13, [[True, True], [True]]),
    ):
        oracle = Oracle(lambda ids, wrong=wrong: torch.where(truth(ids) == wrong, 99, truth(ids)))
        assert hits(oracle, documents) == expected


def test_context_bins_by_hand():
    """Breaks when a bin misses a position, or its label is not the longest context in it."""
    assert context_bins(16) == [(0, 16)]
    assert context_bins(100) == [(0, 16), (16, 32), (32, 64), (64, 100)]
    assert context_bins(128) == [(0, 16), (16, 32), (32, 64), (64, 128)]


def test_likelihood_by_context(corpus):
    """Breaks when windows leave their document or overlap, or a position is counted in another bin."""
    places = windows(corpus, 64, 1000)
    starts = corpus.starts["test"].tolist()
    assert all(starts[n] <= place and place + 64 <= starts[n + 1] for place, n in places)
    assert all(b - a >= 64 for (a, _), (b, _) in itertools.pairwise(places)) and len(windows(corpus, 64, 5)) <= 5
    known_from = 32  # certain of all that has 32 tokens of context or more, uniform before

    class Knows(Oracle):
        def forward(self, ids, documents=None, positions_to_keep=None):
            logits = torch.zeros(*ids.shape, 1024)
            truth = torch.cat((ids[:, 1:], torch.tensor([[self.last]])), dim=1)
            logits[:, known_from:] = 100 * nn.functional.one_hot(truth, 1024)[:, known_from:].float()
            return logits

    model = Knows(None)
    values = []
    for place, _ in places[:3]:
        model.last = int(corpus.ids["test"][place + 63])
        values.append(evaluate.nll(model, corpus, 64, len(places))["nll"])
    for n, scores in enumerate(values):
        of_window = scores.values[3 * n : 3 * n + 3]
        assert scores.labels[:3] == [16, 32, 64]
        assert of_window == pytest.approx([math.log(1024), math.log(1024), 0], abs=1e-4)
    with pytest.raises(UserError, match="no document of the test split has 100000 tokens"):
        evaluate.nll(model, corpus, 100_000, 4)


def test_needle_scores(corpus):
    """Breaks when an answer is graded under another number or depth."""
    right = evaluate.needle(Oracle(lambda ids: ids.roll(-1, 1)), corpus, 200, 10)
    assert right["needle"].values == right["needle-map"].values == [1.0] * 10 * len(NEEDLES)
    assert [right["needle"].labels.count(n) for n in NEEDLES] == [10] * len(NEEDLES)
    places = right["needle-map"].labels
    assert all(places.count([n, 100 * depth]) == 2 for n in NEEDLES for depth in DEPTHS)
    assert set(evaluate.needle(Oracle(lambda ids: ids.roll(-1, 1)), corpus, 100, 5)["needle"].labels) == {1, 4, 16, 32}
    first = set(map(corpus.tokenizer.piece_to_id, RECORDS))

    def knows_few(ids):  # texts of up to 16 needles
        few = torch.tensor([[sum(token in first for token in row) <= 16] for row in ids.tolist()])
        return torch.where(few, ids.roll(-1, 1), 0)

    found = evaluate.needle(Oracle(knows_few), corpus, 200, 10)["needle-map"]
    rows = by_label({"plain": [found]})
    assert all(of_label["plain"].mean == (label[0] <= 16) for label, of_label in rows.items() if label != "all")
    assert chart(found, rows).size[0] > 300 and table(found, rows, {})[2].startswith("| 1, 0 ")
    recalled = evaluate.recall(Oracle(knows_few), corpus, 200, 6)["recall"]
    assert recalled.labels == [n for n in RECALL for _ in range(6)]
    assert recalled.values == [float(n <= 16) for n in recalled.labels]
    other = evaluate.needle_tests(corpus, 200, 5, split="validation")
    assert other[0][2] != evaluate.needle_tests(corpus, 200, 5)[0][2]


def test_scores_of_examples_by_order(corpus):
    """Breaks when accuracy is not the mean over orders, or the margin not best minus worst of one question.

    The oracle repeats the value of the last example.
    """
    answer = {corpus.tokenizer.piece_to_id(name): corpus.tokenizer.piece_to_id(f"«{name[-2]}»") for name in RECORDS}

    def last_value(ids):  # of the record before the question
        return torch.tensor([[0, *(answer.get(token, 0) for token in row[:-1])] for row in ids.tolist()])

    found = evaluate.examples(Oracle(last_value), corpus, 512, 12)
    accuracy, margin = found["examples"], found["examples-margin"]
    by_count = {
        count: [v for own, v in zip(accuracy.labels, accuracy.values, strict=True) if own == count]
        for count in EXAMPLES
    }
    assert all(len(values) == 12 for values in by_count.values())
    assert 0.1 < np.mean(by_count[32]) < 0.4  # one key of four
    assert any(0 < value < 1 for value in accuracy.values)
    for value, own in zip(accuracy.values, margin.values, strict=True):
        assert own == float(0 < value < 1) and (value * ORDERS) == pytest.approx(round(value * ORDERS))


def small(differential: bool) -> TextModel:
    torch.manual_seed(0)
    text = TextConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        rms_norm_eps=1e-5,
        hidden_activation="silu",
    )
    return TextModel(TextModelConfig.of(text, differential)).eval()


@pytest.mark.parametrize("differential", [True, False])
def test_attention_shares_by_hand(differential):
    """Breaks when shares are of other keys or queries, are not normalised, or a difference of maps loses its sign."""
    model = small(differential)
    document = Document(list(range(2, 32)), [(24, 26), (28, 29)], ((5, 9), (12, 15)), (1, 20))
    with torch.no_grad():  # equal queries: uniform maps, and a multiple of one where they are subtracted
        for layer in model.language_model.layers:
            layer.self_attn.q_proj.weight.zero_()
    answer, noise = attention_shares(model, document)
    # what decides tokens 24 and 25 are positions 23 and 24, which see 24 and 25 keys
    assert answer == pytest.approx((4 / 24 + 4 / 25) / 2, rel=1e-5)
    assert noise == pytest.approx((15 / 24 + 15 / 25) / 2, rel=1e-5)
    assert all(layer.self_attn.tap is None for layer in model.language_model.layers)


def test_attention_shares_of_a_difference():
    """Breaks when the second map is left out, or weighed by something else than λ."""
    model = small(True)
    document = Document(list(range(2, 32)), [(24, 25)], ((5, 9),), (1, 20))
    maps = []
    layers = [layer.self_attn for layer in model.language_model.layers]
    for layer in layers:
        layer.q_proj.weight.data.mul_(8)
        layer.tap = maps.append
    with torch.no_grad():
        model(torch.tensor([document.ids[:24]]))
    for layer in layers:
        layer.tap = None
    shares = []
    for number, layer in enumerate(layers):
        for head in range(2):
            first, second = (one[0, head, 23].tolist() for one in maps[2 * number : 2 * number + 2])
            lam = layer.coefficient().item()
            weights = [abs(a - lam * b) for a, b in zip(first, second, strict=True)]
            shares.append(sum(weights[5:9]) / sum(weights))
    assert attention_shares(model, document)[0] == pytest.approx(np.mean(shares), rel=1e-4)


# --- several runs ------------------------------------------------------------------------------------------------


def scores(values, labels=(1, 1, 2, 2), better=1) -> Scores:
    return Scores("title", "x", "y", better, list(labels), ["a", "b", "a", "b"], list(values))


def test_runs_are_taken_together_and_kinds_apart():
    """Breaks when a mean mixes labels or kinds, or the difference has the wrong sign or is not paired."""
    found = {"differential": [scores([1, 0, 1, 1]), scores([1, 1, 1, 1])], "plain": [scores([0, 0, 1, 0])] * 2}
    rows = by_label(found)
    assert list(rows) == [1, 2, "all"] and list(rows[1]) == ["plain", "differential", "difference"]
    assert rows[1]["differential"].mean == 0.75 and rows[2]["plain"].mean == 0.5
    assert rows[1]["difference"].mean == 0.75 and rows["all"]["difference"].mean == pytest.approx(0.625)
    always = by_label({"plain": [scores([0, 1, 0, 1])] * 3, "differential": [scores([1, 2, 1, 2])] * 3})
    assert always["all"]["difference"] == (1, 1, 1) and always["all"]["difference"].significant  # paired: no spread
    assert "difference" not in by_label({"plain": found["plain"], "differential": found["differential"][:1]})[1]
    lines = [" ".join(line.split()) for line in table(found["plain"][0], rows, {})]
    assert lines[0] == "| x | plain | differential | difference |" and len(lines) == 5
    assert lines[2].startswith("| 1 | 0.000 [0.000, 0.000] | 0.750 [")
    with_chance = " ".join(table(found["plain"][0], rows, {1: 0.25})[2].split())
    assert with_chance.startswith("| 1 | 0.250 | 0.000 [0.000, 0.000] | ")
    for panel in (found["plain"][0], found["plain"][0]._replace(labels=["1/1", "1/1", "2/2", "2/2"])):
        again = {kind: [run._replace(labels=panel.labels) for run in runs] for kind, runs in found.items()}
        assert chart(panel, by_label(again)).size[0] > 500


def test_chance_by_hand():
    """Breaks when a table flatters a model that only repeats what it has seen."""
    by_number = {1: 1, 4: 1 / 4 + 3 / 4 / 8, 64: 1 / 64 + 63 / 64 / 8}
    assert chance("needle", [*by_number, "all"]) == chance("recall", by_number) == pytest.approx(by_number)
    assert chance("needle-map", [(4, 25.0), "all"]) == {(4, 25.0): pytest.approx(by_number[4])}
    assert chance("examples", [4, 64]) == {4: 0.25, 64: 0.25}
    assert chance("nll", [16]) == {}


@pytest.mark.long
def test_the_commands_measure_runs(text_folder, tmp_path, capsys):
    """Breaks when a command does not find a run's model or corpus, or its JSON and pictures go missing."""
    from train.systems import text as train

    for number, kind in enumerate(("plain", "differential")):
        flags = "--preset nano --length 256 --batch-size 1 --tokens 400".split()
        flags += ["--attention", kind, "--text", str(text_folder), "--corpus", str(tmp_path / "corpus")]
        train.main([*flags, "--out", str(tmp_path / f"run{number}")])
    capsys.readouterr()
    runs = [str(tmp_path / f"run{number}") for number in (0, 1)]
    evaluate.main(["all", *runs, "--limit", "5", "--out", str(tmp_path / "out"), "--json"])
    told = json.loads(capsys.readouterr().out)
    panels = "nll recall needle needle-map attention attention-noise examples examples-margin".split()
    assert list(told) == panels
    assert set(told["nll"]["all"]) == {"plain", "differential", "difference"}
    assert 6 < told["nll"]["all"]["plain"]["mean"] < 8
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == sorted(told)
    evaluate.main(["nll", runs[1], "--limit", "5", "--out", str(tmp_path / "out")])
    printed = re.sub(" +", " ", capsys.readouterr().out)
    assert "Fewer than three runs" in printed and "| tokens of context, up to | differential |" in printed
    for flags, message in (
        ([runs[0], "--limit", "2"], "expected at least 5"),
        ([str(tmp_path)], "no run folder of train.systems.text"),
        ([runs[0], "--length", "100000"], "no document of the test split"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate.main(["nll", *flags])

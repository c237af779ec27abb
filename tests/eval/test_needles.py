"""Needles in prose: contexts are what they say, replies are those of one pass over all tokens, and
the explorer shows a text."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from eval.explore.__main__ import main as explore
from eval.systems import needles
from eval.systems.needles import FORMS, SHARES, Haystack, ask, sentences_of
from model.attention import attention_modules, tapped
from model.differential import graft
from model.systems.chat import TextTokenizer, load_text_tokenizer
from model.tokenizer import load_tokenizer
from tests.eval.test_explore import data_of
from tests.files import read_json
from tests.pieces import train_pieces
from tests.runs import refused, refuses, words
from weights.load import load_text


@pytest.fixture(scope="module")
def haystacks(llama):
    tokenizer = load_text_tokenizer(llama)
    return {split: Haystack(tokenizer, sentences_of(None), split) for split in FORMS}


def test_a_context_holds_its_facts(haystacks):
    """Breaks when a context has another length, a place is not a fact's, or a question is of
    another fact."""
    for split, haystack in haystacks.items():
        decode = haystack.tokenizer.decode
        begin = haystack.tokenizer.begin
        context = haystack.context(random.Random(3), 700, 6, 4)
        assert len(context.ids) == 700
        assert context.ids[: len(begin)] == begin
        facts = [decode(context.ids[start:end]) for start, end in context.places]
        assert len(set(facts)) == 6
        for fact, (question, answer) in zip(facts[:4], context.questions, strict=True):
            assert fact == f" {decode(question).strip()}{decode(answer)}."
            (city,) = (city for city in FORMS[split].cities if city in fact)
            assert sum(city in other for other in facts) == 2
        taken = {place for start, end in context.places for place in range(start, end)}
        rest = decode([id_ for place, id_ in enumerate(context.ids) if place not in taken])
        assert "of Oslo" not in rest
        assert context == haystack.context(random.Random(3), 700, 6, 4)
        assert len(haystack.context(random.Random(4), 400, 1, 4).questions) == 1
    refused(lambda: haystack.context(random.Random(0), 400, 16, 1), "16 facts fill 400 tokens")
    limit = haystack.tokenizer.max_length
    refused(lambda: haystack.context(random.Random(0), limit, 1, 1), f"the model reads {limit}")


@pytest.mark.parametrize("has_prefix", [False, True])
def test_an_answer_stands_in_its_fact(llama, tmp_path, has_prefix):
    """Breaks when an answer is read as a text by itself, before which a tokenizer such as Llama 2's
    puts a blank of its own: no model could give it."""
    sentences = sentences_of(None)
    pieces = train_pieces(tmp_path / "pieces", sentences[:300], 400, [], has_prefix)
    config = load_text_tokenizer(llama).config
    control = {"pad_token_id": 0, "eos_token_id": (1,), "bos_token_id": 2}
    config = replace(config, text=replace(config.text, vocab_size=400), **control)
    haystack = Haystack(TextTokenizer(config, load_tokenizer(pieces)), sentences, "test")
    for seed in range(5):
        context = haystack.context(random.Random(seed), 900, 6, 6)
        firsts = set()
        end = context.places[0][1]
        text = haystack.tokenizer.decode([*context.ids[:end], *context.questions[0][0]])
        assert not re.search("  | \n", text)
        for (start, end), (_, answer) in zip(context.places, context.questions, strict=True):
            assert context.ids[start:end][-len(answer) - 1 : -1] == answer
            firsts.add(tuple(answer[: context.shared]))
        assert len(firsts) == 1


def test_training_and_test_share_nothing(haystacks):
    """Breaks when what is tested was trained on: a city, a form, a value, a sentence."""
    train = FORMS["train"]
    test = FORMS["test"]
    assert not {*train.cities} & {*test.cities}
    assert not {*train.templates} & {*test.templates}
    dice = [random.Random(n) for n in range(99)]
    assert not {*map(train.value, dice)} & {*map(test.value, dice)}
    parts = [{*map(tuple, haystack.sentences)} for haystack in haystacks.values()]
    assert not parts[0] & parts[1]


@pytest.mark.parametrize("kind", [None, "twin", "v2", "mean", "sink"])
@torch.no_grad()
def test_replies_are_those_of_one_pass(kind, llama, haystacks, seeded):
    """Breaks when a question sees an earlier one, or attention is of another query, place or map."""
    model = load_text(llama)
    if kind:
        graft(model, kind)
        for name, parameter in model.named_parameters():
            if any(part in name for part in "q2 k2 lambda .mu".split()):
                parameter += 0.3 * torch.randn_like(parameter)
    context = haystacks["test"].context(random.Random(1), 500, 3, 3)
    replies = ask(model, context, "it")
    layers = attention_modules(model).values()
    inputs = {}
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args[0]}))
    for number, (question, answer) in enumerate(context.questions):
        maps = {layer: [] for layer in layers}
        ids = torch.tensor([[*context.ids, *question, *answer]])
        with tapped({layer: maps[layer].append for layer in layers}):
            logits = model(ids)[0].double().log_softmax(-1)
        first = 500 + len(question)
        truth = logits[first - 1 : -1].gather(1, ids[0, first:, None])
        assert replies[number].log_probability == pytest.approx(truth.sum().item(), abs=1e-4)
        place = first - 1 + context.shared
        rows = []
        for layer in layers:
            row, *second = (weights[0, :, place] for weights in maps[layer])
            if second:
                factor = layer.factor(inputs[layer])
                factor = factor if factor.shape[-2] == 1 else factor[:, :, place, None]
                row = layer.difference(factor[..., 0].reshape(-1, 1), row, *second)
            rows.append(row.abs() / row.abs().sum(-1, keepdim=True))
        rows = torch.stack(rows)
        start, end = context.places[number]
        shares = replies[number].shares
        np.testing.assert_allclose(shares[0], rows[..., start:end].sum(-1), atol=1e-5)
        np.testing.assert_allclose(shares[2], rows[..., 0], atol=1e-5)
        np.testing.assert_allclose(shares.sum(0), 1, atol=1e-5)


@pytest.mark.long
def test_the_command(llama, haystacks, tmp_path, printed, monkeypatch):
    """Breaks when a rung, a measure or a file is missing, or a mistake is no line."""
    flags = f"--model {llama} --contexts 3 --asked 2 --lengths 500 --facts 1 4"
    needles.main(words(flags, "--out", tmp_path))
    assert "| 500, 4 " in printed()
    rungs = read_json(tmp_path / "needles.json")
    assert [len(rung["questions"]) for rung in rungs] == [3, 6]
    assert np.shape(rungs[0]["heads"]) == (len(SHARES), 2, 2)
    assert (tmp_path / "needles.png").stat().st_size > 1000
    book = tmp_path / "book.txt"
    book.write_text("Too short to be prose.\n\nIt has two lines, and that is not enough.")
    refuses(needles, f"{flags} --text {book}", "book.txt", "1 sentences of prose")
    said = [f"Это первая фраза, её номер {n}. Это вторая, её номер {n}." for n in range(200)]
    book.write_text("\n\n".join(said), encoding="utf-8")
    assert len(sentences_of(book)) == 400  # of another script
    refuses(needles, f"{flags} --facts 2 60", "60 facts fill 500 tokens")
    refuses(needles, f"{flags} --facts 99", "--facts 99", "64 of a form")
    refuses(needles, "--model embedded", "no published language model")
    monkeypatch.setattr(needles, "ask", None)  # nothing is asked before all contexts fit
    lengths = [context.longest for _, context in haystacks["test"].contexts(500, 4, range(3), 2)]
    limit = 499 + max(lengths)
    refuses(needles, f"{flags} --max-length {limit}", f"the model reads {limit}")


def test_the_explorer_shows_a_text(llama, tmp_path):
    """Breaks when the page of a text has a picture's parts, or other words are marked."""
    prompt = "The number of Oslo is 48213. Wood is cheap. The number of Oslo is"
    out = tmp_path / "a.html"
    flags = ["--model", str(llama), "--max-new-tokens", "2", "--out", str(out)]
    explore([*flags, "--prompt", prompt, "--mark", "Oslo is 48213."])
    (case,) = data_of(out.read_text())["cases"]
    start, count = case["picture"]
    words = case["models"][0]["words"]
    assert case["text"]
    assert "".join(words[str(start + n)] for n in range(count)) == " Oslo is 48213."
    assert words["0"] == "‹start›"
    assert "".join(list(words.values())[1:]).startswith(prompt)
    explore([*flags, "--prompt", prompt])
    (case,) = data_of(out.read_text())["cases"]
    assert case["picture"] == [1, len(words) - 2]
    refused(lambda: explore([*flags, "--prompt", prompt, "--mark", "Lima"]), "--mark 'Lima'")
    refused(lambda: explore([*flags, "--prompt", prompt, "--mark", " "]), "marks no token")
    pair = [*flags, "--model", "embedded", "--prompt", prompt]
    refused(lambda: explore(pair), "to language models --prompt alone")

"""Multiple choice by likelihood: against transformers, the harness's prompts and its measures
worked out by hand."""

import csv
import itertools
import json
from argparse import Namespace

import numpy as np
import pytest
import sentencepiece
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, PaliGemmaForConditionalGeneration

from eval import answer
from eval.bench import parser_of
from eval.question import Question
from eval.systems import choices
from model.processor import Processor
from model.systems.language import new_model
from tests.eval.conftest import TOKENIZER
from tests.pieces import language_folder
from tests.runs import refused
from weights.export import export_model


@pytest.mark.long
@torch.no_grad()
def test_likelihoods_are_those_of_transformers(model, processor, source):
    """Breaks when a choice is read with an end token, with other tokens, or after another
    question's prompt."""
    hf = PaliGemmaForConditionalGeneration.from_pretrained(
        source, attn_implementation="eager"
    ).eval()
    words = sentencepiece.SentencePieceProcessor(model_file=str(TOKENIZER))
    blocks = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    texts = {"What is a cat?": ("dog", "two cats", "top left")}
    texts |= {"Row: cat 4 key. What is in column 3?\nAnswer:": ("B", "no")}  # one token each
    shown = {"text": (), "picture": (Image.fromarray(blocks),)}
    pairs = itertools.product(shown.items(), texts.items())
    asks = [
        Question(f"{kind} {text}", kind, p, text, options, scored=True)
        for (kind, p), (text, options) in pairs
    ]
    found = answer.ask_all(model, processor, asks, batch_size=5)
    image = hf.config.vision_config.image_size // hf.config.vision_config.patch_size
    for ask, of_ask in zip(asks, found, strict=True):
        prompt = [hf.config.image_token_index] * image**2 * len(ask.picture) + [
            2,
            *words.encode(ask.prefix + "\n"),
        ]
        pixels = processor(ask.picture, ["-"]).pixel_values if ask.picture else None
        for choice, likelihood in zip(ask.choices, of_ask, strict=True):
            ids = torch.tensor([prompt + words.encode(choice)])
            types = (torch.arange(ids.shape[1]) >= len(prompt)).long()[None]
            positions = torch.arange(1, ids.shape[1] + 1)[None]
            inputs = {
                "token_type_ids": types,
                "attention_mask": torch.ones_like(ids),
                "position_ids": positions,
            }
            logits = (
                hf(input_ids=ids, pixel_values=pixels, use_cache=False, **inputs).logits[0].double()
            )
            each = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(
                -1, ids[0, len(prompt) :, None]
            )
            assert likelihood == pytest.approx(float(each.sum()), abs=1e-5)
    assert len({round(value, 3) for of_ask in found for value in of_ask}) == 10


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("kind", ["gemma2", "llama", "qwen2"])
def test_language_models_read_as_the_harness_lets_them(kind, tmp_path, capsys):
    """Breaks when blanks, bos or the space before a choice are read otherwise, or a long prompt is
    cut and scored."""
    words = language_folder(tmp_path / kind, kind, 128, seed=1)
    words.save_pretrained(tmp_path / kind)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / kind, attn_implementation="eager").eval()
    asked = {
        "Is it \n": ["12 and", "345", "isn't it"],
        "the dog is at the gate Is it:": ["yes", "no"],
    }
    asked |= {f"{'the dog is at the gate ' * 9}Is it": ["a", "the gate"]}
    records = [
        {"question": text, "choices": options, "answer": 0} for text, options in asked.items()
    ]
    (tmp_path / "own").write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = ["--task", "jsonl", "--data", str(tmp_path / "own"), "--model", str(tmp_path / kind)]
    flags += ["--prompt", "{question}", "--dtype", "fp32", "--out", str(tmp_path / "out")]
    refused(
        lambda: choices.main([*flags, "--blind"]),
        "none of 3 questions could be asked",
        "reads text alone",
    )
    choices.main(flags)
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    for (text, options), row in zip(asked.items(), rows, strict=True):
        known = words.encode(text.rstrip(), add_special_tokens=False)
        prompt = [2, *known] if kind == "gemma2" else words.encode(text.rstrip())
        for option, likelihood in zip(options, row["log_likelihoods"], strict=True):
            ids = words.encode(f"{text} {option}", add_special_tokens=False)[len(known) :]
            logits = hf(torch.tensor([prompt + ids])).logits[0].double().log_softmax(-1)
            each = logits[len(prompt) - 1 : -1].gather(-1, torch.tensor(ids)[:, None])
            assert likelihood == pytest.approx(float(each.sum()), abs=1e-5)
    choices.main([*flags, "--max-length", "40", "--no-resume"])
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())) == 2
    assert "tokens with the longest choice, more than 40" in capsys.readouterr().err


@pytest.mark.parametrize("scored", [True, False])
def test_a_choice_that_is_too_long_is_left_out(scored, model):
    """Breaks when one choice of a user's file takes the memory of all, or one with a control token
    ends the command."""
    processor, choices_of = (
        Processor.from_source("embedded", max_length=40),
        [("yes", "no"), ("yes", "no " * 99)],
    )
    choices_of.append(("yes", "<eos>"))
    asks = [
        Question(n, "text", (), "is it?", of_one, scored=scored)
        for n, of_one in enumerate(choices_of)
    ]
    found = answer.ask_all(model, processor, asks, left_out=(left_out := {}))
    assert (
        found[0]
        and found[1:] == [None, None]
        and "more than 40" in left_out[1]
        and "<eos>" in left_out[2]
    )


def test_a_tokenizer_with_more_pieces_than_rows_is_refused(tmp_path):
    """Breaks when an id beyond the embedding ends a command of our own text models with a
    traceback."""
    export_model(new_model("nano", False, 0), tmp_path / "nano", companions=[TOKENIZER])
    refused(
        lambda: choices.main(["--model", f"{tmp_path}/nano", "--out", f"{tmp_path}/out"]),
        "only 1024 rows",
    )


def test_accuracies_by_hand():
    """Breaks when the longer choice is not given its length, a tie takes the last, or subjects
    weigh as questions."""
    rows = [
        (["no", "maybe"], 0, "a", [-4.0, -6.0]),  # by character −2 against −1.2: right, wrong
        (["no", "maybe"], 1, "a", [-4.0, -6.0]),  # wrong, right
        (["one", "two", "six"], 0, "a", [-3.0] * 3),  # a tie: the first, by both
        (["two", "one", "six"], 1, "a", [-3.0] * 3),
        (["学", "éé"], 1, "b", [-2.0, -3.0]),  # characters, not bytes: −2 against −1.5
    ]
    asked = [
        Question(n, "", (), "", tuple(c), truth=right, kind=kind)
        for n, (c, right, kind, _) in enumerate(rows)
    ]
    lines = choices.Choices().summary(
        choices.Choices().rows(asked, [likely for *_, likely in rows])
    )
    expected = {"overall": (40, 60), "a": (50, 50), "b": (0, 100), "mean over subjects": (25, 75)}
    assert {name: tuple(line.values()) for name, line in lines.items()} == expected


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


@pytest.fixture
def files(tmp_path):
    """Two questions of each benchmark, in its official layout."""
    sums = [[f"{n} + 1 =", n, n + 1, "three\nor four", '"', "B"] for n in range(3)]
    for subject in ("abstract_algebra", "anatomy"):
        write_csv(tmp_path / f"mmlu/dev/{subject}_dev.csv", sums)
        write_csv(
            tmp_path / f"mmlu/test/{subject}_test.csv",
            [[" what is it? ", "a", "b", "c", "d", "D"]] * 2,
        )
    head, row = (
        ["", "Question", "A", "B", "C", "D", "Answer"],
        [0, "水是", "冰", "气", "液", "火", "C"],
    )
    for split in ("dev", "test"):
        write_csv(tmp_path / f"cmmlu/{split}/college_law.csv", [head, row])
    options = [
        ["a dog", "a cat", "a man", "none"],
        ["cat", "dog", "man", "car"],
        ["ran", "sat", "ate", "hid"],
    ]
    passage = {
        "article": "A dog ran.",
        "questions": ["Who ran?", "It was a  _  .", "The dog  _  ."],
    }
    (tmp_path / "race/test/high").mkdir(parents=True)
    (tmp_path / "race/test/high/1.txt").write_text(
        json.dumps(passage | {"options": options, "answers": "ABA"})
    )
    options = [
        {"text": text, "label": f"{n}"} for n, text in enumerate(("rock", "water", "air"), 1)
    ]
    question = {"stem": "What is wet?", "choices": options}
    (tmp_path / "arc").write_text(
        json.dumps({"id": "M1", "question": question, "answerKey": "2"}) + "\n"
    )
    Image.new("RGB", (20, 20), "red").save(tmp_path / "red.png")
    own = [
        {"question": "What is 1?", "choices": ["two", "one"], "answer": "one", "subject": "sums"},
        {
            "question": "What color?",
            "choices": ["red", "green", "blue"],
            "answer": 0,
            "image": "red.png",
        },
        {"question": "Which?", "choices": ["cat", "A"], "answer": "A"},
        {"question": "Which?", "choices": ["cat", "dog"], "answer": "B"},
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in own))
    return tmp_path


MMLU_HEAD = "The following are multiple choice questions (with answers) about abstract algebra.\n\n"


def questions_of(flags, template="answer {question}"):
    args = parser_of(choices.Choices()).parse_args(flags)
    return choices.Choices().questions(Namespace(**vars(args), template=template))


def test_prompts_by_hand(files):
    """Breaks when a space or a newline is not where the harness has it, or a shot is not the dev
    file's first."""

    def asked(task, data, *flags):
        return questions_of(["--task", task, "--data", str(files / data), *flags])

    mmlu = asked("mmlu", "mmlu", "--shots", "1")
    shot = '0 + 1 =\nA. 0\nB. 1\nC. three\nor four\nD. "\nAnswer: B\n\n'
    question = "what is it?\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    assert (mmlu[0].id, mmlu[0].prefix) == ("abstract_algebra/0", MMLU_HEAD + shot + question)
    assert (mmlu[0].choices, mmlu[0].truth, mmlu[0].pictures, mmlu[0].scored) == (
        tuple("ABCD"),
        3,
        [],
        True,
    )
    assert [q.kind for q in mmlu] == ["abstract_algebra"] * 2 + ["anatomy"] * 2
    assert asked("mmlu", "mmlu", "--shots", "0")[0].prefix == MMLU_HEAD + question
    law = "水是\nA. 冰\nB. 气\nC. 液\nD. 火\n答案："
    cmmlu = asked("cmmlu", "cmmlu", "--shots", "1")[0]
    assert (
        cmmlu.prefix
        == f"以下是关于大学法律的单项选择题，请直接给出正确答案的选项。\n\n{law} C\n\n{law}"
    )
    assert cmmlu.truth == 2 and len(choices.CMMLU_NAMES) == 67
    (race,), (arc,), own = asked("race", "race"), asked("arc", "arc"), asked("jsonl", "own.jsonl")
    before = "Article: A dog ran.\n\nQuestion: Who ran?\nAnswer: a dog\n _  .dog\n"
    assert (race.id, race.prefix) == ("1", f"{before}The dog  _  .")
    assert (race.choices, race.truth) == (("ran", "sat", "ate", "hid"), 0)
    assert (arc.id, arc.prefix) == ("M1", "Question: What is wet?\nAnswer:")
    assert (arc.choices, arc.truth) == (("rock", "water", "air"), 1)
    assert [(q.prefix, q.truth) for q in own[:2]] == [
        ("answer What is 1?", 1),
        ("answer What color?", 0),
    ]
    assert [(q.id, q.kind) for q in own] == [
        ("1", "sums"),
        ("2", "own"),
        ("3", "own"),
        ("4", "own"),
    ]
    assert [tuple(q.pictures) for q in own] == [(), (files / "red.png",), (), ()]
    assert [q.truth for q in own[2:]] == [1, 1]  # "A" is a choice, "B" a letter
    blind = [choices.Choices().blind(q) for q in own]
    assert blind[0].picture == blind[1].picture and len(blind[0].pictures) == 1


@pytest.mark.long
def test_results_are_read_back(files, source, workplace, capsys):
    """Breaks when results.json does not hold what was asked, with which picture, and how likely
    each choice is."""
    flags = [
        "--task",
        "jsonl",
        "--data",
        str(files / "own.jsonl"),
        "--model",
        source,
        "--json",
        "--out",
        "out",
    ]
    choices.main(flags)
    printed = json.loads(capsys.readouterr().out)["random"]
    written = json.loads((workplace / "out/results.json").read_text())
    assert [len(row["log_likelihoods"]) for row in written] == [2, 3, 2, 2]
    assert [row["picture"] for row in written] == ["", "red.png", "", ""]
    choices.main("--results out/results.json --json".split())
    assert json.loads(capsys.readouterr().out)["out/results.json"] == printed
    nan = float("nan")  # is the largest
    changes = [{"log_likelihoods": [nan, 0]}, {"answer": 2}, {"answer": True}, {"choices": "ab"}]
    changes += [{"log_likelihoods": [0]}, {"subject": ["a"]}, {"picture": 1}]
    for wrong in ([*written, written[0]], *([written[0] | change] for change in changes)):
        (workplace / "wrong.json").write_text(json.dumps(wrong))
        refused(lambda: choices.main(["--results", "wrong.json"]), "wrong.json")


def test_names_are_printed_without_control(workplace, capsys):
    """Breaks when the name of a file or of a subject moves the cursor, or clears the terminal."""
    row = {"id": 1, "subject": "\x1b[31mred\x9b", "picture": "", "answer": 0}
    row |= {"choices": ["a", "b"], "log_likelihoods": [-1.0, -2.0]}
    names = "one\x1b[2J", "two\x9b31m"
    for name, rows in zip(names, ([row], [row, row | {"id": 2}]), strict=True):
        (workplace / name).write_text(json.dumps(rows))
    for more in ((), ("--json",)):
        choices.main([*(f"--results={name}" for name in names), *more])
        printed = capsys.readouterr().out
        assert "one" in printed and printed.replace("\n", "").isprintable()


RACE = '{"article": "a", "questions": ["b", "c"], "options": [%s], "answers": "%s"}'
ARC = '{"id": 1, "question": {"stem": "s", "choices": [%s]}, "answerKey": "B"}'
FOUR, THREE = '["a", "b", "c", "d"]', '["a", "b", "c"]'
BAD = {
    "mmlu/test/anatomy_test.csv": ["q,a,b,c,d,AB\n"],
    "mmlu/dev/anatomy_dev.csv": ["q,a,b,c,d,A\n"],
    "cmmlu/test/college_law.csv": ["0,水是,冰,气,液,火,C\n"],  # without a head
    "race/test/high/1.txt": ['{"article": 3}', RACE % (f"{FOUR}, {FOUR}", "AE")],
    "arc": [ARC % '"a"'],
    "own.jsonl": [{"choices": of} for of in (["a", "a"], ["a"], "ab", ["a", "\ud800"], ["a", " "])],
    "none": [None],
}
for options in (f"{FOUR}, {THREE}", f"{THREE}, {FOUR}", f'"abcd", {FOUR}'):
    BAD["race/test/high/1.txt"].append(RACE % (options, "AB"))
for labels in ("AAB", "ABB", "AC", "B"):  # twice, not there, alone
    listed = ", ".join(f'{{"text": "{n}", "label": "{of}"}}' for n, of in enumerate(labels))
    BAD["arc"].append(ARC % listed)
BAD["own.jsonl"] += [{"answer": "AB"}, {"answer": True}, {"answer": -1}, {"img": "x"}]


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, of in BAD.items() for content in of]
)
def test_bad_files_are_named(files, name, content):
    """A wrong file is scored, or its user is left without the file."""
    if content is not None:
        own = {"question": "q", "choices": ["a", "b"], "answer": 0}
        (files / name).write_text(json.dumps(own | content) if type(content) is dict else content)
    task = {"own.jsonl": "jsonl", "none": "mmlu"}.get(name, name.split("/")[0])
    data, shots = (
        files / (task if "/" in name else name),
        {"mmlu": "3", "cmmlu": "1"}.get(task, "5"),
    )
    flags = ["--task", task, "--data", str(data), "--shots", shots, "--model", "embedded"]
    refused(lambda: choices.main(flags), str(files / name))


def test_embedded_questions_are_fair():
    """Breaks when a choice is there twice, or the right one has a place of its own."""
    questions = questions_of(["--limit", "400"])
    assert len({q.kind for q in questions}) == 3 and len(questions) == 400
    assert all(len(set(q.choices)) == len(q.choices) for q in questions)
    places = [q.truth for q in questions if len(q.choices) == 4]
    assert all(0.15 * len(places) < places.count(place) < 0.35 * len(places) for place in range(4))
    assert len(questions_of(["--limit", "1"])[0].choices) > 1

"""Multiple choice by likelihood: against transformers, the harness's prompts and its measures
worked out by hand."""

import json
from argparse import Namespace

import numpy as np
import pytest
import sentencepiece
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, PaliGemmaForConditionalGeneration

from eval import answer
from eval import ask as ask_command
from eval.bench import parser_of
from eval.explore import __main__ as explore
from eval.question import Question
from eval.systems import choices
from model.processor import Processor
from model.systems.language import new_model
from tests.eval.conftest import TOKENIZER
from tests.files import draw, json_lines, read_json, write_json, write_lines
from tests.pieces import language_folder
from tests.runs import refuses
from tests.runs import words as words_of
from weights.export import export_model


def log_p(logits, prompt, choice):
    """log p of a choice from the logits (1, S, V) of the prompt and the choice."""
    each = logits[0].double().log_softmax(-1)[len(prompt) - 1 : -1]
    return float(each.gather(-1, torch.tensor(choice)[:, None]).sum())


@pytest.mark.long
@torch.no_grad()
def test_likelihoods_are_those_of_transformers(model, processor, source):
    """Breaks when a choice is read with an end token, with other tokens, or after another
    question's prompt."""
    opened = PaliGemmaForConditionalGeneration.from_pretrained
    hf = opened(source, attn_implementation="eager").eval()
    words = sentencepiece.SentencePieceProcessor(model_file=str(TOKENIZER))
    blocks = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    texts = {
        "What is a cat?": ("dog", "two cats", "top left"),
        "Row: cat 4 key. What is in column 3?\nAnswer:": ("B", "no"),  # one token each
    }
    asks = [
        Question(f"{kind} {text}", kind, pictures, text, options, wants_log_probs=True)
        for kind, pictures in {"text": (), "picture": (Image.fromarray(blocks),)}.items()
        for text, options in texts.items()
    ]
    found = answer.ask_all(model, processor, asks, batch_size=5)
    slots = processor.config.num_image_tokens
    for ask, of_ask in zip(asks, found, strict=True):
        prompt = [hf.config.image_token_index] * slots * len(ask.picture)
        prompt += [2, *words.encode(ask.prefix + "\n")]
        pixels = processor(ask.picture, ["-"]).pixel_values if ask.picture else None
        for choice, likelihood in zip(ask.choices, of_ask, strict=True):
            said = words.encode(choice)
            ids = torch.tensor([prompt + said])
            logits = hf(
                input_ids=ids,
                pixel_values=pixels,
                token_type_ids=torch.tensor([[0] * len(prompt) + [1] * len(said)]),
                attention_mask=torch.ones_like(ids),
                position_ids=torch.arange(1, ids.shape[1] + 1)[None],
                use_cache=False,
            ).logits
            assert likelihood == pytest.approx(log_p(logits, prompt, said), abs=1e-5)
    assert len({round(value, 3) for of_ask in found for value in of_ask}) == 10


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("kind", ["gemma2", "llama", "qwen2"])
def test_language_models_read_as_the_harness_lets_them(kind, tmp_path, warned):
    """Breaks when blanks, bos or the space before a choice are read otherwise, or a long prompt is
    cut and scored."""
    words = language_folder(tmp_path / kind, kind, 128, seed=1)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / kind, attn_implementation="eager").eval()
    asked = {
        "Is it \n": ["12 and", "345", "isn't it"],
        "the dog is at the gate Is it:": ["yes", "no"],
        f"{'the dog is at the gate ' * 9}Is it": ["a", "the gate"],
    }
    own = write_lines(
        tmp_path / "own",
        ({"question": text, "choices": of, "answer": 0} for text, of in asked.items()),
    )
    flags = f"--task jsonl --data {own} --model {tmp_path}/{kind} --out {tmp_path}/out"
    flags += " --prompt {question} --dtype fp32"
    refuses(choices, f"{flags} --blind", "none of 3 questions could be asked", "reads text alone")
    choices.main(words_of(flags))
    rows = read_json(tmp_path / "out/results.json")
    start = [2] if kind == "gemma2" else []
    for (text, options), row in zip(asked.items(), rows, strict=True):
        known = words.encode(text.rstrip(), add_special_tokens=False)
        prompt = start + known if start else words.encode(text.rstrip())
        for option, likelihood in zip(options, row["log_likelihoods"], strict=True):
            said = words.encode(f"{text} {option}", add_special_tokens=False)[len(known) :]
            logits = hf(torch.tensor([prompt + said])).logits
            assert likelihood == pytest.approx(log_p(logits, prompt, said), abs=1e-5)
    choices.main(words_of(flags, "--max-length 40 --no-resume"))
    assert len(read_json(tmp_path / "out/results.json")) == 2
    assert "tokens with the longest choice, more than 40" in warned()


def test_our_own_text_models_are_read_and_not_asked(tmp_path):
    """Breaks when one is read as a model of pictures, or an id beyond its embedding ends a command
    with a traceback."""
    for name in ("nano", "0.1m"):
        export_model(new_model(name, False, 0), tmp_path / name, companions=[TOKENIZER])
    small, large = (f"--model {tmp_path / name} --prompt a" for name in ("nano", "0.1m"))
    refuses(ask_command, small, "only 1024 rows")
    refuses(ask_command, large, "is measured, not asked")
    explore.main(words_of(large, "--out", tmp_path / "a.html"))


@pytest.mark.parametrize("scored", [True, False])
def test_a_choice_that_is_too_long_is_left_out(scored, model):
    """Breaks when one choice of a user's file takes the memory of all, or one with a control token
    ends the command."""
    processor = Processor.from_source("embedded", max_length=40)
    asks = [
        Question(n, "text", (), "is it?", ("yes", last), wants_log_probs=scored)
        for n, last in enumerate(("no", "no " * 99, "<eos>"))
    ]
    left_out = {}
    found = answer.ask_all(model, processor, asks, left_out=left_out)
    assert found[0]
    assert found[1:] == [None, None]
    assert "more than 40" in left_out[1]
    assert "<eos>" in left_out[2]


# the choices, the right one, the subject, how likely each is, and what that means
BY_HAND = """["no maybe", 0, "a", [-4.0, -6.0], "by character −2 against −1.2: right, wrong"]
["no maybe", 1, "a", [-4.0, -6.0], "wrong, right"]
["one two six", 0, "a", [-3.0, -3.0, -3.0], "a tie: the first, by both"]
["two one six", 1, "a", [-3.0, -3.0, -3.0]]
["学 éé", 1, "b", [-2.0, -3.0], "characters, not bytes: −2 against −1.5"]"""


def test_accuracies_by_hand():
    """Breaks when the longer choice is not given its length, a tie takes the last, or subjects
    weigh as questions."""
    rows = json_lines(BY_HAND)
    asked = [
        Question(n, "", (), "", tuple(options.split()), truth=right, kind=kind)
        for n, (options, right, kind, *_) in enumerate(rows)
    ]
    benchmark = choices.Choices()
    lines = benchmark.summary(benchmark.rows(asked, [row[3] for row in rows]))
    expected = {"overall": (40, 60), "a": (50, 50), "b": (0, 100), "mean over subjects": (25, 75)}
    assert {name: tuple(line.values()) for name, line in lines.items()} == expected


SUMS = "".join(f'{n} + 1 =,{n},{n + 1},"three\nor four","""",B\n' for n in range(3))
LAW = ",Question,A,B,C,D,Answer\n0,水是,冰,气,液,火,C\n"
OFFICIAL = {
    "mmlu/dev/abstract_algebra_dev.csv": SUMS,
    "mmlu/dev/anatomy_dev.csv": SUMS,
    "mmlu/test/abstract_algebra_test.csv": " what is it? ,a,b,c,d,D\n" * 2,
    "mmlu/test/anatomy_test.csv": " what is it? ,a,b,c,d,D\n" * 2,
    "cmmlu/dev/college_law.csv": LAW,
    "cmmlu/test/college_law.csv": LAW,
    "race/test/high/1.txt": """{
        "article": "A dog ran.", "questions": ["Who ran?", "It was a  _  .", "The dog  _  ."],
        "options": [["a dog", "a cat", "a man", "none"], ["cat", "dog", "man", "car"], ["ran", "sat", "ate", "hid"]],
        "answers": "ABA"}""",
    "arc": """{"id": "M1", "answerKey": "2", "question": {"stem": "What is wet?", "choices": [
        {"text": "rock", "label": "1"}, {"text": "water", "label": "2"}, {"text": "air", "label": "3"}]}}
""".replace("\n   ", ""),
    "own.jsonl": """{"question": "What is 1?", "choices": ["two", "one"], "answer": "one", "subject": "sums"}
{"question": "What color?", "choices": ["red", "green", "blue"], "answer": 0, "image": "red.png"}
{"question": "Which?", "choices": ["cat", "A"], "answer": "A"}
{"question": "Which?", "choices": ["cat", "dog"], "answer": "B"}
""",
}


@pytest.fixture
def files(tmp_path):
    """Two questions of each benchmark, in its official layout."""
    for name, text in OFFICIAL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    draw(tmp_path / "red.png", "red", size=(20, 20))
    return tmp_path


MMLU_HEAD = "The following are multiple choice questions (with answers) about abstract algebra.\n\n"


def questions_of(flags, template="answer {question}"):
    args = parser_of(choices.Choices()).parse_args(flags.split())
    return choices.Choices().questions(Namespace(**vars(args), template=template))


def test_prompts_by_hand(files):
    """Breaks when a space or a newline is not where the harness has it, or a shot is not the dev
    file's first."""

    def asked(task, data, flags=""):
        return questions_of(f"--task {task} --data {files}/{data} {flags}")

    mmlu = asked("mmlu", "mmlu", "--shots 1")
    shot = '0 + 1 =\nA. 0\nB. 1\nC. three\nor four\nD. "\nAnswer: B\n\n'
    question = "what is it?\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    first = mmlu[0]
    assert (first.id, first.prefix) == ("abstract_algebra/0", MMLU_HEAD + shot + question)
    assert (first.choices, first.truth) == (tuple("ABCD"), 3)
    assert (first.pictures, first.wants_log_probs) == ([], True)
    assert [q.kind for q in mmlu] == ["abstract_algebra"] * 2 + ["anatomy"] * 2
    assert asked("mmlu", "mmlu", "--shots 0")[0].prefix == MMLU_HEAD + question
    law = "水是\nA. 冰\nB. 气\nC. 液\nD. 火\n答案："
    cmmlu = asked("cmmlu", "cmmlu", "--shots 1")[0]
    head = "以下是关于大学法律的单项选择题，请直接给出正确答案的选项。\n\n"
    assert (cmmlu.prefix, cmmlu.truth) == (f"{head}{law} C\n\n{law}", 2)
    assert len(choices.CMMLU_NAMES) == 67
    (race,) = asked("race", "race")
    before = "Article: A dog ran.\n\nQuestion: Who ran?\nAnswer: a dog\n _  .dog\n"
    assert (race.id, race.prefix) == ("1", f"{before}The dog  _  .")
    assert (race.choices, race.truth) == (("ran", "sat", "ate", "hid"), 0)
    (arc,) = asked("arc", "arc")
    assert (arc.id, arc.prefix) == ("M1", "Question: What is wet?\nAnswer:")
    assert (arc.choices, arc.truth) == (("rock", "water", "air"), 1)
    own = asked("jsonl", "own.jsonl")
    assert [(q.id, q.kind, q.prefix, q.truth, tuple(q.pictures)) for q in own] == [
        ("1", "sums", "answer What is 1?", 1, ()),
        ("2", "own", "answer What color?", 0, (files / "red.png",)),
        ("3", "own", "answer Which?", 1, ()),  # "A" is a choice
        ("4", "own", "answer Which?", 1, ()),  # "B" is a letter
    ]
    text, picture = (choices.Choices().blind(q) for q in own[:2])
    assert text.picture == picture.picture
    assert len(text.pictures) == 1


@pytest.mark.long
def test_results_are_read_back(files, source, workplace, told):
    """Breaks when results.json does not hold what was asked, with which picture, and how likely
    each choice is."""
    flags = f"--task jsonl --data {files}/own.jsonl --model {source} --out out"
    scores = told(choices, flags)["random"]
    written = read_json(workplace / "out/results.json")
    assert [len(row["log_likelihoods"]) for row in written] == [2, 3, 2, 2]
    assert [row["picture"] for row in written] == ["", "red.png", "", ""]
    assert told(choices, "--results out/results.json")["out/results.json"] == scores
    # NaN is the largest of numbers
    changes = """[{"log_likelihoods": [NaN, 0]}, {"log_likelihoods": [0]}, {"answer": 2},
        {"answer": true}, {"choices": "ab"}, {"subject": ["a"]}, {"picture": 1}]"""
    wrong = [[written[0] | change] for change in json.loads(changes)]
    for rows in ([*written, written[0]], *wrong):
        write_json(workplace / "wrong.json", rows)
        refuses(choices, "--results wrong.json", "wrong.json")


def test_names_are_printed_without_control(workplace, printed):
    """Breaks when the name of a file or of a subject moves the cursor, or clears the terminal."""
    row = json.loads(r"""{"id": 1, "subject": "\u001b[31mred\u009b", "picture": "", "answer": 0,
        "choices": ["a", "b"], "log_likelihoods": [-1.0, -2.0]}""")
    names = ("one\x1b[2J", "two\x9b31m")
    write_json(workplace / names[0], [row])
    write_json(workplace / names[1], [row, row | {"id": 2}])
    for more in ([], ["--json"]):
        choices.main([*(f"--results={name}" for name in names), *more])
        text = printed()
        assert "one" in text
        assert text.replace("\n", "").isprintable()


RACE = '{"article": "a", "questions": ["b", "c"], "options": [%s], "answers": "%s"}'
ARC = '{"id": 1, "question": {"stem": "s", "choices": [%s]}, "answerKey": "B"}'
OWN = json.loads('{"question": "q", "choices": ["a", "b"], "answer": 0}')
FOUR = '["a", "b", "c", "d"]'
THREE = '["a", "b", "c"]'
BAD = [
    ("mmlu/test/anatomy_test.csv", "q,a,b,c,d,AB\n"),
    ("mmlu/dev/anatomy_dev.csv", "q,a,b,c,d,A\n"),
    ("cmmlu/test/college_law.csv", "0,水是,冰,气,液,火,C\n"),  # without a head
    ("race/test/high/1.txt", '{"article": 3}'),
    ("race/test/high/1.txt", RACE % (f"{FOUR}, {FOUR}", "AE")),
    ("race/test/high/1.txt", RACE % (f"{FOUR}, {THREE}", "AB")),
    ("race/test/high/1.txt", RACE % (f"{THREE}, {FOUR}", "AB")),
    ("race/test/high/1.txt", RACE % (f'"abcd", {FOUR}', "AB")),
    ("arc", ARC % '"a"'),
    ("none", None),
]
for labels in "AAB ABB AC B".split():  # twice, not there, alone
    listed = ", ".join(f'{{"text": "{n}", "label": "{of}"}}' for n, of in enumerate(labels))
    BAD.append(("arc", ARC % listed))
for change in r"""
{"choices": ["a", "a"]}
{"choices": ["a"]}
{"choices": "ab"}
{"choices": ["a", "\ud800"]}
{"choices": ["a", " "]}
{"answer": "AB"}
{"answer": true}
{"answer": -1}
{"img": "x"}
""".strip().splitlines():
    BAD.append(("own.jsonl", json.dumps(OWN | json.loads(change))))


@pytest.mark.parametrize("name, content", BAD)
def test_bad_files_are_named(files, name, content):
    """A wrong file is scored, or its user is left without the file."""
    if content is not None:
        (files / name).write_text(content)
    task = {"own.jsonl": "jsonl", "none": "mmlu"}.get(name, name.split("/")[0])
    data = files / (task if "/" in name else name)
    shots = {"mmlu": 3, "cmmlu": 1}.get(task, 5)
    flags = f"--task {task} --data {data} --shots {shots} --model embedded"
    refuses(choices, flags, str(files / name))


def test_embedded_questions_are_fair():
    """Breaks when a choice is there twice, or the right one has a place of its own."""
    questions = questions_of("--limit 400")
    assert len({q.kind for q in questions}) == 3
    assert len(questions) == 400
    assert all(len(set(q.choices)) == len(q.choices) for q in questions)
    places = [q.truth for q in questions if len(q.choices) == 4]
    shares = [places.count(place) / len(places) for place in range(4)]
    assert min(shares) > 0.15
    assert max(shares) < 0.35
    assert len(questions_of("--limit 1")[0].choices) > 1

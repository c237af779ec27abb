"""MMBench: 30 questions worked out by hand, its prompts, the table for the server, and files that
are broken."""

import base64
import csv
import io
from argparse import Namespace
from unittest.mock import Mock

import pytest
from PIL import Image

from eval import answer, mmbench
from eval.bench import AT_LIMIT
from tests.files import read_json, table, write_json
from tests.runs import refuses

FOUR = ("cat", "dog", "a red bus", "hat")
HEAD = "index question hint A B C D answer category image l2-category split".split()
# By rule: first answer → the option of FOUR that it names, or none: undecided. B is right; other
# rotations are answered rightly, by letter.
RULES = {
    "a letter of the last four words": """
        B → B | B. → B | (B) → B | B is what fits → B | The answer is B → B | A dog → A""",
    "no capital and no option's text; a letter one word too early, one also behind, and a text in wHAT": """
        b → | B is what I think → D | B, I think it is a cat: B → A | →""",
    "two letters, then the phrase": """
        A or B Z → | The answer is *B*, A and C are wrong here → B | A or B. The answer  is ***b → B
        A or B. The answer is D or C → D""",
    "one text, also in a word; 36 characters, where 2·18 are allowed, and 37": """
        dog → B | It is a Dog! → B | the dogs of my neighbour, next doors → B | a red bus → C | dog and cat →
        it is the dog of the men who sit here →""",
    "refusals; a letter goes before Z": """
        Z → Z | Z dog → Z | B Z → B | Cannot determine the answer: B → Z
        I'm sorry, but without the image provided, dog → Z""",
}
# first answer, options, what it names, the answer to the last rotation if it is wrong
BY_HAND = []
for case in "|".join(RULES.values()).replace("\n", "|").split("|"):
    if case.strip():
        said, named = case.split("→")
        BY_HAND.append((said.strip(), FOUR, named.strip(), ""))
BY_HAND += [
    ("B", FOUR, "B", "A"),  # right at first, wrong when the options have changed places
    # by text
    ("Failed to obtain answer via API. A", ("yes", "Failed to obtain answer via API"), "B", ""),
    ("D", ("yes", "no"), "", ""),  # no option
    ("no", ("yes", "no"), "B", ""),
    ("B", ("yes", "no", "both"), "B", ""),
]


def picture(color):
    file = io.BytesIO()
    Image.new("RGB", (20, 20), color).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def rows_of(questions=BY_HAND):
    """The file's rows, as official ones are: in rotation k option i stands where option i + k
    stood."""
    rows = []
    red = picture("red")
    blue = picture("blue")
    for number, (_, options, *_) in enumerate(questions):
        for turn in range(len(options)):
            order = options[turn:] + options[:turn]
            image = red if number == turn == 0 else blue
            row = [number + turn * mmbench.BASE, f"what, {number}?"]
            row += ["look" if number == 1 else "nan", *order, *[""] * (4 - len(order))]
            row += ["ABCD"[order.index(options[1])], f"l3-{number % 3}"]
            row += ["0" if number == 1 else image, f"l2-{number % 2}"]
            rows.append([*row, "dev" if number < 20 else "test"])
    return rows


def write(path, rows, head=HEAD):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t").writerows([head, *rows])
    return str(path)


def test_thirty_questions_by_hand(workplace, scored):
    """Breaks when an answer names another option than VLMEvalKit's rules say, or one rotation is
    enough."""
    for text, options, named, _ in BY_HAND:
        letters = dict(zip("ABCD", options, strict=False))
        assert (mmbench.letter_of(text, letters) or "") == named, text
    said = []
    for index, *_, right, _, _, _, _ in rows_of():
        turn, number = divmod(index, mmbench.BASE)
        text, options, _, wrong = BY_HAND[number]
        if turn:
            text = right
        if wrong and turn == len(options) - 1:
            text = wrong
        said.append({"question_id": index, "answer": text})
    write(workplace / "T", rows_of())
    found = scored(mmbench, "--tsv T", said)
    hits = [named == "B" and not wrong for *_, named, wrong in BY_HAND]
    lines = {name: of["CircularEval"] for name, of in found["summary"].items()}
    assert found["measures"]["CircularEval"]["questions"] == len(hits) == 30
    assert sum(hits) == 14
    assert (lines["overall"], lines["dev"]) == (46.67, 5.0 * sum(hits[:20]))  # 14/30
    assert found["summary"]["overall"]["undecided"] == round(100 * 6 / len(said), 2)
    third = hits[22:30:3]
    assert lines["dev l2-0"] == 10 * sum(hits[0:20:2])
    assert lines["test l3-1"] == round(100 * sum(third) / len(third), 2)


# options → the answers that name each, in its place; behind the last "/" those that name none
IN_WORDS = """
    A cat | A dog | A bird | A fish → a cat. | A dog | it is  a BIRD | A fish / B | A | (B) | | A dog, a cat
    1 | 10 | 11 | 1.5 → 1 | 10 | 11. | 1.5 / 2.5 | 2.1 | -1 | 1,000 | 111
    left | upper left | right | upper right → left | Upper\tleft | on the right | upper right / left, right | left-hand
    woman | man | C++ | C → a woman | the man. | C++ | C / men | C+++ C
    dog | cat | dog and cat | none → dog | cat | Dog and cat | none / dog or cat
    狗 | 左 | 左上 | t-shirt → 是狗 | 左 | 左上 | t-shirt / 狗左 | T shirt
    a shirt | same | Same | no → a shirt |  |  | no / same | shirt"""


def test_an_answer_in_words_names_the_option_of_these_words():
    """Breaks when "A dog" is option A, "10" also "1", or one of two named options counts."""
    for line in IN_WORDS.strip().splitlines():
        texts, rest = line.split("→")
        named, neither = rest.split("/")
        options = dict(zip("ABCD", map(str.strip, texts.split("|")), strict=True))
        for letter, said in zip(options, named.split("|"), strict=True):
            if said.strip():
                assert mmbench.letter_of(said, options, "paligemma") == letter, said
        for said in neither.split("|"):
            assert mmbench.letter_of(said, options, "paligemma") is None, said


def test_a_file_of_answers_in_words(workplace, scored):
    """Breaks when right answers of a PaliGemma do not score 100, or a file is scored in another
    wording than it was asked in."""
    texts = "A cat|A dog|no, 1|10|left|upper left|man|woman|A|B|yes|no|Dog|A dog".split("|")
    rows = rows_of([("", (texts[n], texts[n + 1]), "", "") for n in range(0, 14, 2)])
    write(workplace / "T", rows)
    said = [{"index": row[0], "prediction": row["ABCD".index(row[7]) + 3]} for row in rows]
    found = scored(mmbench, "--tsv T --wording paligemma", said[::-1])["summary"]
    assert found["overall"] == {"CircularEval": 100, "undecided": 0}
    said[1]["question"] = "answer en  what, 1? choose from: A dog \t A cat"
    write_json(workplace / "R", said)
    refuses(mmbench, "--tsv T --results R", "R[1]: ", "--wording")
    said[0]["generated_text"] = said[0]["prediction"] + "."  # one of both is the model's
    write_json(workplace / "R", said)
    refuses(mmbench, "--tsv T --results R", "R[0]: ", "'prediction', 'generated_text' differ")
    said[0] |= {"id": 1, "output_tokens": 3}
    write_json(workplace / "R", said)
    refuses(mmbench, "--tsv T --results R", "R[0]: ", "of several questions")
    said[0]["questionID"] = said[0].pop("index")
    del said[0]["id"]
    write_json(workplace / "R", said)
    refuses(mmbench, "--tsv T --results R", "R[0]: ", "'questionID' is no id")


def test_questions_on_one_picture_belong_together(workplace):
    """An interval is too narrow, since questions on one picture, which may stand in another's row,
    count alone."""
    flags = Namespace(tsv=write(workplace / "T", rows_of()), limit=None, wording="llava")
    groups = {q.id: q.group for q in mmbench.MMBench().questions(flags)}
    assert groups[2] == groups[3] != groups[1] == groups[0] == groups[mmbench.BASE]
    assert {groups[n] for n in range(30)} == {groups[0], groups[2]}


@pytest.mark.parametrize("text", ["None", "none", "nan", "N/A", "null", "", "#N/A N/A"])
def test_what_pandas_reads_as_nothing_is_no_option(text, workplace):
    """An option "None" is taken for none, and the file refused whose right answer it is; "N/A" is
    one."""
    is_option = text.lower() == "none"
    options = ("cat", text, "a red bus", "hat") if is_option else FOUR[:3]
    rows = rows_of([("B", options)])
    if not is_option:
        for row in rows:
            row[HEAD.index("D")] = text
    (lines,) = mmbench.read_lines(write(workplace / "T", rows))
    for line in lines:
        found = list(mmbench.options_in(line).values())
        assert (text in found) == is_option
        assert len(found) == len(options)


def test_prompts_by_hand():
    """Breaks when a wording is not the one that its models were evaluated with."""
    line = {"A": "cat", "B": "dog", "question": "Who?"}
    letter = "Answer with the option's letter from the given choices directly."
    for wording, change, prompt in (
        ("llava", {"hint": "look"}, f"look\nWho?\nA. cat\nB. dog\n{letter}"),
        ("llava", {"question": "谁？"}, "谁？\nA. cat\nB. dog\n请直接回答选项字母。"),
        ("paligemma", {}, "answer en  Who? choose from: cat \t dog"),
    ):
        assert mmbench.prompt_of(wording, line | change) == prompt


@pytest.mark.long
def test_a_model_is_asked(source, workplace, told_of_one, monkeypatch):
    """Breaks when a picture is not the row's, the submission lacks a row, or a row without an
    answer has one."""
    ask_all = Mock(wraps=answer.ask_all)
    monkeypatch.setattr(answer, "ask_all", ask_all)
    rows = rows_of(BY_HAND[:3])
    rows[5][HEAD.index("image")] = "no picture"
    write(workplace / "T", rows)
    found = told_of_one(mmbench, "--model", source, "--tsv T --max-new-tokens 2 --out free")
    assert found["measures"]["CircularEval"]["questions"] == 2  # that of rows[5] is not scored
    left_out = read_json(workplace / "free/scores.json")["left_out"]
    assert left_out == {"1000001": "index 1000001: image is no base64: download the file again"}
    asked = [q for q in ask_all.call_args.args[2] if q.id != 1000001]
    colors = [Image.open(q.images()[0]).getpixel((0, 0)) for q in asked]
    red = (255, 0, 0)
    blue = (0, 0, 255)
    assert colors == [red, *[blue] * 3, *[red] * 3, *[blue] * 4]
    with (workplace / "free/submission.tsv").open(newline="") as file:
        head, *cells = csv.reader(file, delimiter="\t")
    assert head == "index question A B C D prediction answer split".split()
    assert sorted(row[0] for row in cells) == sorted(str(row[0]) for row in rows)
    assert cells[1][:6] == ["1000000", "what, 0?", "dog", "a red bus", "hat", "cat"]
    results = read_json(workplace / "free/results.json")
    assert found[AT_LIMIT] == 100 * sum(not result["ended"] for result in results) / 11
    said = {result["question_id"]: result["answer"] for result in results}
    assert said.keys() == {q.id for q in asked}
    assert None not in said.values()
    refuses(mmbench, "--tsv T --results free/results.json", "--wording")


def test_bad_files_are_named(workplace):
    """A wrong file is scored, or its user is left without the file, the line and the remedy."""
    wrong = """0 | x | T:3: expected an index
        0 | 4000000 | T: question 0 lacks some of its 4 rotations
        7 | E | T:3: answer is 'E', not one of A, B, C, D"""
    for place, value, expected in table(wrong):
        rows = rows_of(BY_HAND[:1])
        rows[1][int(place)] = value
        write(workplace / "T", rows)
        refuses(mmbench, "--tsv T --model embedded", expected)
    write(workplace / "T", rows, ["index" if name == "hint" else name for name in HEAD])
    refuses(mmbench, "--tsv T --model embedded", "T: 1 duplicate id(s) ('index')")

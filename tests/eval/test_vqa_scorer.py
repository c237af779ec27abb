"""The VQA scorers against cases worked out by hand from the published rules, and the files they
read and refuse."""

from collections import Counter
from dataclasses import replace

import pytest

from eval import vqa, vqa_scoring
from eval.bench import parser_of
from eval.data.published import Annotation
from eval.data.records import Record
from eval.question import Question
from tests.files import table, write_json
from tests.runs import refused, refuses


def annotation(answers, ids=True, **fields):
    """An annotation from {answer: how many annotators gave it}, in that order, with VQAv2's
    answer_id or without."""
    given = [answer for answer, count in answers.items() for _ in range(count)]
    records = [{"answer": answer, "answer_confidence": "yes"} for answer in given]
    if ids:
        for number, record in enumerate(records, start=1):
            record["answer_id"] = number
    return Annotation(1, tuple(records), max(answers, key=answers.get), **fields)


# By rule: text → what remains of it, cases between bars.
NORMALISED = {
    "marks between words become a space, beside a space they go; what stands beside one is seen first": """
        red/blue → red blue | red / blue → red blue | t-shirt → t shirt | is it -1 → is it 1 | a-b -c → ab c
        x-y;-z → x y z | (left) → left | what?! → what | "stop" → stop | {x}[y]<z>@`w`=+\\_; → x y z w""",
    "with digit, comma, digit anywhere every mark goes": """
        1,000 → 1000 | red-1,000-2 → red10002 | red,blue → red blue | 1, 2 → 1 2""",
    "periods go unless a digit follows": """
        yes. → yes | u.s. → us | 3.5 → 3.5 | .5 → .5 | 5. → 5 | 5.. → 5 | a.b → ab""",
    "other marks stay": """
        10:30 → 10:30 | salt & pepper → salt & pepper | 100% → 100% | $5 #1 2*3 → $5 #1 2*3 | dog's → dog's""",
    "numbers up to ten, articles, case": """
        None → 0 | zero → 0 | One → 1 | ten → 10 | eleven → eleven | two dogs → 2 dogs
        The Dog and a cat → dog and cat | a → | an apple → apple | theater → theater""",
    "one lost apostrophe comes back, two do not": """
        dont → don't | dont know → don't know | don't → don't | couldntve → couldntve | couldn'tve → couldn't've
        couldnt've → couldn't've | yall'd've → y'all'd've | y'all'dve → y'all'd've | ows'at → ows'at
        'ows'at → 'ow's'at | ow's'at → 'ow's'at | twas → 'twas | oclock → o'clock | youre → you're""",
    "exceptions of the list": """
        lets → lets | shes → shes | somebody'd → somebodyd | somebodyd → somebodyd | Im → im | Ive → ive""",
}


@pytest.mark.parametrize("rule", NORMALISED)
def test_normalisation_by_hand(rule):
    """A rule of the official normaliser is missing or applied to the wrong text: published scores
    are not reached."""
    for case in NORMALISED[rule].replace("\n", "|").split("|"):
        if case.strip():
            text, clean = (part.strip() for part in case.split("→"))
            assert vqa_scoring.clean(text) == clean, text
    assert vqa_scoring.clean("." * 40 + "x") == "." * 8 + "x"  # at most 32 periods go
    assert vqa_scoring.clean_space("\n yes\tit is \n") == "yes it is"


# Scorers: by answers of the annotators, what of (prediction → accuracy)


def check(scorer, answers, said, ids=True):
    for case in said.split("|"):
        prediction, accuracy = case.split("→")
        prediction = prediction.strip().strip('"').replace("\\n", "\n")
        assert scorer(annotation(answers, ids), prediction) == pytest.approx(
            float(accuracy), abs=1e-4
        ), case


def test_leave_one_out():
    """Accuracy is min(1, matches / 3) without leaving annotators out: 3 of 10 would count 1 instead
    of 0.9."""
    for matches in range(10):
        given = annotation({"red": matches, "blue": 9 - matches, "green": 1})
        assert vqa_scoring.official(given, "red") == pytest.approx(min(1, 0.3 * matches), abs=1e-12)


def test_unanimous_answers_are_not_normalised():
    """Upstream compares strings without space at the ends where all ten agree; normalising inflates
    yes/no scores."""
    for answers in ({"yes": 10}, {"yes": 5, " yes\n": 5}):
        said = 'yes → 1 | "yes\\n" → 1 | " yes" → 1 | Yes → 0 | Yes. → 0 | yes. → 0 | no → 0'
        check(vqa_scoring.official, answers, said)


def test_both_sides_are_normalised_where_annotators_differ():
    """Ground truths or predictions stay raw: every answer with an article, a digit word or a period
    is lost."""
    for case in """yes: Yes. → 1 / Yes!: yes → 1 / 1,000: 1000 → 1 / two: 2 → 1 / none: 0 → 1 / the dog: a dog → 1 /
        t-shirt: t shirt → 1 | tshirt → 0 / 3.5: 35 → 0 / dog's: dogs → 0""".split("/"):
        truth, said = case.strip().split(": ")
        check(vqa_scoring.official, {truth: 9, "something else": 1}, said)


def test_equal_records_are_left_out_together():
    """Without answer_id, upstream's `!=` leaves out all equal records, normalised: 4 of 10 then
    count 0.6, not 1."""
    official = vqa_scoring.official
    # four equal records see no other match (0), the six others see four (1): 6 / 10
    check(official, {"yes": 4, "no": 6}, "yes → 0.6", ids=False)
    check(official, {"yes": 4, "no": 6}, "yes → 1")
    check(official, {"Yes": 2, "yes": 2, "no": 6}, "yes → 0.6", ids=False)
    check(official, {"yes": 2}, "yes → 0.33333")  # the mean over the annotators there are
    records = [{"answer": "yes", "answer_confidence": c} for c in "yes yes maybe maybe".split()]
    records += [{"answer": "no", "answer_confidence": "yes"}] * 6
    # two of four "maybe" leave two other matches: (4 · 2/3 + 6) / 10
    accuracy = official(Annotation(1, tuple(records), "no"), "yes")
    assert accuracy == pytest.approx((4 * 2 / 3 + 6) / 10)


# answers, with how many annotators gave each: what is said → its accuracy
OTHERS = {
    # the paper's script only lowers case and does not leave out
    "paper": """
        net 3, Mesh 7: net → 1 | NET → 1 | mesh → 1 | " net" → 0
        net 2, mesh 8: net → 0.66667
        the net 10: net → 0 | the net. → 0
        2 10: two → 0""",
    # TextVQA's tokens differ from VQAv2's: "'s" is a word of its own, and commas go first, so they
    # never become a space; unanimous answers are normalised too; equal ones are still ten annotators
    "textvqa": """
        yes 10: Yes. → 1
        Joe's 10: joe 's → 1 | Joe's → 1
        is?it 10: isit → 1 | is?it → 1
        red,blue 10: redblue → 1
        coca-cola 10: coca cola → 1
        yes 4, no 6: yes → 1
        yes 3, no 7: yes → 0.9""",
    # VizWiz normalises predictions only
    "vizwiz": """
        yes 10: Yes. → 1
        Yes 10: Yes → 0
        the dog 10: the dog → 0
        dog 10: the dog → 1
        yes 2, no 8: yes → 0.6""",
    # GQA is exact match without case, and without blanks and periods at the ends
    "gqa": r"""
         yes\n 1: Yes. → 1 | "Yes. " → 1 | yes it is → 0
        t-shirt 1: t shirt → 0
        two 1: 2 → 0""",
}


@pytest.mark.parametrize("scoring", OTHERS)
def test_the_other_scorers(scoring):
    """Another normalisation, or another rule of leaving out, cannot reproduce published
    accuracies."""
    for line in OTHERS[scoring].strip("\n").splitlines():
        counted, said = line.removeprefix(" " * 8).split(": ", 1)
        pairs = [part.rpartition(" ") for part in counted.replace("\\n", "\n").split(", ")]
        answers = {answer: int(count) for answer, _, count in pairs}
        check(vqa_scoring.SCORERS[scoring], answers, said, ids=False)


def test_exact_match_ignores_case_and_outer_space_only():
    """One of several right answers is enough; punctuation and inner space count."""
    for said, truths in {
        "Red ": ["red"],
        "red": ["blue", " RED\n"],
        "cafe\u0301": ["caf\u00e9"],  # an accent of its own
    }.items():
        assert vqa_scoring.exact_match(said, truths)
    for said, truths in {"red.": ["red"], "dark  red": ["dark red"], "re": ["red"], "": []}.items():
        assert not vqa_scoring.exact_match(said, truths)


def test_own_examples_are_scored_as_vqav2_where_four_or_more_have_answered():
    """Equal answers of several people count as one, three people or spellings of one answer make an
    accuracy, ten people who all differ make none, or a right answer is not taken."""
    given = Record("r", "k", (), (("q", "red"),), ("red", "blue", "blue", "blue"))
    scores = vqa_scoring.record_scores(given, "blue")
    assert scores == {"exact_match": 1, "vqa_accuracy": pytest.approx(0.75)}
    three = replace(given, answers=given.answers[1:])
    assert vqa_scoring.record_scores(three, "red") == {"exact_match": 1}
    assert replace(given, answers=("blue", " ")).truths == ["blue", "red"]
    # VQAv2's ten annotators may all differ; fewer who do are spellings of one answer
    for answers, more in ("abcdefghij", {"vqa_accuracy": pytest.approx(0.3)}), ("abcdefghi", {}):
        scores = vqa_scoring.record_scores(replace(given, answers=tuple(answers)), "c")
        assert scores == {"exact_match": 1} | more


def test_summary_by_type_rounds_once():
    """Means over questions, not over types, rounded to two decimals at the end as upstream."""
    one = annotation({"yes": 10}, answer_type="yes/no", question_type="is the")
    other = one._replace(answer_type="other", question_type=None)
    summary = vqa_scoring.summarize([(one, 1), (one, 0.3), (one, 0), (other, 0.9)])
    # 100 · 2.2 / 4; 100 · 1.3 / 3 = 43.333…; a question without a type counts in the overall mean
    # only
    assert summary == {
        "overall": 55.0,
        "per_answer_type": {"yes/no": 43.33, "other": 90.0},
        "per_question_type": {"is the": 43.33},
    }


SAID = {
    70: ("yes/no", "is it", ["yes"] * 10),
    71: ("number", "how many", ["2"] * 3 + ["3"] * 7),
    80: ("other", "what is", ["dog"] * 2 + ["cat"] * 8),
}
RESULTS = [{"question_id": n, "answer": a} for n, a in {80: "A dog.", 70: "yes", 71: "two"}.items()]


def files(most=10):
    """VQAv2's files of questions and annotations, with the first `most` of what is SAID to each
    question."""
    asked, listed = [], []
    for id_, (kind, first, answers) in SAID.items():
        about = {"question_id": id_, "image_id": id_ // 10}
        asked.append(about | {"question": f"{first}?"})
        given = annotation(Counter(answers[:most])).answers
        types = {"answer_type": kind, "question_type": first, "multiple_choice_answer": answers[0]}
        listed.append(about | {"answers": given} | types)
    return {"data_subtype": "val2014", "questions": asked}, {"annotations": listed}


@pytest.fixture
def scores(workplace, told):
    """A function that scores RESULTS, or others."""
    for name, value in zip("QA", files(), strict=True):
        write_json(workplace / name, value)

    def run(*more, results=RESULTS, source="--questions Q --annotations A"):
        write_json(workplace / "R", results)
        return told(vqa, source, "--results R", *more)

    return run


def values(found):
    return {line: of["VQA accuracy"] for line, of in found["R"]["summary"].items()}


def test_a_results_file(scores, workplace):
    """The percents have changed: 1, 3 matches of ten (0.9), 2 matches (0.6) make 100 · 2.5 / 3.
    --scoring is not passed on; or a file with one answer a question, where no other annotator
    agrees, scores 0."""
    found = scores()
    types = {"yes/no": 100.0, "number": 90.0, "other": 60.0}
    questions = {"  is it": 100.0, "  how many": 90.0, "  what is": 60.0}
    assert values(found) == {"overall": 83.33} | types | questions
    measure = found["R"]["measures"]["VQA accuracy, official scoring"]
    assert measure["mean"] == pytest.approx(250 / 3)
    assert measure["questions"] == 3
    overall = {"paper": 33.33, "textvqa": 83.33, "vizwiz": 83.33, "gqa": 33.33}
    for scoring, percent in overall.items():
        assert values(scores("--scoring", scoring))["overall"] == percent
    write_json(workplace / "A", files(most=1)[1])
    assert list(scores()["R"]["measures"]) == ["VQA accuracy, gqa scoring"]
    write_json(workplace / "A", files(most=3)[1])
    refused(scores, "fewer than 4 answers")


def test_own_examples_are_scored_without_their_pictures(scores, workplace):
    """Breaks when a file of answers to own examples asks for the pictures."""
    (workplace / "own.jsonl").write_text('{"image": "gone.png", "prefix": "a", "suffix": "b"}\n')
    said = [{"question_id": "own.jsonl:1", "answer": "b"}]
    found = scores(results=said, source="--data jsonl:own.jsonl")["R"]
    assert found["summary"] == {"overall": {"exact_match": 100}}
    refuses(vqa, "--data jsonl:own.jsonl --model embedded", "'gone.png'")


def test_gqa_in_its_own_layouts(scores, workplace):
    """GQA publishes questions and answers in one file, and scores the balanced ones alone."""
    (workplace / "Q").write_text("""{
        "1": {"question": "Is it?", "answer": "yes", "types": {"structural": "verify"}, "isBalanced": true,
            "imageId": "7"},
        "2": {"question": "What?", "answer": "dog", "types": {"structural": "query"}, "isBalanced": true,
            "imageId": "7"},
        "3": {"question": "What?", "answer": "cat", "types": {"structural": "verify"}, "isBalanced": false,
            "imageId": "7"}}""")
    said = {"1": "Yes.", "2": "cat", "3": "cat"}
    results = [{"questionId": n, "prediction": text} for n, text in said.items()]
    found = scores(results=results, source="--questions Q")
    expected = {"overall": 50.0, "binary": 100.0, "open": 0.0, "  verify": 100.0, "  query": 0.0}
    assert values(found) == expected
    assert list(found["R"]["measures"]) == ["VQA accuracy, gqa scoring"]


def test_text_only_guesses_by_hand():
    """The baseline knows more than the training questions, or less than their words."""

    def questions(text):
        made = []
        for n, (asked, kind, answer) in enumerate(table(text)):
            truth = Annotation(n, (), answer, "", kind, question=asked)
            made.append(Question(n, "", (), "", truth=truth))
        return made

    train = questions("""Is it? | is | yes
        Is it? | is | yes
        Is it? | is | no
        Is he? | is | no
        Is he? | is | no
        How many? | how | 2
        How many? | how | 1""")
    test = questions("""Is it? | is | x
        Is she? | is | x
        How many? | how | x
        Why? | why | x""")
    # the question; its type (no 3, yes 2); a tie goes to the first in the alphabet; all (no 3, yes
    # 2, …)
    assert vqa.text_only_guesses(test, train) == "yes no 1 no".split()
    asked = vqa.embedded(600)
    accuracy = vqa.guess_accuracy(asked)
    guesses = vqa.text_only_guesses(asked, vqa.embedded(vqa.TRAIN_QUESTIONS, "train"))
    hits = sum(guess == q.truth.answer for guess, q in zip(guesses, asked, strict=True))
    assert set(accuracy) == {"overall", "yes/no", "number", "other"}
    assert 25 < accuracy["overall"] == round(hits / 6, 2) < 45
    # of models that are asked in other words it is the same
    benchmark = vqa.Vqa()
    flags = parser_of(benchmark).parse_args(["--limit", "300"])
    for words in ("Q: {question}", vqa.PROMPT):
        flags.template = words
        asked = benchmark.questions(flags)
        guessed = benchmark.baselines(benchmark.rows(asked, [""] * 300))[vqa.GUESS]
        assert [row.answer for row in guessed] == guesses[:300]
    assert len(set(guesses[:300])) > 10

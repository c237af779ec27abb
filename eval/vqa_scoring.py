"""The published scorers of VQAv2, TextVQA, VizWiz and GQA, and the script of the differential PaliGemma paper.

In: annotations and answers. Out: the accuracy of each question, and its mean overall and by type.

The VQAv2 scorer follows the official one, its oddities included, since they are part of all published numbers
(https://visualqa.org/evaluation.html; Antol et al., "VQA: Visual Question Answering", ICCV 2015).
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from eval.data import Annotation
from eval.records import Record
from model.common import UserError, shown

# Normalisation of answers

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'  # kept by the official scorer: ' : & % $ # *
DIGIT_COMMA_DIGIT = re.compile(r"\d,\d")
LONE_PERIOD = re.compile(r"\.(?!\d)")
NUMBERS = {"none": "0"} | {
    word: str(number) for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
}
ARTICLES = {"a", "an", "the"}
_CONTRACTED = """
    'ow's'at 'twas ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't
    he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't
    needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll
    somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd
    there'd've there're there's they'd they'd've they'll they're they've wasn't we'd've we've weren't what'll what're
    what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
    wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've""".split()
# A word without one of its apostrophes gets it back; one entry of the official list is reversed.
CONTRACTIONS = {
    word[:at] + word[at + 1 :]: word for word in _CONTRACTED for at, letter in enumerate(word) if letter == "'"
} | {"somebody'd": "somebodyd"}


def clean_space(text: str) -> str:
    """Newlines and tabs as spaces, none at the ends."""
    return text.replace("\n", " ").replace("\t", " ").strip()


def clean_punctuation(text: str) -> str:
    """Punctuation deleted, or replaced by a space between two words; periods deleted unless a digit follows."""
    result, number = text, DIGIT_COMMA_DIGIT.search(text)
    for mark in PUNCTUATION:
        # decided on the original text: "1,000 (approx)" loses its comma, "red/blue" becomes two words
        apart = mark + " " in text or " " + mark in text
        result = result.replace(mark, "" if apart or number else " ")
    return LONE_PERIOD.sub("", result, count=32)  # the official call passes re.UNICODE, 32, where the count goes


def clean_words(text: str) -> str:
    """Lower case; numbers up to ten as digits; no articles; contractions with their apostrophe."""
    words = (NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


@lru_cache(maxsize=1 << 18)  # a few thousand answers make up most of VQAv2
def clean(text: str) -> str:
    """Punctuation, then words."""
    return clean_words(clean_punctuation(text))


def clean_textvqa(text: str) -> str:
    """The normaliser of TextVQA's scorer (EvalAI): case, commas and possessives, then `clean`."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    return clean(clean_space(text))


ANNOTATORS = 4  # with fewer answers, or mere spellings of one, no answer could reach 1

# Scorers: from an annotation and a prediction to an accuracy in 0..1


def leave_one_out(records: list, prediction: str) -> float:
    """Mean over the annotators of min(1, matches among the *other* records / 3).

    "Other" means unequal: records that are equal (answers without ids) are all left out together, as upstream.
    """
    matching = [record for record in records if record["answer"] == prediction]
    accuracies = [min(1, (len(matching) - matching.count(record)) / 3) for record in records]
    return sum(accuracies) / len(accuracies)


def official(annotation: Annotation, prediction: str) -> float:
    """VQAv2's scorer (2021 and later): answers are normalised only where the annotators do not all agree."""
    prediction = clean_space(prediction)
    records = [given | {"answer": clean_space(given["answer"])} for given in annotation.answers]
    if len({record["answer"] for record in records}) > 1:
        prediction = clean(prediction)
        records = [record | {"answer": clean(record["answer"])} for record in records]
    return leave_one_out(records, prediction)


def paper(annotation: Annotation, prediction: str) -> float:
    """The script of the differential PaliGemma paper: min(1, matches / 3) on lower-cased raw strings."""
    return min(1, sum(given["answer"].lower() == prediction.lower() for given in annotation.answers) / 3)


def textvqa(annotation: Annotation, prediction: str) -> float:
    """TextVQA's scorer: its own normaliser on both sides, annotators left out by position."""
    return leave_one_out(_by_position(annotation, clean_textvqa), clean_textvqa(prediction))


def vizwiz(annotation: Annotation, prediction: str) -> float:
    """VizWiz's scorer: only the prediction is normalised, annotators left out by position."""
    return leave_one_out(_by_position(annotation, str), clean(clean_space(prediction)))


def gqa(annotation: Annotation, prediction: str) -> float:
    """GQA's exact match, without blanks and periods at the ends and without case."""
    said, right = (text.strip().strip(".").lower() for text in (prediction, annotation.answer))
    return float(said == right)


def exact_match(answer: str, truths: Iterable[str]) -> bool:
    """Whether the answer is one of the right ones; case, space at the ends, and how accents are written aside."""
    said, *right = (unicodedata.normalize("NFC", text).strip().lower() for text in (answer, *truths))
    return said in right


def vqa_accuracy(answer: str, answers: Sequence[str]) -> float | None:
    """VQAv2's accuracy, 0 to 1, by the answers of ANNOTATORS or more people; None where they are fewer."""
    if len(answers) < ANNOTATORS:
        return None
    given = tuple({"answer": text, "answer_id": number} for number, text in enumerate(answers))
    return official(Annotation(0, given, answers[0]), answer)


def answerability(is_unanswerable: Sequence[bool], scores: Sequence[float]) -> dict[str, float]:
    """VizWiz's second task, in percent: average precision and F1 of the questions that cannot be answered.

    scores: how sure the model is, 0 to 1, that a question is one of them; for F1 it is called so above ½. Precision is
    summed step by step, over the distinct scores from high to low.
    """
    found = seen = 0
    precision = 0.0
    for _, group in groupby(sorted(zip(scores, is_unanswerable, strict=True), reverse=True), key=lambda pair: pair[0]):
        hits = [hit for _, hit in group]
        found, seen = found + sum(hits), seen + len(hits)
        precision += sum(hits) * found / seen
    called = [score > 0.5 for score in scores]
    both = sum(one and other for one, other in zip(called, is_unanswerable, strict=True))
    return {
        "AP": round(100 * precision / found, 2) if found else 0.0,
        "F1": round(200 * both / (sum(called) + found), 2) if found + sum(called) else 0.0,
    }


def record_scores(record: Record, answer: str) -> dict[str, float]:
    """Exact match of an own example, and VQA accuracy where enough people have answered."""
    scores = {"exact_match": float(exact_match(answer, truths_of(record)))}
    accuracy = vqa_accuracy(answer, record.answers)
    return scores if accuracy is None else scores | {"vqa_accuracy": accuracy}


def truths_of(record: Record) -> list[str]:
    """The right answers of an own example, its suffix included; an empty one is none."""
    given = [*record.answers, *[record.suffix] * (record.suffix not in record.answers)]
    return [text for text in given if text.strip()]


def _by_position(annotation: Annotation, normalize: Callable[[str], str]) -> list[dict]:
    return [{"answer": normalize(given["answer"]), "at": at} for at, given in enumerate(annotation.answers)]


SCORERS = {"official": official, "paper": paper, "textvqa": textvqa, "vizwiz": vizwiz, "gqa": gqa}


def check_scoring(scoring: str, annotations: Sequence[Annotation], source: str | Path) -> None:
    """Raise UserError for a scoring by which no answer can be right.

    Leave-one-out counts what other annotators said: with one answer a question there are none; official scoring leaves
    equal records out together, which without an answer_id are all equal answers.
    """
    scored = [a for a in annotations if a.balanced or scoring != "gqa"][:1000]
    if not any(SCORERS[scoring](a, given["answer"]) for a in scored for given in a.answers):
        raise UserError(
            f"{shown(source)}: {scoring} scoring cannot apply: it needs several answers a question, and an answer_id "
            "each if they are equal: take --scoring gqa, which is exact match, or leave it out"
        )


def summarize(annotations: Iterable[Annotation], accuracies: Mapping) -> dict:
    """{"overall", "per_answer_type", "per_question_type"} in percent, rounded to two decimals as upstream."""
    scored = [a for a in annotations if a.question_id in accuracies]

    def percent(group: list[Annotation]) -> float:
        return round(100 * sum(accuracies[a.question_id] for a in group) / len(group), 2)

    def by(kind: str) -> dict[str, float]:
        groups: dict[str, list[Annotation]] = {}
        for annotation in scored:
            if getattr(annotation, kind) is not None:
                groups.setdefault(getattr(annotation, kind), []).append(annotation)
        return {name: percent(group) for name, group in groups.items()}

    return {"overall": percent(scored), "per_answer_type": by("answer_type"), "per_question_type": by("question_type")}

"""The published scorers of VQAv2, TextVQA, VizWiz and GQA, and the script of the differential
PaliGemma paper.

In: annotations and answers. Out: the accuracy of each question, and its mean overall and by type.

VQAv2's follows the official scorer with its oddities, which are part of all published numbers
(https://visualqa.org/evaluation.html; Antol et al., "VQA: Visual Question Answering", ICCV 2015).
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter

from eval.data.published import Annotation
from eval.data.record import Record

# Normalisation of answers

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'  # kept by the official scorer: ' : & % $ # *
WORDS = "zero one two three four five six seven eight nine ten".split()
DIGITS = {"none": "0"} | {word: str(number) for number, word in enumerate(WORDS)}
ARTICLES = {"a", "an", "the"}
ANNOTATORS = 4  # with fewer answers, or mere spellings of one, no answer could reach 1
_CONTRACTED = """
    'ow's'at 'twas ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't
    hadn't've hasn't haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am
    might've mightn't mightn't've must've mustn't needn't not've o'clock oughtn't shan't she'd've
    should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've
    someone'll someone's something'd something'd've something'll that's there'd there'd've there're
    there's they'd they'd've they'll they're they've wasn't we'd've we've weren't what'll what're
    what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're
    why's won't would've wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're
    you've
""".split()
# A word without one of its apostrophes gets it back.
CONTRACTIONS = {
    word[:at] + word[at + 1 :]: word
    for word in _CONTRACTED
    for at, letter in enumerate(word)
    if letter == "'"
}
CONTRACTIONS["somebody'd"] = "somebodyd"  # this entry of the official list is reversed


def clean_space(text: str) -> str:
    """Newlines and tabs as spaces, none at the ends."""
    return text.replace("\n", " ").replace("\t", " ").strip()


@lru_cache(maxsize=1 << 18)  # a few thousand answers make up most of VQAv2
def clean(text: str) -> str:
    """Punctuation deleted, or replaced by a space between two words; periods deleted unless a digit
    follows. Then lower case; numbers up to ten as digits; no articles; contractions with their
    apostrophe."""
    result = text
    number = re.search(r"\d,\d", text)
    for mark in PUNCTUATION:
        # decided on the original text: "1,000 (approx)" loses its comma, "red/blue" becomes two
        # words
        apart = mark + " " in text or " " + mark in text
        result = result.replace(mark, "" if apart or number else " ")
    # the official call passes re.UNICODE, 32, where the count goes
    result = re.sub(r"\.(?!\d)", "", result, count=32)
    words = (DIGITS.get(word, word) for word in result.lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def clean_textvqa(text: str) -> str:
    """The normaliser of TextVQA's scorer (EvalAI): case, commas and possessives, then `clean`."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    return clean(clean_space(text))


# Scorers: from an annotation and a prediction to an accuracy in 0..1


def leave_one_out(records: list, prediction: str) -> float:
    """Mean over the annotators of min(1, matches among the *other* records / 3). "Other" means
    unequal: records that are equal (answers without ids) are all left out together, as upstream."""
    matching = [record for record in records if record["answer"] == prediction]
    accuracies = [min(1, (len(matching) - matching.count(record)) / 3) for record in records]
    return sum(accuracies) / len(accuracies)


def by_position(annotation: Annotation, normalize: Callable[[str], str]) -> list[dict]:
    """The records of annotators who differ by their place alone."""
    given = enumerate(annotation.answers)
    return [{"answer": normalize(record["answer"]), "at": at} for at, record in given]


def official(annotation: Annotation, prediction: str) -> float:
    """VQAv2's scorer (2021 and later): answers are normalised only where the annotators do not all
    agree."""
    prediction = clean_space(prediction)
    records = [given | {"answer": clean_space(given["answer"])} for given in annotation.answers]
    if len({record["answer"] for record in records}) > 1:
        prediction = clean(prediction)
        records = [record | {"answer": clean(record["answer"])} for record in records]
    return leave_one_out(records, prediction)


def paper(annotation: Annotation, prediction: str) -> float:
    """The script of the differential PaliGemma paper: min(1, matches / 3) on lower-cased raw
    strings."""
    given = [record["answer"].lower() for record in annotation.answers]
    return min(1, given.count(prediction.lower()) / 3)


def textvqa(annotation: Annotation, prediction: str) -> float:
    """TextVQA's scorer: its own normaliser on both sides, annotators left out by position."""
    return leave_one_out(by_position(annotation, clean_textvqa), clean_textvqa(prediction))


def vizwiz(annotation: Annotation, prediction: str) -> float:
    """VizWiz's scorer: only the prediction is normalised, annotators left out by position."""
    return leave_one_out(by_position(annotation, str), clean(clean_space(prediction)))


def gqa(annotation: Annotation, prediction: str) -> float:
    """GQA's exact match, without blanks and periods at the ends and without case."""
    said, right = (text.strip().strip(".").lower() for text in (prediction, annotation.answer))
    return float(said == right)


def exact_match(answer: str, truths: Iterable[str]) -> bool:
    """Whether the answer is one of the right ones; case, space at the ends, and how accents are
    written aside."""
    texts = [unicodedata.normalize("NFC", text).strip().lower() for text in (answer, *truths)]
    return texts[0] in texts[1:]


def answerability(is_unanswerable: Sequence[bool], scores: Sequence[float]) -> dict[str, float]:
    """VizWiz's second task, in percent: average precision and F1 of the questions that cannot be
    answered. scores: how sure the model is, 0 to 1, that a question is one of them; for F1 it is
    called so above ½. Precision is summed step by step, over the distinct scores from high to
    low."""
    pairs = sorted(zip(scores, is_unanswerable, strict=True), reverse=True)
    found = seen = 0
    precision = 0.0
    for _, group in groupby(pairs, key=lambda pair: pair[0]):
        hits = [hit for _, hit in group]
        found += sum(hits)
        seen += len(hits)
        precision += sum(hits) * found / seen
    called = [hit for score, hit in pairs if score > 0.5]
    f1 = 200 * sum(called) / max(1, len(called) + found)
    return {"AP": round(100 * precision / max(1, found), 2), "F1": round(f1, 2)}


def record_scores(
    record: Record, answer: str, score: Callable[..., float] = official
) -> dict[str, float]:
    """Exact match of an own example, and accuracy by `score`, 0 to 1, where ANNOTATORS or more
    people have answered. Fewer than ten answers that all differ are spellings, not people."""
    scores = {"exact_match": float(exact_match(answer, record.truths))}
    people = len(record.answers)
    if people == 10 or ANNOTATORS <= people > len(set(record.answers)):
        given = [{"answer": text, "answer_id": at} for at, text in enumerate(record.answers)]
        scores["vqa_accuracy"] = score(Annotation(record.name, tuple(given)), answer)
    return scores


SCORERS = {"official": official, "paper": paper, "textvqa": textvqa, "vizwiz": vizwiz, "gqa": gqa}


def summarize(scores: Sequence[tuple[Annotation, float]]) -> dict:
    """{"overall", "per_answer_type", "per_question_type"} in percent, rounded to two decimals as
    upstream."""

    def percents(kind: Callable[[Annotation], str | None]) -> dict[str, float]:
        groups = defaultdict(list)
        for annotation, accuracy in scores:
            groups[kind(annotation)].append(accuracy)
        groups.pop(None, None)  # those without a type
        return {name: round(100 * sum(of) / len(of), 2) for name, of in groups.items()}

    types = {f"per_{name}": percents(attrgetter(name)) for name in ("answer_type", "question_type")}
    return percents(lambda annotation: "overall") | types

"""Readers of VQAv2's files and of its relatives: GQA, TextVQA, VizWiz, DocVQA, InfographicVQA and
ChartQA.

In: files exactly as their authors publish them. Out: an `Annotation` of each question; its picture
stays a name.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from eval.data.files import Places, check, check_unique, id_of, placed, problems_at, read, text_at
from model.common import quoted, read_json, shown

# what DocVQA and InfographicVQA call the same
NAMES = {"questionId": "question_id", "image_local_name": "image"}


class Annotation(NamedTuple):
    """A question and its answers as published."""

    question_id: int | str
    answers: tuple[dict, ...] = ()  # an object for each annotator, of a test split none
    answer: str = ""  # the most frequent one
    answer_type: str | None = None  # such as yes/no, number, other
    question_type: str | None = None  # such as its first words
    balanced: bool = True  # GQA scores only its balanced questions
    answerable: int | None = None  # 0 or 1, of VizWiz
    question: str = ""
    image: str = ""  # the name of the picture in its folder


def read_vqa(
    questions: str | Path, annotations: str | Path | None = None
) -> tuple[str, list[Annotation]]:
    """Questions of VQAv2 or a relative, and the scoring that fits: official, textvqa, vizwiz, gqa,
    anls (DocVQA, InfographicVQA) or relaxed (ChartQA). annotations: by default the same file; if it
    holds no answers, there are none. Another file with one answer per question can only be scored
    by exact match, as GQA is; one whose answers have no ids only by position, as TextVQA is. Raises
    UserError, also for an id that occurs twice and for a question without its annotation."""
    source = annotations or questions
    _, subset, asked = records_of(questions, "questions")
    layout, _, answered = records_of(source, "annotations")
    truths = {truth.question_id: truth for truth in read(source, annotation, answered)}

    def question(record: dict) -> Annotation:
        truth = truths.get(id_of(record), Annotation(id_of(record)))
        lacks = f"question {quoted(truth.question_id)} has no answers in {source}"
        check(not annotations or truth.answers, lacks)
        asked_for = text_at(record, "question")
        return truth._replace(question=asked_for, image=image_of(record, subset))

    made = read(questions, question, asked)
    for path, records in ((questions, asked), (source, answered)):
        check_unique((id_of(record) for _, record in records), path)
    answers = [answer for one in made for answer in one.answers]
    if layout in ("anls", "relaxed"):
        return layout, made
    if {len(one.answers) for one in made} - {0} == {1}:
        layout = "gqa"
    elif layout == "official" and not any("answer_id" in answer for answer in answers):
        layout = "textvqa"
    return layout, made


def records_of(path: str | Path, key: str) -> tuple[str, str, Places]:
    """Scoring, COCO's subset, and records of {key: […]}, TextVQA's and DocVQA's {"data": […]},
    VizWiz's and ChartQA's […], or GQA's {id: {…}}. ChartQA's get their places as ids."""
    value = read_json(path, object)
    with problems_at(path):
        is_list = isinstance(value, list)
        if is_list and any("imgname" in record for record in value):
            charts = []
            for number, record in enumerate(value):
                asked = {"question": record["query"], "image": record["imgname"]}
                answers = [text_at(record, "label")]
                charts.append({"question_id": number, "answers": answers, **asked})
            return "relaxed", "", placed(charts)
        if is_list:
            return "vizwiz", "", placed(value)
        subset = text_at({"data_subtype": ""} | value, "data_subtype")
        for part, layout in ((key, "official"), ("questions", "official"), ("data", "textvqa")):
            if part in value:
                records = value[part]
                if part == "data" and any("questionId" in record for record in records):
                    layout = "anls"
                    records = map(renamed, records)
                return layout, subset, placed(records, f": {part}")
        known = [(f": {shown(id_)}", value[id_] | {"question_id": id_}) for id_ in value]
        return "gqa", "", known


def renamed(record: Mapping) -> dict:
    """The record with VQAv2's names."""
    return {NAMES.get(name, name): value for name, value in record.items()}


def image_of(record: Mapping, subset: str) -> str:
    """The name of a question's picture."""
    if "image" in record:  # VizWiz, or a user's file with the name
        return text_at(record, "image")
    image_id = record["imageId" if "imageId" in record else "image_id"]  # GQA, or the others
    if not subset or isinstance(image_id, str):  # TextVQA, GQA
        return f"{image_id}.jpg"
    subset = subset.replace("test-dev", "test")  # two sets of questions on the same pictures
    return f"{subset}/COCO_{subset}_{image_id:012d}.jpg"


def annotation(record: dict) -> Annotation:
    if "answer" in record:  # GQA
        answer = text_at(record, "answer")
        # its own evaluation splits structural types into open (query) and binary (the others)
        structural = text_at(record["types"], "structural")
        kind = "open" if structural == "query" else "binary"
        balanced = record.get("isBalanced", True)
        answers = ({"answer": answer},)
        return Annotation(id_of(record), answers, answer, kind, structural, balanced)
    if "answers" not in record:
        return Annotation(id_of(record))
    check(isinstance(record["answers"], list), "answers is no list")
    answers = []
    for answer in record["answers"]:  # TextVQA: bare texts
        answers.append({"answer": answer} if isinstance(answer, str) else answer)
    counts = Counter(text_at(answer, "answer") for answer in answers)
    most = counts.most_common(1)[0][0]
    answer = text_at({"multiple_choice_answer": most} | record, "multiple_choice_answer")
    types = {}
    for name in ("answer_type", "question_type"):
        if name in record and not isinstance(record[name], list):  # InfographicVQA's are lists
            types[name] = text_at(record, name)
    answerable = record.get("answerable")
    check(answerable in (None, 0, 1), "answerable is neither 0 nor 1")
    return Annotation(
        id_of(record),
        tuple(answers),
        answer,
        answerable=answerable,
        **types,
    )

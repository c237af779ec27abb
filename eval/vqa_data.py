"""`eval.vqa --data`: a user's own examples, asked and scored by exact match, and by VQA accuracy where people differ.

In: the source of the examples. Out: results.json with every question, answer and truth, and a table with intervals;
with --blind also of the same model on gray pictures: what it gains from the pictures is the difference. Of a
conversation the last answer is asked; the turns before it are given with their right answers.
"""

import argparse
import json

from eval.command import Ask, Report, ask_of
from eval.compare import compare
from eval.records import Record, blind, groups_of, read_data
from eval.vqa_scoring import exact_match, vqa_accuracy
from model.common import UserError, shown, write_text


def load(args: argparse.Namespace) -> tuple[list[Record], dict[str, list[Ask]]]:
    """The records of --data, and what to ask. Raises UserError."""
    if args.blind:
        raise UserError("--blind with --data takes no files: the same model is asked about gray pictures")
    if getattr(args, "prompt_given", False):
        raise UserError(f"--prompt: {shown(args.data)} has complete prompts: leave the flag out, or change the file")
    records = read_data(args.data, images=args.images, allow_outside=args.allow_outside)[: args.limit]
    if any(record.detection for record in records):
        raise UserError(f"{shown(args.data)}: boxes are scored by python -m eval.detect --data {shown(args.data)}")
    sets = {"data": [ask_of(record) for record in records]}
    if args.blind is not None:
        sets["blind"] = [ask_of(record) for record in blind(records)]
    return records, sets


def finish(args: argparse.Namespace, records: list[Record], answers: dict[str, list[str | None]], session) -> Report:
    """results.json, and the table of one model."""
    scores = {name: score(records, said) for name, said in answers.items()}
    results = [
        {"question_id": record.name, "question": record.prefix, "answer": text, "right": truths_of(record)}
        | {measure: by_id[record.name] for measure, by_id in scores["data"].items() if record.name in by_id}
        for record, text in zip(records, answers["data"], strict=True)
        if text is not None
    ]
    write_text(session.out / "results.json", json.dumps(results, ensure_ascii=False, indent=1) + "\n")
    pictures = groups_of(records)
    report = Report({}, [], ["results.json", "answers.jsonl"], scores["data"], scores.get("blind", {}), pictures)
    values, lines = compare({session.title: report})
    if "blind" in scores and values[f"{session.title}, blind"]["exact_match"]["difference"]["high"] >= 0:
        lines += ["", "the picture was not used: with every picture gray the answers are not worse by more than chance"]
    return report._replace(values=values, lines=[f"{shown(args.data)}, %: {lines[0]}", *lines[1:]])


def truths_of(record: Record) -> list[str]:
    """The right answers, a suffix that is given beside "answers" included; who said nothing gave none."""
    given = [*record.answers, *[record.suffix] * (record.suffix not in record.answers)]
    return [text for text in given if text.strip()]


def score(records: list[Record], answers: list[str | None]) -> dict[str, dict[str, float]]:
    """By measure, the score of each question that has an answer."""
    said = [(r, text) for r, text in zip(records, answers, strict=True) if text is not None]
    exact = {record.name: float(exact_match(text, truths_of(record))) for record, text in said}
    accuracy = {record.name: vqa_accuracy(text, record.answers) for record, text in said}
    accuracy = {name: value for name, value in accuracy.items() if value is not None}
    return {"exact_match": exact} | ({"vqa_accuracy": accuracy} if accuracy else {})

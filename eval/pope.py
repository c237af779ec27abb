"""POPE: does a model say that an object is in the picture when it is not?

    python -m eval.pope                         the newest run, or the embedded base, on the embedded scenes
    python -m eval.pope --questions coco_pope_{random,popular,adversarial}.json --images DIR --model SRC --adapter RUN
    python -m eval.pope --questions Q --images DIR --results answers.jsonl

In: POPE questions (`eval/data.py`), and a model, or its free-text answers. Out: accuracy, precision, recall, F1 and
the share of yes, for each file and their mean; with --probability also the accuracy where yes is the answer if
P(yes) / (P(yes) + P(no)) at the start of the answer is at least ½.

Source: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models", EMNLP 2023.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from eval import scenes
from eval.bench import PROMPT_FLAG, Benchmark, limit_flag, means, run
from eval.data import PROMPT, PopeQuestion, fill_prompt, find_images, read_pope
from eval.question import Question
from model.common import UserError, run_command, shown, write_text


class Pope(Benchmark):
    name = "pope"
    flags = {
        "--questions": dict(help="POPE's JSONL, one file or several (default: the embedded scenes)", nargs="+"),
        "--images": dict(help="folder of the pictures of --questions", metavar="DIR"),
        "--probability": dict(help="compare P(yes) with P(no) too, in one more pass", default=False),
        "--prompt": PROMPT_FLAG,
        "--limit": limit_flag("questions of each set, the first N (default: all of a file, 600 of the embedded)"),
    }

    def questions(self, args):
        if (args.questions is None) != (args.images is None):
            raise UserError("--questions and --images go together: give both, or neither for the embedded scenes")
        questions, files = [], args.questions or []
        for file in files:
            asked, kind = read_pope(file)[: args.limit], Path(file).stem
            if kind in {question.kind for question in questions}:
                raise UserError(f"{shown(file)}: results are named after their file, and this name is taken: rename it")
            pictures = find_images((q.image for q in asked), args.images, file)
            questions += questions_on(kind, asked, pictures, args.template, named=len(files) > 1)
        for strategy in [] if files else scenes.STRATEGIES:
            questions += embedded(strategy, args.limit or 600, args.template)
        likely = [replace(q, id=f"{q.id}, P(yes)", choices=("yes", "no"), scored=True) for q in questions]
        return questions + likely * args.probability

    def score(self, question, answer):
        if question.scored:
            return {f"P(yes), {question.kind}": float((question.truth.label == "yes") == (answer[0] >= answer[1]))}
        return {f"accuracy, {question.kind}": float(question.truth.label == parse_answer(answer))}

    def summary(self, rows):
        lines = {}
        for kind in dict.fromkeys(row.question.kind for row in rows):
            answered = [row for row in rows if row.question.kind == kind and row.answer is not None]
            said = [(r.question.truth.label, parse_answer(r.answer)) for r in answered if not r.question.scored]
            if not said:
                raise UserError(f"{kind}: none of its questions could be asked: repair what is named above")
            lines[kind] = score_answers(*zip(*said, strict=True))
            if likely := [row for row in answered if row.question.scored]:
                lines[kind]["P(yes)"] = sum(means(likely).values())
        if len(lines) > 1:
            lines["mean"] = {name: sum(line[name] for line in lines.values()) / len(lines) for name in lines[kind]}
        return lines

    def write(self, rows, out, subject):
        super().write(rows, out, subject)
        said = [row for row in rows if row.answer is not None and not row.question.scored]
        for kind in {row.question.kind for row in said}:  # as the published script writes them
            of_kind = [(r.question.truth, r.answer) for r in said if r.question.kind == kind]
            lines = [{"question_id": q.question_id, "question": q.question, "answer": text} for q, text in of_kind]
            text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
            write_text(out / f"answers-{kind}.jsonl", text)


def questions_on(kind: str, asked: Iterable[PopeQuestion], pictures: Mapping, template: str, named: bool):
    """What is asked. named: ids begin with the kind, since POPE's three files share theirs."""
    return [
        Question(
            f"{kind}/{q.question_id}" if named else q.question_id,
            q.image,
            pictures[q.image],
            fill_prompt(template, q.question),
            truth=q,
            kind=kind,
        )
        for q in asked
    ]


def embedded(strategy: str, limit: int = 600, template: str = PROMPT) -> list[Question]:
    """The first `limit` questions of a strategy on the embedded test scenes."""
    samples = scenes.pope(strategy, images=-(-limit // 6))[:limit]
    asked = [PopeQuestion(s.question_id, f"pope/{s.image_id}", s.question, s.suffix) for s in samples]
    pictures = {f"pope/{s.image_id}": s.scene.render for s in samples}
    return questions_on(strategy, asked, pictures, template, named=True)


def parse_answer(text: str) -> str:
    """ "no" if the first sentence has the word No, not or no, else "yes", as in the published script."""
    words = text.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "not", "no"} & set(words) else "yes"


def score_answers(labels: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """Measures in percent of labels and answers, each yes or no; positive is yes, and 0/0 counts as 0."""
    pairs = list(zip(labels, answers, strict=True))
    true_yes, said_yes, are_yes = pairs.count(("yes", "yes")), answers.count("yes"), labels.count("yes")

    def percent(part: int, whole: int) -> float:
        return 100 * part / whole if whole else 0.0

    return {
        "accuracy": percent(true_yes + pairs.count(("no", "no")), len(pairs)),
        "precision": percent(true_yes, said_yes),
        "recall": percent(true_yes, are_yes),
        "F1": percent(2 * true_yes, said_yes + are_yes),  # the harmonic mean of the two above
        "yes": percent(said_yes, len(pairs)),
    }


main = partial(run, Pope())

if __name__ == "__main__":
    run_command(main)

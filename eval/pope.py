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
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from eval import scenes
from eval.bench import PROMPT_FLAG, Benchmark, limit_flag, means, run
from eval.data import PopeQuestion, fill_prompt, find_images, read_pope
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
        sets = {} if args.questions else {kind: embedded(kind, args.limit or 600) for kind in scenes.STRATEGIES}
        for file in args.questions or ():
            asked, kind = read_pope(file)[: args.limit], Path(file).stem
            if kind in sets:
                raise UserError(f"{shown(file)}: results are named after their file, and this name is taken: rename it")
            sets[kind] = asked, find_images((q.image for q in asked), args.images, file)
        questions = []
        for kind, (asked, pictures) in sets.items():
            for q in asked:
                name = f"{kind}/{q.question_id}" if len(sets) > 1 else q.question_id  # POPE's files share their ids
                prompt = fill_prompt(args.template, q.question)
                questions.append(Question(name, q.image, pictures[q.image], prompt, truth=q, kind=kind))
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
        files = {}  # as the published script writes them
        for question, answer, _ in rows:
            if answer is not None and not question.scored:
                line = {"question_id": question.truth.question_id, "question": question.truth.question}
                text = json.dumps(line | {"answer": answer}, ensure_ascii=False) + "\n"
                files[question.kind] = files.get(question.kind, "") + text
        for kind, text in files.items():
            write_text(out / f"answers-{kind}.jsonl", text)


def embedded(strategy: str, limit: int) -> tuple[list[PopeQuestion], dict]:
    """The first `limit` questions of a strategy on the embedded test scenes, and their pictures by name."""
    samples = scenes.pope(strategy, images=-(-limit // 6))[:limit]
    asked = [PopeQuestion(s.question_id, f"pope/{s.image_id}", s.question, s.suffix) for s in samples]
    return asked, {f"pope/{s.image_id}": s.scene.render for s in samples}


def parse_answer(text: str) -> str:
    """ "no" if the first sentence has the word No, not or no, else "yes", as in the published script."""
    words = text.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "not", "no"} & set(words) else "yes"


def score_answers(labels: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """Measures in percent of labels and answers, each yes or no; positive is yes, and 0/0 counts as 0."""
    pairs = list(zip(labels, answers, strict=True))
    hits, said, right = pairs.count(("yes", "yes")), answers.count("yes"), labels.count("yes")
    shares = {
        "accuracy": (hits + pairs.count(("no", "no")), len(pairs)),
        "precision": (hits, said),
        "recall": (hits, right),
        "F1": (2 * hits, said + right),  # the harmonic mean of the two above
        "yes": (said, len(pairs)),
    }
    return {name: 100 * part / whole if whole else 0.0 for name, (part, whole) in shares.items()}


main = partial(run, Pope())

if __name__ == "__main__":
    run_command(main)

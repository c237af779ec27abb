"""POPE: does a model say that an object is in the picture when it is not?

    python -m eval.pope --questions Q [Q …] --images DIR --model SRC --adapter RUN
    python -m eval.pope --questions Q --results answers.jsonl

In: POPE's questions (coco_pope_{random,popular,adversarial}.json), and a model, or its free-text
answers. Out: accuracy, precision, recall, F1 and the share of yes, for each file and their mean;
with --probability also the accuracy where yes is the answer if P(yes) ≥ P(no). "neither" is the
share of answers without the word yes that count as yes, as in the published script.

Source: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models", EMNLP 2023.
"""

import re
from functools import partial
from pathlib import Path

from eval.bench import PROMPT_FLAG, Benchmark, by_kind, mean_over, means, run
from eval.data.files import check, check_unique, find_picture, id_of, read, records_in, text_at
from eval.data.polls import STRATEGIES, pope
from eval.data.record import fill_prompt
from eval.question import Question, log_prob_twins
from model.common import UserError, quoted, run_command

SAYS_YES = "(?i)[^.]*(?<![a-z])yes(?![a-z])"  # in the first sentence


class Pope(Benchmark):
    name = "pope"
    flags = {
        "--questions": dict(
            help="POPE's JSONL, one file or several (default: the embedded scenes)", nargs="+"
        ),
        "--images": dict(help="folder of the pictures of --questions", metavar="DIR"),
        "--probability": dict(
            help="compare P(yes) with P(no) too, in one more pass", default=False
        ),
        "--prompt": PROMPT_FLAG,
    }
    limit = "questions of each set, the first N (default: all of a file, 600 of the embedded)"

    def questions(self, args):
        if args.questions:  # a file of answers is scored without pictures
            is_whole = args.images or args.results
        else:
            is_whole = not args.images
        if not is_whole:
            raise UserError(
                "--questions and --images go together: give both, or neither for the embedded scenes"
            )
        # 1. those of each set
        self.kinds = [Path(name).stem for name in args.questions or STRATEGIES]
        make = partial(self.question, args)
        questions = []
        if args.questions:
            for file, kind in zip(args.questions, self.kinds, strict=True):
                questions += read(file, partial(make, kind), records_in(file)[: args.limit])
        else:
            count = args.limit or 600
            for kind in self.kinds:
                for s in pope(kind, images=-(-count // 6))[:count]:
                    record = {"question_id": s.question_id, "image": f"pope/{s.image_id}"}
                    record |= {"text": s.question, "label": s.suffix}
                    questions.append(make(kind, record, s.scene.render))
        check_unique((question.id for question in questions), "--questions")
        # 2. the same ones, for their probabilities
        if args.probability:
            questions += log_prob_twins(questions, ("yes", "no"), "P(yes)")
        return questions

    def question(self, args, kind: str, record: dict, picture=None) -> Question:
        label = record["label"]
        check(label in ("yes", "no"), f"label is {quoted(label)}, expected yes or no")
        picture = picture or find_picture(args.images or "", text_at(record, "image"))
        id_ = id_of(record)
        if len(self.kinds) > 1:
            id_ = f"{kind}/{id_}"  # the sets share their ids
        prompt = fill_prompt(args.template, text_at(record, "text"))
        return Question(
            id_,
            record["image"],
            picture,
            prompt,
            truth=label,
            kind=kind,
        )

    def score(self, question, answer):
        if not question.wants_log_probs:
            return {f"accuracy, {question.kind}": float(question.truth == parse_answer(answer))}
        yes, no = answer
        likelier = "yes" if yes >= no else "no"
        return {f"P(yes), {question.kind}": float(question.truth == likelier)}

    def summary(self, rows):
        lines = {}
        kinds = by_kind(rows)
        if lost := {*self.kinds} - kinds.keys():
            # a mean without it would be of other questions
            raise UserError(
                f"no question of {quoted(min(lost))} could be asked: mend its pictures, or leave it out"
            )
        for kind, of_kind in kinds.items():
            free = [row for row in of_kind if not row.question.wants_log_probs]
            lines[kind] = score_answers([(r.question.truth, parse_answer(r.answer)) for r in free])
            neither = sum(is_neither(row.answer) for row in free)
            lines[kind]["neither"] = 100 * neither / max(1, len(free))
            if likely := [row for row in of_kind if row.question.wants_log_probs]:
                (lines[kind]["P(yes)"],) = means(likely).values()
        if len(lines) > 1:
            lines["mean"] = mean_over(list(lines.values()))
        return lines


def parse_answer(text: str) -> str:
    """ "no" if the first sentence has the word No, not or no, else "yes", as in the published
    script."""
    words = text.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "not", "no"} & set(words) else "yes"


def is_neither(text: str) -> bool:
    """Whether an answer counts as yes without this word in its first sentence, such as "Maybe"."""
    return parse_answer(text) == "yes" and not re.match(SAYS_YES, text)


def score_answers(pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Measures in percent of (label, answer) pairs, each yes or no; positive is yes, and 0/0 counts
    as 0."""
    labels = [label for label, _ in pairs]
    answers = [answer for _, answer in pairs]
    right, said = labels.count("yes"), answers.count("yes")
    hits = pairs.count(("yes", "yes"))
    agreed = sum(label == answer for label, answer in pairs)
    shares = {
        "accuracy": (agreed, len(pairs)),
        "precision": (hits, said),
        "recall": (hits, right),
        "F1": (2 * hits, said + right),
        "yes": (said, len(pairs)),
    }
    return {name: 100 * part / max(1, whole) for name, (part, whole) in shares.items()}


main = partial(run, Pope())

if __name__ == "__main__":
    run_command(main)

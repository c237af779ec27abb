"""VQA: a model's answers, official results files, and the published scorers of VQAv2, TextVQA,
VizWiz, GQA, DocVQA, InfographicVQA and ChartQA.

    python -m eval.vqa                  the newest run, or the embedded base, on the embedded scenes
    python -m eval.vqa --model SRC --adapter RUN --questions Q --annotations A --images DIR
    python -m eval.vqa --data jsonl:test.jsonl --adapter RUN --adapter OTHER --blind
    python -m eval.vqa --questions Q --annotations A --results R

In: questions and annotations (`eval/data/published.py`) or your own examples
(`eval/data/records.py`), and a model, or its answers. Out: results.json, and accuracy in percent,
overall and by type, beside the best guess from the text alone. Your own examples are scored by
exact match, and by VQA accuracy where people differ, or with --scoring by ANLS, relaxed accuracy
or CIDEr (`eval/document_scoring.py`); of a conversation the last answer is asked. Beside exact
match stands the expected calibration error of the model's confidence, and in scores.json its ten
bins.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial

from eval.bench import PROMPT_FLAG, Benchmark, certainty_fields, check_no_images, run, write_json
from eval.data import scenes
from eval.data.files import find_picture
from eval.data.published import Annotation, read_vqa
from eval.data.record import PROMPT, Record, fill_prompt
from eval.data.records import ANNOTATIONS_FILE, QUESTIONS_FILE, groups_of, read_data, source_parts
from eval.document_scoring import TITLES, cider_scorer, document_scores
from eval.question import Question, log_prob_twins, question_of
from eval.vqa_scoring import ANNOTATORS, SCORERS, answerability, official, record_scores, summarize
from model.common import UserError, run_command, shown

# of a question and its answer in the files of their servers
SERVER_KEYS = {
    "gqa": ("questionId", "prediction"),
    "vizwiz": ("image", "answer"),
    "anls": ("questionId", "answer"),
}
BY_DEFAULT = 1200  # questions on the embedded scenes, by default
TRAIN_QUESTIONS = 12_000  # embedded ones that the text-only guess knows
GUESS = "text-only guess"


class Vqa(Benchmark):
    name = "vqa"
    scoring = "official"
    known = ()  # questions that the text-only guess learns from; of none there is no guess
    flags = {
        "--data": dict(
            help="jsonl:FILE, csv:FILE, vqav2:DIR, vqa:FILE or embedded (default: embedded)",
            metavar="SRC",
        ),
        "--questions": dict(
            help="questions file of VQAv2 or its relatives, see --data vqa:FILE (default: the embedded scenes)"
        ),
        "--annotations": dict(
            help="annotations file (default: the questions file, if it has the answers too)"
        ),
        "--images": dict(
            help="folder of the pictures (default: that of the file of --data)", metavar="DIR"
        ),
        "--scoring": dict(
            help="scorer (default: the one that fits the annotations); of own data the last three",
            choices=[*SCORERS, *TITLES],
        ),
        "--answerability": dict(
            help="of VizWiz: also average precision and F1 of `unanswerable`", default=False
        ),
        "--prompt": PROMPT_FLAG,
    }
    limit = f"questions, the first N (default: all of files, {BY_DEFAULT} of the embedded scenes)"

    def questions(self, args):
        """The questions of the source that the flags name; each source has a method."""
        self.known = ()
        if args.scoring == "cider":
            cider_scorer()  # rather now than when all is answered
        if args.data:
            return self.of_data(args)
        if args.questions and (args.images or args.results):
            return self.of_files(args, [args.questions, args.annotations], args.images)
        if any((args.questions, args.annotations, args.answerability, args.images)):
            raise UserError(
                "--questions and --images go together, --annotations and --answerability with "
                "them: give both"
            )
        return self.of_scenes(args)

    def of_data(self, args):
        """The questions of --data, which excludes --questions and its relatives."""
        kind, folder = source_parts(args.data)
        if any((args.questions, args.annotations, args.answerability)):
            raise UserError(
                "--questions, --annotations and --answerability are of other data: leave --data out"
            )
        if kind == "embedded":
            check_no_images(args)
            return self.of_scenes(args)
        if kind == "vqa":
            return self.of_files(args, [folder, None], args.images or folder.parent)
        if kind == "vqav2":
            names = QUESTIONS_FILE, ANNOTATIONS_FILE
            files = [folder / name.replace("train2014", "val2014") for name in names]
            if not files[0].is_file():
                files = [folder / name for name in names]
            return self.of_files(args, files, args.images or folder)
        return self.of_examples(args)

    def of_scenes(self, args):
        """The questions on the embedded scenes."""
        self.scoring = args.scoring or "official"
        self.known = embedded(TRAIN_QUESTIONS, "train")
        return embedded(args.limit or BY_DEFAULT, "test", args.template)

    def of_examples(self, args):
        """The last question of each of a user's examples, with its own prompt."""
        if args.prompt or args.scoring in SCORERS:
            raise UserError(
                f"{shown(args.data)} has complete prompts: no --prompt, and --scoring is one of "
                f"{', '.join(TITLES)}"
            )
        self.scoring = args.scoring or "official"
        records = read_data(args.data, args.images)[: args.limit]
        groups = groups_of(records)
        return [question_of(r, truth=r, group=groups.get(r.name, "")) for r in records]

    def of_files(self, args, files, images):
        """The questions of published files, questions and annotations, on pictures in the folder
        `images`."""
        fitting, asked = read_vqa(*files)
        questions = questions_of(asked[: args.limit], images, args.template)
        self.scoring = args.scoring or fitting
        file = shown(files[1] or files[0])
        if self.scoring == "official" and fitting in ("textvqa", "vizwiz"):
            raise UserError(
                f"{file}: official scoring knows annotators by answer_id: take --scoring {fitting}"
            )
        has_few = any(0 < len(q.truth.answers) < ANNOTATORS for q in questions)
        if self.scoring not in ("gqa", "paper", *TITLES) and (has_few or fitting in TITLES):
            others = fitting if fitting in TITLES else "gqa, anls or relaxed"
            raise UserError(
                f"{file}: {self.scoring} scoring cannot apply to fewer than {ANNOTATORS} answers a "
                f"question: take --scoring {others}"
            )
        if args.answerability:  # the same ones, for the probability of this answer
            if any(q.truth.answerable is None for q in questions):
                raise UserError(
                    "--answerability: no annotation says which questions are answerable: give VizWiz's"
                )
            # as the prompt spells it
            word = "Unanswerable" if "'Unanswerable'" in args.template else "unanswerable"
            questions += log_prob_twins(questions, (word,), word)
        return questions

    def rows(self, questions, answers, sure: Mapping = {}):
        """As by default; scores of TITLES are added here, since they need all answers at once."""
        rows = super().rows(questions, answers, sure)
        if self.scoring not in TITLES:
            return rows
        truths = {row.question.id: right_answers(row.question) for row in rows}
        said = {row.question.id: row.answer for row in rows}
        scores = document_scores(self.scoring, truths, said)
        for place, row in enumerate(rows):
            if row.question.id in scores:
                of_row = {TITLES[self.scoring]: scores[row.question.id]}
                rows[place] = row._replace(scores=of_row)
        return rows

    def score(self, question, answer):
        truth = question.truth
        if self.scoring in TITLES:
            return {}  # see `rows`
        if isinstance(truth, Record):
            return record_scores(truth, answer) if truth.turns else {}
        is_left_out = self.scoring == "gqa" and not truth.balanced
        if question.wants_log_probs or not truth.answers or is_left_out:
            return {}
        return {f"VQA accuracy, {self.scoring} scoring": SCORERS[self.scoring](truth, answer)}

    def summary(self, rows):
        scored = [row for row in rows if row.scores]
        lines = {}
        if scored and isinstance(scored[0].question.truth, Record):
            lines = super().summary(scored)
        elif scored:
            values = summarize([(row.question.truth, sum(row.scores.values())) for row in scored])
            percents = {"overall": values["overall"], **values["per_answer_type"]}
            percents |= {f"  {name}": p for name, p in values["per_question_type"].items()}
            title = TITLES.get(self.scoring, "VQA accuracy")
            lines = {name: {title: percent} for name, percent in percents.items()}
        if unsure := [row for row in rows if row.question.wants_log_probs]:
            cannot = [row.question.truth.answerable == 0 for row in unsure]
            lines["answerability"] = answerability(cannot, [math.exp(r.answer[0]) for r in unsure])
        return lines

    def baselines(self, rows):
        questions = [row.question for row in rows if not row.question.wants_log_probs]
        if not self.known or not questions:
            return {}
        return {GUESS: self.rows(questions, text_only_guesses(questions, self.known))}

    def write(self, rows, out, subject):
        id_key, answer_key = SERVER_KEYS.get(self.scoring, ("question_id", "answer"))
        results, unsure = [], []
        for row in rows:
            q, said, scores, _ = row
            if q.wants_log_probs:
                unsure.append({id_key: q.truth.question_id, "answerable": 1 - math.exp(said[0])})
                continue
            result = {id_key: q.id, answer_key: said}
            if isinstance(q.truth, Record):
                result |= {"question": q.prefix, "right": q.truth.truths, **scores}
            results.append(result | certainty_fields(row))
        write_json(out / "results.json", results, indent=0)
        if unsure:
            write_json(out / "answerability.json", unsure, indent=0)


# Questions


def right_answers(question: Question) -> list[str]:
    """All right answers that are known; none for a question that wants log-probabilities."""
    truth = question.truth
    if isinstance(truth, Record):
        return truth.truths
    if question.wants_log_probs:
        return []
    return [given["answer"] for given in truth.answers]


@cache
def embedded(
    limit: int,
    split: str = "test",
    template: str = PROMPT,
) -> list[Question]:
    """The first `limit` questions on the embedded scenes of a split."""
    samples = [scenes.sample("vqa", split, number) for number in range(limit)]
    return of_samples(samples, split, template)


def of_samples(
    samples: Iterable[scenes.Sample], split: str, template: str = PROMPT
) -> list[Question]:
    """Questions on embedded scenes; their truth is an `Annotation` by ten people who agree."""
    questions = []
    for s in samples:
        answers = tuple({"answer": s.suffix, "answer_id": i} for i in range(1, 11))
        truth = Annotation(
            s.question_id,
            answers,
            s.suffix,
            s.answer_type,
            s.question_type,
            question=s.question,
        )
        prompt = fill_prompt(template, s.question)
        key = f"{split}/{s.image_id}"
        questions.append(Question(s.question_id, key, s.scene.render, prompt, truth=truth))
    return questions


def questions_of(
    asked: Iterable[Annotation], images=None, template: str = PROMPT
) -> list[Question]:
    """Questions of published files on pictures in the folder `images`. Raises UserError for a
    picture not in it."""
    questions = []
    for truth in asked:
        path = find_picture(images, truth.image) if images else ()
        prompt = fill_prompt(template, truth.question)
        questions.append(Question(truth.question_id, truth.image, path, prompt, truth=truth))
    return questions


# Guesses, and the accuracies of a training run


def text_only_guesses(test: Sequence[Question], train: Sequence[Question]) -> list[str]:
    """The best guess to each question from its text: the answer most frequent in `train` to the
    same question, else to the same question type, else to any; of equally frequent ones the first
    in the alphabet."""

    def keys(question: Question) -> list[tuple]:
        truth = question.truth
        return [("question", truth.question), ("type", truth.question_type), ()]

    counts = defaultdict(Counter)
    for question in train:
        for key in keys(question):
            counts[key][question.truth.answer] += 1
    best = {}
    for key, answers in counts.items():
        best[key] = min(answers, key=lambda text: (-answers[text], text))
    guesses = []
    for question in test:
        nearest = next(key for key in keys(question) if key in best)
        guesses.append(best[nearest])
    return guesses


def guess_accuracy(
    test: Sequence[Question], train: Sequence[Question] | None = None
) -> dict[str, float]:
    """{"overall": percent, answer type: percent, …} of text-only guesses by exact match; train:
    default embedded."""
    guesses = text_only_guesses(test, train or embedded(TRAIN_QUESTIONS, "train"))
    pairs = zip(test, guesses, strict=True)
    values = summarize([(q.truth, guess == q.truth.answer) for q, guess in pairs])
    return {"overall": values["overall"]} | values["per_answer_type"]


def evaluate_embedded(
    model,
    processor,
    limit: int,
    progress: str | None,
    *,
    ask_all: Callable,
) -> dict:
    """{"overall", "per_answer_type", "per_question_type"} on `limit` questions of the embedded test
    split."""
    asked = embedded(limit)
    answers = ask_all(model, processor, asked, progress=progress)
    pairs = zip(asked, answers, strict=True)
    return summarize([(q.truth, official(q.truth, answer)) for q, answer in pairs])


main = partial(run, Vqa())

if __name__ == "__main__":
    run_command(main)

"""Questions with choices: the official files of MMLU, CMMLU, RACE and ARC, a user's own, and embedded ones.

In: a task's name and its files. Out: an `Item` for each question, its prompt as lm-evaluation-harness words it:
description, the first rows of the dev file with their answers, and the question. `eval/choices.py` scores them.

Sources: EleutherAI/lm-evaluation-harness, lm_eval/tasks; Hendrycks et al. 2021 (MMLU), Li et al. 2023 (CMMLU), Lai et
al. 2017 (RACE), Clark et al. 2018 (ARC).
"""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from string import ascii_uppercase
from typing import NamedTuple

from eval import scenes
from eval.command import Picture
from eval.data import problems_at
from eval.datasets import LIST, NAME, TEXT, fill_prompt, find_images, lines_of, read_id, read_table
from eval.own_files import picture_names
from eval.pictures import Dice
from eval.text import sentences
from model.common import Expected, UserError, quoted, read_field, read_json, shown

LETTERS = "ABCD"
BY_LETTER = {letter: number for number, letter in enumerate(ascii_uppercase)}


class Item(NamedTuple):
    """A question of a `subject`: the choices that may follow its prompt, and the number of the right one.
    `picture` is the name of its picture."""

    id: str
    subject: str
    prompt: str
    choices: tuple[str, ...]
    answer: int
    pictures: tuple[Picture, ...] = ()
    picture: str = ""


@dataclass(frozen=True)
class Exam:
    """How a benchmark of several subjects is laid out. The rows of a subject's CSV file are a question, four options
    and the right letter; with `has_head`, a number comes first, and the first line names the columns."""

    files: str  # with the names of split and subject
    has_head: bool
    description: str
    ending: str
    names: dict[str, str] | None = None  # of the subjects, in the description

    def items(self, folder: Path, shots: int, limit: int | None) -> Iterator[Item]:
        """The questions of the test split. Raises UserError."""
        pattern = self.files.format(split="test", subject="*")
        if not (files := sorted(folder.glob(pattern))):
            raise UserError(f"{shown(folder)}: holds no {pattern}: give the folder of the official files (--data DIR)")
        before, _, after = Path(pattern).name.partition("*")
        for file in files:
            subject = file.name.removeprefix(before).removesuffix(after)
            dev = folder / self.files.format(split="dev", subject=subject)
            shown_first = self.read(dev)[:shots] if shots else []
            if len(shown_first) < shots:
                raise UserError(f"{shown(dev)}: holds {len(shown_first)} questions: lower --shots {shots}")
            examples = "".join(f"{text} {LETTERS[right]}\n\n" for text, right in shown_first)
            head = self.description.format((self.names or {}).get(subject, subject.replace("_", " "))) + examples
            for number, (text, right) in enumerate(self.read(file)[:limit]):
                yield Item(f"{subject}/{number}", subject, head + text, tuple(LETTERS), right)

    def read(self, path: Path) -> list[tuple[str, int]]:
        """The text of each question with its options, and the number of the right one. Raises UserError."""
        found, rows = [], read_table(path)
        if self.has_head and rows and rows[0][1][-1] in tuple(LETTERS):
            raise UserError(f"{rows[0][0]}: is a question, expected the names of the columns: add that line")
        for where, row in rows[self.has_head :]:
            if len(row) != 6 + self.has_head or row[-1] not in tuple(LETTERS):
                raise UserError(f"{where}: expected a question, four options and the right letter: correct the file")
            options = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, row[-5:-1], strict=True))
            found.append((f"{row[-6].strip()}\n{options}\n{self.ending}", LETTERS.index(row[-1])))
        return found


_CMMLU = """
    agronomy 农学 anatomy 解剖学 ancient_chinese 古汉语 arts 艺术学 astronomy 天文学 business_ethics 商业伦理
    chinese_civil_service_exam 中国公务员考试 chinese_driving_rule 中国驾驶规则 chinese_food_culture 中国饮食文化
    chinese_foreign_policy 中国外交政策 chinese_history 中国历史 chinese_literature 中国文学
    chinese_teacher_qualification 中国教师资格 clinical_knowledge 临床知识 college_actuarial_science 大学精算学
    college_education 大学教育学 college_engineering_hydrology 大学工程水文学 college_law 大学法律
    college_mathematics 大学数学 college_medical_statistics 大学医学统计 college_medicine 大学医学
    computer_science 计算机科学 computer_security 计算机安全 conceptual_physics 概念物理学
    construction_project_management 建设工程管理 economics 经济学 education 教育学 electrical_engineering 电气工程
    elementary_chinese 小学语文 elementary_commonsense 小学常识 elementary_information_and_technology 小学信息技术
    elementary_mathematics 初等数学 ethnology 民族学 food_science 食品科学 genetics 遗传学 global_facts 全球事实
    high_school_biology 高中生物 high_school_chemistry 高中化学 high_school_geography 高中地理
    high_school_mathematics 高中数学 high_school_physics 高中物理学 high_school_politics 高中政治
    human_sexuality 人类性行为 international_law 国际法学 journalism 新闻学 jurisprudence 法理学
    legal_and_moral_basis 法律与道德基础 logical 逻辑学 machine_learning 机器学习 management 管理学 marketing 市场营销
    marxist_theory 马克思主义理论 modern_chinese 现代汉语 nutrition 营养学 philosophy 哲学
    professional_accounting 专业会计 professional_law 专业法学 professional_medicine 专业医学
    professional_psychology 专业心理学 public_relations 公共关系 security_study 安全研究 sociology 社会学
    sports_science 体育学 traditional_chinese_medicine 中医中药 virology 病毒学 world_history 世界历史
    world_religions 世界宗教""".split()
EXAMS = {
    "mmlu": Exam(
        "{split}/{subject}_{split}.csv",
        False,
        "The following are multiple choice questions (with answers) about {}.\n\n",
        "Answer:",
    ),
    "cmmlu": Exam(
        "{split}/{subject}.csv",
        True,
        "以下是关于{}的单项选择题，请直接给出正确答案的选项。\n\n",
        "答案：",
        dict(zip(_CMMLU[::2], _CMMLU[1::2], strict=True)),
    ),
}


def race(args: Namespace) -> Iterator[Item]:
    """The last question on each passage of `test/high`, or of the folder itself; the others stand before it.

    Of a question that ends in a blank, the harness shows the blank and the answer alone, and so does this.
    """
    folder = Path(args.data)
    folder = folder / "test" / "high" if (folder / "test" / "high").is_dir() else folder
    if not (files := sorted(folder.glob("*.txt"))):
        raise UserError(f"{shown(folder)}: holds no passages (*.txt): give RACE's folder, with test/high in it")
    for file in files[: args.limit]:
        record, where = read_json(file), shown(file)
        names = ("questions", "options", "answers")
        columns = [read_field(record, name, LIST, where) for name in names]
        if len({len(column) for column in columns}) > 1:
            raise UserError(f"{where}: questions, options and answers differ in number: correct the file")
        prompt = f"Article: {read_field(record, 'article', TEXT, where)}\n\n"
        for number, row in enumerate(zip(*columns, strict=True), start=1):
            one = dict(zip(names, row, strict=True))
            question = read_field(one, "questions", TEXT, where)
            options = texts(read_field(one, "options", Expected(list, 4, 4), where), where)
            right = LETTERS.index(read_field(one, "answers", Expected(str, choices=tuple(LETTERS)), where))
            if number == len(columns[0]):
                yield Item(file.stem, "race", prompt + question, options, right)
            elif question.endswith("  _  ."):
                prompt += f"{question[-5:]}{options[right]}\n"
            else:
                prompt += f"Question: {question}\nAnswer: {options[right]}\n"


def arc(args: Namespace) -> Iterator[Item]:
    """The questions of ARC's JSON lines; options are lettered or numbered."""
    for where, record in islice(lines_of(args.data), args.limit):
        question = read_field(record, "question", Expected(dict), where)
        options = read_field(question, "choices", LIST, where)
        options = [one if isinstance(one, dict) else {} for one in options]
        labels, answers = (texts([one.get(name) for one in options], where) for name in ("label", "text"))
        right = read_field(record, "answerKey", Expected(str, choices=labels), where)
        prompt = f"Question: {read_field(question, 'stem', TEXT, where)}\nAnswer:"
        yield Item(str(read_id(record, "id", where)), "arc", prompt, answers, labels.index(right))


def own(args: Namespace) -> Iterator[Item]:
    """{"question", "choices", "answer"}, JSON lines: the answer is a choice's number, from 0, its text or its letter.

    "subject" and "image", the name of a picture or a list of them, may be given.
    """
    records = lines_of(args.data)[: args.limit]
    with problems_at(args.data):
        names = {where: picture_names(record) for where, record in records}
    folder, every = args.images or Path(args.data).parent, chain(*names.values())
    pictures = find_images(every, folder, args.data)
    for number, (where, record) in enumerate(records, start=1):
        choices, right = texts(read_field(record, "choices", LIST, where), where), record.get("answer")
        if isinstance(right, str):
            right = choices.index(right) if choices.count(right) == 1 else BY_LETTER.get(right, -1)
        if type(right) is not int or not 0 <= right < len(choices):
            found = quoted(record.get("answer"))
            raise UserError(
                f"{where}: answer is {found}, expected one of the choices, its letter, or its number from 0"
            )
        if len(choices) == 1:
            raise UserError(f"{where}: choices has the right one alone, which no model misses: give others, too")
        if choices.count(choices[right]) > 1:  # the first of equally likely ones counts, which may be the other
            raise UserError(f"{where}: choices has {quoted(choices[right])}, the right one, twice: remove one")
        prompt = fill_prompt(args.prompt, read_field(record, "question", TEXT, where))
        subject = read_field(record, "subject", NAME, where, default="own")
        of_record = tuple(pictures[name] for name in names[where])
        yield Item(str(number), subject, prompt, choices, right, of_record, "\n".join(names[where]))


def texts(values: list, where: str) -> tuple[str, ...]:
    """The entries of a list, each a text that is not empty. Raises UserError."""
    return tuple(read_field({"choices": value}, "choices", Expected(str, 1), where) for value in values)


# Embedded


def embedded_scenes(args: Namespace) -> Iterator[Item]:
    """Questions on the embedded pictures, as in `eval.vqa`."""
    drawn = (sample for number in count() for sample in scenes.vqa_picture("test", number))
    samples = list(islice(drawn, args.limit or 600))
    rows = [(s.answer_type, s.question_type, fill_prompt(args.prompt, s.question), s.suffix) for s in samples]
    for item, sample in zip(with_distractors("scene", rows), samples, strict=True):
        yield item._replace(pictures=(sample.scene.render,), picture=f"test/{sample.image_id}")


def embedded_sentences(args: Namespace) -> Iterator[Item]:
    """Questions on text alone, in the prompts of `eval/text/sentences.py`."""
    tasks, last = list(sentences.TASKS), args.limit or 600
    drawn = (sentences.sentence(tasks[n % len(tasks)], "test", n // len(tasks)) for n in range(last))
    yield from with_distractors("sentence", [(s.task, s.task, s.prefix, s.suffix) for s in drawn])


def with_distractors(name: str, rows: Iterable[tuple[str, str, str, str]]) -> Iterator[Item]:
    """Items of (subject, kind, prompt, answer), up to three answers to others of its kind beside the right one."""
    rows, answers = list(rows), defaultdict(set)
    for _, kind, _, answer in rows:
        answers[kind].add(answer)
    for number, (subject, kind, prompt, answer) in enumerate(rows):
        dice, others = Dice(f"choices/{name}/{number}"), sorted(answers[kind] - {answer})
        others = dice.draw(others, min(3, len(others)))
        choices = dice.draw([answer, *others], 1 + len(others))
        yield Item(f"{name}/{number}", subject, prompt, tuple(choices), choices.index(answer))


TASKS: dict[str, Callable[[Namespace], Iterator[Item]]] = {
    "scenes": embedded_scenes,
    "sentences": embedded_sentences,
    "race": race,
    "arc": arc,
    "jsonl": own,
} | {name: lambda args, exam=exam: exam.items(Path(args.data), args.shots, args.limit) for name, exam in EXAMS.items()}
EMBEDDED = ("scenes", "sentences")

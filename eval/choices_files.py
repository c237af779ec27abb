"""Questions with choices: the official files of MMLU, CMMLU, RACE and ARC, your own, and embedded ones.

In: a task's name and its files. Out: a `Question` for each, whose truth is the number of the right choice and whose
kind is its subject; worded as in lm-evaluation-harness: description, first rows of the dev file with their answers, and
the question. `eval/choices.py` scores them.

Sources: EleutherAI/lm-evaluation-harness, lm_eval/tasks; Hendrycks et al. 2021 (MMLU), Li et al. 2023 (CMMLU), Lai et
al. 2017 (RACE), Clark et al. 2018 (ARC).
"""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from string import ascii_uppercase

from eval import scenes
from eval.data import check, fill_prompt, id_of, problems_at, read, read_table, records_in, text
from eval.own_files import find_picture, picture_names
from eval.pictures import Dice
from eval.question import Question
from eval.text import sentences
from model.common import UserError, quoted, read_json, shown

LETTERS = "ABCD"


def question(id_, subject: str, prompt: str, choices: Iterable[str], right: int, pictures=(), picture="") -> Question:
    """picture: names the pictures; questions about text alone share an encoding, and are independent."""
    choices = tuple(choices)
    check(all(isinstance(choice, str) and choice for choice in choices), f"choices {quoted(choices)} are no texts")
    group, key = picture or str(id_), picture or "text"
    return Question(str(id_), key, pictures, prompt, choices, scored=True, truth=right, kind=subject, group=group)


# Exams of several subjects


def exam(args: Namespace, files: str, has_head: bool, head: str, ending: str, names: dict[str, str]) -> list[Question]:
    """MMLU or CMMLU. files: a pattern with split and subject; a row is a question, four options and the right letter;
    with `has_head` a number comes first, and the first line names the columns. names: of the subjects, in `head`."""

    def rows_of(path: Path) -> list[tuple[str, str]]:
        rows, shown_rows = read_table(path), []
        if has_head and rows and rows.pop(0)[1][-1] in tuple(LETTERS):
            raise UserError(
                f"{shown(path)}:1: is a question, expected the names of the columns: take the official file"
            )
        for where, row in rows:
            if len(row) != 6 + has_head or row[-1] not in tuple(LETTERS):
                raise UserError(f"{where}: expected a question, four options and the right letter: correct the file")
            options = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, row[-5:-1], strict=True))
            shown_rows.append((f"{row[-6].strip()}\n{options}\n{ending}", row[-1]))
        return shown_rows

    folder, pattern, questions = Path(args.data), files.format(split="test", subject="*"), []
    if not (paths := sorted(folder.glob(pattern))):
        raise UserError(f"{shown(folder)}: holds no {pattern}: give the folder of the official files (--data DIR)")
    before, _, after = Path(pattern).name.partition("*")
    for path in paths:
        subject = path.name.removeprefix(before).removesuffix(after)
        dev = folder / files.format(split="dev", subject=subject)
        shots = rows_of(dev)[: args.shots] if args.shots else []
        if len(shots) < args.shots:
            raise UserError(f"{shown(dev)}: holds {len(shots)} questions: lower --shots {args.shots}")
        examples = "".join(f"{asked} {right}\n\n" for asked, right in shots)
        prompt = head.format(names.get(subject, subject.replace("_", " "))) + examples
        for number, (asked, right) in enumerate(rows_of(path)[: args.limit]):
            questions.append(question(f"{subject}/{number}", subject, prompt + asked, LETTERS, LETTERS.index(right)))
    return questions


CMMLU = """
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
MMLU = "The following are multiple choice questions (with answers) about {}.\n\n"
EXAMS = {
    "mmlu": partial(exam, files="{split}/{subject}_{split}.csv", has_head=False, head=MMLU, ending="Answer:", names={}),
    "cmmlu": partial(
        exam,
        files="{split}/{subject}.csv",
        has_head=True,
        head="以下是关于{}的单项选择题，请直接给出正确答案的选项。\n\n",
        ending="答案：",
        names=dict(zip(CMMLU[::2], CMMLU[1::2], strict=True)),
    ),
}

# Other files


def race(args: Namespace) -> list[Question]:
    """The last question on each passage of `test/high`, or of the folder itself; the others stand before it.

    Of a question that ends in a blank, the harness shows the blank and the answer alone, and so does this.
    """
    folder, questions = Path(args.data), []
    folder = folder / "test" / "high" if (folder / "test" / "high").is_dir() else folder
    if not (paths := sorted(folder.glob("*.txt"))):
        raise UserError(f"{shown(folder)}: holds no passages (*.txt): give RACE's folder, with test/high in it")
    for path in paths[: args.limit]:
        record = read_json(path)
        with problems_at(path):
            prompt = f"Article: {text(record, 'article')}\n\n"
            *earlier, last = zip(*(record[key] for key in ("questions", "options", "answers")), strict=True)
            for asked, options, right in earlier:
                answer = options[LETTERS.index(right)]
                is_blank = asked.endswith("  _  .")
                prompt += f"{asked[-5:]}{answer}\n" if is_blank else f"Question: {asked}\nAnswer: {answer}\n"
            questions.append(question(path.stem, "race", prompt + last[0], last[1], LETTERS.index(last[2])))
    return questions


def arc(args: Namespace) -> list[Question]:
    """The questions of ARC's JSON lines; options are lettered or numbered."""

    def of_record(record: dict) -> Question:
        asked = record["question"]
        labels, options = ([option[key] for option in asked["choices"]] for key in ("label", "text"))
        id_, prompt = id_of({"question_id": record["id"]}), f"Question: {text(asked, 'stem')}\nAnswer:"
        return question(id_, "arc", prompt, options, labels.index(record["answerKey"]))

    return read(args.data, of_record, records_in(args.data)[: args.limit])


def own(args: Namespace) -> list[Question]:
    """{"question", "choices", "answer"}, JSON lines: the answer is a choice's number, from 0, its text or its letter.

    "subject" and "image", the name of a picture or a list of them, may be given.
    """
    folder = Path(args.images or Path(args.data).parent)

    def of_record(record: dict) -> Question:
        choices, right, names = record["choices"], record["answer"], picture_names(record)
        if isinstance(right, str):
            letter = ascii_uppercase.find(right) if len(right) == 1 else -1
            right = choices.index(right) if choices.count(right) == 1 else letter
        expected = "one of the choices, its letter, or its number from 0"
        check(type(right) is int and 0 <= right < len(choices), f"answer is {quoted(record['answer'])}, not {expected}")
        check(len(choices) > 1, "choices has the right one alone, which no model misses")
        # the first of equally likely ones counts, which may be the other
        check(choices.count(choices[right]) == 1, f"choices has {quoted(choices[right])}, the right one, twice")
        prompt, subject = (
            fill_prompt(args.template, text(record, "question")),
            text({"subject": "own"} | record, "subject"),
        )
        pictures = tuple(find_picture(folder, name) for name in names)
        return question("", subject, prompt, choices, right, pictures, "\n".join(names))

    made = read(args.data, of_record, records_in(args.data)[: args.limit])
    return [replace(q, id=str(number), group=q.group or str(number)) for number, q in enumerate(made, 1)]


# Embedded


def embedded_scenes(args: Namespace) -> list[Question]:
    """Questions on the embedded pictures, as in `eval.vqa`."""
    drawn = (sample for number in count() for sample in scenes.vqa_picture("test", number))
    samples = list(islice(drawn, args.limit or 600))
    rows = [(s.answer_type, s.question_type, fill_prompt(args.template, s.question), s.suffix) for s in samples]
    pictures = [(f"test/{s.image_id}", (s.scene.render,)) for s in samples]
    questions = zip(with_distractors("scene", rows), pictures, strict=True)
    return [replace(q, key=name, group=name, picture=picture) for q, (name, picture) in questions]


def embedded_sentences(args: Namespace) -> list[Question]:
    """Questions on text alone, in the prompts of `eval/text/sentences.py`."""
    tasks, last = list(sentences.TASKS), args.limit or 600
    drawn = (sentences.sentence(tasks[n % len(tasks)], "test", n // len(tasks)) for n in range(last))
    return with_distractors("sentence", [(s.task, s.task, s.prefix, s.suffix) for s in drawn])


def with_distractors(name: str, rows: list[tuple[str, str, str, str]]) -> list[Question]:
    """Questions of (subject, kind, prompt, answer), up to three answers to others of its kind beside the right one."""
    answers, questions = defaultdict(set), []
    for _, kind, _, answer in rows:
        answers[kind].add(answer)
    for number, (subject, kind, prompt, answer) in enumerate(rows):
        dice, others = Dice(f"choices/{name}/{number}"), sorted(answers[kind] - {answer})
        others = dice.draw(others, min(3, len(others)))
        choices = dice.draw([answer, *others], 1 + len(others))
        questions.append(question(f"{name}/{number}", subject, prompt, choices, choices.index(answer)))
    return questions


EMBEDDED = {"scenes": embedded_scenes, "sentences": embedded_sentences}
TASKS = EMBEDDED | {"race": race, "arc": arc, "jsonl": own} | EXAMS

"""The suite on files of the official layouts: the rows of two models, the plan, what is missing;
VizWiz and POPE."""

import re
import shutil

import pytest

from eval import suite
from eval.bench import parser_of
from eval.vqa import Vqa
from eval.vqa_scoring import answerability
from model.config import PRESETS
from model.systems.configs import WingsConfig
from tests.eval.test_mmbench import BY_HAND, rows_of, write
from tests.files import draw, read_json, write_json, write_mmneedle, write_vqav2
from tests.runs import refuses, words

TABLE = "VQAv2,GQA,VizWiz,unanswerable AP,unanswerable F1,TextVQA"
TABLE += ",POPE,POPE F1,POPE P(yes),MMBench,MMNeedle"
# of the benchmarks whose files need not be drawn
FILES = """
gqa/testdev_balanced_questions | {
    "0": {"imageId": "0", "question": "Who 0?", "types": {"structural": "query"},
        "isBalanced": true, "answer": "dog"},
    "1": {"imageId": "1", "question": "Who 1?", "types": {"structural": "query"},
        "isBalanced": true, "answer": "dog"}}
vizwiz/val | [
    {"image": "0.jpg", "question": "Who?", "answerable": 0, "answer_type": "other",
        "answers": [{"answer": "dog"}, {"answer": "cat"}, {"answer": "dog"}, {"answer": "cat"}]},
    {"image": "1.jpg", "question": "Who?", "answerable": 1, "answer_type": "other",
        "answers": [{"answer": "dog"}, {"answer": "dog"}, {"answer": "dog"}, {"answer": "dog"}]}]
textvqa/TextVQA_0.5.1_val | {"data": [
    {"image_id": "0", "question": "Which 0?", "question_id": 0, "answers": ["dog", "cat", "dog", "cat"]},
    {"image_id": "1", "question": "Which 1?", "question_id": 1, "answers": ["dog", "dog", "dog", "dog"]}]}
pope/coco_pope_KIND | [
    {"text": "Is it KIND?", "question_id": 1, "image": "COCO_val2014_000000000001.jpg",
        "label": "yes"},
    {"text": "Is it KIND?", "question_id": 2, "image": "COCO_val2014_000000000001.jpg",
        "label": "no"}]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """All files that --root holds, with a few questions in each."""
    root = tmp_path_factory.mktemp("root")
    write_vqav2(root / "coco", 3, "val2014")
    write_mmneedle(root / "needle")
    shutil.copytree(root / "needle/val2014", root / "coco/val2014", dirs_exist_ok=True)
    (root / "needle/C").rename(root / "needle/file_to_caption.json")
    for folder in "vqav2 gqa/images vizwiz/val textvqa/train_images pope mmbench".split():
        (root / folder).mkdir(parents=True)
        for number in range(2):
            draw(root / folder / f"{number}.jpg", (99 * number, 0, 0), size=(20, 20))
    for file in (root / "coco").glob("*.json"):
        shutil.move(file, root / "vqav2" / file.name)
    for part in re.split(r"\n(?=\w)", FILES.strip()):
        for kind in ("random", "popular", "adversarial"):
            name, content = part.replace("KIND", kind).split(" | ")
            (root / f"{name}.json").write_text(content)
    write(root / "mmbench/MMBench_DEV_EN.tsv", rows_of(BY_HAND[:2]))
    return root


@pytest.mark.long
def test_the_rows_of_two_models(root, source, twin, workplace, printed, told):
    """Breaks when a benchmark is not asked, or its figure is another's."""
    flags = f"--root {root} --model {source} --max-new-tokens 2 --limit 2 --adapter none"
    found = told(suite, flags)
    folder = workplace / "runs/eval/suite"
    assert [*found["random"]] == TABLE.split(",")
    assert None not in found["random"].values()
    assert found == read_json(folder / "suite.json")
    named = found["random"]
    assert (named["POPE"], named["POPE F1"], named["unanswerable F1"]) == (50, 200 / 3, 0)
    assert read_json(folder / "vizwiz/answerability.json")[0]["answerable"] > 0.9
    rows = read_json(folder / "gqa/results.json")
    assert [set(row) for row in rows] == 2 * [{"questionId", "prediction", "confidence", "ended"}]
    suite.main(words(flags, "--adapter", twin, "--tasks gqa,pope --blind --out two"))
    lines = printed()
    for part in ("| random, blind |", "| random ", "| twin", "pope:\n2 questions"):
        assert part in lines
    assert (workplace / "two/pope/twin/results.json").is_file()


def test_prompts_of_the_families_and_what_is_missing(root, source, printed, monkeypatch, workplace):
    """Breaks when a model is asked in another's words, a plan opens one, or missing files show
    after an hour."""
    monkeypatch.setattr("eval.open.load_model", None)
    (workplace / "wings").mkdir()
    write_json(workplace / "wings/config.json", WingsConfig(**vars(PRESETS["tiny"])).to_dict())
    short = r"\nAnswer the question using a single word or phrase."
    unsure = r"\nWhen the provided information is insufficient, respond with 'Unanswerable'."
    llava = rf"Who 0?{short}|Who?{unsure}{short}|Is it random?{short}|what, 0?\nA."
    paligemma = "answer en Who 0?|answer en Who?|Is it random?|answer en  what, 0? choose from: cat"
    given = "Now:Who 0?|Now:Who?|Now:Is it|answer en  what, 0?"
    models = {source: paligemma, f"{source} --wording llava": llava, "wings": llava}
    for model, prompts in (models | {f"{source} --prompt Now:{{question}}": given}).items():
        suite.main(f"--root {root} --tasks gqa,vizwiz,pope,mmbench --plan --model {model}".split())
        rows = printed().splitlines()[2:]
        for row, prompt in zip(rows, prompts.split("|"), strict=True):
            assert prompt in row
    flags = f"--questions {root}/vizwiz/val.json --images {root}/vizwiz/val --answerability"
    args = parser_of(Vqa()).parse_args(flags.split())
    args.template = suite.UNSURE
    assert Vqa().questions(args)[-1].choices == ("Unanswerable",)  # as the prompt spells it
    assert [path.name for path in workplace.iterdir()] == ["wings"]
    (workplace / "gqa").symlink_to(root / "gqa")
    missing = "3 of 5 ", ": textvqa/TextVQA_0.5.1_val.json, textvqa"
    refuses(suite, f"--root . --model {source} --tasks gqa,textvqa,mmbench", *missing)
    refuses(suite, "--root . --tasks vqa", "'vqa' is none of vqav2, gqa")


def test_answerability_by_hand():
    """Breaks when the positives are the answerable ones, ties are broken by place, or ½ counts as
    called."""
    # from high to low: hit | miss, hit | miss | hit: precision 1/1, 2/3, –, 3/5 at recall steps of
    # 1/3
    found = answerability([True, False, True, False, True], [0.9, 0.6, 0.6, 0.5, 0.2])
    # called: 3, of which 2 hit; 2·2/(3+3)
    assert found == {"AP": round(100 * (1 + 2 / 3 + 3 / 5) / 3, 2), "F1": 66.67}
    assert answerability([False], [0.1]) == {"AP": 0.0, "F1": 0.0}

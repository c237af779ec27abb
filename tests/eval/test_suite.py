"""The suite on files of the official layouts: the rows of two models, the plan, what is missing;
VizWiz and POPE."""

import json
import shutil
from functools import partial

import pytest

from eval import suite
from eval.vqa_scoring import answerability
from model.config import PRESETS
from model.systems.configs import WingsConfig
from tests.eval.test_mmbench import BY_HAND, rows_of, write
from tests.files import draw, read_json, write_json, write_mmneedle, write_vqav2
from tests.runs import refused

TABLE = "VQAv2,GQA,VizWiz,unanswerable AP,unanswerable F1,TextVQA,POPE,POPE F1,POPE P(yes),MMBench,MMNeedle".split(
    ","
)


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
    kinds = {
        "types": {"structural": "query", "semantic": "obj", "detailed": "x"},
        "isBalanced": True,
        "answer": "dog",
    }
    said = {"answers": [{"answer": "dog", "answer_confidence": "yes"}] * 10, "answer_type": "other"}
    text = [
        {"image_id": str(n), "question": f"Which {n}?", "question_id": n, "answers": ["dog"] * 10}
        for n in (0, 1)
    ]
    files = {
        "gqa/testdev_balanced_questions": {
            n: {"imageId": n, "question": f"Who {n}?"} | kinds for n in "01"
        },
        "vizwiz/val": [
            {"image": f"{n}.jpg", "question": "Who?", "answerable": n} | said for n in range(2)
        ],
        "textvqa/TextVQA_0.5.1_val": {"data": text},
    }
    for name in ("random", "popular", "adversarial"):
        line = {
            "text": f"Is it {name}?",
            "question_id": 1,
            "image": "COCO_val2014_000000000001.jpg",
            "label": "yes",
        }
        files[f"pope/coco_pope_{name}"] = [line, line | {"question_id": 2}]
    for name, content in files.items():
        write_json(root / f"{name}.json", content)
    write(root / "mmbench/MMBench_DEV_EN.tsv", rows_of(BY_HAND[:2]))
    return root


@pytest.mark.long
def test_the_rows_of_two_models(root, source, twin, workplace, printed):
    """Breaks when a benchmark is not asked, or its figure is another's."""
    flags = [
        "--root",
        str(root),
        "--model",
        source,
        *"--max-new-tokens 2 --limit 2 --adapter none".split(),
    ]
    suite.main([*flags, "--json"])
    found = json.loads(printed())
    folder = workplace / "runs/eval/suite"
    assert [*found["random"]] == TABLE
    assert None not in found["random"].values()
    assert found == read_json(folder / "suite.json")
    rows = read_json(folder / "gqa/results.json")
    assert [set(row) for row in rows] == 2 * [{"questionId", "prediction", "confidence", "ended"}]
    suite.main([*flags, "--adapter", twin, *"--tasks gqa,pope --blind --out two".split()])
    lines = printed()
    assert all(
        part in lines for part in ("| random, blind |", "| random ", "| twin", "pope:\n2 questions")
    )
    assert (workplace / "two/pope/twin/results.json").is_file()


def test_prompts_of_the_families_and_what_is_missing(root, source, printed, monkeypatch, workplace):
    """Breaks when a model is asked in another's words, a plan opens one, or missing files show
    after an hour."""
    monkeypatch.setattr("eval.open.load_model", None)
    (workplace / "wings").mkdir()
    write_json(workplace / "wings/config.json", WingsConfig(**vars(PRESETS["tiny"])).to_dict())
    short = "Answer the question using a single word or phrase."
    unsure = "When the provided information is insufficient, respond with 'Unanswerable'."
    llava = (
        f"Who 0?\n{short}",
        f"Who?\n{unsure}\n{short}",
        f"Is it random?\n{short}",
        "what, 0?\nA.",
    )
    paligemma = (
        "answer en Who 0?",
        "answer en Who?",
        "Is it random?",
        "answer en  what, 0? choose from: cat \t",
    )
    given = "Now:Who 0?", "Now:Who?", "Now:Is it", paligemma[3]
    models = (source, paligemma), (f"{source} --wording llava", llava), ("wings", llava)
    for model, prompts in (*models, (f"{source} --prompt Now:{{question}}", given)):
        suite.main(f"--root {root} --tasks gqa,vizwiz,pope,mmbench --plan --model {model}".split())
        rows = printed().splitlines()[2:]
        assert all(repr(prompt)[1:-1] in row for row, prompt in zip(rows, prompts, strict=True)), (
            rows
        )
    assert [path.name for path in workplace.iterdir()] == ["wings"]
    (workplace / "gqa").symlink_to(root / "gqa")
    missing = partial(suite.main, f"--root . --model {source} --tasks gqa,textvqa,mmbench".split())
    refused(missing, "3 of 5 ", ": textvqa/TextVQA_0.5.1_val.json, textvqa")
    refused(lambda: suite.main("--root . --tasks vqa".split()), "'vqa' is none of vqav2, gqa")


def test_answerability_by_hand():
    """Breaks when the positives are the answerable ones, ties are broken by place, or ½ counts as
    called."""
    # from high to low: hit | miss, hit | miss | hit: precision 1/1, 2/3, –, 3/5 at recall steps of
    # 1/3
    found = answerability([True, False, True, False, True], [0.9, 0.6, 0.6, 0.5, 0.2])
    assert found == {
        "AP": round(100 * (1 + 2 / 3 + 3 / 5) / 3, 2),
        "F1": 66.67,
    }  # called: 3, of which 2 hit; 2·2/(3+3)
    assert answerability([False], [0.1]) == {"AP": 0.0, "F1": 0.0}

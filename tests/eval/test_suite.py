"""The suite on files of the official layouts: the rows of two models, the plan, what is missing; VizWiz and POPE."""

import json
import shutil

import pytest
from PIL import Image

from eval import answer, suite
from eval.vqa_scoring import answerability
from model.common import UserError
from model.config import PRESETS
from model.system_configs import WingsConfig
from tests.eval.test_mmbench import BY_HAND, rows_of, write
from tests.files import write_mmneedle, write_vqav2

TABLE = ("VQAv2", "GQA", "VizWiz", "unanswerable AP", "unanswerable F1", "TextVQA", "POPE", "POPE F1", "POPE P(yes)")
TABLE += ("MMBench", "MMNeedle")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """All files that --root holds, with a few questions in each."""
    root = tmp_path_factory.mktemp("root")
    write_vqav2(root / "coco", 3, "val2014")
    (root / "vqav2").mkdir()
    for file in (root / "coco").glob("*.json"):
        shutil.move(file, root / "vqav2" / file.name)
    write_mmneedle(root / "needle")
    for file in (root / "needle" / "val2014").iterdir():
        if not (root / "coco" / "val2014" / file.name).exists():
            shutil.move(file, root / "coco" / "val2014" / file.name)
    (root / "needle" / "C").rename(root / "needle" / "file_to_caption.json")
    for folder in ("gqa/images", "vizwiz/val", "textvqa/train_images"):
        (root / folder).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (20, 20), (99 * number, 0, 0)).save(root / folder / f"{number}.jpg")
    kinds = {"types": {"structural": "query", "semantic": "obj", "detailed": "x"}, "isBalanced": True}
    gqa = {f"0{n}": {"imageId": str(n), "question": f"Who {n}?", "answer": "dog"} | kinds for n in range(2)}
    (root / "gqa/testdev_balanced_questions.json").write_text(json.dumps(gqa))
    said = [{"answer": "dog", "answer_confidence": "yes"}] * 10
    vizwiz = [
        {"image": f"{n}.jpg", "question": "Who?", "answers": said, "answer_type": "other", "answerable": n}
        for n in range(2)
    ]
    (root / "vizwiz/val.json").write_text(json.dumps(vizwiz))
    text = [{"image_id": str(n), "question": f"Which {n}?", "question_id": n, "answers": ["dog"] * 10} for n in (0, 1)]
    (root / "textvqa/TextVQA_0.5.1_val.json").write_text(json.dumps({"data": text}))
    (root / "pope").mkdir()
    for name in ("random", "popular", "adversarial"):
        lines = [
            {"question_id": n, "image": f"COCO_val2014_{n:012d}.jpg", "text": f"Is it {name}?", "label": label}
            for n, label in ((1, "yes"), (2, "no"))
        ]
        (root / f"pope/coco_pope_{name}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "mmbench").mkdir()
    write(root / "mmbench/MMBench_DEV_EN.tsv", rows_of(BY_HAND[:2]))
    return root


@pytest.mark.long
def test_the_rows_of_two_models(root, source, twin, workplace, capsys, monkeypatch):
    """Breaks when a benchmark is not asked, its figure is another's, or a resumed run asks again."""
    asked, generate, score = [], answer.generate, answer.log_likelihoods
    monkeypatch.setattr(answer, "generate", lambda *args, **options: asked.append(args) or generate(*args, **options))
    monkeypatch.setattr(
        answer, "log_likelihoods", lambda *args, **pictures: asked.append(args) or score(*args, **pictures)
    )
    flags = ["--root", str(root), "--model", source, *"--max-new-tokens 2 --limit 2 --adapter none".split()]
    suite.main([*flags, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert tuple(found["random"]) == TABLE and None not in found["random"].values() and len(asked) >= 8
    folder = workplace / "runs/eval/suite"
    assert found == json.loads((folder / "suite.json").read_text())
    names = {"vqav2": {"question_id", "answer"}, "gqa": {"questionId", "prediction"}, "vizwiz": {"image", "answer"}}
    for task, fields in names.items():
        results = json.loads((folder / f"random/{task}/results.json").read_text())
        assert len(results) == 2 and all(set(row) == fields for row in results)
    unsure = json.loads((folder / "random/vizwiz/answerability.json").read_text())
    assert [row["image"] for row in unsure] == ["0.jpg", "1.jpg"] and all(0 <= row["answerable"] <= 1 for row in unsure)
    asked.clear()
    suite.main([*flags, "--adapter", twin, *"--tasks gqa,pope --blind".split()])
    lines = capsys.readouterr().out
    assert {id(args[0]) for args in asked if "blind" not in args} and "| random, blind |" in lines
    assert "| random " in lines and "| twin" in lines and "pope:\n2 questions" in lines


def test_prompts_of_the_families_and_the_plan(root, source, capsys, monkeypatch, workplace):
    """Breaks when a model is asked in another's words, or a plan opens a model."""
    monkeypatch.setattr(suite, "open_model", None)
    tasks = ["--tasks", "gqa,vizwiz,pope,mmbench", "--root", str(root), "--plan"]
    short = "Answer the question using a single word or phrase."
    unsure = "When the provided information is insufficient, respond with 'Unanswerable'."
    (workplace / "wings").mkdir()
    config = WingsConfig.beside(PRESETS["tiny"]).to_dict()
    (workplace / "wings/config.json").write_text(json.dumps(config))
    llava = (f"Who 0?\n{short}", f"Who?\n{unsure}\n{short}", f"Is it random?\n{short}", "what, 0?\nA.")
    for model, wording, prompts in (
        (
            source,
            [],
            ("answer en Who 0?", "answer en Who?", "Is it random?", "answer en  what, 0? choose from: cat \t"),
        ),
        (source, ["--wording", "llava"], llava),
        ("wings", [], llava),
        (
            source,
            ["--prompt", "Now: {question}"],
            ("Now: Who 0?", "Now: Who?", "Now: Is it random?", "answer en  what"),
        ),
    ):
        suite.main([*tasks, *wording, "--model", model])
        rows = capsys.readouterr().out.splitlines()[2:]
        assert len(rows) == 4
        for row, prompt in zip(rows, prompts, strict=True):
            assert repr(prompt)[1:-1] in row, row
    assert [path.name for path in workplace.iterdir()] == ["wings"]


def test_missing_files_are_named_before_anything_is_asked(root, source, workplace, monkeypatch):
    """Breaks when an hour is spent on the first benchmark before the files of the last are looked for."""
    monkeypatch.setattr(suite, "open_model", None)
    for name in ("gqa", "coco"):
        (workplace / name).symlink_to(root / name)
    with pytest.raises(UserError) as caught:
        suite.main(["--root", ".", "--tasks", "gqa,textvqa,mmbench", "--model", source])
    assert str(caught.value).startswith(
        "3 of 5 files and folders are missing: textvqa/TextVQA_0.5.1_val.json, textvqa/"
    )
    with pytest.raises(UserError, match="'vqa' is none of vqav2, gqa"):
        suite.main(["--root", ".", "--tasks", "vqa"])


def test_answerability_by_hand():
    """Breaks when the positives are the answerable ones, ties are broken by place, or ½ counts as called."""
    # from high to low: hit | miss, hit | miss | hit: precision 1/1, 2/3, –, 3/5 at recall steps of 1/3
    found = answerability([True, False, True, False, True], [0.9, 0.6, 0.6, 0.5, 0.2])
    assert found == {"AP": round(100 * (1 + 2 / 3 + 3 / 5) / 3, 2), "F1": 66.67}  # called: 3, of which 2 hit; 2·2/(3+3)
    assert answerability([False], [0.1]) == {"AP": 0.0, "F1": 0.0}

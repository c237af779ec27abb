"""PaliGemma's published transfers as recipes: the numbers, which row a base takes, and what a run
says about it."""

import pytest
import torch

from model.config import PRESETS
from tests.files import table, write_json
from tests.runs import metrics, refused, run, settings_of, train, words
from train import finetune
from train.recipes import ROWS, TASKS
from train.settings import parse
from train.summary import next_commands

# task and side of the base | epochs, rate, weight decay a step, rows of a step, smoothing | prompt
PUBLISHED = """
    vqav2 224       | 10 1e-5 1e-6 256 0.0 | answer en {question}
    vqav2 448       | 10 1e-5 0.0 256 0.0  | answer en {question}
    textvqa 224     | 5 3e-6 0.0 256 0.0   | answer en {question}
    textvqa 448     | 10 3e-6 3e-7 256 0.0 | answer en {question}
    textvqa 896     | 10 3e-6 0.0 256 0.0  | answer en {question}
    vizwizvqa 448   | 10 1e-5 0.0 256 0.0  | answer en {question}
    gqa 224         | 1 1e-5 0.0 256 0.0   | answer en {question}
    gqa 448         | 1 1e-5 0.0 256 0.0   | answer en {question}
    vizwizvqa 224   | 10 1e-5 0.0 256 0.0  | answer en {question}
    docvqa 224      | 10 1e-5 1e-6 256 0.0 | {question}
    docvqa 448      | 10 1e-5 1e-6 256 0.0 | {question}
    docvqa 896      | 10 1e-5 1e-6 256 0.0 | {question}
    chartqa 224     | 30 1e-5 1e-6 256 0.2 | {question}
    chartqa 448     | 30 1e-5 1e-6 256 0.2 | {question}
    infovqa 224     | 3 1e-5 1e-6 256 0.4  | answer en {question}
    infovqa 448     | 3 1e-5 1e-6 128 0.4  | answer en {question}
    infovqa 896     | 3 3e-6 3e-7 32 0.4   | answer en {question}
    refcoco_seg 224 | 100 3e-5 0.0 256 0.3 | {question}
    refcoco_seg 448 | 100 1e-5 0.0 256 0.3 | {question}
    refcoco_seg 896 | 100 1e-5 0.0 64 0.3  | {question}
    cococap 224     | 5 1e-5 1e-6 256 0.0  | answer en {question}
    cococap 448     | 5 1e-5 1e-6 256 0.0  | answer en {question}"""


@pytest.mark.parametrize("base, numbers, prompt", table(PUBLISHED))
def test_a_transfer_is_the_published_one(base, numbers, prompt):
    """Breaks when a number of a published sweep is another, or its decay is taken as AdamW's,
    relative to the rate: with it a step would take 1e-11 of a weight instead of 1e-6."""
    task, side = base.split()
    epochs, rate, decay, rows, smoothing = map(float, numbers.split())
    s = settings_of(f"--base paligemma-3b-{side} --recipe paligemma:{task}")
    assert (s.epochs, s.lr, s.step_batch, s.label_smoothing) == (epochs, rate, rows, smoothing)
    assert (s.prompt, s.answers, s.full, s.attention) == (prompt, "sampled", True, "softmax")
    assert (s.beta2, s.schedule, s.warmup, s.clip) == (0.999, "cosine", 0.05, 1.0)
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    weight.grad = torch.zeros_like(weight)
    # in the middle of the decay, where big_vision's is half of wd
    torch.optim.AdamW([weight], lr=0.5 * s.lr, weight_decay=s.weight_decay).step()
    assert 1 - weight.item() == pytest.approx(0.5 * decay, rel=1e-6, abs=1e-18)


def test_the_side_of_the_base_chooses_the_row(tmp_path):
    """Breaks when a base of another size takes a row of larger pictures, or none, or a flag is
    overruled."""

    def rows(base, more=""):
        return settings_of(f"--base {base} --recipe paligemma:infovqa {more}").step_batch

    write_json(tmp_path / "config.json", PRESETS["paligemma-3b-448"].to_dict())
    assert rows(tmp_path) == 128  # by its config.json
    assert rows("embedded") == 256  # smaller than all
    assert rows("paligemma-3b-896", "--step-batch 48") == 48
    last = settings_of("--base paligemma-3b-896 --recipe paligemma:vqav2")
    assert last.weight_decay == 0  # 448, the next smaller one that is published
    refused(lambda: settings_of("--base gone --recipe paligemma:gqa"), "gone")


def test_help_prints_every_row(printed):
    """Breaks when `--recipe help` starts a run, or hides a row or what is not done here."""
    with pytest.raises(SystemExit) as caught:
        train("--recipe help")
    assert not caught.value.code
    text = printed()
    lines = [line.split() for line in text.splitlines()]
    for row in ROWS:
        assert [*row[:-1], *row[-1].split()] in lines
    assert "dropout 0.1" in text
    with pytest.raises(SystemExit) as caught:
        parse(words("--recipe paligemma:docvq"))
    assert caught.value.code == 2


def test_a_run_says_what_differs_from_the_published_one(printed):
    """Breaks when a published setting that is none here is left out in silence."""
    for task in TASKS:
        finetune.print_recipe(settings_of(f"--base paligemma-3b-224 --recipe {task}"))
        text = printed()
        assert "published for pictures of 224 pixels" in text
        assert "tokens of a step count alike" in text
        assert "--weight-decay is wd / lr" in text
        assert ("dropout" in text) == (task[10:] in ("chartqa", "refcoco_seg"))
        assert ("frozen" in text) == (task == "paligemma:gqa")
    finetune.print_recipe(settings_of("--recipe paligemma"))
    assert len(printed().splitlines()) == 1


def test_questions_of_a_published_file_are_asked_with_the_prompt(tmp_path):
    """Breaks when the prompt of a recipe is not that of training, or not that of the command that
    asks the trained model."""
    settings = settings_of("--data vqa:train.json --recipe paligemma:docvqa")
    assert settings.question_prompt == "{question}"
    first, *_ = next_commands(settings, tmp_path, False)
    assert "eval.vqa --data vqa:TEST" in first
    assert "--prompt '{question}'" in first


@pytest.mark.long
def test_training_is_smoothed_and_held_out_losses_are_not(tmp_path):
    """Breaks when --label-smoothing changes nothing, or what a run is judged by."""
    losses = {}
    for smoothing in (0, 0.3):
        flags = f"--base embedded --steps 1 --evaluate --eval-limit 8 --lr 0 --label-smoothing {smoothing}"
        run(flags, out=tmp_path / str(smoothing))
        (line,) = metrics(tmp_path / str(smoothing))
        losses[smoothing] = line["loss"], line["held_out_loss"]
    assert losses[0.3][0] > losses[0][0] + 0.5
    assert losses[0.3][1] == losses[0][1]

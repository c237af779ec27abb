"""Every evaluation stops at logits that are NaN or infinite and names the question: no such answer is scored."""

import pytest
import torch
from PIL import Image

from eval import ask, pope, shift, vqa
from eval.answer import ask_all
from eval.question import Question
from eval.text import measures
from model.common import UserError
from model.generate import NonFiniteError, generate
from model.language import new_model
from weights.export import companions, export_model
from weights.load import load_model

pytestmark = pytest.mark.long

PICTURE = Image.new("RGB", (112, 112), (10, 200, 90))


@pytest.fixture
def model():
    return load_model("embedded").eval()


def damage(model, token: int, value: float) -> None:
    """Make every sequence that reads `token` non-finite: its hidden state, not the tied head, gets the value."""
    embed = model.language_model.embed_tokens
    embed.register_forward_hook(lambda _, given, out: out.masked_fill((given[0] == token)[..., None], value))


@pytest.mark.parametrize("choices", [(), ("1", "2")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_the_question_is_named_and_no_other(model, processor, choices, value):
    """Breaks when a non-finite row of a batch is answered, or another question of the batch is blamed."""
    asked = [Question(f"of {name}", "one", PICTURE, f"count {name}", choices) for name in ("dog", "cat", "horse")]
    damage(model, processor.encode(" cat")[-1], value)
    if value == 1e30:  # large but finite: the norms bring it back
        assert len(ask_all(model, processor, asked)) == 3
        return
    with pytest.raises(UserError, match="question of cat: the logits are not finite"):
        ask_all(model, processor, asked, left_out={})
    assert None not in ask_all(model, processor, [asked[0], asked[2]])


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_a_later_token_counts_and_none_after_the_end(model, processor, options):
    """Breaks when only the first step is checked, sampling from NaN is a traceback, or padding stops a whole batch."""
    batch = processor([PICTURE] * 2, ["count dog", "caption en"])
    inputs = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask

    def answers() -> list[list[int]]:
        torch.manual_seed(0)
        return [row.tolist() for row in generate(model, *inputs, 8, image_index=batch.image_index, **options)]

    expected = answers()
    assert len(expected[0]) < len(expected[1]) and len(expected[1]) > 2
    damage(model, processor.config.eos_token_id, float("nan"))
    assert answers() == expected  # the shorter row has ended
    damage(model, expected[1][1], float("nan"))
    with pytest.raises(NonFiniteError) as caught:
        answers()
    assert 1 in caught.value.rows


def test_no_command_scores_it(workplace, corpus):
    """Breaks when an evaluation prints empty answers, 50 % or NaN with exit code 0."""
    model = load_model("embedded")
    with torch.no_grad():
        model.language_model.norm.weight.fill_(3e38)  # finite weights, as of an adapter with alpha 1e30
    export_model(model, workplace / "large", companions=companions("embedded"))
    PICTURE.save("p.png")
    commands = (ask, "--image p.png --prompt caption"), (vqa, "--limit 6"), (pope, "--limit 6 --probability")
    for command, flags in (*commands, (shift, "--limit 2 --slot inside")):
        with pytest.raises(UserError, match="^(question|prompt) .*: the logits are not finite"):
            command.main(["--model", "large", *flags.split()])
    assert not [*(workplace / "runs").rglob("*.json")]
    text = new_model("nano", differential=True, seed=0).eval()
    with torch.no_grad():
        text.language_model.norm.weight.fill_(float("inf"))
    for name, measure in measures.MEASURES.items():
        with pytest.raises(UserError, match=rf"{name} test 1: the logits are not finite"):
            measure(text, corpus, 256, 5)

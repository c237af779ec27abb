"""Every evaluation stops at logits that are NaN or infinite and names the question: no such answer is scored."""

import pytest
import torch
from PIL import Image

from eval import ask, pope, shift, vqa
from eval.answer import ask_all, log_likelihoods
from eval.question import Question
from eval.text import measures
from model.common import UserError
from model.generate import NonFiniteError, generate
from model.language import new_model
from weights.export import companions, export_model
from weights.load import load_model

pytestmark = pytest.mark.long

PICTURE = Image.new("RGB", (112, 112), (10, 200, 90))
PROMPTS = ("count dog", "count cat", "count horse")


@pytest.fixture
def model():
    return load_model("embedded").eval()


def questions(*choices: str) -> list[Question]:
    return [Question(f"of {prompt}", "one", PICTURE, prompt, choices) for prompt in PROMPTS]


def damage(model, processor, word: str, value: float = float("nan")) -> None:
    """Make every sequence that reads `word` non-finite: its hidden state, not the tied head, gets the value."""
    token = processor.encode(word)[-1]
    embed = model.language_model.embed_tokens

    def spoil(module, inputs, output):
        return output.masked_fill((inputs[0] == token)[..., None], value)

    embed.register_forward_hook(spoil)


@pytest.mark.parametrize("choices", [(), ("1", "2")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_the_question_is_named_and_no_other(model, processor, choices, value):
    """Breaks when a non-finite row of a batch is answered, or another question of the batch is blamed."""
    damage(model, processor, " cat", value)
    whole = value == 1e30  # large but finite: the norms bring it back
    if whole:
        assert len(ask_all(model, processor, questions(*choices))) == 3
        return
    left_out = {}
    with pytest.raises(UserError, match="question of count cat: the logits are not finite"):
        ask_all(model, processor, questions(*choices), left_out=left_out)
    assert left_out == {}
    others = [question for question in questions(*choices) if "cat" not in question.prefix]
    assert None not in ask_all(model, processor, others)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_a_later_token_counts_and_none_after_the_end(model, processor, options):
    """Breaks when only the first step is checked, sampling from NaN is a traceback, or padding stops a whole batch."""
    batch = processor([PICTURE] * 2, ["count dog", "caption en"])
    inputs = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask

    def answers() -> list[list[int]]:
        torch.manual_seed(0)
        return [row.tolist() for row in generate(model, *inputs, 8, image_index=batch.image_index, **options)]

    expected, hooks = answers(), model.language_model.embed_tokens._forward_hooks
    assert len(expected[0]) < len(expected[1]) and len(expected[1]) > 2
    embed, eos = model.language_model.embed_tokens, processor.config.eos_token_id
    embed.register_forward_hook(lambda _, given, out: out.masked_fill((given[0] == eos)[..., None], float("nan")))
    assert answers() == expected  # the shorter row has ended
    hooks.clear()
    damage(model, processor, processor.tokenizer.id_to_piece(expected[1][1]).replace("▁", " "))
    with pytest.raises(NonFiniteError) as caught:
        answers()
    assert 1 in caught.value.rows


def test_likelihoods_are_checked(model, processor):
    """Breaks when a choice is taken because NaN compares as the largest."""
    batch = processor([PICTURE], ["count dog"])
    features = model.encode_images(batch.pixel_values)
    damage(model, processor, " cat")
    ids = [[processor.encode(" cat") * 2, processor.encode(" dog") * 2]]
    with pytest.raises(NonFiniteError) as caught:
        log_likelihoods(model, batch, ids, features, batch.image_index)
    assert caught.value.rows == [0]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory) -> str:
    """A model folder of finite weights whose logits overflow, as those of an adapter with alpha 1e30."""
    model = load_model("embedded")
    with torch.no_grad():
        model.language_model.norm.weight.fill_(3e38)
    folder = tmp_path_factory.mktemp("models") / "overflowing"
    export_model(model, folder, companions=companions("embedded"))
    return str(folder)


COMMANDS = [
    (ask, "--image p.png --prompt caption", "p.png, 'caption'"),
    (ask, "--image p.png --prompt caption --temperature 1", "p.png, 'caption'"),
    (vqa, "--limit 6", "question "),
    (pope, "--limit 6 --probability", "question "),
    (shift, "--limit 2 --slot inside", "prompt 1"),
]


@pytest.mark.parametrize(("command", "flags", "name"), COMMANDS)
def test_no_command_scores_it(command, flags, name, overflowing, workplace):
    """Breaks when an evaluation prints empty answers, 50 % or NaN with exit code 0."""
    PICTURE.save("p.png")
    with pytest.raises(UserError, match="the logits are not finite") as caught:
        command.main(["--model", overflowing, *flags.split()])
    assert str(caught.value).startswith(name) and not list(workplace.rglob("*.json"))


@pytest.mark.parametrize("measure", list(measures.MEASURES))
def test_no_measure_of_text_scores_it(measure, corpus):
    """Breaks when a likelihood, an accuracy or a share of attention of NaN is averaged."""
    model = new_model("nano", differential=True, seed=0).eval()
    with torch.no_grad():
        model.language_model.norm.weight.fill_(float("inf"))
    with pytest.raises(UserError, match=rf"{measure} test 1: the logits are not finite"):
        measures.MEASURES[measure](model, corpus, 256, 5)

"""Every evaluation stops at logits that are NaN or infinite and names the question: no such answer is scored."""

import pytest
import torch
from PIL import Image

from eval import ask, attention, needle, pope, shift, vqa
from eval.command import Ask
from eval.run import ask_all, log_likelihoods
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


def questions(*choices: str) -> list[Ask]:
    return [Ask(f"of {prompt}", "one", PICTURE, prompt, choices) for prompt in PROMPTS]


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
def test_a_later_token_counts(model, processor, options):
    """Breaks when only the first step is checked, or sampling from NaN ends in a traceback of torch."""
    batch = processor([PICTURE], ["caption en"])
    inputs = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask
    torch.manual_seed(0)
    first = generate(model, *inputs, 8, **options)[0]
    assert len(first) > 2
    damage(model, processor, processor.tokenizer.id_to_piece(int(first[1])).replace("▁", " "))
    torch.manual_seed(0)
    with pytest.raises(NonFiniteError) as caught:
        generate(model, *inputs, 8, **options)
    assert caught.value.rows == [0]
    model.language_model.embed_tokens._forward_hooks.clear()
    torch.manual_seed(0)
    assert generate(model, *inputs, 8, **options)[0].tolist() == first.tolist()


def test_what_follows_the_end_of_an_answer_does_not_count(model, processor):
    """Breaks when padding after a row's end token stops a batch whose answers are whole."""
    batch = processor([PICTURE] * 2, ["count dog", "caption en"])
    inputs = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask
    expected = generate(model, *inputs, 8, image_index=batch.image_index)
    eos = processor.config.eos_token_id
    embed = model.language_model.embed_tokens
    embed.register_forward_hook(
        lambda module, given, output: output.masked_fill((given[0] == eos)[..., None], float("nan"))
    )
    found = generate(model, *inputs, 8, image_index=batch.image_index)
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]
    assert len(expected[0]) != len(expected[1])


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
    (ask, ["--image", "p.png", "--prompt", "caption en"], "p.png, 'caption en'"),
    (ask, ["--image", "p.png", "--prompt", "caption en", "--temperature", "1"], "p.png, 'caption en'"),
    (vqa, ["--limit", "6"], "question "),
    (pope, ["--limit", "6"], "question "),
    (needle, ["--limit", "4", "--kind", "n2o1"], "question "),
    (needle, ["--limit", "4", "--kind", "n2o1", "--protocol", "constrained"], "question "),
    (attention, ["--image", "p.png", "--prompt", "count dog"], "'count dog'"),
    (shift, ["--limit", "2", "--slot", "inside"], "prompt 1"),
]


@pytest.mark.parametrize(("command", "flags", "name"), COMMANDS)
def test_no_command_scores_it(command, flags, name, overflowing, tmp_path, monkeypatch):
    """Breaks when an evaluation prints empty answers, 50 % or NaN with exit code 0."""
    monkeypatch.chdir(tmp_path)
    PICTURE.save("p.png")
    with pytest.raises(UserError, match="the logits are not finite") as caught:
        command.main(["--model", overflowing, *flags])
    assert str(caught.value).startswith(name) and "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("measure", list(measures.MEASURES))
def test_no_measure_of_text_scores_it(measure, corpus):
    """Breaks when a likelihood, an accuracy or a share of attention of NaN is averaged."""
    model = new_model("nano", differential=True, seed=0).eval()
    with torch.no_grad():
        model.language_model.norm.weight.fill_(float("inf"))
    with pytest.raises(UserError, match=rf"{measure} test 1: the logits are not finite"):
        measures.MEASURES[measure](model, corpus, 256, 5)

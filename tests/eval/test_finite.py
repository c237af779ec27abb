"""Every evaluation stops at logits that are NaN or infinite and names the question: no such answer
is scored."""

from functools import partial

import pytest
from PIL import Image

from eval import ask, pope, vqa
from eval.answer import ask_all
from eval.question import Question
from eval.systems import shift
from eval.systems.text import measures
from model.generate import NonFiniteError, generate
from model.systems.language import new_model
from tests.reference import inputs_of
from tests.runs import refused, refuses
from weights.export import companions, export_model
from weights.load import load_model

pytestmark = pytest.mark.long

PICTURE = Image.new("RGB", (112, 112), (10, 200, 90))


def damage(model, token, value):
    """Make every sequence that reads `token` non-finite: its hidden state, not the tied head, gets
    the value."""

    def fill(module, given, out):
        return out.masked_fill((given[0] == token)[..., None], value)

    model.language_model.embed_tokens.register_forward_hook(fill)


@pytest.mark.parametrize("choices", [(), ("1", "2")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_the_question_is_named_and_no_other(processor, choices, value):
    """Breaks when a non-finite row of a batch is answered, or another question of the batch is
    blamed."""
    model = load_model("embedded").eval()
    asked = []
    for name in ("dog", "cat", "horse"):
        asked.append(Question(f"of {name}", "one", PICTURE, f"count {name}", choices))
    damage(model, processor.encode(" cat")[-1], value)
    if value == 1e30:  # large but finite: the norms bring it back
        assert len(ask_all(model, processor, asked)) == 3
        return
    named = "question of cat: the logits are not finite"
    refused(lambda: ask_all(model, processor, asked, left_out={}), named)
    assert None not in ask_all(model, processor, [asked[0], asked[2]])


def test_a_later_token_counts_and_none_after_the_end(processor):
    """Breaks when only the first step is checked, sampling from NaN is a traceback, or padding
    stops a whole batch."""
    model = load_model("embedded").eval()
    inputs = *inputs_of(processor([PICTURE, PICTURE.copy()], ["count dog", "caption en"])), 8
    first, second = generate(model, *inputs)
    assert len(first) < len(second)
    assert len(second) > 2
    damage(model, processor.config.eos_token_id, float("nan"))  # the shorter row has ended
    assert [row.tolist() for row in generate(model, *inputs)] == [first.tolist(), second.tolist()]
    damage(model, int(second[0]), float("nan"))
    for options in ({}, {"temperature": 1e-6, "top_p": 0.9}):
        with pytest.raises(NonFiniteError) as caught:
            generate(model, *inputs, **options)
        assert caught.value.rows == [1]


def test_no_command_scores_it(workplace, corpus):
    """Breaks when an evaluation prints empty answers, 50 % or NaN with exit code 0."""
    model = load_model("embedded")
    # finite weights, as of an adapter with alpha 1e30
    model.language_model.norm.weight.data.fill_(3e38)
    export_model(model, workplace / "large", companions=companions("embedded"))
    PICTURE.save("p.png")
    commands = {ask: "--image p.png --prompt caption", vqa: "--limit 6"}
    commands |= {pope: "--limit 6 --probability", shift: "--limit 2 --slot inside"}
    for command, flags in commands.items():
        refuses(command, f"--model large {flags}", ": the logits are not finite")
    assert not [*(workplace / "runs").rglob("*.json")]
    text = new_model("nano", differential=True, seed=0).eval()
    text.language_model.norm.weight.data.fill_(float("inf"))
    for name, measure in measures.MEASURES.items():
        refused(partial(measure, text, corpus, 256, 5), f"{name} test 1: the logits are not finite")

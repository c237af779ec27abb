"""`--show-batch`: what it prints is what is learned, for every kind of data and every system."""

import pytest
from PIL import Image

from tests.files import draw
from train import finetune
from train.systems import qmamba, wings

OWN = r"""[
    {"image": "a.png", "conversations": [
        {"from": "human", "value": "Where is <image>\nthe dog?"}, {"from": "gpt", "value": "top left"},
        {"from": "human", "value": "count cat"}, {"from": "gpt", "value": "2"}]},
    {"image": "gone.png", "prefix": "a", "suffix": "b"}
]"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    draw(folder / "a.png", (200, 0, 0), size=(9, 9))
    (folder / "own.json").write_text(OWN)
    return folder / "own.json"


REST = "⟦top left<eos>⟧count cat↵⟦2<eos>⟧"
PICTURE_FIRST = f"[picture 1]<bos>Where is↵the dog?↵{REST}"
PICTURE_INSIDE = f"<bos>Where is [picture 1]↵the dog?↵{REST}"


@pytest.mark.parametrize(
    "flags, row, tokens",
    [
        ("", PICTURE_FIRST, "80 tokens, 5"),
        ("--recipe lora", PICTURE_FIRST, "32 tokens, 5"),
        ("wings --stage 1", PICTURE_INSIDE, "33 tokens, 5"),
        ("qmamba --stage 1", PICTURE_INSIDE, "25 tokens, 5"),
    ],
)
def test_a_batch_is_shown_as_it_is_learned(flags, row, tokens, own, workplace, printed):
    """Breaks when what is marked is not what carries loss, the picture is shown elsewhere, or a run
    begins."""
    system, *flags = flags.split() if "--stage" in flags else ["", *flags.split()]
    command = {"wings": wings, "qmamba": qmamba}.get(system, finetune)
    more = f"--data jsonl:{own} --batch-size 2 --device cpu --show-batch sheet.png"
    command.main([*more.split(), *flags])
    text = printed()
    assert "left out own.json[1]: " in text
    assert f"   {row}\n" in text
    assert f": {tokens} of them learned" in text
    assert [path.name for path in workplace.iterdir()] == ["sheet.png"]
    assert (200, 0, 0) in {
        color for _, color in Image.open("sheet.png").convert("RGB").getcolors(1 << 20)
    }

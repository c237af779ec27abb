"""The local page, also in a real browser: it answers, asks nobody else, keeps nothing, and refuses what is no picture.

The page needs gradio, which is no requirement: without it that test is skipped.
"""

import io
import sys
import tempfile
import time

import pytest
import torch

from eval import demo, scenes
from eval.open import Subject
from model.common import UserError
from weights.load import load_model

pytestmark = pytest.mark.long
PROMPT = "answer en Where is the dog?"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>alert(1)</script></svg>'
SCENE = scenes.sample("vqa", "test", 192).image


@pytest.fixture
def opened(processor) -> demo.Opened:
    return demo.Opened(load_model("embedded"), processor, Subject("embedded", None, "embedded"), 32)


def test_a_cancelled_answer_stops_and_the_explorer_sees_its_own_passes_alone(opened):
    """Breaks when the answer comes at the end only, a generation that nobody waits for goes on, and the explorer
    records it as its own; or a pass of the page keeps what only gradients need."""
    parts = list(demo.stream(opened, SCENE, PROMPT))
    assert parts[0] == "bottom" and parts[-1] == "bottom right"
    passes, layer = [], opened.model.language_model.layers[0].self_attn

    def watch(module, args) -> None:
        time.sleep(0.02)
        passes.append((module.tap is not None, args[0].shape[1]))
        assert not torch.is_grad_enabled()

    layer.register_forward_pre_hook(watch)
    page, alone = demo.explored(opened, SCENE, PROMPT), passes[:]
    answer = demo.stream(opened, SCENE, "caption en")
    next(answer)
    answer.close()
    assert demo.explored(opened, SCENE, PROMPT) == page
    assert passes[-len(alone) :] == alone and len(passes) <= 2 * len(alone) + 3  # the prompt, two tokens at most


def test_mistakes_are_one_line(opened, monkeypatch, tmp_path):
    """Breaks when a traceback of imports comes after a large model was read, or a script comes in as a picture."""
    (tmp_path / "a.png").write_bytes(SVG)
    for path, prompt in ((None, "x"), ("a.png", " "), (str(tmp_path / "a.png"), "x")):
        with pytest.raises(UserError, match="picture"):
            demo.read_question(path, prompt)
    with pytest.raises(UserError):
        list(demo.stream(opened, SCENE, "<bos>"))
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(demo, "open_model", None)
    with pytest.raises(UserError, match="pip install 'gradio"):
        demo.main(["--model", "embedded"])


def test_the_page_answers_and_refuses(opened, new_page, tmp_path, monkeypatch):
    """Breaks when the example question gets a wrong answer or no boxes, the explorer does not open, a hostile upload is
    taken or kept, or the page loads a font or a script from elsewhere."""
    pytest.importorskip("gradio", reason="no gradio: pip install 'gradio>=6,<7'")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    blocks = demo.serve(opened, tmp_path)
    page, png = new_page(blocks.local_url), io.BytesIO()
    upload = page.locator("input[type=file]").first
    SCENE.save(png, "PNG")

    def ask(content: bytes, prompt: str) -> None:
        upload.set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": content})
        page.wait_for_selector("[data-testid=image] img, .image-frame img")
        page.locator("#prompt textarea").fill(prompt)
        page.locator("#prompt button").click()

    ask(png.getvalue(), "detect dog")
    page.wait_for_function("() => document.querySelector('#answer textarea').value.includes('<loc1023> dog')")
    page.wait_for_selector("#boxes img")
    page.locator("#inside").click()
    frame = page.frame_locator("#look iframe")
    frame.locator("body[data-ready]").wait_for()
    assert frame.locator("h1").inner_text() == "detect dog" and not page.problems
    page.reload()
    upload.wait_for(state="attached")
    ask(SVG, "caption en")
    page.get_by_text("not a picture in a format").first.wait_for()
    page.reload()
    upload.wait_for(state="attached")
    upload.set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": bytes(21 << 20)})
    page.get_by_text("maximum").first.wait_for()
    blocks.close(verbose=False)
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 1 << 20]
    page.wait_for_timeout(500)
    page.problems[:] = [problem for problem in page.problems if problem.startswith("http")]  # refusals are logged

"""The local page, also in a real browser: it answers, asks nobody else, keeps nothing, and refuses
what is no picture.

The page needs gradio, which is no requirement: without it that test is skipped.
"""

import io
import sys
import tempfile

import pytest

from eval import demo, scenes
from eval.open import Subject
from tests.runs import refused
from weights.load import load_model

pytestmark = pytest.mark.long
SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>alert(1)</script></svg>'
)


def test_without_gradio_nothing_is_loaded(monkeypatch):
    """Breaks when a traceback of imports comes after a large model was read."""
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(demo, "open_model", None)
    refused(lambda: demo.main(["--model", "embedded"]), "pip install 'gradio")


def test_the_page_answers_and_refuses(processor, new_page, tmp_path, monkeypatch):
    """Breaks when the example question gets a wrong answer or no boxes, the explorer does not open,
    a hostile upload is taken or kept, or the page loads a font or a script from elsewhere."""
    pytest.importorskip("gradio", reason="no gradio: pip install 'gradio>=6,<7'")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    blocks = demo.serve(
        Subject("embedded", None, "embedded"), load_model("embedded"), processor, tmp_path
    )
    page, png = new_page(blocks.local_url), io.BytesIO()
    upload = page.locator("input[type=file]").first
    scenes.sample("vqa", "test", 192).image.save(png, "PNG")

    def ask(content: bytes, prompt: str) -> None:
        upload.set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": content})
        page.wait_for_selector("[data-testid=image] img, .image-frame img")
        page.locator("#prompt textarea").fill(prompt)
        page.locator("#prompt button").click()

    ask(png.getvalue(), "detect dog")
    page.wait_for_function(
        "() => document.querySelector('#answer textarea').value.includes('<loc1023> dog')"
    )
    page.wait_for_selector("#boxes img")
    page.locator("#inside").click()
    frame = page.frame_locator("#look iframe")
    frame.locator("body[data-ready]").wait_for()
    assert frame.locator("h1").inner_text() == "detect dog" and not page.problems
    page.reload()
    upload.wait_for(state="attached")
    ask(SVG, "caption en")
    page.get_by_text("cannot be read").first.wait_for()
    blocks.close(verbose=False)
    page.wait_for_timeout(500)
    page.problems[:] = [
        problem for problem in page.problems if problem.startswith("http")
    ]  # refusals are logged

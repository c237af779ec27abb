"""The local page in a real browser: it answers, asks nobody else, keeps nothing, and refuses what is no picture.

Needs gradio, which is no requirement: without it these tests are skipped.
"""

import io
import socket
import struct
import sys
import tempfile
import zlib
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from PIL import Image

from eval import demo, scenes
from eval.session import Subject
from model.common import UserError
from weights.load import load_model

pytestmark = pytest.mark.long
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>alert(1)</script></svg>'


def bomb(side: int = 7000) -> bytes:
    """A PNG of few bytes and very many black pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side + 7) // 8 + 1) * min(side, 7000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_uploads_are_checked_before_they_are_decoded(tmp_path):
    """A picture of a few kilobytes fills the memory, or a script comes in as a picture."""
    for name, content, message in (
        ("bomb.png", bomb(), "more than 40 million pixels"),
        ("huge.png", bomb(60_000), "more than 40 million pixels"),
        ("a.svg", SVG, "no picture in a format read here"),
        ("a.png", b"", "no picture in a format read here"),
    ):
        (tmp_path / name).write_bytes(content)
        assert len(content) < 600_000
        with pytest.raises(UserError, match=message):
            demo.read_upload(str(tmp_path / name))
    with pytest.raises(UserError, match="there is no picture"):
        demo.read_upload(None)


def test_the_answer_streams(processor):
    """The answer comes at the end only, is another than without streaming, or an error is lost in the thread."""
    opened = demo.Opened(load_model("embedded"), processor, Subject("embedded", None, "embedded"), 16)
    image = scenes.sample("vqa", "test", 192).image
    parts = list(demo.stream(opened, image, "answer en Where is the dog?"))
    assert parts[0] == "bottom" and parts[-1] == "bottom right"
    with pytest.raises(UserError, match="spells the control token"):
        list(demo.stream(opened, image, "<bos>"))
    with pytest.raises(UserError, match="there is no question"):
        list(demo.stream(opened, image, " "))


def test_without_gradio_there_is_one_line(monkeypatch):
    """A traceback of imports, after a large model was read."""
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(demo, "open_model", None)
    with pytest.raises(UserError, match=r"^the page needs gradio: pip install 'gradio>=6,<7'$"):
        demo.main(["--model", "embedded"])


@pytest.fixture
def address(processor, tmp_path, monkeypatch):
    """The running page of the embedded base, its files in `tmp_path`."""
    pytest.importorskip("gradio", reason="no gradio: pip install 'gradio>=6,<7'")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = demo.Opened(load_model("embedded"), processor, Subject("embedded", None, "embedded"), 32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    blocks = demo.build(opened, tmp_path)
    yield demo.serve(blocks, port)
    blocks.close(verbose=False)


def test_the_page_answers_and_refuses(address, new_page, tmp_path, tmp_path_factory):
    """The example question gets a wrong answer or no boxes, the explorer does not open, a hostile upload is taken, or
    the page loads a font or a script from elsewhere."""
    assert address.startswith("http://127.0.0.1:")
    scene = io.BytesIO()
    scenes.sample("vqa", "test", 192).image.save(scene, "PNG")
    page = new_page(address)
    upload = page.locator("input[type=file]").first

    def give(name: str, content: bytes) -> None:
        upload.set_input_files({"name": name, "mimeType": "image/png", "buffer": content})

    def answered(text: str) -> None:
        script = "text => document.querySelector('#answer textarea').value.includes(text)"
        page.wait_for_function(script, arg=text)

    def ask() -> None:
        page.locator("#prompt button").click()

    give("scene.png", scene.getvalue())
    page.wait_for_selector("[data-testid=image] img, .image-frame img")
    ask()
    answered("bottom right")
    page.locator("#inside").click()
    frame = page.frame_locator("#look iframe")
    frame.locator("body[data-ready]").wait_for()
    assert frame.locator("h1").inner_text() == "answer en Where is the dog?"
    page.locator("#prompt textarea").fill("detect dog")
    ask()
    answered("<loc0512><loc0768><loc0767><loc1023> dog")
    page.wait_for_selector("#boxes img")

    assert not page.problems

    page.reload()
    upload.wait_for(state="attached")
    for name, content, message in (("bomb.png", bomb(), "million pixels"), ("a.svg", SVG, "no picture in a format")):
        give(name, content)
        page.get_by_text(message).first.wait_for()
        page.get_by_test_id("toast-close").first.click()
    large = tmp_path_factory.mktemp("upload") / "large.png"
    large.write_bytes(scene.getvalue())
    with large.open("r+b") as file:
        file.truncate(100 << 20)
    upload.set_input_files(large)
    page.get_by_text("exceed the maximum allowed size of 20").first.wait_for()
    page.problems[:] = [problem for problem in page.problems if problem.startswith("http")]  # refusals are logged
    body = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
        + bytes(21 << 20)
        + b"\r\n--x--\r\n"
    )
    request = Request(f"{address}gradio_api/upload", body, {"Content-Type": "multipart/form-data; boundary=x"})
    with pytest.raises(HTTPError, match="413"):  # also where no page is asked before
        urlopen(request)
    assert not [file for file in Path(tmp_path).rglob("*") if file.is_file() and file.stat().st_size > 1 << 20]


def test_the_bomb_is_one():
    """The test above proves nothing."""
    with Image.open(io.BytesIO(bomb())) as image:
        assert image.size == (7000, 7000)

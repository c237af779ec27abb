"""The local page, also in a real browser: it answers, asks nobody else, keeps nothing, and refuses
what is no picture, and whoever is no page of its own.

The page needs gradio, which is no requirement: without it those tests are skipped.
"""

import asyncio
import io
import sys
import tempfile
import urllib.error
import urllib.request

import pytest

from eval import demo
from eval.data import scenes
from eval.open import Subject
from tests.files import table
from tests.runs import refuses
from weights.load import load_model

pytestmark = pytest.mark.long
SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>alert(1)</script></svg>'
)


def test_without_gradio_nothing_is_loaded(monkeypatch):
    """Breaks when a traceback of imports comes after a large model was read."""
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(demo, "open_subject", None)
    refuses(demo, "--model embedded", "pip install 'gradio")


@pytest.fixture
def served(processor, tmp_path, monkeypatch):
    """The demo of the embedded base, which keeps its files in `tmp_path`."""
    pytest.importorskip("gradio", reason="no gradio: pip install 'gradio>=6,<7'")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    subject = Subject("embedded", None, "embedded")
    return demo.serve(subject, load_model("embedded"), processor, tmp_path)


# Host, Origin, and the status of the answer
REQUESTS = """
    127.0.0.1:7860 | | 200
    LocalHost:8000 | http://LocalHost:8000 | 200 | a port forwarded by ssh
    localhost | http://localhost | 200
    evil.example:7860 | | 403
    evil.example:7860 | http://evil.example:7860 | 403
    localhost.evil.example | | 403
    | | 403
    127.0.0.1:7860 | http://evil.example | 403
    127.0.0.1:7860 | http://127.0.0.1:8888 | 403 | another server of this machine
    127.0.0.1:7860 | null | 403 | a file, or a frame without rights"""


@pytest.mark.parametrize("case", table(REQUESTS))
def test_pages_from_elsewhere_are_refused(case):
    """Breaks when a page elsewhere can ask the model or store a picture, or the own page cannot."""
    host, origin, status, *_ = case
    headers = [(b"host", host.encode())]
    if origin:
        headers.append((b"origin", origin.encode()))
    sent = []

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    asyncio.run(demo.own_page(app)({"type": "http", "headers": headers}, None, send))
    assert sent[0]["status"] == int(status)


def test_no_part_of_the_server_answers_pages_from_elsewhere(served, tmp_path):
    """Breaks when gradio asks the check last, or not at all: its settings name folders, and an
    upload is stored."""
    form = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="f"\r\n\r\nhi\r\n--x--\r\n'
    )
    kind = {"Content-Type": "multipart/form-data; boundary=x"}

    def status(path, body=None, **headers):
        url = served.local_url + path
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    before = set(tmp_path.rglob("*"))
    foreign = {"Origin": "http://evil.example"}
    for path in ("", "config", "gradio_api/info", "gradio_api/queue/join"):
        assert status(path, Host="evil.example") == status(path, **foreign) == 403
    assert status("gradio_api/upload", form, **kind, **foreign) == 403
    assert set(tmp_path.rglob("*")) == before
    assert status("gradio_api/upload", form, **kind) == status("config") == 200
    served.close(verbose=False)


def test_the_page_answers_and_refuses(served, new_page):
    """Breaks when the example question gets a wrong answer or no boxes, the explorer does not open,
    a hostile upload is taken or kept, or the page loads a font or a script from elsewhere."""
    page = new_page(served.local_url)
    png = io.BytesIO()
    upload = page.locator("input[type=file]").first
    scenes.sample("vqa", "test", 192).image.save(png, "PNG")

    def ask(content, prompt):
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
    assert frame.locator("h1").inner_text() == "detect dog"
    assert not page.problems
    page.reload()
    upload.wait_for(state="attached")
    ask(SVG, "caption en")
    page.get_by_text("cannot be read").first.wait_for()
    served.close(verbose=False)
    page.wait_for_timeout(500)
    # refusals are logged
    page.problems[:] = [problem for problem in page.problems if problem.startswith("http")]

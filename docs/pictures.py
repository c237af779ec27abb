"""The pictures at the top of the README: the explorer with a fine-tuned twin, and the local page with the base.

pip install gradio playwright && apt-get install chromium
python -m train.finetune --attention twin --out runs/readme
python docs/pictures.py runs/readme
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from eval import demo, scenes
from eval.explore.__main__ import main as explore
from eval.open import Subject
from model.processor import Processor
from weights.load import load_model

HERE = Path(__file__).parent
MOST_BYTES = 300_000


def explorer(browser, folder: Path, run: str) -> None:
    scenes.sample("vqa", "test", 192).image.save(folder / "scene.png")
    file, prompt = folder / "explore.html", "answer en Where is the dog?"
    explore(["--adapter", run, "--image", f"{folder}/scene.png", "--prompt", prompt, "--out", str(file)])
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]")
    page.locator(".layers .strip button").first.click()
    page.wait_for_timeout(500)
    page.screenshot(path=HERE / "explore.png", full_page=True)


def local_page(browser, folder: Path) -> None:
    processor = Processor.from_source("embedded")
    blocks = demo.serve(Subject("embedded", None, "embedded"), load_model("embedded"), processor, folder)
    page = browser.new_page(viewport={"width": 1180, "height": 760})
    page.goto(blocks.local_url)
    page.get_by_text("detect dog").first.click()
    page.wait_for_selector(".image-frame img")
    page.locator("#prompt button").click()
    page.wait_for_selector("#boxes img")
    page.wait_for_timeout(1000)
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=HERE / "demo.png")
    blocks.close(verbose=False)


if __name__ == "__main__":
    with sync_playwright() as started, tempfile.TemporaryDirectory() as temporary:
        tempfile.tempdir = temporary
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        explorer(browser, Path(temporary), sys.argv[1])
        local_page(browser, Path(temporary))
        browser.close()
    for name in ("explore.png", "demo.png"):
        assert (size := (HERE / name).stat().st_size) < MOST_BYTES, f"{name}: {size} bytes"
        print(f"docs/{name}: {size:,} bytes")

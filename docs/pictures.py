"""The pictures of README.md and docs/: the idea as a drawing, answers before and after, and the
explorer.

    python docs/pictures.py                     docs/idea.svg alone
    python docs/pictures.py runs/dex runs/twin  also docs/answers.png of a run, and docs/explore.png
                                                of another

The explorer's picture needs `pip install playwright` and Debian's `chromium`.
"""

import math
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
NEEDLE = 7  # the patch that matters
NOISE = [0.9, 0.2, 1.3, 0.1, 0.8, 0.3, 1.1, 0.4, 0.2, 1.4, 0.6, 0.9]  # logits that both maps have
PANELS = (
    ("A₁", "looks at the needle, and around", "#3b6fb6"),
    ("λ · A₂", "looks around alone", "#b65a3b"),
    ("A₁ − λ · A₂", "what is left", "#2f7d4f"),
)


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


def idea(factor: float = 0.8) -> str:
    """Two maps over the same patches and their difference, as bars in an SVG."""
    logits = list(NOISE)
    logits[NEEDLE] += 1.8
    first = softmax(logits)
    second = [factor * weight for weight in softmax(NOISE)]
    difference = [a - b for a, b in zip(first, second, strict=True)]
    maps = first, second, difference
    parts = []
    for number, ((title, caption, color), weights) in enumerate(zip(PANELS, maps, strict=True)):
        left = 20 + 270 * number
        for key, weight in enumerate(weights):
            height = 400 * abs(weight)
            x = left + 18 * key
            shade = color if key == NEEDLE else "#b9bec6"
            y = 130 - height if weight > 0 else 130
            place = f'x="{x}" y="{y:.1f}" width="14" height="{height:.1f}"'
            parts.append(f'<rect {place} fill="{shade}"/>')
        parts.append(f'<line x1="{left}" x2="{left + 214}" y1="130" y2="130" stroke="#888"/>')
        parts.append(f'<text x="{left}" y="166" font-size="17" fill="{color}">{title}</text>')
        parts.append(f'<text x="{left}" y="186" font-size="13" fill="#666">{caption}</text>')
    for x, sign in (254, "−"), (524, "="):
        parts.append(f'<text x="{x}" y="90" font-size="28" fill="#666">{sign}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 196" font-family="sans-serif">'
    return "\n".join([head, '<rect width="800" height="196" fill="#fff"/>', *parts, "</svg>\n"])


def answers(run: Path) -> None:
    """The first of three rows of the run's answers.png, below its title."""
    sheet = Image.open(run / "answers.png")
    row = sheet.crop((0, 70, sheet.width, 70 + (sheet.height - 70) // 3))
    row.resize((800, 800 * row.height // row.width)).save(HERE / "answers.png", optimize=True)


def explorer(run: Path) -> None:
    """The page of `eval.explore` as it opens, of the example in docs/differential.md."""
    from playwright.sync_api import sync_playwright

    from eval.data import scenes
    from eval.explore.__main__ import main as explore

    with sync_playwright() as started, tempfile.TemporaryDirectory() as folder:
        picture = Path(folder, "scene.png")
        file = Path(folder, "explore.html")
        sample = scenes.sample("vqa", "test", 310)
        sample.image.save(picture)
        command = ["--adapter", run, "--image", picture, "--prompt", sample.prefix, "--out", file]
        explore([str(word) for word in command])
        chromium = shutil.which("chromium")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 1380})
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready]")
        page.wait_for_timeout(500)
        page.screenshot(path=HERE / "explore.png")
        browser.close()


if __name__ == "__main__":
    (HERE / "idea.svg").write_text(idea(), encoding="utf-8")
    if len(sys.argv) == 3:
        answers(Path(sys.argv[1]))
        explorer(Path(sys.argv[2]))

"""A local page to ask a model: drop a picture, ask, see the answer come, its boxes, and where the model looked.

    pip install gradio
    python -m eval.demo                          the last run, or the embedded base, with its scenes as examples
    python -m eval.demo --model google/paligemma-3b-pt-224 --adapter RUN

In: a model. Out: a page on this machine alone (127.0.0.1). It loads nothing from the network and reports to nobody. One
question is answered at a time. Pictures are kept in a temporary folder, which is deleted at the end.
"""

import argparse
import html
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
from PIL import Image

from eval import figures, scenes
from eval.command import add_flag, command_parser, positive, whole
from eval.explore.command import add_answer, add_plain
from eval.explore.gallery import Question
from eval.explore.page import Case, page
from eval.session import Subject, add_model_flags, model_of, open_model, open_plain
from model.common import UserError, run_command, shown
from model.generate import generate
from model.images import FORMATS, load_image
from model.paligemma import PaliGemma
from model.processor import Processor, parse_boxes
from model.source import EMBEDDED

MOST_MEGABYTES, MOST_PIXELS = 20, 40_000_000  # of an upload
GRADIO = "gradio>=6,<7"
EXAMPLES = (
    (192, "answer en Where is the dog?"),
    (193, "answer en How many objects are there in the image?"),
    (192, "detect dog"),
    (200, "caption en"),
)
STYLE = """
.gradio-container { width: 100%; max-width: 1180px !important; margin: 0 auto !important; }
.image-frame img { width: 100% !important; height: 100% !important; object-fit: contain !important; }
#prompt button { background: var(--button-primary-background-fill); color: var(--button-primary-text-color); }
#answer textarea { font-size: 1.5rem; font-weight: 600; }
#look iframe { width: 100%; height: 1180px; border: 1px solid var(--border-color-primary); border-radius: 14px; }
footer { display: none !important; }
"""


class Opened(NamedTuple):
    """The model that is asked, and its names; limit: of an answer's tokens."""

    model: PaliGemma
    processor: Processor
    subject: Subject
    limit: int


def read_upload(path: str | None) -> Image.Image:
    """An uploaded picture. Raises UserError if there is none, and for one that is no picture or too large, before it is
    decoded."""
    if not path:
        raise UserError("there is no picture: drop one first")
    try:
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        width = height = MOST_PIXELS
    except (OSError, ValueError, SyntaxError):
        raise UserError(f"this is no picture in a format read here ({', '.join(FORMATS)})") from None
    if width * height > MOST_PIXELS:
        raise UserError(f"the picture has more than {MOST_PIXELS // 10**6} million pixels: scale it down")
    return load_image(path)


def stream(opened: Opened, image: Image.Image, prompt: str) -> Iterator[str]:
    """The answer as far as it has come, after each token. Raises UserError."""
    if not prompt.strip():
        raise UserError("there is no question: write one, such as 'caption en'")
    model, processor, _, limit = opened
    batch = processor([image], [prompt]).to(next(model.parameters()).device)
    news: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        try:
            inputs = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask
            generate(model, *inputs, limit, on_token=lambda token: news.put(int(token)))
            news.put(None)
        except Exception as error:  # is raised where the answer is awaited
            news.put(error)

    Thread(target=run, daemon=True).start()
    ids: list[int] = []
    while (new := news.get()) is not None:
        if isinstance(new, Exception):
            raise new
        ids.append(new)
        yield processor.decode(ids)


def with_boxes(image: Image.Image, text: str) -> Image.Image | None:
    """The picture with the boxes of an answer, None if it has none."""
    found = parse_boxes(text, *image.size)
    return (
        figures.draw_boxes(image, [box for _, box in found], [name for name, _ in found], least=448) if found else None
    )


def explored(opened: Opened, image: Image.Image, prompt: str) -> str:
    """The explorer's page for this question."""
    model, processor, subject, limit = opened
    case = Case(image, prompt)
    add_answer(case, Question(image, prompt), model, processor, subject.title, limit)
    if subject.run is not None:
        weight = next(model.parameters())
        add_plain(case, subject.title, open_plain(subject, weight))
    return page([case], f"{prompt} · {subject.title}")


def load_gradio():
    """The package, told to report nothing. Raises UserError if it is not installed."""
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        import gradio
    except ImportError:
        raise UserError(f"the page needs gradio: pip install '{GRADIO}'") from None
    return gradio


def example_rows(folder: Path) -> list[list[str]]:
    """Scenes of the embedded base, written to `folder`, and a prompt for each."""
    rows = []
    for number, (index, prompt) in enumerate(EXAMPLES):
        path = folder / f"scene-{number}.png"
        scenes.sample("vqa", "test", index).image.save(path)
        rows.append([str(path), prompt])
    return rows


def build(opened: Opened, folder: Path) -> Any:
    """The page, a `gradio.Blocks`; the pictures of its examples are written to `folder`."""
    gradio = load_gradio()

    def told(function, *arguments):
        try:
            yield from function(*arguments)
        except UserError as error:
            raise gradio.Error(str(error), print_exception=False) from None

    def check(path):
        try:
            read_upload(path)
        except UserError as error:
            gradio.Warning(str(error))
            return None
        return gradio.skip()

    def ask(path, prompt):
        image, text = read_upload(path), ""
        for text in stream(opened, image, prompt):
            yield text, gradio.skip(), ""
        drawn = with_boxes(image, text)
        yield text, gradio.update(value=drawn, visible=drawn is not None), ""

    def explore(path, prompt):
        text = explored(opened, read_upload(path), prompt)
        yield f'<iframe title="attention explorer" sandbox="allow-scripts" srcdoc="{html.escape(text)}"></iframe>'

    with gradio.Blocks(title="Ask the model", analytics_enabled=False, delete_cache=(600, 1800)) as blocks:
        gradio.Markdown(f"# Ask about a picture\n`{shown(opened.subject.name)}` answers, on this machine alone.")
        with gradio.Row():
            with gradio.Column():
                picture = gradio.Image(type="filepath", sources=["upload", "clipboard"], label="Picture", height=380)
                picture.preprocess = lambda payload: payload and payload.path  # nothing is decoded unchecked
                prompt = gradio.Textbox(label="Prompt", value=EXAMPLES[0][1], submit_btn="Ask", elem_id="prompt")
            with gradio.Column():
                answer = gradio.Textbox(label="Answer", interactive=False, elem_id="answer")
                boxes = gradio.Image(
                    label="Boxes",
                    visible=False,
                    interactive=False,
                    format="png",
                    elem_id="boxes",
                    height=380,
                    buttons=["download", "fullscreen"],
                )
                inside = gradio.Button("Where did it look?", elem_id="inside")
                if opened.subject.source == EMBEDDED:
                    gradio.Examples(example_rows(folder), [picture, prompt], label="Scenes of the embedded base")
        look = gradio.HTML(elem_id="look")
        options: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private"}
        picture.upload(check, picture, picture, **options)
        prompt.submit(partial(told, ask), [picture, prompt], [answer, boxes, look], **options)
        inside.click(partial(told, explore), [picture, prompt], look, **options)
    return blocks.queue(max_size=8, default_concurrency_limit=1)


def serve(blocks: Any, port: int | None) -> str:
    """Start the page in threads of this process; returns its address. Raises UserError if the port is taken."""
    gradio = load_gradio()
    theme = gradio.themes.Base(
        primary_hue="orange", neutral_hue="stone", font=["system-ui", "sans-serif"], font_mono=["monospace"]
    )
    try:
        _, url, _ = blocks.launch(
            server_name="127.0.0.1",
            server_port=port,
            max_file_size=f"{MOST_MEGABYTES}mb",
            share=False,
            ssr_mode=False,
            quiet=True,
            prevent_thread_lock=True,
            footer_links=[],
            theme=theme,
            css=STYLE,
        )
    except OSError as error:
        raise UserError(f"--port {port}: {error}") from None
    return url


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.demo", __doc__)
    add_model_flags(parser)
    add_flag(parser, "--max-new-tokens", "limit of an answer's tokens", 64, type=positive, metavar="N")
    add_flag(
        parser, "--port", "of 127.0.0.1 (default: the first free one from 7860)", type=whole(1, 65535), metavar="N"
    )
    args: argparse.Namespace = parser.parse_args(argv)
    load_gradio()
    subject = model_of(args)
    opened = Opened(*open_model(args, subject), subject, args.max_new_tokens)
    torch.set_grad_enabled(False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        tempfile.tempdir = os.environ["GRADIO_TEMP_DIR"] = folder
        blocks = build(opened, Path(folder))
        print(f"{shown(subject.name)} answers at {serve(blocks, args.port)}; end with Ctrl+C")
        try:
            blocks.block_thread()
        finally:
            blocks.close(verbose=False)


if __name__ == "__main__":
    run_command(main)

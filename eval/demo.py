"""A local page to ask a model: drop a picture, ask, see the answer come, its boxes, and where the model looked.

    pip install gradio
    python -m eval.demo                          the last run, or the embedded base, with its scenes as examples
    python -m eval.demo --model google/paligemma-3b-pt-224 --adapter RUN

In: a model. Out: a page on this machine alone (127.0.0.1). It loads nothing from the network and reports to nobody. One
question is answered at a time. Pictures are kept in a temporary folder, which is deleted at the end.
"""

import html
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, NamedTuple

from PIL import Image

from eval import figures, scenes
from eval.command import add_flag, command_parser, positive, whole
from eval.explore.page import page
from eval.explore.record import Case
from eval.open import Subject, add_model_flags, model_of, open_model, open_plain
from model.common import UserError, run_command, shown
from model.generate import generate
from model.images import load_image
from model.paligemma import PaliGemma
from model.processor import Processor, parse_boxes
from model.source import EMBEDDED

EXAMPLES = (  # scenes of the test split, and prompts
    (192, "answer en Where is the dog?"),
    (192, "detect dog"),
    (193, "answer en How many objects are there in the image?"),
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
MODEL_THREAD = ThreadPoolExecutor(1)  # all work of the model: the explorer's taps must see no other forward pass


class Opened(NamedTuple):
    """The model that is asked, and its names; limit: of an answer's tokens."""

    model: PaliGemma
    processor: Processor
    subject: Subject
    limit: int


def stream(opened: Opened, image: Image.Image, prompt: str) -> Iterator[str]:
    """The answer as far as it has come, after each token; closed early, it stops the model. Raises UserError."""
    model, processor, _, limit = opened
    batch = processor([image], [prompt]).to(next(model.parameters()).device)
    inputs = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask
    tokens, cancelled, ids = SimpleQueue[int | None](), Event(), []

    def receive(token: Any) -> None:
        if cancelled.is_set():
            raise CancelledError
        tokens.put(int(token))

    future = MODEL_THREAD.submit(generate, model, *inputs, limit, on_token=receive)
    future.add_done_callback(lambda _: tokens.put(None))
    try:
        while (token := tokens.get()) is not None:
            ids.append(token)
            yield processor.decode(ids)
        future.result()  # raises what ended the generation
    finally:
        cancelled.set()


def explored(opened: Opened, image: Image.Image, prompt: str) -> str:
    """The explorer's page for this question. Raises UserError."""
    model, processor, subject, limit = opened
    case = Case(image, prompt)
    MODEL_THREAD.submit(case.ask, subject.title, model, processor, limit).result()
    if subject.run is not None:
        plain = open_plain(subject, next(model.parameters()))
        MODEL_THREAD.submit(case.add_plain, subject.title, plain).result()
    return page([case], f"{prompt} · {subject.title}")


def load_gradio() -> Any:
    """The package, told to report nothing. Raises UserError if it is not installed."""
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        import gradio
    except ImportError:
        raise UserError("the page needs gradio: pip install 'gradio>=6,<7'") from None
    return gradio


def serve(opened: Opened, folder: Path, port: int | None = None) -> Any:
    """The page, a `gradio.Blocks`, started in threads of this process; `local_url` is its address, and the pictures of
    its examples are written to `folder`. Raises UserError if the port is taken."""
    gradio = load_gradio()

    def ask(path, prompt):
        try:
            image = read_question(path, prompt)
            for text in stream(opened, image, prompt):
                yield text, gradio.skip(), ""
        except UserError as error:
            raise gradio.Error(str(error), print_exception=False) from None
        if boxes := parse_boxes(text, *image.size):
            names, sides = zip(*boxes, strict=True)
            image = figures.draw_boxes(image, sides, names, least=448)
        yield text, gradio.update(value=image, visible=bool(boxes)), ""

    def explore(path, prompt):
        try:
            text = explored(opened, read_question(path, prompt), prompt)
        except UserError as error:
            raise gradio.Error(str(error), print_exception=False) from None
        return f'<iframe title="attention explorer" sandbox="allow-scripts" srcdoc="{html.escape(text)}"></iframe>'

    with gradio.Blocks(title="Ask the model", analytics_enabled=False, delete_cache=(600, 1800)) as blocks:
        gradio.Markdown(f"# Ask about a picture\n`{shown(opened.subject.name)}` answers, on this machine alone.")
        with gradio.Row():
            with gradio.Column():
                picture = gradio.Image(type="filepath", sources=["upload", "clipboard"], label="Picture", height=380)
                picture.preprocess = lambda payload: payload and payload.path  # only `load_image` decodes it
                prompt = gradio.Textbox(label="Prompt", value=EXAMPLES[0][1], submit_btn="Ask", elem_id="prompt")
            with gradio.Column():
                answer = gradio.Textbox(label="Answer", interactive=False, elem_id="answer")
                looks = {"interactive": False, "format": "png", "buttons": ["download", "fullscreen"]}
                boxes = gradio.Image(label="Boxes", visible=False, elem_id="boxes", height=380, **looks)
                inside = gradio.Button("Where did it look?", elem_id="inside")
                if opened.subject.source == EMBEDDED:
                    for index, _ in EXAMPLES:
                        scenes.sample("vqa", "test", index).image.save(folder / f"scene-{index}.png")
                    rows = [[f"{folder}/scene-{index}.png", text] for index, text in EXAMPLES]
                    gradio.Examples(rows, [picture, prompt], label="Scenes of the embedded base")
        look = gradio.HTML(elem_id="look")
        options: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private"}
        prompt.submit(ask, [picture, prompt], [answer, boxes, look], **options)
        inside.click(explore, [picture, prompt], look, **options)
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["monospace"]}  # of the system, not of the network
    theme = gradio.themes.Base(primary_hue="orange", neutral_hue="stone", **fonts)
    local = {"server_name": "127.0.0.1", "server_port": port, "share": False, "max_file_size": "20mb"}
    quiet = {"ssr_mode": False, "quiet": True, "prevent_thread_lock": True, "footer_links": []}
    try:
        blocks.queue(max_size=8).launch(**local, **quiet, theme=theme, css=STYLE)
    except OSError as error:
        raise UserError(f"--port {port}: {error}") from None
    return blocks


def read_question(path: str | None, prompt: str) -> Image.Image:
    """The uploaded picture of a question. Raises UserError where picture or prompt is missing, or for no picture."""
    if not path or not prompt.strip():
        raise UserError("drop a picture and write a prompt first, such as 'caption en'")
    return load_image(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.demo", __doc__)
    add_model_flags(parser)
    add_flag(parser, "--max-new-tokens", "limit of an answer's tokens", 64, type=positive, metavar="N")
    port = "of 127.0.0.1 (default: the first free one from 7860)"
    add_flag(parser, "--port", port, type=whole(1, 65535), metavar="N")
    args = parser.parse_args(argv)
    load_gradio()
    subject = model_of(args)
    opened = Opened(*open_model(args, subject), subject, args.max_new_tokens)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        tempfile.tempdir = os.environ["GRADIO_TEMP_DIR"] = folder
        blocks = serve(opened, Path(folder), args.port)
        print(f"{shown(subject.name)} answers at {blocks.local_url}; end with Ctrl+C")
        try:
            blocks.block_thread()
        finally:
            blocks.close(verbose=False)


if __name__ == "__main__":
    run_command(main)

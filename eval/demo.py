"""A local page to ask a model: drop a picture, ask, see the answer, its boxes, and where the model
looked.

    pip install gradio
    python -m eval.demo     the newest run, or the embedded base, with its scenes as examples
    python -m eval.demo --model google/paligemma-3b-pt-224 --adapter RUN

In: a model. Out: a page on this machine alone (127.0.0.1), which no page from elsewhere can ask. It
loads nothing from the network and reports to nobody. One question is answered at a time. Pictures
are kept in a temporary folder, which is deleted at the end. Confidence and scores are those of
`eval.ask --json`.
"""

import html
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL.Image import Image

from eval import figures
from eval.command import MASKS_HELP, add_flag, add_limit, add_model_flags, command_parser, whole
from eval.data import scenes
from eval.data.files import read
from eval.explore.page import page
from eval.explore.record import Case
from eval.open import Subject, open_subject, run_file, subject_of, toy_note
from model.boxes import parse_objects
from model.common import UserError, run_command, shown
from model.confidence import Certainty
from model.generate import ask
from model.images import load_image
from model.masks import MaskCoder
from model.paligemma import PaliGemma
from model.processor import Processor
from weights.load import load_model
from weights.masks import load_mask_coder

SCENES = [  # scenes of the test split, and prompts
    (192, "answer en Where is the dog?"),
    (192, "detect dog"),
    (193, "answer en How many objects are there in the image?"),
    (200, "caption en"),
]
STYLE = """
.gradio-container { width: 100%; max-width: 1180px !important; margin: 0 auto !important; }
.image-frame img {
  width: 100% !important; height: 100% !important; object-fit: contain !important;
}
#answer textarea { font-size: 1.5rem; font-weight: 600; }
#look iframe {
  width: 100%; height: 1180px; border: 1px solid var(--border-color-primary); border-radius: 14px;
}
footer { display: none !important; }
"""


def explored(
    subject: Subject,
    model: PaliGemma,
    processor: Processor,
    limit: int,
    image,
    prompt: str,
) -> str:
    """The explorer's page for a question, beside the base of an adapter. Raises UserError."""
    case = Case(image, prompt)
    case.ask(subject.title, model, processor, limit)
    if subject.run is not None:
        weight = next(model.parameters())
        plain = load_model(
            subject.source, dtype=weight.dtype, device=weight.device, quantize=subject.quantize
        )
        case.add_plain(subject.title, plain)
    return page([case], f"{prompt} · {subject.title}")


def framed(page: str) -> str:
    """A page in a frame of its own, which cannot reach this one."""
    flags = 'title="attention explorer" sandbox="allow-scripts"'
    return f'<iframe {flags} srcdoc="{html.escape(page)}"></iframe>'


def own_page(app: Callable) -> Callable:
    """`app`, an ASGI application, without what pages from elsewhere send: they get status 403.

    A foreign page comes by a name of its own that it lets point to this machine (DNS rebinding:
    the Host is foreign), or sends without reading (the Origin is foreign). The port is the
    browser's, so that one forwarded by ssh works too.
    """

    async def answer(scope, receive, send):
        headers = dict(scope.get("headers", ()))
        host = headers.get(b"host", b"")
        own = b"http://" + host
        is_local = host.partition(b":")[0].lower() in (b"127.0.0.1", b"localhost")
        is_own = is_local and headers.get(b"origin", own) == own
        if is_own or scope["type"] == "lifespan":
            return await app(scope, receive, send)
        await send({"type": "http.response.start", "status": 403, "headers": []})
        text = b"Open this page itself: it answers http://127.0.0.1 and http://localhost alone."
        return await send({"type": "http.response.body", "body": text})

    return answer


def load_gradio() -> Any:
    """The package, told to report nothing. Raises UserError if it is not installed."""
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        import gradio
    except ImportError:
        raise UserError("the page needs gradio: pip install 'gradio>=6,<7'") from None
    return gradio


def example_rows(subject: Subject, folder: Path) -> list[list[str]]:
    """Files of pictures in `folder`, each with a prompt: scenes for the toy, which no other model
    knows, or what a run has held out, as far as it is in files that are still there."""
    pairs, rows = [], []
    if toy_note(subject):
        pairs = [(scenes.sample("vqa", "test", index).image, prompt) for index, prompt in SCENES]
    else:
        with suppress(UserError):
            file = run_file(subject, "answers.jsonl")
            pairs = read(file, lambda answer: (answer["images"][0], answer["question"]))
    for picture, prompt in pairs[:4]:
        with suppress(UserError):
            load_image(picture).save(f"{folder}/{len(rows)}.png")
            rows.append([f"{folder}/{len(rows)}.png", prompt])
    return rows


def shown_answer(
    image: Image, text: str, certainty: Certainty, coder: MaskCoder | None
) -> tuple[dict, dict]:
    """What the page shows of an answer: the text, and the picture with its boxes."""
    boxes = parse_objects(text, *image.size)
    if boxes:
        image = figures.draw_objects(image, boxes, coder)
    scores = ", ".join(f"{certainty.scores[box.part]:.2f}" for box in boxes)
    said = {"value": text, "label": f"Answer (confidence {certainty.confidence:.2f})"}
    return said, {"value": image, "visible": bool(boxes), "label": f"Boxes (scores {scores})"}


def serve(
    subject: Subject,
    model: PaliGemma,
    processor: Processor,
    folder: Path,
    limit: int = 64,
    port: int | None = None,
    coder: MaskCoder | None = None,
) -> Any:
    """The page, a `gradio.Blocks`, started in threads of this process; `local_url` is its address,
    and the pictures of its examples are written to `folder`. Raises OSError if the port is
    taken."""
    gradio = load_gradio()
    rows = example_rows(subject, folder)

    def answer(path, prompt, is_explored=False):
        try:
            if not path or not prompt.strip():
                raise UserError("drop a picture and write a prompt first, such as 'caption en'")
            image = load_image(path)
            if is_explored:
                return framed(explored(subject, model, processor, limit, image, prompt))
            sure = []
            (text,) = ask(model, processor, [image], [prompt], limit, sure=sure)
        except UserError as error:
            raise gradio.Error(str(error), print_exception=False) from None
        said, drawn = shown_answer(image, text, sure[0], coder)
        return gradio.update(**said), gradio.update(**drawn), ""

    def look_inside(path, prompt):
        return answer(path, prompt, is_explored=True)

    # 1. what is on the page
    with gradio.Blocks(
        title="Ask the model", analytics_enabled=False, delete_cache=(600, 1800)
    ) as blocks:
        note = f"`{shown(subject.name)}` answers on this machine{toy_note(subject)}."
        gradio.Markdown(f"# Ask about a picture\n{note}")
        with gradio.Row():
            with gradio.Column():
                picture = gradio.Image(
                    rows[0][0] if rows and not toy_note(subject) else None,
                    type="filepath",
                    sources=["upload", "clipboard"],
                    label="Picture",
                    height=380,
                )
                # only `load_image` decodes it
                picture.preprocess = lambda payload: payload and payload.path
                prompt = gradio.Textbox(
                    label="Prompt",
                    value=rows[0][1] if rows else "",
                    submit_btn="Ask",
                    elem_id="prompt",
                )
            with gradio.Column():
                said = gradio.Textbox(label="Answer", interactive=False, elem_id="answer")
                boxes = gradio.Image(
                    label="Boxes", visible=False, elem_id="boxes", height=380, interactive=False
                )
                inside = gradio.Button("Where did it look?", elem_id="inside")
                if rows:
                    gradio.Examples(rows, [picture, prompt])
        look = gradio.HTML(elem_id="look")
        # 2. what its buttons do, one at a time
        options = {
            "concurrency_id": "model",
            "concurrency_limit": 1,
            "api_visibility": "private",
        }
        prompt.submit(answer, [picture, prompt], [said, boxes, look], **options)
        inside.click(look_inside, [picture, prompt], look, **options)
    # 3. a server for this machine, with fonts that are here
    theme = gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    blocks.queue(max_size=8).launch(
        server_name="127.0.0.1",
        server_port=port,
        share=False,
        max_file_size="20mb",
        ssr_mode=False,
        quiet=True,
        prevent_thread_lock=True,
        theme=theme,
        css=STYLE,
        app_kwargs={"middleware": [(own_page, (), {})]},
    )
    return blocks


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("eval.demo", __doc__)
    add_model_flags(parser)
    add_limit(parser, 64)
    port = "(default: the first free one from 7860)"
    add_flag(parser, "--port", port, type=whole(1, 65535), metavar="N")
    masks = f"draw masks too, with the coder of the model: {MASKS_HELP}"
    add_flag(parser, "--masks", masks, metavar="FILE")
    args = parser.parse_args(argv)
    load_gradio()
    coder = load_mask_coder(args.masks)
    subject = subject_of(args)
    model, processor = open_subject(args, subject)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        tempfile.tempdir = os.environ["GRADIO_TEMP_DIR"] = folder
        blocks = serve(
            subject,
            model,
            processor,
            Path(folder),
            args.max_new_tokens,
            args.port,
            coder,
        )
        print(f"{shown(subject.name)} answers at {blocks.local_url}; end with Ctrl+C")
        blocks.block_thread()


if __name__ == "__main__":
    run_command(main)

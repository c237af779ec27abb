"""One self-contained page: template, style, script, pictures and maps in a file that needs no
server and no network.

In: `Case`s. Out: HTML. The maps are quantized to 8 bits; a token's maps are one gzipped block for
the means over heads and one for the single heads. What does not fit into the bound of the file is
left out, and the page says so: first single heads of the last tokens, then their means.
"""

import base64
import gzip
import html
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from eval.explore.record import Case, Maps, Said

MOST_BYTES = 4_800_000  # of a page
SIDE = 640  # pixels of a picture's longer side
TEMPLATE = Path(__file__).parent


def quantized(
    maps: np.ndarray, slots: np.ndarray, prompt: int, signed: bool
) -> tuple[bytes, bytes]:
    """Maps (…, S) as 6 float32 numbers and S bytes each: byte q is the weight scale·q/255,
    scale·q/127 if signed. The numbers: the scale of the picture's keys, that of the others, which a
    sink among them would make coarse; and, since small weights are rounded to nothing, the exact
    sums over picture, prompt (its first `prompt` keys) and answer, and the weight of the first key.
    slots (S,): the picture's keys."""
    is_prompt = ~slots & (np.arange(len(slots)) < prompt)
    parts = [maps[..., keys] for keys in (slots, is_prompt, ~slots & ~is_prompt)]
    scales = [np.abs(maps[..., keys]).max(-1) for keys in (slots, ~slots)]
    header = np.stack([*scales, *(part.sum(-1) for part in parts), maps[..., 0]], axis=-1).astype(
        "<f4"
    )
    scale = np.where(slots, *(np.maximum(part, 1e-12)[..., None] for part in scales))
    levels = np.rint(maps / scale * (127 if signed else 255))
    return header.tobytes(), levels.astype(np.int8 if signed else np.uint8).tobytes()


def picture_url(image: Image.Image) -> str:
    """The picture as a data URL: small ones exact, larger ones scaled down."""
    file, small, image = BytesIO(), max(image.size) <= 256, image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    image.save(file, "webp", lossless=small, quality=85)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def model_entry(name: str, said: Said, maps: Maps) -> dict:
    """What the page knows of a model's answer, but for the maps."""
    prompt = said.batch.input_ids.shape[1]
    _, *shape, keys = next(iter(maps.kinds.values())).shape
    entry = {
        "name": name,
        "text": said.text,
        "kinds": sorted(maps.kinds),
        "shape": [*shape, keys],
        "prompt": prompt,
    }
    entry["words"] = {
        str(position): text for position, text in said.words.items() if position < keys
    }
    entry["laws"] = {kind: np.round(100 * values, 3).tolist() for kind, values in maps.laws.items()}
    entry["apart"] = np.round(maps.apart, 2).tolist()
    entry["factor"] = None if maps.factor is None else np.round(maps.factor, 4).tolist()
    texts = [said.words[prompt + number] for number in range(len(maps.probabilities))]
    chances = [round(float(chance), 4) for chance in maps.probabilities]
    tokens = [
        {"text": text, "p": p, "mean": None, "heads": None}
        for text, p in zip(texts, chances, strict=True)
    ]
    return entry | {"formula": maps.formula, "tokens": tokens}


def case_entry(case: Case) -> dict:
    """What the page knows of a question and its answers, but for the maps."""
    slots = next(iter(case.answers.values()))[0].slots
    models = [model_entry(name, *given) for name, given in case.answers.items()]
    entry = {
        "prompt": case.prompt,
        "truth": " / ".join(dict.fromkeys(case.truths)),
        "hit": case.hit,
        "models": models,
    }
    entry |= {"image": picture_url(case.image), "size": case.image.size, "boxes": case.boxes}
    return entry | {"picture": [int(slots.argmax()), int(slots.sum())]}


def fill(title: str, entries: Sequence[dict]) -> str:
    """The template with its style, script and data in it."""
    data = json.dumps({"title": title, "cases": entries}, ensure_ascii=False, separators=(",", ":"))
    # "<" is escaped: no text of a prompt or an answer can end the script element that holds it
    parts = {"title": html.escape(title), "data": data.replace("<", "\\u003c")}
    parts |= {
        name: (TEMPLATE / f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")
    }
    template = (TEMPLATE / "page.html").read_text(encoding="utf-8")
    return "".join(parts.get(part, part) for part in template.split("%%"))


def page(cases: Sequence[Case], title: str, most_bytes: int = MOST_BYTES) -> str:
    """The HTML of the cases. Single heads, then means, are left out where the file would be larger
    than the bound."""
    entries = [case_entry(case) for case in cases]
    answers = [answer for case in cases for answer in case.answers.values()]
    models = zip((model for entry in entries for model in entry["models"]), answers, strict=True)
    tokens = [
        (n, token, *answer) for model, answer in models for n, token in enumerate(model["tokens"])
    ]
    room = most_bytes - len(fill(title, entries).encode())
    for part in ("mean", "heads"):
        for n, token, said, maps in sorted(
            tokens, key=lambda token: token[0]
        ):  # the first tokens of all cases first
            rows = {
                kind: values[n].mean(1) if part == "mean" else values[n]
                for kind, values in maps.kinds.items()
            }
            prompt = said.batch.input_ids.shape[1]
            pairs = [
                quantized(rows[kind], said.slots, prompt, signed=kind == "mix")
                for kind in sorted(rows)
            ]
            raw = b"".join(
                b"".join(parts) for parts in zip(*pairs, strict=True)
            )  # all numbers, then all weights
            coded = base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()
            room -= len(coded)
            if room < 0:
                break
            token[part] = coded
    return fill(title, entries)

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

from eval.explore.record import Case, Maps, TokenizedAnswer

PAGE_BYTES = 4_800_000  # of a page
LONGER_SIDE = 640  # pixels of a picture's longer side
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
    # 1. the scales and the sums
    scales = [np.abs(maps[..., keys]).max(-1) for keys in (slots, ~slots)]
    parts = (slots, is_prompt, ~slots & ~is_prompt)
    sums = [maps[..., keys].sum(-1) for keys in parts]
    header = np.stack([*scales, *sums, maps[..., 0]], axis=-1)
    # 2. the weights, in a byte each
    of_picture, of_others = np.maximum(scales, 1e-12)[..., None]
    shares = maps / np.where(slots, of_picture, of_others)
    if signed:
        weights = np.rint(shares * 127).astype(np.int8)
    else:
        weights = np.rint(shares * 255).astype(np.uint8)
    return header.astype("<f4").tobytes(), weights.tobytes()


def picture_url(image: Image.Image) -> str:
    """The picture as a data URL: small ones exact, larger ones scaled down."""
    is_small = max(image.size) <= 256
    image = image.convert("RGB")
    image.thumbnail((LONGER_SIDE, LONGER_SIDE))
    file = BytesIO()
    image.save(file, "webp", lossless=is_small, quality=85)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def rounded(numbers: np.ndarray, digits: int) -> list:
    return np.round(numbers, digits).tolist()


def model_entry(name: str, said: TokenizedAnswer, maps: Maps) -> dict:
    """What the page knows of a model's answer, but for the maps."""
    prompt = said.batch.input_ids.shape[1]
    _, layers, heads, keys = next(iter(maps.kinds.values())).shape
    words = {str(position): text for position, text in said.words.items() if position < keys}
    tokens = []
    for number, chance in enumerate(maps.probabilities):
        text = said.words[prompt + number]
        p = round(float(chance), 4)
        tokens.append({"text": text, "p": p, "mean": None, "heads": None})
    return {
        "name": name,
        "text": said.text,
        "kinds": sorted(maps.kinds),
        "shape": [layers, heads, keys],
        "prompt": prompt,
        "words": words,
        "laws": {kind: rounded(100 * shares, 3) for kind, shares in maps.laws.items()},
        "apart": rounded(maps.apart, 2),
        "factor": None if maps.factor is None else rounded(maps.factor, 4),
        "formula": maps.formula,
        "tokens": tokens,
    }


def case_entry(case: Case) -> dict:
    """What the page knows of a question and its answers, but for the maps."""
    first, _ = next(iter(case.answers.values()))
    count = int(first.slots.sum())
    # a text has a strip in its place: a token beside the other
    image = case.image or Image.new("RGB", (4 * count, count), "white")
    return {
        "text": case.image is None,
        "prompt": case.prompt,
        "truth": " / ".join(dict.fromkeys(case.truths)),
        "hit": case.hit,
        "models": [model_entry(name, *answer) for name, answer in case.answers.items()],
        "image": picture_url(image),
        "size": image.size,
        "boxes": case.boxes,
        "picture": [int(first.slots.argmax()), count],
    }


def fill(title: str, entries: Sequence[dict]) -> str:
    """The template with its style, script and data in it."""
    known = {"title": title, "cases": entries}
    data = json.dumps(known, ensure_ascii=False, separators=(",", ":"))
    # "<" is escaped: no text of a prompt or an answer can end the script element that holds it
    parts = {"title": html.escape(title), "data": data.replace("<", "\\u003c")}
    for name in ("css", "js", "html"):
        parts[name] = (TEMPLATE / f"page.{name}").read_text(encoding="utf-8")
    template = parts.pop("html")
    return "".join(parts.get(part, part) for part in template.split("%%"))


def page(cases: Sequence[Case], title: str, most_bytes: int = PAGE_BYTES) -> str:
    """The HTML of the cases. Single heads, then means, are left out where the file would be larger
    than the bound."""
    # 1. all tokens, the first ones of all cases first
    entries = [case_entry(case) for case in cases]
    tokens = []
    for entry, case in zip(entries, cases, strict=True):
        for model, answer in zip(entry["models"], case.answers.values(), strict=True):
            for number, token in enumerate(model["tokens"]):
                tokens.append((number, token, *answer))
    tokens.sort(key=lambda token: token[0])
    # 2. their maps, as many as fit
    room = most_bytes - len(fill(title, entries).encode())
    for part in ("mean", "heads"):
        for number, token, said, maps in tokens:
            coded = coded_maps(said, maps, number, part)
            room -= len(coded)
            if room < 0:
                break
            token[part] = coded
    return fill(title, entries)


def coded_maps(said: TokenizedAnswer, maps: Maps, number: int, part: str) -> str:
    """The maps of a token, `mean` over heads or all `heads`: all numbers, then all weights."""
    prompt = said.batch.input_ids.shape[1]
    headers = weights = b""
    for kind in sorted(maps.kinds):
        rows = maps.kinds[kind][number]
        if part == "mean":
            rows = rows.mean(1)
        header, levels = quantized(rows, said.slots, prompt, signed=kind == "mix")
        headers += header
        weights += levels
    return base64.b64encode(gzip.compress(headers + weights, 6, mtime=0)).decode()

"""The model card, README.md, of an exported folder: what the hub shows of it.

In: the model, its base, and the run folder that trained it. Out: Markdown with the hub's front matter: base, data,
settings, scores and command, as far as the run's config.json and summary.json have them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model.common import read_json
from model.paligemma import PaliGemma
from model.source import EMBEDDED

USE = """\
```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

model, processor = (kind.from_pretrained(FOLDER) for kind in (AutoModelForImageTextToText, AutoProcessor))
inputs = processor(images=Image.open(PICTURE), text="<image>answer en Where is the dog?", return_tensors="pt")
inputs.pop("labels", None)  # of the prompt there are none, and transformers would make their loss NaN
new = model.generate(**inputs, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
print(processor.decode(new, skip_special_tokens=True))
```"""


def model_card(model: PaliGemma, title: str, base: str, run: Path | None = None) -> str:
    """The card. base: the checkpoint that the `run` trained, or that was exported as it is. Raises UserError."""
    settings, summary = (_read(run, name) for name in ("config.json", "summary.json"))
    generation, side = 2 if model.config.text.is_gemma2 else 1, model.config.vision.image_size
    count = sum(parameter.numel() for parameter in model.parameters())
    origin = f"Base: `{base}`."
    if run is not None:
        origin = f"Trained from `{base}` on `{_cell(settings.get('data', 'unknown data'))}`."
    lines = [*_front_matter(base), f"# {title}", ""]
    lines += [f"PaliGemma {generation}, {count:,} parameters, pictures of {side} × {side} pixels. {origin}"]
    if "command" in summary:
        lines += ["", "```bash", str(summary["command"]), "```"]
    if scores := _scores(summary):
        lines += ["", "## Scores", "", *scores]
    lines += ["", "## Use", "", USE]
    if settings:
        given = {name: value for name, value in settings.items() if value not in (None, False, [], "")}
        lines += ["", "## Settings", "", "| setting | value |", "|---|---|"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in given.items()]
    return "\n".join(lines) + "\n"


def _read(run: Path | None, name: str) -> dict:
    return read_json(run / name) if run is not None and (run / name).is_file() else {}


def _front_matter(base: str) -> Iterator[str]:
    """What the hub reads; Google's terms go with its weights, the embedded base is the project's own."""
    is_on_hub = base.count("/") == 1 and not Path(base).exists()
    yield from ("---", "library_name: transformers", "pipeline_tag: image-text-to-text", "tags:", "- paligemma")
    if is_on_hub:
        yield f"base_model: {base}"
    if base.startswith("google/paligemma"):
        yield "license: gemma"
    elif base == EMBEDDED:
        yield "license: apache-2.0"
    yield from ("---", "")


def _scores(summary: Mapping[str, Any]) -> list[str]:
    """A table of every number in the summary's results: a column for each, such as before and after training."""
    results = {n: dict(_numbers(value)) for n, value in summary.items() if isinstance(value, dict) and n != "held_out"}
    for name, value in summary.get("held_out", {}).items():  # which has results by the same names
        if isinstance(value, dict):
            results.setdefault(name, {}).update((f"held-out {key}", number) for key, number in _numbers(value))
    results = {name: numbers for name, numbers in results.items() if numbers}
    rows = dict.fromkeys(row for numbers in results.values() for row in numbers)
    if not rows:
        return []
    table = [["", *results], ["---", *["---:"] * len(results)]]
    table += [[row, *(f"{numbers[row]:.4g}" if row in numbers else "" for numbers in results.values())] for row in rows]
    return [f"| {' | '.join(row)} |" for row in table]


def _numbers(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a result, and of its details one level down."""
    for name, value in result.items():
        details = {f"{name}, {key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        yield from ((path, part) for path, part in details.items() if type(part) in (int, float))


def _cell(value: Any) -> str:
    """A value as the text of a table's cell."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.replace("|", "\\|").split())

"""The model card, README.md, of an exported folder: what the hub shows of it.

In: the model's configuration, its base, and the run folder that trained it. Out: Markdown with the hub's front matter:
base, data, settings, scores and command, as far as the run's config.json and summary.json have them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model.common import read_json
from model.config import PaliGemmaConfig
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


def model_card(config: PaliGemmaConfig, count: int, title: str, base: str, run: Path | None = None) -> str:
    """The card of a model of `count` parameters. base: what the `run` trained, or what was exported as it is."""
    settings, summary = (_read(run, name) for name in ("config.json", "summary.json"))
    generation, side = 2 if config.text.is_gemma2 else 1, config.vision.image_size
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
    """A table of the summary's accuracies and held-out results, before and after training and of the blind model."""
    held_out = summary.get("held_out", {})
    columns = {}
    for name in ("before", "start", "after", "best", "blind"):
        columns[name] = {{"overall": "vqa"}.get(key, key): value for key, value in summary.get(name, {}).items()}
        columns[name] |= {f"held-out {key}": value for key, value in (held_out.get(name) or {}).items()}
    columns = {name: _numbers(column) for name, column in columns.items() if _numbers(column)}
    rows = dict.fromkeys(row for name, column in columns.items() if name != "blind" for row in column)
    table = [["", *columns], ["---", *["---:"] * len(columns)]]
    table += [[row, *(f"{column[row]:.4g}" if row in column else "" for column in columns.values())] for row in rows]
    return [f"| {' | '.join(row)} |" for row in table] if rows else []


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if type(value) in (int, float)}


def _cell(value: Any) -> str:
    """A value as the text of a table's cell."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = ", ".join(map(str, value)) if isinstance(value, list) else text
    return " ".join(text.replace("|", "\\|").split())

"""The model card, README.md, of an exported folder: what the hub shows of it.

In: the model's configuration, its base, and the run folder that trained it. Out: Markdown with the hub's front matter:
base, data, settings and scores, as far as the run's config.json and summary.json have them.
"""

import json
from pathlib import Path
from typing import Any

from model.common import read_json
from model.config import PaliGemmaConfig
from model.source import EMBEDDED

USE = """
## Use

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
    files = {name: run / name for name in ("config.json", "summary.json")} if run else {}
    read = {name: read_json(file) for name, file in files.items() if file.is_file()}
    settings, summary = read.get("config.json", {}), read.get("summary.json", {})
    lines = ["---", "library_name: transformers", "pipeline_tag: image-text-to-text", "tags:", "- paligemma"]
    if base.count("/") == 1 and not Path(base).exists():
        lines.append(f"base_model: {base}")
    if base.startswith("google/paligemma"):
        lines.append("license: gemma")  # Google's terms go with its weights; the embedded base is the project's
    elif base == EMBEDDED:
        lines.append("license: apache-2.0")
    generation, side = 2 if config.text.is_gemma2 else 1, config.vision.image_size
    lines += ["---", "", f"# {title}", ""]
    lines.append(f"PaliGemma {generation}, {count:,} parameters, pictures of {side} × {side} pixels.")
    lines.append(f"Trained from `{base}` on `{_cell(settings.get('data'))}`." if run else f"Base: `{base}`.")
    held_out, scores = summary.get("held_out", {}), []
    for name in ("before", "start", "after", "best", "blind"):
        measures = summary.get(name, {}) | {f"held-out {key}": v for key, v in (held_out.get(name) or {}).items()}
        numbers = {key: value for key, value in measures.items() if type(value) in (int, float)}
        scores += [f"| {name} | {key} | {value:.4g} |" for key, value in numbers.items()]
    if scores:
        lines += ["", "## Scores", "", "| model | measure | score |", "|---|---|---:|", *scores]
    lines.append(USE)
    if given := {name: value for name, value in settings.items() if value not in (None, False, [], "")}:
        lines += ["", "## Settings", "", "| setting | value |", "|---|---|"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in given.items()]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    """A value as the text of a table's cell."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.replace("|", "\\|").split())

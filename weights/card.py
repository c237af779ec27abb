"""The model card, README.md, of an exported folder: base, data, settings and scores, as far as a run has them."""

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
    lines += [f"base_model: {base}"] * (base.count("/") == 1 and not Path(base).exists())
    lines += ["license: gemma"] * base.startswith("google/paligemma")  # Google's terms go with its weights
    lines += ["license: apache-2.0"] * (base == EMBEDDED)
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
    if given := [f"| {name} | {_cell(v)} |" for name, v in settings.items() if v not in (None, False, [], "")]:
        lines += ["", "## Settings", "", "| setting | value |", "|---|---|", *given]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.replace("|", "\\|").split())

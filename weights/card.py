"""The model card, README.md, of an exported folder: base, data, settings and scores, as far as a
run has them."""

import json
import re
from pathlib import Path
from typing import Any

from model.common import parse_json, read_text
from model.config import PaliGemmaConfig
from model.source import EMBEDDED

USE = """
## Use

```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

model, processor = (kind.from_pretrained(FOLDER) for kind in (AutoModelForImageTextToText, AutoProcessor))
inputs = processor(images=Image.open(PICTURE), text=PROMPT, return_tensors="pt")
inputs.pop("labels", None)  # of the prompt there are none, and transformers would make their loss NaN
new = model.generate(**inputs, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
print(processor.decode(new, skip_special_tokens=True))
```"""


SILENT = (
    "base images device workers keep max_bad checkpoint_every".split()
)  # settings that do not shape the weights


def model_card(
    config: PaliGemmaConfig, count: int, title: str, base: str, run: Path | None = None, step="last"
) -> str:
    """The card of a model of `count` parameters, without paths. base: what the `run` trained up to
    its last or best `step`, or what was exported as it is."""
    files = [
        run / name if run else Path() for name in ("config.json", "summary.json", "answers.jsonl")
    ]
    settings, summary, asked = (read_text(file) if file.is_file() else "" for file in files)
    settings, summary = (parse_json(text or "{}", str(run)) for text in (settings, summary))
    data = _cell(settings.get("data", ""))
    public = base if base.count("/") == 1 and not Path(base).exists() else Path(base).name
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: image-text-to-text",
        "tags:",
        "- paligemma",
    ]
    lines += [f"base_model: {base}"] * ("/" in public)
    lines += ["license: gemma"] * base.startswith(
        "google/paligemma"
    )  # Google's terms go with its weights
    lines += ["license: apache-2.0"] * (base == EMBEDDED)
    size = f"{count:,} parameters, pictures of {config.vision.image_size} pixels a side."
    lines += ["---", "", f"# {title}", "", f"PaliGemma {1 + config.text.is_gemma2}, {size}"]
    lines.append(
        f"Trained from `{public}` on `{data}` to its {step} step." if run else f"Base: `{public}`."
    )
    named = ("before", "start", "after", "best", "blind", "text_only_guess", "over_blind")
    scores = {
        name: {"held-out": summary.get("held_out", {}).get(name)} | summary.get(name, {})
        for name in named
    }
    if rows := [
        f"| {n} | {m} | {v:.4g} |" for n, values in scores.items() for m, v in _numbers(values)
    ]:
        lines += ["", "## Scores", "", "| model | measure | score |", "|---|---|---:|", *rows]
    examples = sorted(
        map(json.loads, asked.splitlines()), key=lambda line: not line["right"]
    )  # one that works
    prompt = (
        examples[0]["question"].replace("<image>", "").strip()
        if asked
        else "answer en Where is the dog?"
    )
    lines.append(USE.replace("PROMPT", json.dumps(f"<image>{prompt}", ensure_ascii=False)))
    unused = SILENT + "r alpha dropout targets".split() * bool(settings.get("full"))
    unused += ["samples", "tasks"] * (EMBEDDED not in data) + ["prompt", "answers"] * (
        "vqav2:" not in data
    )
    used = [
        (n, v) for n, v in settings.items() if n not in unused and v not in (None, False, [], "")
    ]
    lines += ["", "## Settings", "", "| setting | value |", "|---|---|"] * bool(used)
    lines += [f"| {name} | {_cell(value)} |" for name, value in used]
    return "\n".join(lines) + "\n"


def _numbers(values: Any, name: str = "") -> list[tuple[str, float]]:
    if isinstance(values, dict):
        return [
            pair
            for key, value in values.items()
            for pair in _numbers(value, f"{name} {key}".strip())
        ]
    return [(name, values)] if type(values) in (int, float) else []


def _cell(value: Any) -> str:
    """A value for a table, sources without their folders."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(re.sub(r"(?<=:)[^\s\"][^\"]*/", "", text).replace("|", "\\|").split())

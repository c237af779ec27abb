"""The model card, README.md, of an exported folder: base, data, settings and scores, as far as a
run has them."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from model.common import UserError, parse_json, read_json_if, read_text, shown
from model.config import PaliGemmaConfig, config_errors
from model.source import EMBEDDED, HUB_ID, own_file

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


DEFAULT_PROMPT = '"<image>answer en Where is the dog?"'
# settings that do not shape the weights
SILENT = "base images device threads workers keep max_bad checkpoint_every".split()
SCORES = "before start after best blind text_only_guess over_blind".split()


def model_card(
    config: PaliGemmaConfig,
    count: int,
    title: str,
    base: str,
    run: Path | None = None,
    step="last",
) -> str:
    """The card of a model of `count` parameters, without paths. base: what the `run` trained up to
    its last or best `step`, or what was exported as it is. Raises UserError for damaged files
    of the run."""
    is_public = HUB_ID.fullmatch(base) and not Path(base).exists()
    public = base if is_public else _plain(Path(base).name)
    # 1. what the hub reads
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: image-text-to-text",
        "tags:",
        "- paligemma",
    ]
    if is_public:
        lines.append(f"base_model: {base}")
    if base.startswith("google/paligemma"):
        lines.append("license: gemma")  # Google's terms go with its weights
    if base == EMBEDDED:
        lines.append("license: apache-2.0")
    size = f"{count:,} parameters, pictures of {config.vision.image_size} pixels a side."
    version = 2 if config.text.is_gemma2 else 1
    lines += ["---", "", f"# {_plain(title)}", "", f"PaliGemma {version}, {size}"]
    if run is None:
        return "\n".join([*lines, f"Base: {public}.", USE.replace("PROMPT", DEFAULT_PROMPT)]) + "\n"
    # 2. what it was trained on and scores
    settings = read_json_if(own_file(run / "config.json"))
    summary = read_json_if(own_file(run / "summary.json"))
    data = _plain(settings.get("data", ""))
    lines.append(f"Trained from {public} on {data} to its {step} step.")
    scores, held_out = {}, summary.get("held_out", {})
    with config_errors(run / "summary.json"):
        for name in SCORES:
            scores[name] = _numbers({"held-out": held_out.get(name)} | summary.get(name, {}))
        if scores["start"] == scores["before"]:
            del scores["start"]
        rows = [f"| {n} | {_plain(m)} | {v:.4g} |" for n in scores for m, v in scores[n]]
    if rows:
        lines += ["", "## Scores", "", "| model | measure | score |", "|---|---|---:|", *rows]
    # 3. how it is asked and was trained
    lines.append(USE.replace("PROMPT", _prompt(run / "answers.jsonl")))
    unused = [*SILENT]
    if settings.get("full"):
        unused += "r alpha dropout targets".split()
    if EMBEDDED not in data:
        unused += ["samples", "tasks"]
    if "vqav2:" not in data and "vqa:" not in data:
        unused += ["prompt", "answers"]
    rows = [
        f"| {_plain(name)} | {_plain(value)} |"
        for name, value in settings.items()
        if name not in unused and value not in (None, False, [], "")
    ]
    if rows:
        lines += ["", "## Settings", "", "| setting | value |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _prompt(file: Path) -> str:
    """A question of a run as Python writes it, if it can be one with a right answer."""
    prompt = DEFAULT_PROMPT
    text = read_text(own_file(file)) if file.is_file() else ""
    with config_errors(file):
        for line in text.split("\n"):
            with contextlib.suppress(UserError):  # the last line of a run that was stopped is cut
                asked = parse_json(line, "")
                question = "<image>" + asked["question"].replace("<image>", "").strip()
                prompt = shown(json.dumps(question, ensure_ascii=False), 10_000)
                if asked["right"]:
                    break
    return prompt


def _numbers(values: Any, name: str = "") -> list[tuple[str, float]]:
    if isinstance(values, dict):
        return [
            pair
            for key, value in values.items()
            for pair in _numbers(value, f"{name} {key}".strip())
        ]
    return [(name, values)] if type(values) in (int, float) else []


def _plain(value: Any) -> str:
    """A value as one line without markup, sources without their folders."""
    texts = []
    for part in value if isinstance(value, list) else [value]:
        text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
        texts.append(re.sub(r"(?<=:)[^\s\"][^\"]*/", "", text))
    line = shown(" ".join(", ".join(texts).split()), 1000)
    return re.sub(r"[\\`*\[\]<>|]", r"\\\g<0>", line)

"""A published SigLIP into `model.siglip.Siglip`: the eye alone, for models that are put together from parts.

In: a folder or hub id with config.json and safetensors of transformers' SiglipModel, such as
google/siglip-so400m-patch14-384, or of a PaliGemma, whose tower is taken. Out: the tower. Its pooling head and the text
tower beside it are left out. Next: `train/systems/qmamba.py`.
"""

import json
from pathlib import Path

import torch

from model.common import UserError
from model.config import VisionConfig, read_known
from model.siglip import Siglip
from model.source import resolve
from weights.load import load_model
from weights.streaming import INDEX_FILE, compare, find_tensors, in_one_line, stream_into

PREFIX = "vision_model."
LEFT_OUT = ("text_model.", "logit_", "vision_model.head.", "vision_model.embeddings.position_ids")


def load_siglip(source: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Siglip:
    """The vision tower of `source` in eval mode. Raises UserError, all problems in one, before a tensor is read."""
    path = resolve(source, ["config.json"]) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        raw = None
    if not isinstance(raw, dict) or raw.get("model_type") not in ("siglip", "siglip_vision_model"):
        return load_model(source, dtype=dtype, device=device).vision_tower  # or it says what is wrong
    folder = resolve(source, ["config.json", "model*.safetensors", INDEX_FILE])
    config = read_known(VisionConfig, raw.get("vision_config") or raw)
    with torch.device("meta"):
        tower = Siglip(config).to(dtype).eval()
    entries, unreadable, problems = find_tensors(folder)
    entries = {name: entry for name, entry in entries.items() if not name.startswith(LEFT_OUT)}
    wanted = {name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
    comparison = compare(entries, unreadable, {PREFIX + name: name for name in wanted}, wanted)
    if problems or (problems := comparison.problems(folder, entries)):
        raise UserError(in_one_line(folder, problems))
    stream_into(tower, entries, comparison.name_map, device)
    return tower

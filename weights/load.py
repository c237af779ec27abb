"""Models from checkpoints: a PaliGemma or another complete model, a Mamba language model, a vision tower.

In: a folder, a hub id "owner/name", "embedded", a preset's name, or a big_vision .npz. Out: the model in eval mode, in
the dtype and on the device asked for, in no more memory than its weights; on "meta" the headers are checked and no
tensor is read. Needs config.json and the tensors, no tokenizer. `weights/checkpoint.py` says what is raised.
"""

from pathlib import Path

import torch

from model.common import UserError, read_json
from model.config import VisionConfig, read_section, read_vision
from model.language import LanguageModel
from model.language_config import LanguageConfig
from model.mamba import MambaLM
from model.paligemma import PaliGemma, initialize
from model.qmamba import QMamba, initialize_qmamba
from model.siglip import Siglip
from model.source import preset_of, resolve
from model.system_configs import MambaConfig
from weights.checkpoint import empty_model, open_checkpoint, quantized

_SIGLIP_TYPES = ("siglip", "siglip_vision_model")


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    quantize: str | None = None,
) -> PaliGemma:
    """The model of `source`, of the class that `weights.registry.KINDS` has for its config.json.

    source: a folder, a hub id at `revision`, "embedded", a preset's name (random weights; a folder of that name comes
    first), or a .npz file. quantize: a key of `lora.quantize.KINDS`, in which all layers but norms are then held, see
    `weights.quantized`. The head is the embedding: a stored `lm_head` must equal it, or a UserError says so
    (transformers would warn and untie the two, a model that this code does not have).
    """
    if preset := preset_of(source):
        model = empty_model(preset, dtype)
        if torch.device(device).type != "meta":
            fill = initialize_qmamba if isinstance(model, QMamba) else initialize
            model = fill(model.to_empty(device=device))
        return quantized(model, quantize)
    return open_checkpoint(source, dtype, device, revision, quantize=quantize)


def load_text(
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> LanguageModel:
    """The published language model of `source`, Gemma, Gemma 2, Qwen1.5 or Qwen2, under the names of transformers.

    Raises UserError for another model, and for what is not computed here, such as scaled rotary positions.
    """
    return open_checkpoint(source, dtype, device, revision, LanguageConfig.from_file)


def load_mamba(
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> MambaLM:
    """The Mamba language model of `source`, under the names of transformers or of the original repository.

    A stored `lm_head` must equal the embedding, or a UserError says so.
    """
    return open_checkpoint(source, dtype, device, revision, MambaConfig.from_file)


def load_siglip(source: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Siglip:
    """The vision tower of `source`: of transformers' SiglipModel, or of a PaliGemma. The pooling head is left out."""
    path = resolve(source, ["config.json"]) / "config.json"
    try:
        is_siglip = read_json(path).get("model_type") in _SIGLIP_TYPES
    except UserError:
        is_siglip = False  # load_model reports what is wrong with the file
    if not is_siglip:
        model = load_model(source, dtype=dtype, device=device)
        if isinstance(model, LanguageModel):
            raise UserError(
                f"{source}: a language model for text alone has no vision tower: give a SigLIP, a PaliGemma"
            )
        return model.vision_tower
    return open_checkpoint(source, dtype, device, read=read_siglip)


def read_siglip(path: Path) -> VisionConfig:
    """The vision tower in the config.json of a SigLIP, whole or its tower alone. Raises UserError."""
    raw = read_json(path)
    is_whole = raw.get("model_type") == "siglip"
    return read_vision(read_section(raw, "vision_config", str(path)) if is_whole else raw, str(path))

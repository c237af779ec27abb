"""What Q-Mamba is made of when its training begins: an eye, a fresh projector, and a language model.

In: the settings of a run with `--arch qmamba`, whose `--option NAME=VALUE` sets what `Parts` and
`model.qmamba.ProjectorConfig` name. Out: the model of a stage. Next: `train/systems/stages.py` says what of it learns.

    python -m train.finetune --arch qmamba --stage 1 --base google/siglip-so400m-patch14-384 --data jsonl:FILE \\
        --option language_model=state-spaces/mamba-2.8b-hf --option blocks_from=state-spaces/mamba-130m-hf
"""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.common import UserError
from model.qmamba import ProjectorConfig, QMamba, QMambaConfig, QMambaProjector, fill_from_mamba, initialize_projector
from model.source import BUNDLED_FOLDER, EMBEDDED
from weights.load import empty_model, load_mamba, load_model
from weights.siglip import load_siglip

if TYPE_CHECKING:
    from train.settings import Settings

TINY_MAMBA = BUNDLED_FOLDER.parent / "tiny-mamba"  # the embedded language model
# for the embedded base, whose picture has 16 features
TINY = ProjectorConfig(queries=8, hidden_size=64, num_blocks=4, num_attention_heads=4, state_size=8)


@dataclass(frozen=True)
class Parts:
    """Where the parts come from: folders or hub ids."""

    language_model: str = EMBEDDED
    blocks_from: str = ""  # a Mamba whose layers fill the projector's blocks; none: they begin fresh
    connector_from: str = ""  # a trained Q-Mamba whose connector is taken over, with the projection before it
    feature_layer: int = -2  # of the eye, see VisionConfig


def read_options(settings: "Settings") -> tuple[Parts, ProjectorConfig]:
    """What `--option` says. Raises UserError for a name that is none, or a value of another type."""
    tiny = settings.base == EMBEDDED
    parts, projector = Parts(), TINY if tiny else ProjectorConfig()
    known = asdict(parts) | asdict(projector)
    for name, value in settings.options.items():
        if name not in known:
            raise UserError(f"--option {name}: choose of {', '.join(known)}")
        if type(value) is not type(known[name]):
            raise UserError(f"--option {name}={value}: expected {type(known[name]).__name__}, such as {known[name]!r}")
    given = {
        cls: {f.name: settings.options[f.name] for f in fields(cls) if f.name in settings.options}
        for cls in (Parts, ProjectorConfig)
    }
    parts, projector = replace(parts, **given[Parts]), replace(projector, **given[ProjectorConfig])
    if not tiny and parts.language_model == EMBEDDED:
        raise UserError(
            f"--base {settings.base}: its language model is not told: add --option "
            "language_model=state-spaces/mamba-2.8b-hf, or another published Mamba"
        )
    return parts, projector


def language_model(settings: "Settings") -> str:
    """The source of the language model, whose tokenizer the model reads with: in stage 2 the model itself."""
    if settings.stage != 1:
        return settings.base
    source = read_options(settings)[0].language_model
    return str(TINY_MAMBA) if source == EMBEDDED else source


def open_qmamba(settings: "Settings", dtype: torch.dtype, device: torch.device) -> QMamba:
    """Stage 1: a fresh projector between the eye of a base and a language model. Stage 2: what stage 1 made of it.

    Raises UserError for parts that do not fit together, before the projector is made.
    """
    if settings.stage != 1:
        if settings.option:
            raise UserError(f"--option {settings.option[0]}: stage 1 has decided that: leave it out")
        model = load_model(settings.base, dtype=dtype, device=device)
        if type(model) is not QMamba:
            raise UserError(
                f"--stage {settings.stage}: {settings.base} is no Q-Mamba: train one with --arch qmamba --stage 1, and "
                "give --base RUN/model"
            )
        return model
    parts, projector = read_options(settings)
    tower = load_siglip(settings.base, dtype, device)
    text = load_mamba(language_model(settings), dtype, device)
    config = QMambaConfig(
        vision=replace(tower.config, feature_layer=parts.feature_layer),
        projector=projector,
        text=text.config,
        image_token_id=text.config.vocab_size - 1,  # of the embedding's padding, which no text uses
    )
    config.check(f"--base {settings.base}")
    model = empty_model(config, dtype)
    tower.config = config.vision
    model.vision_tower, model.language_model = tower, text.backbone
    fresh = QMambaProjector(config)
    initialize_projector(fresh, settings.seed)
    if parts.blocks_from:
        fill_from_mamba(fresh, load_mamba(parts.blocks_from).backbone)
    if parts.connector_from:
        copy_connector(fresh, parts.connector_from)
    model.multi_modal_projector = fresh.to(device, dtype)
    return model


def copy_connector(projector: QMambaProjector, source: str | Path) -> None:
    """Take over the connector of a trained Q-Mamba, and the projection and norm before it.

    Raises UserError for another model, or one of other sizes.
    """
    theirs = load_model(source)
    if type(theirs) is not QMamba or not theirs.config.projector.connector or not projector.config.connector:
        raise UserError(f"connector_from={source}: both models must be a Q-Mamba with a connector")
    for part in ("vision_proj", "vision_norm", "connector"):
        try:
            projector.get_submodule(part).load_state_dict(theirs.multi_modal_projector.get_submodule(part).state_dict())
        except RuntimeError as error:
            told = str(error).splitlines()[-1].strip()
            raise UserError(f"connector_from={source}: its {part} has other sizes ({told}): take one like it") from None

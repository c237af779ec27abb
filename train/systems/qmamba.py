"""Q-Mamba as it is trained: a vision tower, a fresh projector, and a language model; then what
stage 1 made of them.

In: the settings of a run with `--arch qmamba`; `--option NAME=VALUE` sets a field of `Parts` or of
`model.systems.qmamba.ProjectorConfig`. Out: the model of a stage.

    python -m train.finetune --arch qmamba --stage 1 --base google/siglip-so400m-patch14-384 --data
        jsonl:FILE \\ --option language_model=state-spaces/mamba-2.8b-hf --option
        blocks_from=state-spaces/mamba-130m-hf
"""

from dataclasses import asdict, dataclass, replace

import torch

from model.common import UserError
from model.source import BUNDLED_FOLDER, EMBEDDED
from model.systems.configs import ProjectorConfig, QMambaConfig
from model.systems.qmamba import QMamba, fill_from_mamba, fresh_projector
from train.settings import Settings
from weights.load import empty_model, load_model, load_siglip, load_system

TINY_MAMBA = BUNDLED_FOLDER.parent / "tiny-mamba"  # the embedded language model
# for the embedded base, which has 16 image tokens
TINY = ProjectorConfig(queries=8, hidden_size=64, num_blocks=4, num_attention_heads=4, state_size=8)
CONNECTOR = ("vision_proj", "vision_norm", "connector")


@dataclass(frozen=True)
class Parts:
    """The sources of the parts: folders or hub ids.

    blocks_from: a Mamba whose layers are copied into the projector's blocks. connector_from: a
    trained Q-Mamba whose connector and vision projection are copied. feature_layer: of the vision
    tower, see `VisionConfig`.
    """

    language_model: str = EMBEDDED
    blocks_from: str = ""
    connector_from: str = ""
    feature_layer: int = -2


def read_options(settings: Settings) -> tuple[Parts, ProjectorConfig]:
    """The parts and the projector that `--option` describes. Raises UserError for an unknown name
    or a wrong type."""
    parts, projector = Parts(), TINY if settings.base == EMBEDDED else ProjectorConfig()
    given = settings.options_of(asdict(parts) | asdict(projector))
    parts = replace(parts, **{name: given.pop(name) for name in asdict(parts) if name in given})
    if settings.base != EMBEDDED and parts.language_model == EMBEDDED:
        remedy = (
            "add --option language_model=state-spaces/mamba-2.8b-hf, or another published Mamba"
        )
        raise UserError(f"--base {settings.base}: its language model is not named: {remedy}")
    return parts, replace(projector, **given)


def tokenizer_source(settings: Settings) -> str:
    """The source of the language model and its tokenizer: from stage 2 on the base itself."""
    source = read_options(settings)[0].language_model if settings.stage == 1 else settings.base
    return str(TINY_MAMBA) if source == EMBEDDED else source


def open_stage(settings: Settings, dtype: torch.dtype, device: torch.device) -> QMamba:
    """Stage 1: a fresh projector between the vision tower of a base and a language model. Stage 2:
    the base itself.

    Raises UserError for parts that do not fit together.
    """
    if settings.stage != 1:
        return load_qmamba(settings.base, dtype, device)
    parts, projector = read_options(settings)
    tower = load_siglip(settings.base, dtype, device)
    text = load_system(tokenizer_source(settings), "mamba", dtype, device)
    vision, padding = (
        replace(tower.config, feature_layer=parts.feature_layer),
        text.config.vocab_size - 1,
    )
    config = QMambaConfig(
        vision, projector, text.config, image_token_id=padding
    )  # no text has this id
    model = empty_model(config, dtype)
    tower.config = config.vision
    model.vision_tower, model.language_model = tower, text.backbone
    fresh = fresh_projector(config, settings.seed)
    if parts.blocks_from:
        fill_from_mamba(fresh, load_system(parts.blocks_from, "mamba").backbone)
    if parts.connector_from:
        trained = load_qmamba(parts.connector_from).multi_modal_projector
        try:
            for name in CONNECTOR:
                fresh.get_submodule(name).load_state_dict(trained.get_submodule(name).state_dict())
        except (AttributeError, RuntimeError):  # it has none, or of other sizes
            problem = f"connector_from={parts.connector_from}: has other sizes than this run's: take another one"
            raise UserError(problem) from None
    model.multi_modal_projector = fresh.to(device, dtype)
    return model


def load_qmamba(
    source: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> QMamba:
    """The Q-Mamba of `source`. Raises UserError for another model."""
    model = load_model(source, dtype=dtype, device=device)
    if type(model) is not QMamba:
        raise UserError(
            f"{source}: is no Q-Mamba: train one with --arch qmamba --stage 1, and give RUN/model"
        )
    return model

"""Q-Mamba as it is trained: a vision tower, a fresh projector, and a language model; then what stage 1 made of them.

In: the settings of a run with `--arch qmamba`; `--option NAME=VALUE` sets a field of `Parts` or of
`model.qmamba.ProjectorConfig`. Out: the model of a stage.

    python -m train.finetune --arch qmamba --stage 1 --base google/siglip-so400m-patch14-384 --data jsonl:FILE \\
        --option language_model=state-spaces/mamba-2.8b-hf --option blocks_from=state-spaces/mamba-130m-hf
"""

from dataclasses import asdict, dataclass, replace

import torch

from model.common import UserError
from model.qmamba import QMamba, QMambaProjector, fill_from_mamba, fresh_projector
from model.source import BUNDLED_FOLDER, EMBEDDED
from model.system_configs import ProjectorConfig, QMambaConfig
from train.settings import Settings
from weights.load import empty_model, load_mamba, load_model, load_siglip

TINY_MAMBA = BUNDLED_FOLDER.parent / "tiny-mamba"  # the embedded language model
# for the embedded base, which has 16 image tokens
TINY = ProjectorConfig(queries=8, hidden_size=64, num_blocks=4, num_attention_heads=4, state_size=8)


@dataclass(frozen=True)
class Parts:
    """The sources of the parts: folders or hub ids.

    blocks_from: a Mamba whose layers are copied into the projector's blocks; "" initializes them at random.
    connector_from: a trained Q-Mamba whose connector and vision projection are copied; "" initializes them at random.
    feature_layer: of the vision tower, see `VisionConfig`.
    """

    language_model: str = EMBEDDED
    blocks_from: str = ""
    connector_from: str = ""
    feature_layer: int = -2


def read_options(settings: Settings) -> tuple[Parts, ProjectorConfig]:
    """The parts and the projector that `--option` describes. Raises UserError for an unknown name or a wrong type."""
    is_tiny = settings.base == EMBEDDED
    parts, projector = Parts(), TINY if is_tiny else ProjectorConfig()
    given = settings.options_of(asdict(parts) | asdict(projector))
    parts = replace(parts, **{name: value for name, value in given.items() if hasattr(parts, name)})
    projector = replace(projector, **{name: value for name, value in given.items() if not hasattr(parts, name)})
    if not is_tiny and parts.language_model == EMBEDDED:
        remedy = "add --option language_model=state-spaces/mamba-2.8b-hf, or another published Mamba"
        raise UserError(f"--base {settings.base}: its language model is not named: {remedy}")
    return parts, projector


def tokenizer_source(settings: Settings) -> str:
    """The source of the language model and its tokenizer: from stage 2 on the base itself."""
    if settings.stage != 1:
        return settings.base
    source = read_options(settings)[0].language_model
    return str(TINY_MAMBA) if source == EMBEDDED else source


def open_stage(settings: Settings, dtype: torch.dtype, device: torch.device) -> QMamba:
    """Stage 1: a fresh projector between the vision tower of a base and a language model. Stage 2: the base itself.

    Raises UserError for parts that do not fit together.
    """
    if settings.stage != 1:
        return load_qmamba(settings.base, dtype, device)
    parts, projector = read_options(settings)
    tower = load_siglip(settings.base, dtype, device)
    text = load_mamba(tokenizer_source(settings), dtype, device)
    config = QMambaConfig(
        vision=replace(tower.config, feature_layer=parts.feature_layer),
        projector=projector,
        text=text.config,
        image_token_id=text.config.vocab_size - 1,  # in the padding of the embedding: no text has this id
    )
    model = empty_model(config, dtype)
    tower.config = config.vision
    model.vision_tower, model.language_model = tower, text.backbone
    fresh, source = model.multi_modal_projector, device
    if device.type != "meta":
        fresh, source = fresh_projector(config, settings.seed), torch.device("cpu")
    if parts.blocks_from:
        fill_from_mamba(fresh, load_mamba(parts.blocks_from, device=source).backbone)
    if parts.connector_from:
        copy_connector(fresh, load_qmamba(parts.connector_from, torch.float32, source), parts.connector_from)
    model.multi_modal_projector = fresh.to(device, dtype)
    return model


def load_qmamba(source: str, dtype: torch.dtype, device: torch.device) -> QMamba:
    """The Q-Mamba of `source`. Raises UserError for another model."""
    model = load_model(source, dtype=dtype, device=device)
    if type(model) is not QMamba:
        raise UserError(f"{source}: is no Q-Mamba: train one with --arch qmamba --stage 1, and give RUN/model")
    return model


def copy_connector(projector: QMambaProjector, donor: QMamba, source: str) -> None:
    """Copy the connector of `donor`, with queries or without, and the projection and norm before it.

    Raises UserError, naming its `source`, for other sizes.
    """
    parts = ("vision_proj", "vision_norm", "connector")
    theirs, mine = (
        {name: tensor for name, tensor in part.state_dict().items() if name.split(".")[0] in parts}
        for part in (donor.multi_modal_projector, projector)
    )
    for name in sorted(theirs.keys() | mine.keys()):
        sizes = [tuple(tensors[name].shape) if name in tensors else "none" for tensors in (theirs, mine)]
        if sizes[0] != sizes[1]:
            raise UserError(f"connector_from={source}: its {name} is {sizes[0]}, expected {sizes[1]}: take another one")
    projector.load_state_dict(theirs, strict=False)

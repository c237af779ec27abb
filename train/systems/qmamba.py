"""Q-Mamba as it is trained: a vision tower, a fresh projector, and a language model; then what
stage 1 made of them.

    python -m train.systems.qmamba --stage 1
    python -m train.systems.qmamba --stage 2 --base runs/qmamba-stage1-1/model
    python -m train.systems.qmamba --stage 1 --base google/siglip-so400m-patch14-384 \\
        --data jsonl:FILE --option language_model=state-spaces/mamba-2.8b-hf \\
        --option blocks_from=state-spaces/mamba-130m-hf

In: flags; `--option NAME=VALUE` sets a field of `Parts` or of `model.systems.configs`'
`ProjectorConfig`. Out: a run folder with the model of the stage.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from model.common import UserError, run_command
from model.source import BUNDLED_FOLDER, EMBEDDED
from model.systems.configs import ProjectorConfig, QMambaConfig
from model.systems.qmamba import QMamba, fill_from_mamba, fresh_projector
from train.finetune import run_flags
from train.systems.stages import ONE_EPOCH, StageRecipe, StageSettings, parse_stage
from weights.load import empty_model, load_model, load_siglip, load_system

TINY_MAMBA = BUNDLED_FOLDER.parent / "tiny-mamba"  # the embedded language model
# for the embedded base, which has 16 image tokens
TINY = ProjectorConfig(
    queries=8,
    hidden_size=64,
    num_blocks=4,
    num_attention_heads=4,
    state_size=8,
)
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


# the paper's rates and batches; weights in fp32, matrix products in bf16 on a GPU
_PAPER = ONE_EPOCH | {"optimizer": "radam", "weight_decay": 0.0, "dtype": "fp32"}
_SMALL = {"batch_size": 32, "step_batch": 32, "tasks": "vqa,locate,count,exist"}


@dataclass(frozen=True)
class QMambaSettings(StageSettings):
    """The settings of `train.systems.qmamba`."""

    NAME = "qmamba"
    STAGES = {
        1: StageRecipe(
            {r"multi_modal_projector\..*": 1.0},
            _PAPER | {"lr": 1e-4, "step_batch": 256},
            _SMALL | {"lr": 1e-2, "samples": 2000},
        ),
        2: StageRecipe(
            {r"multi_modal_projector\..*|language_model\..*": 1.0},
            _PAPER | {"lr": 2e-5, "step_batch": 128},
            _SMALL | {"lr": 6e-3, "samples": 10000},
        ),
    }

    def read_options(self) -> tuple[Parts, ProjectorConfig]:
        """The parts and the projector that `--option` describes. Raises UserError for an unknown
        name or a wrong type."""
        projector = TINY if self.base == EMBEDDED else ProjectorConfig()
        given = self.options_of(asdict(Parts()) | asdict(projector))
        parts = Parts(**{name: given.pop(name) for name in asdict(Parts()) if name in given})
        if self.base != EMBEDDED and parts.language_model == EMBEDDED:
            remedy = (
                "add --option language_model=state-spaces/mamba-2.8b-hf, or another published Mamba"
            )
            raise UserError(f"--base {self.base}: its language model is not named: {remedy}")
        return parts, replace(projector, **given)

    def tokenizer_source(self) -> str:
        """That of the language model: from stage 2 on the base itself."""
        source = self.read_options()[0].language_model if self.stage == 1 else self.base
        return str(TINY_MAMBA) if source == EMBEDDED else source

    def open_stage(self, dtype: torch.dtype, device: torch.device) -> QMamba:
        """Stage 1: a fresh projector between the vision tower of a base and a language model. Stage
        2: the base itself. Raises UserError for parts that do not fit together."""
        if self.stage != 1:
            return load_qmamba(self.base, dtype=dtype, device=device)
        # 1. the parts that are there
        parts, projector = self.read_options()
        tower = load_siglip(self.base, dtype, device)
        text = load_system(self.tokenizer_source(), "mamba", dtype, device)
        config = QMambaConfig(
            replace(tower.config, feature_layer=parts.feature_layer),
            projector,
            text.config,
            image_token_id=text.config.vocab_size - 1,  # of the padding: no text has it
        )
        # 2. the projector
        fresh = fresh_projector(config, self.seed)
        if parts.blocks_from:
            fill_from_mamba(fresh, load_system(parts.blocks_from, "mamba").backbone)
        if parts.connector_from:
            copy_connector(parts.connector_from, fresh)
        # 3. all of them in a model
        model = empty_model(config, dtype)
        tower.config = config.vision
        model.vision_tower = tower
        model.language_model = text.backbone
        model.multi_modal_projector = fresh.to(device, dtype)
        return model


def copy_connector(source: str, fresh: nn.Module) -> None:
    """Copy connector and vision projection of the trained Q-Mamba `source`. Raises UserError."""
    trained = load_qmamba(source).multi_modal_projector
    try:
        for name in CONNECTOR:
            fresh.get_submodule(name).load_state_dict(trained.get_submodule(name).state_dict())
    except (AttributeError, RuntimeError):  # it has none, or of other sizes
        problem = f"connector_from={source}: has other sizes than this run's"
        raise UserError(f"{problem}: take another one") from None


def load_qmamba(source: str, **place: Any) -> QMamba:
    """The Q-Mamba of `source`. place: `dtype` and `device`. Raises UserError for another model."""
    model = load_model(source, **place)
    if type(model) is not QMamba:
        raise UserError(f"{source}: is no Q-Mamba: train one with --stage 1, and give RUN/model")
    return model


def main(argv: Sequence[str] | None = None) -> None:
    run_flags(*parse_stage(QMambaSettings, argv, __doc__))


if __name__ == "__main__":
    run_command(main)

"""Settings as data: the recipes of `train.finetune`, and the stages of each system.

Names are those of `train.settings.Settings`. This file imports nothing of this project.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Recipes: the paper's Table 1 (its section 4), and the transfer of PaliGemma's authors (Beyer et al. 2024, appendix J)

_PAPER = {"batch_size": 4, "step_batch": 4}  # "a batch size of 4", and the rule rate / batch = 1e-4
_PAPER |= {"optimizer": "adam", "schedule": "linear", "warmup": 50, "epochs": 1, "fraction": 0.4}
_PAPER |= {"diff_in": "both", "r": 32, "alpha": 64.0, "dropout": 0.1, "prompt": "answer {question}"}
_FAST, _SLOW = {"lr": 4e-4, "weight_decay": 1e-9}, {"lr": 2e-5, "weight_decay": 1e-8}
_WHOLE = {"attention": "softmax", "full": True, "weight_decay": 0.0}
RECIPES: dict[str, dict] = {
    "paper-1": _PAPER | _FAST | {"attention": "softmax", "feed_forward": "mlp"},
    "paper-2": _PAPER | _FAST | {"attention": "shared", "feed_forward": "swiglu-new"},
    "paper-3": _PAPER | _SLOW | {"attention": "softmax", "feed_forward": "mlp", "r": 16, "alpha": 32.0},
    "paper-4": _PAPER | _SLOW | {"attention": "shared", "feed_forward": "mlp"},
    "paper-5": _PAPER | _SLOW | {"attention": "split", "feed_forward": "swiglu-new", "option": ('rope_pairs="fresh"',)},
    "paligemma": _WHOLE
    | {"lr": 1e-5, "beta2": 0.999, "schedule": "cosine", "warmup": 0.05, "clip": 1.0}
    | {"epochs": 10, "batch_size": 16, "step_batch": 256, "prompt": "answer en {question}", "answers": "sampled"},
    # The embedded base on other pictures than its own. Its vision tower knows 40 emojis by patches of a fixed grid:
    # every weight must learn. Questions of one picture in one batch make the picture matter, and share its encoding.
    "own": _WHOLE | {"align": 16, "optimizer": "muon", "lr": 0.01} | {"epochs": 2, "batch_size": 64, "per_picture": 8},
}

# Stages


@dataclass(frozen=True)
class StageRecipe:
    """What a stage trains: patterns of whole parameter names, and for each the factor of `--lr`.

    defaults: settings of this stage; flags of the command line override them. embedded: overrides for the embedded
    data, where the parts are a thousand times smaller and there are a hundred times fewer pictures.
    """

    rates: Mapping[str, float]
    defaults: Mapping[str, object] = field(default_factory=dict)
    embedded: Mapping[str, object] = field(default_factory=dict)


_ONE_EPOCH = {"epochs": 1, "schedule": "cosine", "warmup": 0.03, "clip": 1.0, "batch_size": 16, "beta2": 0.999}
_WINGS = _ONE_EPOCH | {"r": 64}  # the paper's rates and decays; it gives a range for the first rate
# Q-Mamba: the paper's rates and batches; weights in fp32, matrix products in bf16 on a GPU
_QMAMBA = _ONE_EPOCH | {"optimizer": "radam", "weight_decay": 0.0, "dtype": "fp32"}
_SMALL = {"batch_size": 32, "step_batch": 32}
_SMALL_WINGS = _SMALL | {"tasks": "vqa,scan"}  # its decoder has never seen a picture: it learns to read one from scan
_SMALL_QMAMBA = _SMALL | {"tasks": "vqa,locate,count,exist"}

# Of each system with stages, by its `--arch` name and the stage's number. `train/systems/open.py` makes their models.
STAGES: dict[str, dict[int, StageRecipe]] = {
    "wings": {
        1: StageRecipe(
            {r"multi_modal_projector\..*|.*\.visual\..*": 1.0},
            _WINGS | {"lr": 2e-4, "weight_decay": 1e-9, "step_batch": 256},
            _SMALL_WINGS | {"r": 16, "lr": 3e-3, "samples": 3200, "base": "embedded-text"},
        ),
        2: StageRecipe(
            {r"multi_modal_projector\..*": 5.0, r"language_model\..*": 1.0},
            _WINGS | {"lr": 2e-6, "weight_decay": 1e-8, "step_batch": 64},
            _SMALL_WINGS | {"lr": 5e-4, "samples": 9600},
        ),
    },
    "qmamba": {
        1: StageRecipe(
            {r"multi_modal_projector\..*": 1.0},
            _QMAMBA | {"lr": 1e-4, "step_batch": 256},
            _SMALL_QMAMBA | {"lr": 1e-2, "samples": 2000},
        ),
        2: StageRecipe(
            {r"multi_modal_projector\..*|language_model\..*": 1.0},
            _QMAMBA | {"lr": 2e-5, "step_batch": 128},
            _SMALL_QMAMBA | {"lr": 6e-3, "samples": 10000},
        ),
    },
}


def stage_defaults(arch: str | None, stage: int | None, is_embedded: bool) -> dict[str, object]:
    """The settings of a stage, on the embedded data or on others; empty where there is no such stage."""
    recipe = STAGES.get(arch, {}).get(stage, StageRecipe({}))
    return {**recipe.defaults, **(recipe.embedded if is_embedded else {})}


# Dense bf16 FLOP/s (the data sheets' figures with sparsity are twice as high), and GB of memory
GPUS = {
    "A100": (312e12, 80),
    "H100": (989e12, 80),
    "H200": (989e12, 141),
    "B200": (2250e12, 180),
    "L4": (121e12, 24),
    "L40S": (362e12, 48),
    "RTX4090": (165e12, 24),
}

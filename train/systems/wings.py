"""WINGS as it is trained: a base with visual learners, then with textual learners and routers.

    python -m train.systems.wings --stage 1
    python -m train.systems.wings --stage 2 --base runs/wings-stage1-1/model
    python -m train.systems.wings --stage 1 --base google/siglip-so400m-patch14-384 \\
        --data jsonl:FILE --option language_model=Qwen/Qwen1.5-7B-Chat

In: flags; in stage 1 `--option NAME=VALUE` sets a field of `Parts`. Out: a run folder with the model
of the stage, see `model/systems/wings.py`. The base is a PaliGemma or, with a language model, the
vision tower beside it. On the embedded scenes it is `embedded-text`, whose decoder knows text alone:
`python -m train.systems.text_base` makes it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from model.common import UserError, run_command
from model.source import EMBEDDED
from model.systems.chat import load_text_tokenizer
from model.systems.configs import LanguageWingsConfig
from model.systems.wings import Wings, attach, join, route
from train.finetune import run_flags
from train.systems.stages import ONE_EPOCH, StageRecipe, StageSettings, parse_stage
from weights.load import load_model, load_siglip, load_text

# as a --base, and where it lies
TEXT_BASE = "embedded-text"
TEXT_FOLDER = Path("runs", "embedded-text")


@dataclass(frozen=True)
class Parts:
    """What stage 1 is made of.

    language_model: a folder or hub id; "" is the base's own decoder. feature_layer: of the vision
    tower beside it, see `VisionConfig`. chat: train and ask in turns of a conversation, if the
    model's configuration ends answers by the mark of a turn's end; else, and for other models, in
    plain text.
    """

    language_model: str = ""
    feature_layer: int = -2
    chat: bool = True


# the paper's rates and decays; it gives a range for the first rate
_PAPER = ONE_EPOCH | {"r": 64}
# the decoder has never seen a picture: it learns to read one from scan
_SMALL = {"batch_size": 32, "step_batch": 32, "tasks": "vqa,scan"}


@dataclass(frozen=True)
class WingsSettings(StageSettings):
    """The settings of `train.systems.wings`."""

    NAME = "wings"
    STAGES = {
        1: StageRecipe(
            {r"multi_modal_projector\..*|.*\.visual\..*": 1.0},
            _PAPER | {"lr": 2e-4, "weight_decay": 1e-9, "step_batch": 256},
            _SMALL | {"r": 16, "lr": 3e-3, "samples": 3200, "base": TEXT_BASE},
        ),
        2: StageRecipe(
            {r"multi_modal_projector\..*": 5.0, r"language_model\..*": 1.0},
            _PAPER | {"lr": 2e-6, "weight_decay": 1e-8, "step_batch": 64},
            _SMALL | {"lr": 5e-4, "samples": 9600},
        ),
    }

    @property
    def parts(self) -> Parts:
        """Raises UserError for an unknown option, and one of another type."""
        return Parts(**self.options_of(asdict(Parts())))

    def tokenizer_source(self) -> str:
        """The embedded models share one."""
        own = EMBEDDED if self.base == TEXT_BASE else self.base
        return self.parts.language_model or own

    def open_stage(self, dtype: torch.dtype, device: torch.device) -> Wings:
        """Stage 1: a base with visual learners. Stage 2: the model of stage 1 with textual learners
        and routers. Raises UserError for another base than the stage starts from."""
        if self.parts.language_model:
            return self.join_parts(dtype, device)
        source = self.base
        if self.base == TEXT_BASE:
            source = TEXT_FOLDER
            if not TEXT_FOLDER.is_dir():
                remedy = "make it with python -m train.systems.text_base"
                raise UserError(f"--base {TEXT_BASE}: {TEXT_FOLDER} is not there: {remedy}")
        base = load_model(source, dtype=dtype, device=device)
        if self.stage == 1:
            return attach(base, self.r, seed=self.seed)
        if type(base) is not Wings or base.config.routed:
            remedy = "train one with --stage 1, and give --base RUN/model"
            raise UserError(f"--stage 2: {self.base} is no model of stage 1: {remedy}")
        return route(base, self.seed)

    def join_parts(self, dtype: torch.dtype, device: torch.device) -> Wings:
        """A published language model with visual learners, and the vision tower of the base."""
        parts = self.parts
        tower = load_siglip(EMBEDDED if self.base == TEXT_BASE else self.base, dtype, device)
        text = load_text(parts.language_model, dtype, device)
        ends = text.config.eos_token_id
        tokenizer = load_text_tokenizer(parts.language_model)
        turn_ends = [mark for mark in tokenizer.marks[1:] if parts.chat and mark in ends]
        config = LanguageWingsConfig(
            vision=replace(tower.config, feature_layer=parts.feature_layer),
            text=text.config.text,
            # no text has it: it is no row of the embedding
            image_token_id=text.config.text.vocab_size,
            pad_token_id=text.config.pad_token_id or 0,
            eos_token_id=(turn_ends or ends)[0],
            bos_token_id=text.config.bos_token_id,
            chat=bool(turn_ends),
            system=tokenizer.system,
            adds_bos=bool(tokenizer.begin),
            opens_with_bos=bool(tokenizer.opening),
            rank=self.r,
            routed=False,
        )
        return join(config, tower, text, self.seed)


def main(argv: Sequence[str] | None = None) -> None:
    run_flags(*parse_stage(WingsSettings, argv, __doc__))


if __name__ == "__main__":
    run_command(main)

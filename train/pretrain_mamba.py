"""Make the embedded Mamba from nothing: a language model of half a million parameters.

    python -m train.pretrain_mamba --out runs/tiny-mamba

In: the scenes of `eval/scenes.py`, described in words. Out: a folder with config.json, model.safetensors and
tokenizer.model, which transformers opens too. `weights/tiny-mamba` is what this command writes.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from model.common import run_command
from model.config import PRESETS
from model.mamba import MambaLM, initialize_mamba
from model.processor import Processor, load_tokenizer
from model.source import BUNDLED_FOLDER
from train.embedded.mamba import BATCH, CONFIG, SAMPLES, accuracy, teach
from train.flags import flag, read_flags
from train.optim import count
from train.run_folder import check_empty
from weights.export import export_model


@dataclass(frozen=True)
class PretrainOptions:
    """The flags of this command."""

    out: Path = flag(Path("runs/tiny-mamba"), "folder to write", metavar="DIR")
    seed: int = flag(0, "of the weights")
    threads: int = flag(torch.get_num_threads(), "CPU threads", least=1)
    samples: int = flag(SAMPLES, "scenes to learn from", least=BATCH)


def main(argv: Sequence[str] | None = None) -> None:
    args = read_flags(PretrainOptions, "train.pretrain_mamba", __doc__, argv)
    check_empty(args.out)
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    tokenizer = BUNDLED_FOLDER / "tokenizer.model"
    processor, model = Processor(PRESETS["tiny"], load_tokenizer(tokenizer)), MambaLM(CONFIG)
    initialize_mamba(model.backbone, args.seed)
    print(f"{count(model.parameters()):,} parameters, {args.samples:,} scenes")
    teach(model, list(model.parameters()), processor, args.samples)
    model = model.to(torch.bfloat16).float()  # evaluate the weights as they are written
    record = {
        "answer_tokens": round(accuracy(model, processor), 1),
        "samples": args.samples,
        "seed": args.seed,
        "seconds": round(time.perf_counter() - started),
        "torch": torch.__version__,
    }
    texts = {"pretraining.json": json.dumps(record, indent=1) + "\n"}
    export_model(model, args.out, dtype=torch.bfloat16, companions=[tokenizer], texts=texts)
    print(
        f"{record['answer_tokens']} % of the answers' tokens are right; {args.out}: model.safetensors, config.json, "
        f"tokenizer.model, pretraining.json; {record['seconds']} s"
    )


if __name__ == "__main__":
    run_command(main)

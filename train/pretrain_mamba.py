"""Make the embedded Mamba from nothing: a language model of half a million parameters.

    python -m train.pretrain_mamba --out runs/tiny-mamba

In: the scenes of `eval/scenes.py`, described in words. Out: a folder with config.json, model.safetensors and
tokenizer.model, which transformers opens too. `weights/tiny-mamba` is what this command writes.
"""

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.common import UserError, atomic_path, run_command, write_text
from model.config import PRESETS
from model.mamba import MambaLM, initialize_mamba
from model.processor import Processor, load_tokenizer
from model.source import BUNDLED_FOLDER
from train.embedded.mamba import BATCH, CONFIG, SAMPLES, accuracy, teach
from train.optim import count


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.pretrain_mamba", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/tiny-mamba"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: %(default)s)"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="scenes to learn from (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.samples < BATCH:
        raise UserError(f"--samples is {args.samples}, expected at least {BATCH}")
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
    with atomic_path(args.out / "model.safetensors") as temporary:
        save_file(
            {name: tensor.bfloat16() for name, tensor in model.state_dict().items()},
            temporary,
            metadata={"format": "pt"},
        )
    write_text(args.out / "config.json", json.dumps(CONFIG.to_dict() | {"torch_dtype": "bfloat16"}, indent=2) + "\n")
    write_text(args.out / "pretraining.json", json.dumps(record, indent=1) + "\n")
    shutil.copyfile(tokenizer, args.out / tokenizer.name)
    print(
        f"{record['answer_tokens']} % of the answers' tokens are right; {args.out}: model.safetensors, config.json, "
        f"tokenizer.model, pretraining.json; {record['seconds']} s"
    )


if __name__ == "__main__":
    run_command(main)

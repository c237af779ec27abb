"""Report what a checkpoint holds, from its headers alone: `python -m weights.inspect SRC`.

In: a folder, a hub id, a .npz, or `embedded`. Out: dialect, dtypes, and parameters by part. Exit code 2, and what is
missing, unexpected or of another shape, if anything is wrong.
"""

import argparse
from collections import Counter
from math import prod

from model.common import UserError, run_command
from weights.load import Checkpoint, examine
from weights.mapping import EMBEDDING

PARTS = {"vision": "vision_tower.", "projector": "multi_modal_projector.", "embedding": EMBEDDING}


def describe(checkpoint: Checkpoint) -> str:
    """A short page. A stored head is a second copy of the embedding and counts once."""
    sizes: dict[str, int] = dict.fromkeys((*PARTS, "decoder"), 0)
    for ours, size in {ours: prod(checkpoint.entries[name].shape) for name, ours in checkpoint.names.items()}.items():
        sizes[next((part for part, prefix in PARTS.items() if ours.startswith(prefix)), "decoder")] += size
    vision = getattr(checkpoint.config, "vision", None)
    pixels = f", {vision.image_size} px" if vision else ""
    dtypes = ", ".join(
        f"{count} {dtype}" for dtype, count in Counter(entry.dtype for entry in checkpoint.entries.values()).items()
    )
    return "\n".join(
        [
            f"{checkpoint.folder}: {type(checkpoint.model).__name__}{pixels}, dialect {checkpoint.dialect}",
            f"{len(checkpoint.entries)} tensors: {dtypes}",
            *(f"{part:<10}{size:>16,}" for part, size in (sizes | {"total": sum(sizes.values())}).items()),
        ]
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Show what a checkpoint holds, without reading its tensors.")
    parser.add_argument("source", metavar="SRC", help="a folder, hub id, .npz, or 'embedded'")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id (default: its main branch)")
    args = parser.parse_args(argv)
    checkpoint = examine(args.source, args.revision)
    print(describe(checkpoint), flush=True)
    if checkpoint.problems:
        raise UserError(f"{checkpoint.folder}: {'; '.join(checkpoint.problems)}")


if __name__ == "__main__":
    run_command(main)

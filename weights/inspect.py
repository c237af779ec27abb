"""Report what a checkpoint holds, from its headers alone: `python -m weights.inspect SRC`.

Dialect, dtypes, and parameters by part. Exit code 2, and what is missing, unexpected or of another
shape, if anything is wrong.
"""

from collections import Counter
from math import prod

from model.common import Parser, run_command
from weights.load import Checkpoint, examine
from weights.mapping import EMBEDDING

PARTS = {"vision": "vision_tower.", "projector": "multi_modal_projector.", "embedding": EMBEDDING}


def describe(checkpoint: Checkpoint) -> str:
    """A short page. A stored head is a second copy of the embedding and counts once."""
    entries, vision = checkpoint.entries, getattr(checkpoint.model.config, "vision", None)
    sizes: dict[str, int] = dict.fromkeys((*PARTS, "decoder"), 0)
    for ours, size in {
        ours: prod(entries[name].shape) for name, ours in checkpoint.names.items()
    }.items():
        sizes[
            next((part for part, prefix in PARTS.items() if ours.startswith(prefix)), "decoder")
        ] += size
    pixels = f", {vision.image_size} px" if vision else ""
    dtypes = [
        f"{count} {dtype}"
        for dtype, count in Counter(entry.dtype for entry in entries.values()).items()
    ]
    lines = [
        f"{checkpoint.folder}: {type(checkpoint.model).__name__}{pixels}, dialect "
        f"{checkpoint.dialect}"
    ]
    lines += [f"{len(entries)} tensors: {', '.join(dtypes)}"]
    sizes["total"] = sum(sizes.values())
    return "\n".join([*lines, *(f"{part:<10}{size:>16,}" for part, size in sizes.items())])


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description="Show what a checkpoint holds, without reading its tensors.")
    parser.add_argument("source", metavar="SRC", help="a folder, hub id, .npz, or 'embedded'")
    parser.add_argument(
        "--revision", help="branch, tag or commit of a hub id (default: its main branch)"
    )
    args = parser.parse_args(argv)
    checkpoint = examine(args.source, args.revision)
    print(describe(checkpoint), flush=True)
    checkpoint.check()


if __name__ == "__main__":
    run_command(main)

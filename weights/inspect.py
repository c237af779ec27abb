"""Report what a checkpoint holds, from its headers alone: `python -m weights.inspect SRC`.

Dialect, dtypes, and parameters by part. Exit code 2, and what is missing, unexpected or of another
shape, if anything is wrong.
"""

from collections import Counter
from math import prod

from model.common import Parser, run_command
from weights.load import Checkpoint, examine
from weights.mapping import EMBEDDING

# the beginnings of their parameters' names; the first that fits
PARTS = {
    "vision": "vision_tower.",
    "projector": "multi_modal_projector.",
    "embedding": EMBEDDING,
    "decoder": "",
}


def report_of(checkpoint: Checkpoint) -> str:
    """A short page. A stored head is a second copy of the embedding and counts once."""
    entries, vision = checkpoint.entries, getattr(checkpoint.model.config, "vision", None)
    counts = {ours: prod(entries[name].shape) for name, ours in checkpoint.names.items()}
    sizes = dict.fromkeys(PARTS, 0)
    for ours, count in counts.items():
        part = next(part for part, prefix in PARTS.items() if ours.startswith(prefix))
        sizes[part] += count
    sizes["total"] = sum(counts.values())
    pixels = f", {vision.image_size} px" if vision else ""
    dtypes = Counter(entry.dtype for entry in entries.values())
    listed = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
    kind = type(checkpoint.model).__name__
    lines = [
        f"{checkpoint.folder}: {kind}{pixels}, dialect {checkpoint.dialect}",
        f"{len(entries)} tensors: {listed}",
    ]
    lines += [f"{part:<10}{size:>16,}" for part, size in sizes.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "python -m weights.inspect",
        description="Show what a checkpoint holds, without reading its tensors.",
    )
    parser.add_argument("source", metavar="SRC", help="a folder, hub id, .npz, or 'embedded'")
    parser.add_argument(
        "--revision", help="branch, tag or commit of a hub id (default: its main branch)"
    )
    args = parser.parse_args(argv)
    checkpoint = examine(args.source, args.revision)
    print(report_of(checkpoint), flush=True)
    checkpoint.check()


if __name__ == "__main__":
    run_command(main)

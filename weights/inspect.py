"""Report what a checkpoint holds, from its headers alone: `python -m weights.inspect SRC [--json]`.

In: a folder, a hub id, a .npz, or `embedded`. Out: dialect, dtypes, parameters by part, and the tensors that are
missing, unexpected or of another shape. Exit code 2 if anything is wrong.
"""

import argparse
import json
from collections import Counter
from math import prod

from model.common import UserError, run_command, shown
from weights.checkpoint import Checkpoint, examine
from weights.mapping import EMBEDDING, HEADS, OWN
from weights.npz import NPZ
from weights.registry import is_published
from weights.streaming import in_one_line

DIFFERENCES = ("missing", "unexpected", "misshaped")
PARTS = {
    "vision": "vision_tower.",
    "projector": "multi_modal_projector.",
    "embedding": EMBEDDING,
    "decoder": "language_model.",
}


def describe(checkpoint: Checkpoint) -> dict:
    """All that is known of a checkpoint without reading a tensor, as JSON; None where something is not known."""
    entries, config, comparison = checkpoint.entries, checkpoint.config, checkpoint.comparison
    facts = {
        "folder": str(checkpoint.folder),
        "model": None if config is None else _title(config),
        "image_size": None if config is None or not hasattr(config, "vision") else config.vision.image_size,
        "dialect": checkpoint.dialect,
        "files": sorted({entry.path.name for entry in entries.values()}),
        "tensors": len(entries),
        "tied_head": [
            name for name in HEADS if name in entries and (not comparison or comparison.name_map.get(name) == EMBEDDING)
        ],
        "dtypes": dict(Counter(entry.dtype for entry in entries.values())),
        **dict.fromkeys(("parameters", "bytes", *DIFFERENCES)),
        "problems": checkpoint.problems,
    }
    if comparison is None:
        return facts
    parameters, stored = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    counted = set()  # a stored head is a second copy of the embedding and counts once
    for name, ours in comparison.name_map.items():
        part = next((part for part, prefix in PARTS.items() if ours.startswith(prefix)), "decoder")
        parameters[part] += prod(entries[name].shape) * (ours not in counted)
        stored[part] += entries[name].end - entries[name].start
        counted.add(ours)
    return facts | {
        "parameters": parameters | {"total": sum(parameters.values())},
        "bytes": stored | {"total": sum(stored.values())},
        **{what: getattr(comparison, what) for what in DIFFERENCES},
    }


def _title(config) -> str:
    """The name of a model."""
    return f"PaliGemma {2 if config.text.is_gemma2 else 1}" if is_published(config) else config.to_dict()["model_type"]


def as_text(facts: dict) -> str:
    """The facts as a short page."""
    model = facts["model"] or "no readable config.json"
    model += f", {facts['image_size']} px" if facts["image_size"] else ""
    known = {NPZ: "big_vision's arrays", OWN: "our own names"}
    dialect = known.get(facts["dialect"]) or f"dialect {facts['dialect'] or 'unknown'}"
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in facts["dtypes"].items())
    lines = [f"{facts['folder']}: {model}, {dialect}"]
    if facts["tensors"]:
        lines.append(f"{facts['tensors']} tensors in {', '.join(facts['files'])}: {dtypes}")
    lines += [f"the head is stored too, as {name}" for name in facts["tied_head"]]
    if facts["parameters"]:
        lines.append(f"{'part':<10}{'parameters':>16}{'bytes':>18}")
        lines += [f"{part:<10}{count:>16,}{facts['bytes'][part]:>18,}" for part, count in facts["parameters"].items()]
        for what in DIFFERENCES:
            lines += [f"{what}: {len(facts[what]) or 'none'}", *(f"  {name}" for name in facts[what])]
    return "\n".join(shown(line, 4000) for line in lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Show what a checkpoint holds, without reading its tensors.")
    parser.add_argument("source", metavar="SRC", help="a folder, hub id, .npz, or 'embedded'")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id (default: its main branch)")
    parser.add_argument(
        "--json", action=argparse.BooleanOptionalAction, default=False, help="print JSON instead of text (default: no)"
    )
    args = parser.parse_args(argv)
    checkpoint = examine(args.source, args.revision)
    facts = describe(checkpoint)
    print(json.dumps(facts, indent=2) if args.json else as_text(facts), flush=True)
    if checkpoint.problems:
        raise UserError(in_one_line(checkpoint.folder, checkpoint.problems))


if __name__ == "__main__":
    run_command(main)

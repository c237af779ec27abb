"""Do the branches of two maps pull against each other? `python docs/results/branches.py [FOLDER …]`.

Two cosines of each layer of the decoder, on 64 needles, of grafts before training, and of the
adapters in the folders: those of a study's cells.

- *learning*: of the gradients of the loss by the queries of both branches. −1: what one learns, the
  other unlearns.
- *input*: of the gradients by the layer's input of ⟨g, o₁⟩ and ⟨g, o₂⟩, g being the gradient of the
  loss by what is left of both. This is the angle of arXiv 2510.00517, whose worst case is −1: then a
  change of the input moves o₁ − λ·o₂ by the sum of both, and at +1 by their difference.

It writes branches.csv beside this file, a line for each layer.
"""

import csv
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from lora import adapter  # noqa: E402
from model.differential import Branched, graft, variants_of  # noqa: E402
from model.paligemma import PaliGemma  # noqa: E402
from train.studies import dose  # noqa: E402
from weights.load import load_model  # noqa: E402

NEEDLES = 64
GRAFTS = {
    "twin": {},
    "twin-small": {"mu": 0.25},
    "v2": {"exact": False},
    "difflora": {},
    "split": {},
    "mean": {},
}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def cosines(model: PaliGemma) -> list[tuple[float | None, float]]:
    """Both cosines of each variant of two maps, in the model's order."""
    seen = {}
    variants = variants_of(model).values()

    def watch(module) -> None:
        project, blend = module.project, module.blend

        def projected(x, rope):
            q, k, v = project(x, rope)
            q.retain_grad()
            seen[module] = [q, x]
            return q, k, v

        def blended(x, first, second):
            heads = blend(x, first, second)
            heads.retain_grad()
            seen[module] += [first, second, heads]
            return heads

        module.project, module.blend = projected, blended

    for module in variants:
        watch(module)
    model.requires_grad_(True)
    logits, tokens = dose.answers(model, "train", NEEDLES, torch.arange(NEEDLES))
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward(retain_graph=True)
    found = []
    for module in variants:
        q, x, first, second, heads = seen[module]
        learning = None
        if isinstance(module, Branched):
            learning = cosine(*q.grad.chunk(2, dim=1))
        by_input = []
        for branch in (first, second):
            along = (heads.grad * branch).sum()
            by_input += torch.autograd.grad(along, x, retain_graph=True)
        found.append((learning, cosine(*by_input)))
    return found


def main(folders: list[str]) -> None:
    lines = []
    for row, options in GRAFTS.items():
        model = load_model("embedded")
        graft(model, row.removesuffix("-small"), **options)
        lines += [(row, "start", "", n, *both) for n, both in enumerate(cosines(model))]
    for folder in folders:
        cell = json.loads(Path(folder, "cell.json").read_text())
        model = load_model("embedded")
        adapter.load(model, folder)
        if any(module.maps == 2 for module in variants_of(model).values()):
            place = cell["row"], "trained", cell["seed"]
            lines += [(*place, n, *both) for n, both in enumerate(cosines(model))]
    with (HERE / "branches.csv").open("w", encoding="utf-8", newline="") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow("row state seed layer learning input".split())
        writer.writerows(sorted(lines, key=lambda line: line[:2]))


if __name__ == "__main__":
    main(sys.argv[1:])

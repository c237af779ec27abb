"""What the attention of one model does: where it looks, how its heads and its two maps differ, how far LoRA moved it.

In: a model, and needle questions about pictures in which it is known where the answer is. Out: measures by layer, each
a mean over heads and questions; and which needles are found with a part of the second map.

The effective map of a layer is what its values are multiplied with: of two maps A₁ − λ·A₂, of `twin` A₁ + μ·(A₁ − A₂).
Its weights may be negative, so shares are those of absolute values.

- "answer on needle" …: shares of the attention, of a query on keys. Queries: the answer, at the positions that decide
  tokens in which answers differ, and the name, the caption's last word. Keys: see KEYS.
- negative: the share of negative weights. sum: of absolute weights, 1 for one map; two maps amplify what is above it.
- entropy of a query's weights, in nats. rank: the effective rank, exp of the entropy of the singular values divided by
  their sum (Roy and Vetterli 2007). In the prompt, where all n tokens attend to each other: at most log n and n.
- distance: of both maps, the total variation ½·Σ|A₁ − A₂|, as training logs it. weight: λ or μ, its mean over tokens.
- cosine, cka: redundancy of heads, by two measures of DEX's authors (Kong et al. 2025, arXiv 2505.16333): the cosine of
  the maps of two heads, and the linear CKA of their outputs (Kornblith et al. 2019). Means over pairs, 1 if equal.
- update: ‖ΔW‖/‖W‖ of LoRA on q and k; second update: of the second branch, of dex ‖λ·W_D‖/‖I‖; update cosine: of both
  branches; whole update: of `twin` that of (1 + μ)·ΔW₁ − μ·ΔW₂, by which its logits change to first order, else the
  first; other update: of all other LoRA in the layer.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import NamedTuple

import torch

from eval import scenes
from eval.pictures import GRID, NONE
from eval.records import sample_record
from lora.layer import LoRALinear
from model import cpu
from model.attention import Attention, tapped
from model.differential import variants_of
from model.paligemma import PaliGemma
from model.processor import Processor
from model.variants import Dex, Differential, Shared
from train.data.batches import MicroBatch, collate
from train.supervised import forward

TESTS = 32  # of a kind, at least
KEYS = ("needle", "distractors", "name", "first", "others")  # first: token of the text; others: empty patches, words


class Asked(NamedTuple):
    """Needle questions with their right answers. groups (B, S, len(KEYS)): 1 where a token belongs to a group of keys;
    prompt (B, S): its tokens; queries: their positions (B, Q) by name; each: questions of a test."""

    micro: MicroBatch
    groups: torch.Tensor
    prompt: torch.Tensor
    queries: dict[str, torch.Tensor]
    each: int


@lru_cache(maxsize=8)
def ask(kind: str, processor: Processor, device: torch.device) -> Asked:
    """The first `TESTS` needle tests of a kind in the test split, or a few more: as many in each place."""
    places = scenes.layout_of(kind)[0] ** 2
    tests = [scenes.needle(kind, "test", number) for number in range(-(-TESTS // places) * places)]
    each = len(tests[0].samples())
    micro = collate([sample_record(sample, "test") for test in tests for sample in test.samples()], processor)
    ids = micro.batch.input_ids
    prompt = (micro.batch.token_type_ids == 0) & micro.batch.attention_mask.bool()
    is_picture = ids == processor.config.image_token_id
    tokens = [row.nonzero()[:, 0] for row in prompt]
    after = next(k for k in count(1) if len({int(row[own[-k]]) for row, own in zip(ids, tokens, strict=True)}) > 1)
    names = torch.stack([own[-after] for own in tokens])  # what follows the name is the same in all prompts
    groups = torch.zeros(*ids.shape, len(KEYS))
    for row, group in enumerate(groups):
        group[is_picture[row], groups_of_patches(tests[row // each], int(is_picture[row].sum()))] = 1
        group[names[row], 2] = group[(prompt & ~is_picture)[row].nonzero()[0], 3] = 1
    groups[..., 4] = 1 - groups[..., :4].sum(-1)
    decides = ((micro.targets != micro.targets[0]) & (micro.targets != -100)).any(0)
    queries = {"answer": micro.positions[:, decides].to(device), "name": names[:, None].to(device)}
    return Asked(micro.to(device), groups.to(device), prompt.to(device), queries, each)


def groups_of_patches(test: scenes.Needle, patches: int) -> torch.Tensor:
    """The number in KEYS of each patch of a picture, by what is at its centre."""
    side, part, found = math.isqrt(patches), GRID // test.n, []
    for patch in range(patches):
        y, x = ((2 * place + 1) * GRID // (2 * side) for place in divmod(patch, side))
        is_needle = (y // part, x // part) == test.targets[0]
        found.append(4 if test.scene.squares[y * GRID + x] == NONE else 0 if is_needle else 1)
    return torch.tensor(found)


# Measures of maps


def entropy(weights: torch.Tensor) -> torch.Tensor:
    """Of weights (…, S) whose sum is 1, in nats."""
    return torch.special.entr(weights).sum(-1)


def effective_rank(maps: torch.Tensor) -> torch.Tensor:
    """Of matrices (…, S, S)."""
    values = torch.linalg.svdvals(maps)
    return entropy(values / values.sum(-1, keepdim=True)).exp()


def mean_over_pairs(matrix: torch.Tensor) -> float:
    """The mean of a matrix (…, N, N) of heads by heads outside its diagonal; 0 for a single head."""
    heads = matrix.shape[-1]
    others = matrix.sum((-1, -2)) - matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    return float(others.mean()) / max(1, heads * (heads - 1))


def cosine(maps: torch.Tensor) -> float:
    """Of the maps (B, N, S, S) of two heads, the mean over pairs."""
    flat = torch.nn.functional.normalize(maps.flatten(2), dim=-1)
    return mean_over_pairs(flat @ flat.mT)


def linear_cka(outputs: torch.Tensor) -> float:
    """‖Y'X‖²/(‖X'X‖·‖Y'Y‖), columns centred, of the outputs (N, tokens, D) of two heads, the mean over pairs."""
    x = outputs - outputs.mean(1, keepdim=True)
    products = torch.einsum("itd,jte->ijde", x, x).square().sum((-1, -2))
    sizes = products.diagonal().sqrt()
    return mean_over_pairs(products / sizes[:, None] / sizes)


def looks(maps: torch.Tensor, asked: Asked) -> dict[str, float]:
    """The shares "QUERY on KEY" of maps (B, N, S, S)."""
    rows, found = torch.arange(len(maps))[:, None], {}
    for query, positions in asked.queries.items():
        weights = maps[rows, :, positions].abs()  # (B, Q, N, S)
        shares = (weights @ asked.groups[:, None]).mean((0, 1, 2)) / weights.sum(-1).mean()
        found |= {f"{query} on {key}": float(share) for key, share in zip(KEYS, shares, strict=True)}
    return found


def forms(maps: torch.Tensor, prompt: torch.Tensor) -> dict[str, float]:
    """What maps (B, N, S, S) are like within the prompt (B, S)."""
    inner = maps * (prompt[:, None, :, None] & prompt[:, None, None, :])
    sums, queries = inner.abs().sum(-1).clamp(min=1e-12), prompt[:, None].expand(maps.shape[:3])
    by_query = {
        "negative": inner.clamp(max=0).abs().sum(-1) / sums,
        "sum": sums,
        "entropy": entropy(inner.abs() / sums[..., None]),
    }
    found = {name: float(values[queries].mean()) for name, values in by_query.items()}
    return found | {"rank": float(effective_rank(inner).mean()), "cosine": cosine(inner)}


def effective(module: Attention, maps: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The effective map of a layer that reads hidden states x, up to a positive factor for each query."""
    if isinstance(module, Differential) and len(maps) == 2:
        return cpu.blend(*maps, module.factor(x), module.extrapolates)
    return maps[0] * (1 - module.coefficient()) if isinstance(module, Shared) else maps[0]


@torch.no_grad()
def measure_layers(model: PaliGemma, asked: Asked) -> list[dict[str, float]]:
    """The measures of each layer of the decoder; where single maps look begins with "A1 " and "A2 "."""
    layers = [layer.self_attn for layer in model.language_model.layers]
    maps: dict[Attention, list[torch.Tensor]] = {layer: [] for layer in layers}
    read: dict[torch.nn.Module, torch.Tensor] = {}  # the inputs of attention, and of its output projection
    with contextlib.ExitStack() as stack:
        stack.enter_context(tapped({layer: maps[layer].append for layer in layers}))
        for part in (part for layer in layers for part in (layer, layer.get_submodule(layer.output_name))):
            hook = part.register_forward_pre_hook(lambda module, inputs: read.update({module: inputs[0]}))
            stack.callback(hook.remove)
        forward(model, asked.micro)
    found = []
    for layer, parent in zip(layers, model.language_model.layers, strict=True):
        own, x, prompt = [one.float() for one in maps[layer]], read[layer], asked.prompt
        heads = read[layer.get_submodule(layer.output_name)].float()[prompt].unflatten(-1, (layer.num_heads, -1))
        whole = effective(layer, own, x)
        measures = looks(whole, asked) | forms(whole, prompt) | {"cka": linear_cka(heads.transpose(0, 1))}
        if len(own) == 2:
            queries = prompt[:, None].expand(own[0].shape[:3])
            measures["distance"] = float((own[0] - own[1]).abs().sum(-1)[queries].mean()) / 2
            measures["weight"] = float(layer.factor(x).expand(*queries.shape, 1)[..., 0][queries].mean())
            for number, one in enumerate(own, 1):
                measures |= {f"A{number} {name}": share for name, share in looks(one, asked).items()}
        elif isinstance(layer, Differential) and (weight := layer.coefficient()) is not None:
            measures["weight"] = float(weight.mean())
        found.append(measures | updates(layer, parent))
    return found


# What training has changed


@torch.no_grad()
def updates(attention: Attention, layer: torch.nn.Module) -> dict[str, float]:
    """The sizes of the updates in a decoder layer, and the cosine of those of both branches."""
    size = dict.fromkeys(("base", "first", "second", "compared", "product", "other base", "other"), 0.0)
    for name, part in layer.named_modules():
        if not isinstance(part, LoRALinear):
            continue
        first, second, kind = part.lora.delta_weight(), None, "other "
        if (place := name.rpartition(".")[2]) in ("q_proj", "k_proj"):
            kind, branch = "", getattr(attention, f"{place[0]}2", None)
            if branch is not None:
                second = branch.delta_weight()
            elif place in getattr(attention, "read_twice", ()):  # each branch has half of the rank
                a, b, half = part.lora.lora_A.weight, part.lora.scaling * part.lora.lora_B.weight, part.lora.r // 2
                first, second = b[:, :half] @ a[:half], b[:, half:] @ a[half:]
        size[f"{kind}base"] += float(part.base_layer.weight.float().square().sum())
        size["other" if kind else "first"] += float(first.square().sum())
        if second is not None:
            own = first if len(first) == len(second) else attention.leaders(first.mT).mT  # one for several heads
            for sums, value in (("second", second * second), ("compared", own * own), ("product", own * second)):
                size[sums] += float(value.sum())
    base, other = max(size["base"], 1e-12), max(size["other base"], 1e-12)
    mu = float(attention.coefficient().mean()) if getattr(attention, "extrapolates", False) else 0.0
    whole = (1 + mu) ** 2 * size["first"] - 2 * mu * (1 + mu) * size["product"] + mu**2 * size["second"]
    found = {"update": size["first"] / base, "whole update": whole / base, "other update": size["other"] / other}
    if size["second"]:
        found["second update"] = size["second"] / base
    found = {name: math.sqrt(max(0.0, square)) for name, square in found.items()}
    if both := size["compared"] * size["second"]:
        found["update cosine"] = size["product"] / math.sqrt(both)
    if isinstance(attention, Dex):
        found["second update"] = float((attention.lambda_d * attention.w_d).norm()) / math.sqrt(attention.head_dim)
    return found


@contextlib.contextmanager
def second_map_left(model: PaliGemma, share: float) -> Iterator[None]:
    """Within the block, so much of the second map's weight is left, and of dex's change of the heads."""
    layers = variants_of(model).values()
    try:
        for layer in layers:  # an attribute of an instance hides the method of its class
            if layer.maps == 2:
                vars(layer)["factor"] = partial(lambda own, x: share * own(x), layer.factor)
            elif isinstance(layer, Dex):
                vars(layer)["change"] = partial(lambda own, heads: torch.lerp(heads, own(heads), share), layer.change)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("factor", None)
            vars(layer).pop("change", None)


@torch.no_grad()
def find_needles(model: PaliGemma, asked: Asked) -> list[float]:
    """1 for each test whose answers are the likeliest ones token by token, as in greedy decoding; else 0."""
    said, targets = forward(model, asked.micro).argmax(-1), asked.micro.targets
    return ((said == targets) | (targets == -100)).all(1).view(-1, asked.each).all(1).float().tolist()

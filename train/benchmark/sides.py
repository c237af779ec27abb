"""What the benchmarks time: each section's work, by our code and by transformers and PEFT, on the same weights.

In: a `Setup` and the weights by name. Out: functions without arguments, one call of which is the work.
Next: `train/benchmark/command.py` times them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from eval import scenes
from eval.run import Ask, ask_all
from lora import adapter
from lora.adapter import DECODER_TARGETS
from lora.quantize import quantize
from model import cpu
from model.common import UserError
from model.config import PRESETS, PaliGemmaConfig
from model.differential import KINDS, default_options, graft
from model.generate import CompiledStep, generate, last_valid
from model.linear import linear
from model.paligemma import PaliGemma
from model.processor import Batch, Processor
from train.benchmark.timing import COMPILED, OURS, THEIRS
from train.data.batches import MicroBatch, supervised
from train.optim import Rule, make_adamw, parameter_groups, trainable
from train.supervised import free_sizes, supervised_loss
from weights.checkpoint import empty_model

ATTENTION = r"language_model\.layers\.\d+\.self_attn\.[qkvo]_proj"
PREFIX, SUFFIX = 16, 16  # tokens of text beside the picture's
ANSWER = 20  # new tokens of a generation
STEPS = 32  # decoding steps that are timed by themselves, on a GPU


@dataclass(frozen=True)
class Setup:
    """Sizes, dtype and device. A model at work has no end token: every side makes as many tokens."""

    config: PaliGemmaConfig
    device: torch.device
    dtype: torch.dtype
    batch: int = 4  # rows of a training step
    targets: str = ATTENTION
    r: int = 16

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass
class Work:
    """One call of `run` is the work. flops, moved: what it computes, and what bytes it must read, for the limits."""

    run: Callable[[], object]
    flops: float | None = None
    moved: float | None = None
    result: Callable[[], object] | None = None  # what a side found, to compare with the others'


State = dict[str, torch.Tensor]


def random_state(config: PaliGemmaConfig, dtype: torch.dtype, device: torch.device) -> State:
    """Random weights, made on the device: matrices of unit gain, norms at their neutral value."""
    torch.manual_seed(0)
    model = empty_model(config, dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                neutral = re.fullmatch(r"vision_tower.*norm\d?\.weight", name)
                parameter.fill_(1.0 if neutral else 0.0)
    return model.state_dict()


def our_model(setup: Setup, state: State) -> PaliGemma:
    """Our model around the tensors of `state`, not copied."""
    model = empty_model(replace(setup.config, eos_token_id=-1), setup.dtype)
    model.load_state_dict(state, assign=True)
    return model


def their_model(setup: Setup, state: State) -> nn.Module:
    """transformers' model around the same tensors. Raises UserError where transformers is not installed."""
    try:
        from transformers import PaliGemmaConfig as HFConfig
        from transformers import PaliGemmaForConditionalGeneration as HFModel
    except ImportError:
        raise UserError("transformers is not installed: only our side is measured") from None
    raw = setup.config.to_dict()
    with torch.device("meta"):
        model = HFModel(HFConfig.from_dict(raw)).to(setup.dtype).eval()
    missing, unexpected = model.load_state_dict({f"model.{n}": t for n, t in state.items()}, strict=False, assign=True)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise UserError(f"this version of transformers names its weights otherwise: {[*missing, *unexpected][:3]}")
    model.tie_weights()
    # its tables depend on neither depth nor vocabulary: a small twin has them, computed
    small = {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8}
    twin = HFConfig.from_dict(
        raw
        | {
            part: raw[part] | {k: v for k, v in small.items() if k in raw[part]}
            for part in ("text_config", "vision_config")
        }
    )
    for name, table in HFModel(twin).to(setup.device).named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, table)
    model.generation_config.eos_token_id = None
    return model


def prompt(setup: Setup, rows: int, suffix: int = 0) -> dict[str, torch.Tensor]:
    """A batch of equally long rows: a picture, PREFIX tokens, and a causal suffix."""
    generator = torch.Generator().manual_seed(rows)
    image, side = setup.config.num_image_tokens, setup.config.vision.image_size
    text = torch.randint(3, 1000, (rows, PREFIX + suffix), generator=generator)
    ids = torch.cat((torch.full((rows, image), setup.config.image_token_id), text), dim=1)
    types = (torch.arange(ids.shape[1]) >= image + PREFIX).long().expand(rows, -1)
    pixels = torch.rand(rows, 3, side, side, generator=generator) * 2 - 1
    inputs = {
        "input_ids": ids,
        "pixel_values": pixels.to(setup.dtype),
        "token_type_ids": types.contiguous(),
        "attention_mask": torch.ones_like(ids),
    }
    return {name: tensor.to(setup.device) for name, tensor in inputs.items()}


def micro_batch(setup: Setup, rows: int) -> MicroBatch:
    """The training batch: the suffix is supervised."""
    inputs = prompt(setup, rows, SUFFIX)
    labels = inputs["input_ids"].masked_fill(inputs["token_type_ids"] == 0, -100)
    positions, targets = supervised(labels)
    index = torch.arange(rows, device=setup.device)
    batch = Batch(**inputs, labels=labels, image_index=index)
    return MicroBatch(batch, positions, targets, rows * SUFFIX, ("",) * rows)


def matmul_flops(setup: Setup, rows: int, length: int, head_rows: int, backward: bool) -> float:
    """2 FLOPs a parameter and token, 4 with the backward pass through frozen weights; the tower has none."""

    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.dim() > 1)

    model = empty_model(setup.config)
    decoder, head = size(model.language_model.layers), model.language_model.embed_tokens.weight.numel()
    eye = size(model.vision_tower.encoder) * setup.config.num_image_tokens
    return rows * 2 * eye + (4 if backward else 2) * (rows * length * decoder + head_rows * head)


# ---------------------------------------------------------------------------------------------------------------------
# Prefill and decoding
# ---------------------------------------------------------------------------------------------------------------------


def prefill(setup: Setup, side: str, state: State) -> dict[str, Work]:
    """Picture and prompt to the logits of the first new token, with a cache to go on from."""
    model = (our_model if side == OURS else their_model)(setup, state)
    works = {}
    for rows in (1, 8):
        inputs = prompt(setup, rows)

        @torch.inference_mode()
        def run(inputs=inputs):
            if side == OURS:
                cache = model.new_cache(inputs["input_ids"].shape[1] + ANSWER)
                return model(**inputs, positions_to_keep=1, cache=cache)
            return model(**inputs, logits_to_keep=1, use_cache=True).logits

        length = inputs["input_ids"].shape[1]
        works[f"batch {rows}, {length} tokens"] = Work(run, matmul_flops(setup, rows, length, rows, False))
    return works


def decode(setup: Setup, side: str, state: State) -> dict[str, Work]:
    """ANSWER new tokens, greedily, picture and prompt included; on a GPU also the compiled steps by themselves."""
    model = (their_model if side == THEIRS else our_model)(setup, state)
    works = {}
    for rows in (1, 4, 16):
        inputs, compiled = prompt(setup, rows), CompiledStep(model) if side == COMPILED else None

        def run(inputs=inputs, compiled=compiled):
            if side != THEIRS:
                return torch.stack(generate(model, **inputs, max_new_tokens=ANSWER, compiled=compiled))
            out = model.generate(**inputs, max_new_tokens=ANSWER, do_sample=False)
            return out[:, inputs["input_ids"].shape[1] :]

        works[f"{ANSWER} tokens, batch {rows}"] = Work(run, result=run)
        if compiled is not None and setup.on_gpu:
            works[f"{STEPS} steps alone, batch {rows}"] = decode_steps(model, CompiledStep(model), inputs)
    return works


@torch.no_grad()
def decode_steps(model: PaliGemma, compiled: CompiledStep, inputs: dict[str, torch.Tensor]) -> Work:
    """STEPS steps after one prompt, again and again from the same place. Each reads every weight of the decoder and
    the head, and the keys and values."""
    rows, length = inputs["input_ids"].shape
    cache = compiled.open(rows, length + STEPS)
    types, valid = (
        F.pad(inputs[name], (0, cache[0].capacity - length), value=1) for name in ("token_type_ids", "attention_mask")
    )
    logits = model(**inputs, positions_to_keep=last_valid(inputs["attention_mask"]), cache=cache)
    first = logits[:, -1].argmax(-1)

    @torch.no_grad()
    def run():
        compiled.seal()
        token = first
        for _ in range(STEPS):
            token = compiled(token, types, valid).argmax(-1)
        return token

    weights = [*model.language_model.parameters(), *(t for layer in cache for t in (layer.keys, layer.values))]
    return Work(run, moved=STEPS * sum(t.numel() * t.element_size() for t in weights))


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def train(setup: Setup, side: str, state: State) -> dict[str, Work]:
    """A step of LoRA: loss, gradients, AdamW. On a GPU also with activation checkpointing, and ours compiled."""
    plans = {f"batch {setup.batch}": {}}
    if setup.on_gpu:
        plans = {"batch 16, r 32": {"batch": 16}, "batch 4, r 32, checkpointing": {"checkpointing": True}}
        setup = replace(setup, targets=DECODER_TARGETS, r=32)
    step = {OURS: our_step, COMPILED: our_compiled_step, THEIRS: their_step}[side]
    length = setup.config.num_image_tokens + PREFIX + SUFFIX
    works = {}
    for name, plan in plans.items():
        rows = plan.get("batch", setup.batch)
        flops = matmul_flops(setup, rows, length, rows * SUFFIX, True)
        run = step(replace(setup, batch=rows), state, plan.get("checkpointing", False))
        works[f"{name}, {length} tokens"] = Work(run, flops)
    return works


def our_step(
    setup: Setup,
    state: State,
    checkpointing: bool = False,
    compiled: bool = False,
    kind: str = "softmax",
    eight_bits: bool = False,
) -> Callable[[], object]:
    """Our training step of one variant of attention."""
    model = our_model(setup, state).train()
    torch.manual_seed(0)
    if kind != "softmax":
        graft(model, kind, **default_options(kind, setup.r, 2 * setup.r))
    adapter.inject(model, setup.targets, setup.r, 2 * setup.r)
    learns = Rule("|".join(map(re.escape, trainable(model))), 1e-4)
    optimizer = make_adamw(parameter_groups(model, [learns]), (0.9, 0.98))
    if eight_bits:
        quantize(model)
    model.language_model.checkpointing = checkpointing
    called, micro = torch.compile(model) if compiled else model, micro_batch(setup, setup.batch)

    def run():
        if compiled:
            free_sizes(micro)
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.on_gpu):
            loss = supervised_loss(called, micro) / micro.tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run


def our_compiled_step(setup: Setup, state: State, checkpointing: bool = False) -> Callable[[], object]:
    return our_step(setup, state, checkpointing, compiled=True)


def their_step(setup: Setup, state: State, checkpointing: bool = False) -> Callable[[], object]:
    """The step of transformers and PEFT, as their manuals write it. Raises UserError without them."""
    model = their_model(setup, state)
    try:
        import peft
    except ImportError:
        raise UserError("peft is not installed: only our side is measured") from None
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    targets = rf".*{setup.targets}"
    config = peft.LoraConfig(r=setup.r, lora_alpha=2 * setup.r, target_modules=targets, lora_dropout=0.0)
    torch.manual_seed(0)  # A is drawn as ours is
    model = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, betas=(0.9, 0.98))
    batch = micro_batch(setup, setup.batch).batch
    inputs = {
        name: getattr(batch, name)
        for name in ("input_ids", "pixel_values", "token_type_ids", "attention_mask", "labels")
    }

    def run():
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.on_gpu):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run


def attention(setup: Setup, side: str, state: State) -> dict[str, Work]:
    """The training step with each variant of attention in the decoder."""
    return {f"LoRA step, batch {setup.batch}": Work(our_step(setup, state, kind=side))}


def eight_bits(setup: Setup, side: str, state: State) -> dict[str, Work]:
    """The training step around whole and around quantized weights."""
    return {f"LoRA step, batch {setup.batch}": Work(our_step(setup, state, eight_bits=side == "int8"))}


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, and single products
# ---------------------------------------------------------------------------------------------------------------------


def evaluate(setup: Setup, side: str, state: State, pictures: int = 4, per_picture: int = 6) -> dict[str, Work]:
    """Questions on pictures, several each, from the picture to the answer's text, eight tokens each."""
    model = (our_model if side == OURS else their_model)(setup, state)
    processor = Processor(setup.config, Processor.from_source("embedded").tokenizer)
    samples = [scenes.sample("vqa", "validation", number) for number in range(pictures * per_picture)]
    drawn = {s.image_id: Image.fromarray(s.scene.render()) for s in samples}
    questions = [Ask(str(n), s.image_id, drawn[s.image_id], s.prefix) for n, s in enumerate(samples)]
    size = 12

    def ours():
        return ask_all(model, processor, questions, max_new_tokens=8, batch_size=size)

    def theirs():
        answers = []
        for start in range(0, len(questions), size):
            part = questions[start : start + size]
            batch = processor([q.picture for q in part], [q.prefix for q in part]).to(setup.device, setup.dtype)
            new = model.generate(
                input_ids=batch.input_ids,
                pixel_values=batch.pixel_values[batch.image_index],
                token_type_ids=batch.token_type_ids,
                attention_mask=batch.attention_mask,
                max_new_tokens=8,
                do_sample=False,
            )[:, batch.input_ids.shape[1] :]
            answers += [processor.decode(row) for row in new]
        return answers

    run = ours if side == OURS else theirs
    return {f"{len(questions)} questions on {len(drawn)} pictures": Work(run, result=run)}


def products(setup: Setup, side: str, state: State) -> dict[str, Work]:
    """The products of a training batch, forward and backward, through MKL and oneDNN, and attention by either."""
    if setup.on_gpu or cpu.onednn_linear is None:
        raise UserError("section linear compares oneDNN with MKL on a CPU: there is no choice on this device")
    text = setup.config.text
    tokens = setup.batch * (setup.config.num_image_tokens + PREFIX + SUFFIX)
    torch.manual_seed(0)
    works = {}
    for name, wide, out in (
        ("q_proj", text.hidden_size, text.num_attention_heads * text.head_dim),
        ("gate_proj", text.hidden_size, text.intermediate_size),
        ("down_proj", text.intermediate_size, text.hidden_size),
    ):
        x, weight = torch.randn(tokens, wide, requires_grad=True), torch.randn(out, wide)
        product = linear if side == "oneDNN" else F.linear
        works[f"{name}, {tokens}×{wide}×{out}"] = Work(lambda x=x, w=weight, p=product: p(x, w).sum().backward())
    length = tokens // setup.batch
    q, k, v = (
        torch.randn(setup.batch, heads, length, text.head_dim, requires_grad=True)
        for heads in (text.num_attention_heads, text.num_key_value_heads, text.num_key_value_heads)
    )
    mask = torch.ones(setup.batch, 1, length, length, dtype=torch.bool).tril(length - SUFFIX)

    def attend():
        if side == "oneDNN":
            out = cpu.row_attention([(q, k)], v, mask, text.head_dim**-0.5)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        out.sum().backward()

    works[f"attention, {tuple(q.shape)}"] = Work(attend)
    return works


# By section: how it is made, its sides, and the one that others are compared with.
SECTIONS: dict[str, tuple[Callable[[Setup, str, State], dict[str, Work]], tuple[str, ...], str]] = {
    "prefill": (prefill, (OURS, THEIRS), THEIRS),
    "decode": (decode, (OURS, THEIRS), THEIRS),
    "train": (train, (OURS, THEIRS), THEIRS),
    "eval": (evaluate, (OURS, THEIRS), THEIRS),
    "attention": (attention, tuple(KINDS), "softmax"),
    "quantize": (eight_bits, ("whole", "int8"), "whole"),
    "linear": (products, ("oneDNN", "MKL"), "MKL"),
}


def geometry(name: str) -> PaliGemmaConfig:
    return PRESETS["paligemma-3b-224" if name == "3b" else name]

"""The work that the benchmark times: the same inputs and weights on every side, ours and that of transformers and PEFT.

In: a `Setup`, a side, the weights by name. Out: `Work` by name: functions without arguments, each call one repetition.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from PIL import Image

from eval import scenes
from eval.run import Ask, ask_all
from lora import adapter
from lora.adapter import DECODER_TARGETS
from model import cpu
from model.attention import fused_attention
from model.common import UserError
from model.differential import default_options, graft
from model.generate import CompiledStep, generate, last_valid
from model.linear import linear
from model.paligemma import PaliGemma
from model.processor import Processor
from train.benchmark.setup import (
    PREFIX,
    SUFFIX,
    Setup,
    State,
    matmul_flops,
    micro_batch,
    our_model,
    prompt,
    their_model,
)
from train.benchmark.timing import COMPILED, OURS, THEIRS
from train.optim import Rule, make_adamw, parameter_groups, trainable
from train.supervised import free_sizes, supervised_loss

ANSWER = 20  # new tokens of a generation
STEPS = 32  # decoding steps that are timed by themselves, on a GPU


@dataclass
class Work:
    """One repetition is a call of `run`. flops: operations that it computes; moved: bytes that it must read."""

    run: Callable[[], object]
    flops: float | None = None
    moved: float | None = None
    result: Callable[[], object] | None = None  # its answers, to be compared with the other sides'


# Prefill and decoding


def prefill(setup: Setup, side: str, state: State) -> dict[str, Work]:
    """From picture and prompt to the logits of the first new token, with a key-value cache for the next ones."""
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
    """ANSWER new tokens by greedy decoding, picture and prompt included; also the steps alone, compiled on a GPU."""
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
        if side == (COMPILED if setup.on_gpu else OURS):
            steps = CompiledStep(model) if setup.on_gpu else None
            works[f"{STEPS} steps alone, batch {rows}"] = decode_steps(model, steps, inputs)
    return works


@torch.no_grad()
def decode_steps(model: PaliGemma, compiled: CompiledStep | None, inputs: dict[str, torch.Tensor]) -> Work:
    """STEPS decoding steps after a prompt, compiled or not; every repetition starts from the same position.

    Each step reads all weights of the decoder and the head, and the keys and values.
    """
    rows, length = inputs["input_ids"].shape
    cache = model.new_cache(length + STEPS) if compiled is None else compiled.open(rows, length + STEPS)
    types, valid = (
        F.pad(inputs[name], (0, cache[0].capacity - length), value=1) for name in ("token_type_ids", "attention_mask")
    )
    logits = model(**inputs, positions_to_keep=last_valid(inputs["attention_mask"]), cache=cache)
    first = logits[:, -1].argmax(-1)

    @torch.no_grad()
    def run():
        if compiled is not None:
            compiled.seal()
        for layer in cache:
            layer.length = length
        token = first
        for seen in range(length + 1, length + STEPS + 1):
            if compiled is None:
                masks = {"token_type_ids": types[:, :seen], "attention_mask": valid[:, :seen]}
                logits = model(token[:, None], pixel_values=None, **masks, cache=cache)[:, -1]
            else:
                logits = compiled(token, types, valid)
            token = logits.argmax(-1)
        return token

    weights = [*model.language_model.parameters(), *(t for layer in cache for t in (layer.keys, layer.values))]
    return Work(run, moved=STEPS * sum(t.numel() * t.element_size() for t in weights))


# Training


def train(setup: Setup, side: str, state: State) -> dict[str, Work]:
    """A step of LoRA: loss, gradients, AdamW. On a GPU also with activation checkpointing, and ours compiled."""
    plans = {f"batch {setup.batch}": {}}
    if setup.on_gpu:
        plans = {"batch 16, r 32": {"batch": 16}, "batch 4, r 32, checkpointing": {"checkpointing": True}}
        setup = replace(setup, targets=DECODER_TARGETS, r=32)
    step = {OURS: our_step, COMPILED: partial(our_step, compiled=True), THEIRS: their_step}[side]
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
    quantized: str | None = None,
) -> Callable[[], object]:
    """Our training step of one variant of attention."""
    model = our_model(setup, state).train()
    torch.manual_seed(0)
    if kind != "softmax":
        graft(model, kind, **default_options(kind, setup.r, 2 * setup.r))
    adapter.inject(model, setup.targets, setup.r, 2 * setup.r)
    learns = Rule("|".join(map(re.escape, trainable(model))), 1e-4)
    optimizer = make_adamw(parameter_groups(model, [learns]), (0.9, 0.98))
    if quantized:
        adapter.quantize(model, quantized)
    model.language_model.checkpointing = checkpointing
    called, micro = torch.compile(model) if compiled else model, micro_batch(setup, setup.batch)

    def loss() -> torch.Tensor:
        if compiled:
            free_sizes(micro)
        return supervised_loss(called, micro) / micro.tokens

    return step_of(setup, loss, optimizer)


def step_of(
    setup: Setup, loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[], torch.Tensor]:
    """The training step of any side: the loss, its gradients, the update."""

    def run() -> torch.Tensor:
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.on_gpu):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return run


def their_step(setup: Setup, state: State, checkpointing: bool = False) -> Callable[[], object]:
    """The training step of transformers and PEFT, as their documentation shows it. Raises UserError without them."""
    model = their_model(setup, state)
    try:
        import peft
    except ImportError:
        raise UserError("peft is not installed: only our side is measured") from None
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    targets = rf".*{setup.targets}"
    config = peft.LoraConfig(r=setup.r, lora_alpha=2 * setup.r, target_modules=targets, lora_dropout=0.0)
    torch.manual_seed(0)  # the same A as ours
    model = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, betas=(0.9, 0.98))
    inputs = {**vars(micro_batch(setup, setup.batch).batch)}
    del inputs["image_index"]  # each row has a picture of its own
    return step_of(setup, lambda: model(**inputs).loss, optimizer)


def attention(setup: Setup, side: str, state: State) -> dict[str, Work]:
    """The training step with each variant of attention in the decoder."""
    return {f"LoRA step, batch {setup.batch}": Work(our_step(setup, state, kind=side))}


def few_bits(setup: Setup, side: str, state: State) -> dict[str, Work]:
    """The training step and decoding in bf16, with weights as they are, "whole", or quantized: frozen, or all."""
    kind = None if side == "whole" else side
    model = our_model(setup, {name: tensor.bfloat16() for name, tensor in state.items()})
    if kind:
        adapter.quantize(model, kind, head=True)
    inputs = prompt(replace(setup, dtype=torch.bfloat16), 1)
    return {
        f"LoRA step, batch {setup.batch}": Work(our_step(setup, state, quantized=kind)),
        f"{ANSWER} tokens, batch 1, bf16": Work(lambda: generate(model, **inputs, max_new_tokens=ANSWER)),
    }


# Evaluation, and single products


def evaluate(setup: Setup, side: str, state: State, pictures: int = 4, per_picture: int = 6) -> dict[str, Work]:
    """Several questions on each picture, from the picture to the text of the answers, eight tokens each."""
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
    """The matrix products and the attention of a training batch, forward and backward, by one of `cpu.PATHS`."""
    if setup.on_gpu or cpu.onednn_linear is None:
        raise UserError("section linear compares oneDNN with PyTorch on a CPU: there is no choice on this device")
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

        @cpu.using(side)
        def multiply(x=x, weight=weight):
            linear(x, weight).sum().backward()

        works[f"{name}, {tokens}×{wide}×{out}"] = Work(multiply)
    length = tokens // setup.batch
    q, k, v = (
        torch.randn(setup.batch, heads, length, text.head_dim, requires_grad=True)
        for heads in (text.num_attention_heads, text.num_key_value_heads, text.num_key_value_heads)
    )
    mask = torch.ones(setup.batch, 1, length, length, dtype=torch.bool).tril(length - SUFFIX)

    @cpu.using(side)
    def attend():
        fused_attention(q, k, v, mask, text.head_dim**-0.5).sum().backward()

    works[f"attention, {tuple(q.shape)}"] = Work(attend)
    return works

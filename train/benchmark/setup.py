"""What all sections of the benchmark share: sizes, random weights, and the same model in both libraries.

In: a configuration, a device, a dtype. Out: models around the same tensors, and inputs for them.
"""

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from model.common import UserError
from model.config import PRESETS, PaliGemmaConfig
from model.device import DTYPES, choose_device
from model.paligemma import PaliGemma
from model.processor import Batch
from train.benchmark.timing import THEIRS
from train.data.batches import MicroBatch, supervised
from train.flags import flag
from train.metrics import peak_bytes
from train.optim import count
from weights.checkpoint import empty_model

ATTENTION = r"language_model\.layers\.\d+\.self_attn\.[qkvo]_proj"
PREFIX, SUFFIX = 16, 16  # tokens of text beside the picture's


@dataclass(frozen=True)
class Options:
    """The flags of the command that a section reads."""

    geometry: str = flag("mini", "sizes of the model", ["3b", *PRESETS])
    device: str = flag("auto", "cpu, cuda, … (default: cuda if there is one)")
    dtype: str | None = flag(None, "of the weights (default: bf16 for 3b and on CUDA, else fp32)", list(DTYPES))
    rounds: int | None = flag(None, "rounds of each row (default: 7; load 3, decode 5, attention 15)", least=1)
    threads: int | None = flag(None, "CPU threads (default: PyTorch's)", least=1)
    compile: bool | None = flag(None, "measure with torch.compile too: decode and train (default: on CUDA)")
    memory: bool = flag(True, "measure each side's peak in a process of its own")
    folder: Path | None = flag(None, "model folder for section load (default: made, and removed)")
    out: Path | None = flag(None, "folder to write (default: runs/benchmark-GEOMETRY-DEVICE)")


@dataclass(frozen=True)
class Setup:
    """Sizes, dtype, device and threads of a benchmark. Its models have no end token: all sides make as many tokens."""

    config: PaliGemmaConfig
    device: torch.device
    dtype: torch.dtype
    threads: int | None = None  # CPU threads (None: PyTorch's choice)
    batch: int = 4  # rows of a training step
    targets: str = ATTENTION
    r: int = 16

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def open_setup(options: Options) -> Setup:
    """The setup that the flags name. Raises UserError for a device that is not there."""
    device = choose_device(options.device)
    large = options.geometry == "3b"
    config = PRESETS["paligemma-3b-224" if large else options.geometry]
    dtype = options.dtype or ("bf16" if large or device.type != "cpu" else "fp32")
    return Setup(config, device, DTYPES[dtype], options.threads)


def use_threads(setup: Setup) -> None:
    """Give this process as many CPU threads as `setup` says."""
    if setup.threads:
        torch.set_num_threads(setup.threads)


def import_theirs() -> None:
    """Import what transformers and PEFT import lazily, so that it does not count as the model's memory."""
    import transformers.models.paligemma.modeling_paligemma as modeling

    modeling.logging.disable_progress_bar()
    if find_spec("peft"):
        import peft  # noqa: F401


def begin_process(setup: Setup, side: str) -> int:
    """Give this process its threads and its side's imports; returns the bytes that do not count as its memory."""
    use_threads(setup)
    if side == THEIRS:
        import_theirs()
    return 0 if setup.on_gpu else peak_bytes()


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
    """Our model, which shares the tensors of `state` and has no end token."""
    model = empty_model(setup.config, setup.dtype)
    model.config = replace(setup.config, eos_token_id=-1)
    model.load_state_dict(state, assign=True)
    return model


def their_model(setup: Setup, state: State) -> nn.Module:
    """transformers' model, which shares the same tensors. Raises UserError where transformers is not installed."""
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
    # Its buffers (position tables) depend on neither depth nor vocabulary: take them from a small model.
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
    batch = Batch(**inputs, labels=labels, image_index=torch.arange(rows, device=setup.device))
    return MicroBatch(batch, positions, targets, rows * SUFFIX, ("",) * rows)


def matmul_flops(setup: Setup, rows: int, length: int, head_rows: int, backward: bool) -> float:
    """FLOPs of the matrix products: 2 for each parameter and token, 4 with a backward pass through frozen weights.

    Those of attention, queries by keys and maps by values, are added: they have no weights, and are three times as
    many with a backward pass. The vision tower has none. Behind the last keys and values only `head_rows` go on.
    """

    def size(module: nn.Module) -> int:
        return count(p for p in module.parameters() if p.dim() > 1)

    model = empty_model(setup.config)
    decoder, head = size(model.language_model.layers), model.language_model.embed_tokens.weight.numel()
    patches, text, vision = setup.config.num_image_tokens, setup.config.text, setup.config.vision
    tower = size(model.vision_tower.encoder) * patches + 2 * vision.num_hidden_layers * vision.hidden_size * patches**2
    queries = (text.num_hidden_layers - 1) * rows * length + head_rows
    maps = 4 * queries * length * text.num_attention_heads * text.head_dim
    last = model.language_model.layers[-1]
    dropped = (rows * length - head_rows) * (size(last.mlp) + size(last.self_attn.o_proj))
    products = rows * length * decoder + head_rows * head - dropped
    return rows * 2 * tower + (3 if backward else 1) * maps + (4 if backward else 2) * products

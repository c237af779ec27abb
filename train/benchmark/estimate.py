"""How much memory fine-tuning the published sizes takes: computed from their sizes, not measured.

In: a geometry, a batch, a number of GPUs. Out: bytes on each GPU, and a table.
"""

from dataclasses import dataclass

import torch

from eval.report import markdown_table
from model.config import PRESETS, PaliGemmaConfig
from model.paligemma import MAX_LOGITS
from weights.checkpoint import empty_model

SIZES = {"3B": "paligemma-3b-224", "10B": "paligemma2-10b-224", "28B": "paligemma2-28b-224"}
RANK, TEXT = 32, 24  # the paper's rank; tokens of text beside the picture's 256


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU."""

    weights: float
    adapter: float  # fp32: weights, gradients, and both moments of Adam
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.adapter + self.activations


def memory(config: PaliGemmaConfig, rows: int = 4, gpus: int = 1, r: int = RANK) -> Memory:
    """LoRA on the decoder's seven projections, bf16 base, each layer's activations recomputed, fp32 adapters.

    On several GPUs weights and adapter are sharded (FSDP2): each holds its part, and gathers two layers and the
    embedding while it computes with them. Activations: the input of every layer, those within one layer, and three
    copies of a chunk of logits in fp32.
    """
    model, text = empty_model(config, torch.bfloat16), config.text
    total = sum(parameter.numel() for parameter in model.parameters())
    layer = sum(parameter.numel() for parameter in model.language_model.layers[0].parameters())
    projections = [module for module in model.language_model.layers[0].modules() if isinstance(module, torch.nn.Linear)]
    lora = text.num_hidden_layers * sum(r * (module.in_features + module.out_features) for module in projections)
    gathered = 2 * layer + text.vocab_size * text.hidden_size if gpus > 1 else 0
    tokens = rows * (config.num_image_tokens + TEXT)
    # inputs of the norms in fp32, of the projections and of the activation in bf16; the widths of LoRA are small
    heads = text.head_dim * (2 * text.num_attention_heads + 2 * text.num_key_value_heads)
    within = tokens * (2 * (4 * text.hidden_size + heads + 4 * text.intermediate_size) + 4 * 4 * text.hidden_size)
    between = tokens * text.hidden_size * text.num_hidden_layers * 2
    return Memory(2 * (total / gpus + gathered), 16 * lora / gpus, between + within + 3 * 4 * MAX_LOGITS)


def estimate(rows: int = 4) -> str:
    """The table for 1, 8 and 64 GPUs, in Markdown."""
    rows_of_table = []
    for name, preset in SIZES.items():
        config = PRESETS[preset]
        total = sum(parameter.numel() for parameter in empty_model(config).parameters())
        by_gpus = [memory(config, rows, gpus) for gpus in (1, 8, 64)]
        sizes = [f"{one.total / 2**30:.1f} GiB" for one in by_gpus]
        lora = f"{by_gpus[0].adapter / 16 / 1e6:.1f} × 10⁶"
        rows_of_table.append((name, f"{total / 1e9:.2f} × 10⁹", lora, *sizes, "not yet measured"))
    head = ("size", "parameters", "LoRA", "1 GPU", "8 GPUs", "64 GPUs", "time")
    about = (
        f"Estimates, from parameter counts: LoRA of rank {RANK} on all seven projections of the decoder, bf16 base, "
        f"`--checkpointing`, {rows} rows of 256 + {TEXT} tokens a GPU, `--shard` on more than one."
    )
    return "\n".join([about, "", *markdown_table(head, rows_of_table)])

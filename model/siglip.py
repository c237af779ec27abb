"""SigLIP's vision transformer (Zhai et al. 2023): one vector for each patch of a picture.

In: pixel_values (B, 3, R, R) in [-1, 1]. Out: features (B, I, H) of I = (R / patch)² patches,
row-major. Module names are the published ones.
"""

from torch import Tensor, nn

from model.attention import Attention
from model.config import VisionConfig
from model.linear import Linear, activated


class SiglipEmbeddings(nn.Module):
    """A linear map of each patch, as a strided convolution, plus a learned position; no class
    token."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.patch_embedding = nn.Conv2d(3, width, patch, patch)
        self.position_embedding = nn.Embedding(config.num_image_tokens, width)

    def forward(self, pixel_values: Tensor) -> Tensor:
        pixels = pixel_values.to(self.patch_embedding.weight.dtype)
        patches = self.patch_embedding(pixels)  # (B, H, P, P)
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight  # (B, I, H)


class SiglipMLP(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(activated(self.fc1, x, "gelu_pytorch_tanh"))


class SiglipLayer(nn.Module):
    """Pre-norm transformer layer; every patch attends to every patch."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.layer_norm1 = nn.LayerNorm(width, config.layer_norm_eps)
        self.self_attn = Attention(
            width,
            heads,
            heads,
            width // heads,
            bias=True,
            output_name="out_proj",
        )
        self.layer_norm2 = nn.LayerNorm(width, config.layer_norm_eps)
        self.mlp = SiglipMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Siglip(nn.Module):
    """The tower without its pooling head, which PaliGemma does not use."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.embeddings = SiglipEmbeddings(config)
        layers = nn.ModuleList(SiglipLayer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layers": layers})
        self.post_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """pixel_values (B, 3, R, R) to features (B, I, H)."""
        layers, last = list(self.encoder["layers"].children()), self.config.feature_layer
        if last is not None:
            layers = layers[: range(len(layers) + 1)[last]]
        x = self.embeddings(pixel_values)
        for layer in layers:
            x = layer(x)
        return self.post_layernorm(x) if last is None else x

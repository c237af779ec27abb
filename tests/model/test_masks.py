"""Masks and their codes beside flax's operations, written out in NumPy with fp64."""

import numpy as np
import pytest
import torch

from model.common import UserError
from model.masks import CODES, GRID, SIDE, MaskCoder, crop, paste
from weights.masks import load_mask_coder

WIDTH, SIZE = 3, 7


def draw_masks(count):
    return torch.rand(count, SIDE, SIDE, dtype=torch.float64)


@pytest.fixture(scope="module")
def coder():
    torch.manual_seed(0)
    coder = MaskCoder(WIDTH, SIZE).double().requires_grad_(False)
    for parameter in coder.parameters():
        parameter.normal_(std=0.2)
    # codes are what the encoder says of other masks, so that many are used
    coder._vq_vae._embedding.data = coder.to_vectors(draw_masks(8)).flatten(0, 1)
    return coder


@pytest.fixture(scope="module")
def arrays(coder):
    return {name: array.numpy() for name, array in coder.state_dict().items()}


def same_convolution(x, kernel, bias, stride):
    """TensorFlow's conv2d with padding SAME: x (B, h, w, in), kernel (h, w, in, out)."""
    side = kernel.shape[0]
    out = -(-x.shape[1] // stride)
    missing = max((out - 1) * stride + side - x.shape[1], 0)
    edges = (missing // 2, missing - missing // 2)
    x = np.pad(x, ((0, 0), edges, edges, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (side, side), (1, 2))
    return np.einsum("bhwcij,ijco->bhwo", windows[:, ::stride, ::stride], kernel) + bias


def transposed_convolution(x, kernel, bias):
    """flax's ConvTranspose with strides 2, padding 2 and transpose_kernel: zeros between the
    pixels, two at the edges, the kernel (h, w, out, in) mirrored and its channels exchanged."""
    batch, side, _, channels = x.shape
    spread = np.zeros((batch, 2 * side - 1, 2 * side - 1, channels))
    spread[:, ::2, ::2] = x
    spread = np.pad(spread, ((0, 0), (2, 2), (2, 2), (0, 0)))
    mirrored = kernel[::-1, ::-1].transpose(0, 1, 3, 2)
    windows = np.lib.stride_tricks.sliding_window_view(spread, mirrored.shape[:2], (1, 2))
    return np.einsum("bhwcij,ijco->bhwo", windows, mirrored) + bias


def layer(arrays, name, x, stride=1, transposed=False):
    kernel = arrays[f"{name}.weight"].transpose(2, 3, 1, 0)
    bias = arrays[f"{name}.bias"]
    if transposed:
        return transposed_convolution(x, kernel, bias)
    return same_convolution(x, kernel, bias, stride)


def residual(arrays, name, x):
    inner = np.maximum(layer(arrays, f"{name}.net.0", x), 0)
    inner = np.maximum(layer(arrays, f"{name}.net.2", inner), 0)
    return layer(arrays, f"{name}.net.4", inner) + x


def test_codes_equal_big_visions(coder, arrays):
    """Breaks when a layer, a padding, the range of a mask or the distance to a code differs from
    the published encoder."""
    masks = draw_masks(5)
    x = 2 * (masks.numpy()[..., None] - 0.5)
    for number in range(4):
        x = np.maximum(layer(arrays, f"encoder.{2 * number}", x, stride=2), 0)
    for number in (8, 9):
        x = residual(arrays, f"encoder.{number}", x)
    x = layer(arrays, "encoder.10", x)
    assert np.allclose(coder.to_vectors(masks).numpy(), x.reshape(5, -1, SIZE), rtol=1e-10)
    distances = ((x.reshape(-1, 1, SIZE) - arrays["_vq_vae._embedding"]) ** 2).sum(-1)
    codes = coder.encode(masks)
    assert np.array_equal(codes.flatten(), distances.argmin(1))
    assert len(codes.unique()) > CODES / 4


def test_masks_equal_big_visions(coder, arrays):
    """Breaks when a layer of the published decoder differs, or the codes' raster order."""
    codes = torch.randint(CODES, (5, 16))
    x = arrays["_vq_vae._embedding"][codes.numpy()].reshape(5, GRID, GRID, SIZE)
    x = np.maximum(layer(arrays, "decoder.0", x), 0)
    for number in (2, 3):
        x = residual(arrays, f"decoder.{number}", x)
    for number in (4, 6, 8, 10):
        x = np.maximum(layer(arrays, f"decoder.{number}", x, transposed=True), 0)
    x = layer(arrays, "decoder.12", x)[..., 0]
    assert x.shape == (5, SIDE, SIDE)
    assert np.allclose(coder.decode(codes).numpy(), x, rtol=1e-10)


SIZES = """encoder.0 16 1 4 4
encoder.2 32 16 4 4
encoder.4 64 32 4 4
encoder.6 128 64 4 4
encoder.9.net.4 128 128 1 1
encoder.10 512 128 1 1
decoder.0 128 512 1 1
decoder.4 128 128 4 4
decoder.6 128 64 4 4
decoder.8 64 32 4 4
decoder.10 32 16 4 4
decoder.12 1 16 1 1"""


def test_published_sizes():
    """Breaks when names or shapes are not those of the published code: 16, 32, 64, 128 channels,
    128 codes of 512."""
    shapes = {name: tuple(array.shape) for name, array in MaskCoder().state_dict().items()}
    assert shapes["_vq_vae._embedding"] == (128, 512)
    for line in SIZES.splitlines():
        name, *sizes = line.split()
        assert shapes[f"{name}.weight"] == tuple(map(int, sizes))


def test_a_mask_is_cropped_and_pasted():
    """Breaks when a crop is not antialiased and in [0, 1], x is taken for y, or a mask leaves its
    box."""
    mask = np.zeros((90, 200), bool)
    mask[20:60, 30:130] = True
    mask[30:50, 60:100] = False
    cropped = crop(mask, (30, 20, 130, 60))
    assert cropped.shape == (SIDE, SIDE)
    assert abs(cropped.mean().item() - mask.sum() / 4000) < 1e-3  # the share that is covered
    assert (paste(2 * cropped - 1, (30.9, 20, 130.2, 60), 200, 90) == mask).mean() > 0.995
    assert not paste(torch.ones(SIDE, SIDE), (30, 20, 30.5, 60), 200, 90).any()


def test_a_coder_is_read(coder, arrays, tmp_path):
    """Breaks when the names of `vae-oid.npz` are not found, its moving averages disturb, or a
    wrong file opens."""
    np.savez(tmp_path / "vae-oid.npz", **arrays, **{"_vq_vae._ema_w": np.zeros(2)})
    opened = load_mask_coder(tmp_path / "vae-oid.npz")
    codes = torch.randint(CODES, (2, 16))
    expected = coder.decode(codes).float()
    assert torch.allclose(opened.decode(codes), expected, atol=1e-5 * expected.abs().max())
    wrong = [
        {name: array for name, array in arrays.items() if name != "decoder.4.bias"},
        arrays | {"decoder.12.weight": np.zeros((1, WIDTH, 3, 3))},
        arrays | {"_vq_vae._embedding": np.zeros((64, SIZE))},
        arrays | {"encoder.0.weight": np.zeros(())},
        arrays | {"encoder.0.weight": np.zeros((10**6, 1, 4, 4), np.float16)},
        {"encoder.0.weight": np.array([{}])},
        arrays | {"decoder.4.bias": np.full_like(arrays["decoder.4.bias"], np.nan)},
    ]
    for number, given in enumerate(wrong):
        np.savez(tmp_path / f"{number}.npz", **given)
        with pytest.raises(UserError, match=f"{number}.npz"):
            load_mask_coder(tmp_path / f"{number}.npz")
    for name in ("missing.npz", "missing.safetensors"):
        with pytest.raises(UserError, match=name):
            load_mask_coder(tmp_path / name)

"""Pictures against transformers' SiglipImageProcessor, bit for bit, and files that are refused."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from model.images import load_image, to_pixels
from model.systems.processors import pad_to_square
from tests.files import picture
from tests.runs import refused

SIDE = 56
HF = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})


def theirs(image):
    return HF(image, return_tensors="pt")["pixel_values"][0]


EVERY_BYTE = Image.fromarray(np.arange(SIDE * SIDE * 3).astype(np.uint8).reshape(SIDE, SIDE, 3))
SIZES = (40, 30), (1, 1), (1, 900), (500, 7), (56, 56), (57, 55), (640, 427)


@pytest.mark.parametrize(
    "image", [EVERY_BYTE, *(picture(*size) for size in SIZES)], ids=lambda image: str(image.size)
)
def test_pixels_equal_transformers(image):
    """Breaks when filter, rounding, or the order of x/255·2-1, not x·(2/255)-1, differs by one bit
    from training."""
    pixels = to_pixels(image, SIDE)
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous()
    assert torch.equal(pixels, theirs(image))


@pytest.mark.parametrize("size", [(5, 2), (2, 5), (6, 2), (3, 3)])
def test_squares_are_llavas(size):
    """Breaks when the odd row or column of the gray goes to the other side than in training."""
    theirs = LlavaImageProcessorPil().pad_to_square(
        np.asarray(picture(*size)).transpose(2, 0, 1), (127,) * 3
    )
    assert np.array_equal(np.asarray(pad_to_square(picture(*size))), theirs.transpose(1, 2, 0))


def translucent():
    """RGBA with every alpha from 0 to 255, and noise for colours, under alpha 0 too."""
    pixels = np.random.default_rng(3).integers(0, 256, (32, 64, 4)).astype(np.uint8)
    pixels[..., 3] = np.arange(32 * 64).reshape(32, 64) % 256
    return Image.fromarray(pixels)


def palette(transparency):
    image = translucent().convert("RGB").quantize(16)
    image.info["transparency"] = transparency
    return image


def png(depth, colour_type, pixels, transparency):
    """A PNG whose tRNS chunk is `transparency`, as Pillow opens it; pixels (H, W) or (H, W,
    channels)."""

    def chunk(name, content):
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    rows = b"".join(
        b"\0" + row.astype(">u2" if depth == 16 else np.uint8).tobytes() for row in pixels
    )
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], depth, colour_type, 0, 0, 0)
    parts = (
        (b"IHDR", header),
        (b"tRNS", transparency),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    return Image.open(io.BytesIO(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)))


def reopened(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return Image.open(buffer)


COLOURS = np.random.default_rng(4).integers(0, 2, (6, 8, 3))
MODES = {
    mode: lambda mode=mode: picture().convert(mode) for mode in "1 L RGBX CMYK YCbCr HSV".split()
}
MODES |= {
    "P": lambda: picture().quantize(16),
    "RGBA": translucent,
    "LA": lambda: Image.merge("LA", (translucent().convert("L"), translucent().getchannel("A"))),
    "PA": lambda: Image.merge("PA", (translucent().getchannel("R"), translucent().getchannel("A"))),
    "P, alpha of some entries": lambda: palette(bytes(range(0, 256, 40))),
    "P, one entry": lambda: palette(3),
    "P, none": lambda: palette(b""),
    "WebP": lambda: reopened(translucent(), "WEBP", lossless=True, exact=True),
    "GIF": lambda: reopened(palette(3), "GIF", transparency=3),
    "JPEG 2000": lambda: reopened(translucent(), "JPEG2000"),
    "grey with tRNS": lambda: png(8, 0, np.arange(48).reshape(6, 8) % 7, struct.pack(">H", 3)),
    "colour with tRNS": lambda: png(8, 2, COLOURS, struct.pack(">HHH", 1, 0, 1)),
    "16-bit colour with tRNS": lambda: png(16, 2, COLOURS * 257, struct.pack(">HHH", 1, 0, 1)),
    "16-bit RGBA": lambda: png(16, 6, np.asarray(translucent()) * 251, b""),
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.filterwarnings("error:Palette")
def test_modes_equal_transformers(name):
    """Breaks when a mode comes out differently, or alpha is dropped or blended with another
    background or rounding."""
    image = MODES[name]()
    assert torch.equal(to_pixels(image.copy(), SIDE), theirs(image))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, orientation):
    """Breaks when photographs from telephones enter lying on their side or mirrored."""
    exif = Image.Exif()
    stored = picture(5, 3)
    exif[0x0112] = orientation
    a = np.asarray(stored)
    stored.save(tmp_path / "a.png", exif=exif)
    upright = [a, a[:, ::-1], a[::-1, ::-1], a[::-1]]
    upright += [upright[number].transpose(1, 0, 2) for number in (0, 3, 2, 1)]
    for source in (tmp_path / "a.png", Image.open(tmp_path / "a.png")):
        assert np.array_equal(np.asarray(load_image(source)), upright[orientation - 1])


def test_arrays_and_functions():
    """Breaks when an array's channels are taken for something else."""
    array = np.asarray(picture())
    assert np.array_equal(np.asarray(load_image(lambda: array)), array)
    with_alpha = np.dstack([array, array[..., :1]])
    assert torch.equal(to_pixels(with_alpha, SIDE), theirs(with_alpha))
    assert np.array_equal(
        np.asarray(load_image(array[..., 0])), np.repeat(array[..., :1], 3, axis=2)
    )


@pytest.mark.parametrize("ending", "gif webp png tiff".split())
def test_the_first_frame_of_an_animation(tmp_path, ending):
    """Breaks when an animated picture is refused or shows another frame."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    path = tmp_path / f"a.{ending}"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    red, green, blue = load_image(path).getpixel((4, 4))
    assert red > 240
    assert green < 15
    assert blue < 15


def test_what_is_no_picture_is_one_line(tmp_path):
    """Breaks when one bad file among thousands ends in a traceback that does not name it, or runs a
    program."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    header = b"IHDR" + struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + header
        + struct.pack(">I", zlib.crc32(header))
        + b"\0\0\1\0IDAT"
    )
    for name, content in {
        "text.png": b"<html>",
        "bomb.png": bomb,
        "program.eps": eps,
        "a\x1b[2J\nb.png": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        refused(lambda name=name: load_image(tmp_path / name), name[-5:])
    refused(lambda: load_image(tmp_path / "none.jpg"), "none.jpg", "not found")
    refused(
        lambda: load_image(Image.fromarray(np.array([[0, 65535]], np.uint16))), "grey"
    )  # would become white
    refused(lambda: load_image(np.zeros((4, 4, 3), np.float32)), "float32")
    refused(
        lambda: load_image(Image.new("1", (9440, 9440))), "9440 × 9440 pixels"
    )  # with alpha of 1.4 GB
    refused(lambda: pad_to_square(Image.new("1", (1, 18_900))), "1 × 18900 pixels")

"""Pictures against transformers' SiglipImageProcessor, bit for bit, and files that are refused."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from model.common import UserError, shown
from model.images import load_image, to_pixels
from model.processor import Processor

SIDE = 56


@pytest.fixture(scope="session")
def hf_images() -> SiglipImageProcessorPil:
    return SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Noise over a gradient, so that filters, channels and orientations all show."""
    noise = np.random.default_rng(seed).integers(0, 120, (height, width, 3))
    ramp = np.linspace(0, 135, width).astype(int)[None, :, None]
    return Image.fromarray((noise + ramp).astype(np.uint8))


@pytest.mark.parametrize("size", [(40, 30), (1, 1), (1, 900), (500, 7), (56, 56), (57, 55), (640, 427)])
def test_pixels_equal_transformers(hf_images, size):
    """Breaks when filter, rounding, or the order of scaling differs by one bit from training."""
    image = picture(*size)
    expected = hf_images(image, return_tensors="pt")["pixel_values"][0]
    pixels = to_pixels(image, SIDE)
    assert pixels.dtype == torch.float32 and pixels.is_contiguous() and torch.equal(pixels, expected)


def test_all_byte_values_scale_as_in_transformers(hf_images):
    """Breaks when x/255·2-1 is computed in an order that rounds otherwise, such as x·(2/255)-1."""
    image = Image.fromarray(np.arange(SIDE * SIDE * 3).astype(np.uint8).reshape(SIDE, SIDE, 3))
    expected = hf_images(image, do_resize=False, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(to_pixels(image, SIDE), expected)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_modes_equal_transformers(hf_images, mode):
    """Breaks when a mode that transformers reads soundly comes out differently here."""
    image = picture().quantize(16) if mode == "P" else picture().quantize(16).convert("PA") if mode == "PA" else None
    image = image or picture().convert(mode)
    expected = hf_images(image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(to_pixels(load_image(image), SIDE), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Transparency
# ---------------------------------------------------------------------------------------------------------------------


def translucent() -> Image.Image:
    """RGBA with every alpha from 0 to 255, and noise for colours, under alpha 0 too."""
    pixels = np.random.default_rng(3).integers(0, 256, (32, 64, 4)).astype(np.uint8)
    pixels[..., 3] = np.arange(32 * 64).reshape(32, 64) % 256
    return Image.fromarray(pixels)


def palette(transparency: bytes | int) -> Image.Image:
    image = translucent().convert("RGB").quantize(16)
    image.info["transparency"] = transparency
    return image


def png(depth: int, colour_type: int, pixels: np.ndarray, transparency: bytes) -> Image.Image:
    """A PNG whose tRNS chunk is `transparency`, as Pillow opens it; pixels (H, W) or (H, W, channels)."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = b"".join(b"\0" + row.astype(">u2" if depth == 16 else np.uint8).tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], depth, colour_type, 0, 0, 0)
    parts = (b"IHDR", header), (b"tRNS", transparency), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return Image.open(io.BytesIO(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)))


def reopened(image: Image.Image, format: str, **options) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return Image.open(buffer)


GREYS = np.arange(48).reshape(6, 8) % 7
COLOURS = np.random.default_rng(4).integers(0, 2, (6, 8, 3))
TRANSPARENT = {
    "RGBA": translucent,
    "LA": lambda: Image.merge("LA", (translucent().convert("L"), translucent().getchannel("A"))),
    "PA with its own alpha": lambda: Image.merge("PA", (translucent().getchannel("R"), translucent().getchannel("A"))),
    "P, alpha of some entries": lambda: palette(bytes(range(0, 256, 40))),
    "P, one entry": lambda: palette(3),
    "P, none": lambda: palette(b""),
    "WebP": lambda: reopened(translucent(), "WEBP", lossless=True, exact=True),
    "GIF": lambda: reopened(palette(3), "GIF", transparency=3),
    "JPEG 2000": lambda: reopened(translucent(), "JPEG2000"),
    "grey with tRNS": lambda: png(8, 0, GREYS, struct.pack(">H", 3)),
    "colour with tRNS": lambda: png(8, 2, COLOURS, struct.pack(">HHH", 1, 0, 1)),
    "16-bit colour with tRNS": lambda: png(16, 2, COLOURS * 257, struct.pack(">HHH", 1, 0, 1)),
    "16-bit RGBA": lambda: png(16, 6, np.asarray(translucent()) * 251, b""),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TRANSPARENT)
@pytest.mark.filterwarnings("error:Palette")
def test_transparency_equals_transformers(hf_images, name):
    """Breaks when alpha is dropped, or blended with another background or rounding than in transformers."""
    image = TRANSPARENT[name]()
    expected = hf_images(image.copy(), return_tensors="pt")["pixel_values"][0]
    assert torch.equal(to_pixels(load_image(image), SIDE), expected)
    if name not in ("P, none", "16-bit colour with tRNS"):
        dropped = image.convert("RGBA").convert("RGB")
        assert not torch.equal(to_pixels(dropped, SIDE), expected)


@pytest.mark.long
def test_premultiplied_colours_are_composited():
    """Breaks when RGBa and La, which transformers reads without alpha or refuses, look different from RGBA and LA."""
    for mode, premultiplied in (("RGBA", "RGBa"), ("LA", "La")):
        image = TRANSPARENT[mode]()
        result = np.asarray(load_image(image.convert(premultiplied))).astype(int)
        assert np.abs(result - np.asarray(load_image(image))).max() <= 2  # premultiplying rounds


@pytest.mark.parametrize("values", [np.array([[0, 65535]], np.uint16), np.array([[0, 0.5]], np.float32)])
def test_wide_grey_is_refused(values):
    """Breaks when grey of more bits becomes a white picture without a word."""
    with pytest.raises(UserError, match="16 or 32 bits of grey"):
        load_image(Image.fromarray(values))


ORIENTATIONS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),  # a quarter turn clockwise
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_exif_orientation(tmp_path, orientation):
    """Breaks when photographs from telephones enter lying on their side or mirrored."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = picture(5, 3)
    stored.save(tmp_path / "a.png", exif=exif)
    expected = ORIENTATIONS[orientation](np.asarray(stored))
    for source in (tmp_path / "a.png", Image.open(tmp_path / "a.png")):
        assert np.array_equal(np.asarray(load_image(source)), expected)


def test_arrays(hf_images):
    """Breaks when an array's channels are taken for something else."""
    array = np.asarray(picture())
    assert np.array_equal(np.asarray(load_image(array)), array)
    with_alpha = np.dstack([array, array[..., :1]])
    expected = hf_images(with_alpha, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(to_pixels(load_image(with_alpha), SIDE), expected)
    for grey in (array[..., 0], array[..., :1]):
        assert np.array_equal(np.asarray(load_image(grey)), np.repeat(array[..., :1], 3, axis=2))
    assert np.array_equal(np.asarray(load_image(array[::-1, ::2])), array[::-1, ::2])


@pytest.mark.parametrize("ending", ["gif", "webp", "png", "tiff"])
def test_the_first_frame_of_an_animation(tmp_path, ending):
    """Breaks when an animated picture is refused or shows another frame."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    path = tmp_path / f"a.{ending}"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert Image.open(path).n_frames == 3
    red, green, blue = load_image(path).getpixel((4, 4))
    assert red > 240 and green < 15 and blue < 15


def test_draft_decodes_smaller_and_only_on_request(tmp_path):
    """Breaks when the default is no longer bit-equal, or training sees other pictures than evaluation."""
    path = tmp_path / "a.jpg"
    picture(900, 700).save(path)
    assert load_image(path).size == (900, 700)
    assert load_image(path, draft=150).size == (225, 175)
    assert load_image(path, draft=701).size == (900, 700)
    for width, height, is_equal in ((900, 700, True), (910, 900, False)):  # twice DRAFT times 112 are 896
        picture(width, height).save(path)
        full, reduced = (
            Processor.from_source("embedded", draft=draft)([path], ["caption en"]).pixel_values[0]
            for draft in (False, True)
        )
        assert torch.equal(full, to_pixels(load_image(path), 112)) and torch.equal(full, reduced) == is_equal
        torch.testing.assert_close(full, reduced, atol=6 / 127.5, rtol=0)  # of noise; of photographs 4


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG that claims to be width × height."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 1000) + b"IDAT"


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    picture(64, 64).save(buffer, kind)
    return buffer.getvalue()


BAD = {
    "text.png": (b"<html>404 not found</html>", "not a picture"),
    "cut.jpg": (encoded("JPEG")[:-700], "cannot be read .*truncated"),
    "bomb.png": (png_header(40000, 40000), "decompression bomb"),
    "program.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "not a picture"),
    "a\x1b[2J\nb.png": (b"", "not a picture"),
}


def test_what_is_no_picture_is_one_line(tmp_path):
    """Breaks when one bad file among thousands ends in a traceback that does not name it, or runs a program."""
    sources = [(tmp_path / name, message) for name, (_, message) in BAD.items()]
    for path, (content, _) in zip((path for path, _ in sources), BAD.values(), strict=True):
        path.write_bytes(content)
    sources += [(tmp_path / "none.jpg", "not found"), (tmp_path, "cannot be read"), ("a\0b", "cannot be read")]
    sources += [(5, "cannot be read"), (np.zeros((4, 4, 3), np.float32), "is float32")]
    sources += [(np.zeros((3, 4, 5), np.uint8), "expected uint8"), (Image.new("RGB", (0, 5)), "no pixels")]
    for source, message in sources:
        with pytest.raises(UserError, match=message) as caught:
            load_image(source)
        name = shown(source) if isinstance(source, str | Path) else "passed as a picture"
        assert name in str(caught.value) and str(caught.value).isprintable()

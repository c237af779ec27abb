"""Pictures: from a file, a Pillow image or an array to the pixels that the vision tower takes.

In: a `Picture`. Out: `load_image` gives upright 8-bit RGB, `fit` the same in the model's size, `to_pixels` float32
(3, R, R) in [-1, 1], which `model/processor.py` puts into batches.

Pixels equal those of transformers' SiglipImageProcessor with its Pillow backend, except that EXIF orientation is
applied, that 16-bit grey keeps its contrast, and that colours premultiplied by alpha are composited as all others are.
"""

import os
import re
from collections.abc import Callable
from typing import BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps

from model.common import FILE_LIMIT, UserError, open_regular, shown

Picture = Image.Image | np.ndarray | str | os.PathLike | BinaryIO
Drawn = Picture | Callable[[], Picture]  # a function that draws or opens one

# Formats that Pillow decodes by itself; other readers of it start programs (EPS: Ghostscript).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")


def load_image(source: Drawn, draft: int | None = None) -> Image.Image:
    """One picture as upright 8-bit RGB; a Pillow image that is so already is returned itself.

    source: a path, an open file, a Pillow image, a uint8 array (height, width) or (height, width, 1, 3 or 4), or a
    function that returns one of these. Of an animation the first frame is taken. Transparent pixels are composited on
    white, as transformers does since 5.23. Of 16 bits the upper eight are kept.
    draft: let the JPEG decoder scale down by 2, 4 or 8 as long as both sides have at least `draft` pixels. This is
    faster for large photographs, but not bit-equal, see DRAFT in `model/processor.py`.
    Raises UserError, naming the file, for a broken picture.
    """
    source = source() if callable(source) else source
    if isinstance(source, str | os.PathLike):
        if re.match("(https?|ftp|s3|gs|file):/", os.fspath(source)):
            raise UserError(f"{shown(source)}: is a URL, expected a file: download it first")
        with open_regular(source, FILE_LIMIT) as file:
            return _decode(file, shown(source), draft)
    if hasattr(source, "read"):
        return _decode(source, shown(getattr(source, "name", "the open file")), draft)
    return _decode(source, shown(getattr(source, "filename", "") or f"the {type(source).__name__} passed as a picture"))


def _decode(source: Image.Image | np.ndarray | BinaryIO, name: str, draft: int | None = None) -> Image.Image:
    try:
        if isinstance(source, Image.Image):
            return _to_rgb(source)
        if isinstance(source, np.ndarray):
            return _to_rgb(_from_array(source))
        if not hasattr(source, "read"):
            raise UserError("expected a file, a Pillow image or a uint8 array (height, width, 3)")
        with Image.open(source, formats=FORMATS) as image:
            if draft is not None:
                image.draft(None, (draft, draft))
            return _to_rgb(image)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except Image.UnidentifiedImageError:
        problem = f"not a picture in a format read here ({', '.join(FORMATS)}): save it as PNG or JPEG"
    except Image.DecompressionBombError as error:
        problem = f"refused as a decompression bomb ({error}): scale the picture down with a tool you trust"
    except Exception as error:  # hostile files make Pillow's readers raise nearly anything
        problem = f"cannot be decoded ({type(error).__name__}: {shown(str(error))}): download or save the picture again"
    raise UserError(f"{name}: {problem}")


def fit(source: Drawn, size: int, draft: int | None = None, square: bool = False) -> np.ndarray:
    """One picture, see `load_image`, as uint8 (size, size, 3): bicubic on 8 bits, aspect not kept.

    An array that is so already is returned itself. square: `pad_to_square` first. Raises UserError as `load_image`.
    """
    source = source() if callable(source) else source
    if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.shape == (size, size, 3):
        return source
    image = load_image(source, draft)
    image = (pad_to_square(image) if square else image).resize((size, size), Image.Resampling.BICUBIC)
    planes = b"".join(image.tobytes("raw", band) for band in "RGB")  # Pillow separates them fastest
    return np.frombuffer(planes, np.uint8).reshape(3, size, size).transpose(1, 2, 0)


def to_pixels(source: Drawn, size: int, out: np.ndarray | None = None) -> torch.Tensor:
    """One picture as float32 (3, size, size) in [-1, 1]: `fit`, then x/255·2-1. out: where to write it."""
    # by NumPy: several threads for so little work are slower where other programs share the cores
    pixels = np.divide(fit(source, size).transpose(2, 0, 1), 255, out=out, dtype=np.float32, order="C")
    pixels *= 2
    pixels -= 1
    return torch.from_numpy(pixels)


def pad_to_square(image: Image.Image) -> Image.Image:
    """The picture in the middle of a gray square of its longer side, as LLaVA and WINGS are trained."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), (127, 127, 127))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _to_rgb(image: Image.Image) -> Image.Image:
    if 0 in image.size:
        raise UserError(f"is {image.width}×{image.height} pixels: give a picture with at least one")
    image.load()  # while its file is open
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # else it would be copied
        image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        return _to_8_bits(image).convert("RGB")
    if image.mode in ("La", "RGBa"):  # premultiplied by alpha
        image = image.convert(image.mode.upper())
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Grey in 16 or 32 bits to mode L. Pillow's own conversion would turn values above 255 into white."""
    values = np.asarray(image)
    if image.mode == "F":
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 255):
            raise UserError("holds floats outside 0…255: scale them to that range, or save 8 bits")
        if values.max() <= 1 and (values % 1).any():
            raise UserError("holds floats from 0 to 1: multiply them by 255, or save 8 bits")
    elif image.mode == "I" and not (values.min() >= 0 and values.max() <= 65535):
        raise UserError("holds integers outside 0…65535: scale them to that range, or save 8 bits")
    # the depth of mode I is unknown: 16 bits from a file, 8 bits after Pillow's conversion from grey
    is_wide = image.mode.startswith("I;") or image.mode == "I" and values.max() > 255
    grey = (values >> 8 if is_wide else values).astype(np.uint8)  # as Pillow does for 16-bit colour
    transparent = image.info.get("transparency")  # the one grey that is transparent, with all its bits
    if isinstance(transparent, int) and image.mode != "F":
        grey[values == transparent] = 255
    return Image.fromarray(grey)


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        raise UserError(
            f"is {array.dtype} {array.shape}, expected uint8 (height, width) or (height, width, 1, 3 or 4): "
            "scale it to 0…255 and put the channels last"
        )
    return Image.fromarray(array[..., 0] if array.shape[2:] == (1,) else array)

"""Pictures: from a file, a Pillow image or an array to the pixels that the vision tower takes.

In: a `Picture`. Out: `load_image` gives upright 8-bit RGB, `fit` the same in the model's size, `to_pixels` float32
(3, R, R) in [-1, 1], which `model/processor.py` puts into batches.

Pixels equal those of transformers' SiglipImageProcessor with its Pillow backend, except that EXIF orientation is
applied, that colours premultiplied by alpha are composited as all others are, and that grey of more than 8 bits, which
would be clipped to white, is refused.
"""

import os
from collections.abc import Callable
from typing import BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps

from model.common import UserError, shown

Picture = Image.Image | np.ndarray | str | os.PathLike | BinaryIO
Drawn = Picture | Callable[[], Picture]  # a function that draws or opens one

# Formats that Pillow decodes by itself; other readers of it start programs (EPS: Ghostscript).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")


def load_image(source: Drawn, draft: int | None = None) -> Image.Image:
    """One picture as upright 8-bit RGB; a Pillow image that is so already is returned itself.

    source: a path, an open file, a Pillow image, a uint8 array (height, width) or (height, width, 1, 3 or 4), or a
    function that returns one of these. Of an animation the first frame is taken. Transparent pixels are composited on
    white, as transformers does since 5.23. Of 16 bits of colour the upper eight are kept.
    draft: let the JPEG decoder scale down by 2, 4 or 8 as long as both sides have at least `draft` pixels. This is
    faster for large photographs, but not bit-equal, see DRAFT in `model/processor.py`.
    Raises UserError, naming the file, for a broken picture.
    """
    source = source() if callable(source) else source
    is_path = isinstance(source, str | os.PathLike)
    name = source if is_path else getattr(source, "name", "") or getattr(source, "filename", "")
    try:
        if isinstance(source, np.ndarray):
            return _to_rgb(_from_array(source))
        if isinstance(source, Image.Image):
            return _to_rgb(source)
        with Image.open(source, formats=FORMATS) as image:
            if draft is not None:
                image.draft(None, (draft, draft))
            return _to_rgb(image)
    except UserError as error:
        problem = str(error)
    except FileNotFoundError:
        problem = "not found: check the path"
    except Image.UnidentifiedImageError:
        problem = f"not a picture in a format read here ({', '.join(FORMATS)}): save it as PNG or JPEG"
    except Image.DecompressionBombError as error:
        problem = f"refused as a decompression bomb ({error}): scale the picture down with a tool you trust"
    except Exception as error:  # hostile files make Pillow's readers raise nearly anything
        problem = f"cannot be read ({type(error).__name__}: {shown(str(error))}): download or save the picture again"
    raise UserError(f"{shown(name or f'the {type(source).__name__} passed as a picture')}: {problem}")


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


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or array.shape[2:] not in ((), (1,), (3,), (4,)):
        raise UserError(f"is {array.dtype} {array.shape}, expected uint8 (height, width, 3), from 0 to 255")
    return Image.fromarray(array[..., 0] if array.shape[2:] == (1,) else array)


def _to_rgb(image: Image.Image) -> Image.Image:
    if 0 in image.size:
        raise UserError("has no pixels: give another picture")
    image.load()  # while its file is open
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # else it would be copied
        image = ImageOps.exif_transpose(image)
    if image.mode[0] in "FI":
        raise UserError("holds 16 or 32 bits of grey: save it with 8 bits")
    if image.mode in ("La", "RGBa"):  # premultiplied by alpha
        image = image.convert(image.mode.upper())
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")

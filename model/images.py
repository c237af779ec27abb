"""Pictures: from a file, a Pillow image or an array to the pixels that the vision tower takes.

Pixels equal those of transformers' SiglipImageProcessor with its Pillow backend, except that EXIF
orientation is applied, and that grey of more than 8 bits, which would be clipped to white, is
refused.
"""

import os
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from model.common import UserError, shown

# a path, an open file, a Pillow image, a uint8 array (height, width) or (height, width, 3 or 4), or
# a function that draws or opens one of these
Picture = Image.Image | np.ndarray | str | os.PathLike | BinaryIO | Callable[[], Any]

# Formats that Pillow decodes by itself; other readers of it start programs (EPS: Ghostscript).
FORMATS = tuple("JPEG PNG WEBP GIF BMP TIFF PPM JPEG2000".split())
# of a picture, 1.4 GB with alpha, whose copies take 16 bytes each; above this Pillow warns
MOST_PIXELS = 89_000_000


def load_image(source: Picture) -> Image.Image:
    """One picture as upright 8-bit RGB; a Pillow image that is so already is returned itself.

    Of an animation the first frame is taken. Transparent pixels are composited on white, as
    transformers does since 5.23. Of 16 bits of colour the upper eight are kept. Raises UserError,
    naming the file, for a broken picture.
    """
    opened: Any = source() if callable(source) else source
    name = opened if isinstance(opened, str | os.PathLike) else getattr(opened, "name", "")
    try:
        if isinstance(opened, np.ndarray):
            if opened.dtype != np.uint8:
                raise ValueError(f"{opened.dtype}, expected uint8")
            return _to_rgb(Image.fromarray(opened))
        if isinstance(opened, Image.Image):
            return _to_rgb(opened)
        with Image.open(opened, formats=FORMATS) as image:
            return _to_rgb(image)
    except FileNotFoundError:
        problem = "not found: check the path"
    except Exception as error:  # hostile files make Pillow's readers raise nearly anything
        problem = (
            f"cannot be read ({type(error).__name__}: {shown(error)}): save it again as one of "
            f"{', '.join(FORMATS)}"
        )
    raise UserError(
        f"{shown(name or f'the {type(opened).__name__} passed as a picture')}: {problem}"
    )


def picture_array(source: Picture, size: int) -> np.ndarray:
    """One picture, see `load_image`, as uint8 (size, size, 3): bicubic on 8 bits, aspect not kept.

    An array that is so already is returned itself. Raises UserError as `load_image`.
    """
    shape = size, size, 3
    if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.shape == shape:
        return source
    return np.asarray(load_image(source).resize((size, size), Image.Resampling.BICUBIC))


def to_pixels(source: Picture, size: int) -> Tensor:
    """One picture as float32 (3, size, size) in [-1, 1]: x/255·2 − 1 of `picture_array`."""
    # by NumPy: several threads for so little work are slower where other programs share the cores
    pixels = picture_array(source, size).transpose(2, 0, 1)
    pixels = np.divide(pixels, 255, dtype=np.float32, order="C")
    return torch.from_numpy(pixels * np.float32(2) - np.float32(1))


def preprocessing(size: int) -> dict[str, Any]:
    """What `to_pixels` does, by the names of transformers' image processors."""
    return {
        "size": {"height": size, "width": size},
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,  # bicubic
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def pad_to_square(image: Image.Image) -> Image.Image:
    """The picture in the middle of a gray square of its longer side, as LLaVA trains.
    Raises UserError."""
    side = max(image.size)
    if side**2 > 4 * MOST_PIXELS:  # as much memory
        raise UserError(
            f"a picture of {image.width} × {image.height} pixels is too long to be padded: crop it"
        )
    square = Image.new("RGB", (side, side), (127, 127, 127))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(
            f"{image.width} × {image.height} pixels, more than {MOST_PIXELS:,}: scale it down"
        )
    image.load()  # while its file is open
    if image.mode[0] in "FI" or 0 in image.size:
        raise ValueError("16 or 32 bits of grey, or no pixels")
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # else it would be copied
        image = ImageOps.exif_transpose(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")

"""Pictures for a page: arrays as PNG data URIs, with nothing but zlib."""

import base64
import struct
import zlib
from typing import Any

import numpy as np
import torch

from metasketch.errors import ArgumentError

Array = np.ndarray[Any, Any]

MAX_SIDE = 128
"""Pixels of a picture's longer side: larger ones are averaged down."""

_COLOUR_TYPE = {1: 0, 3: 2, 4: 6}
"""PNG's numbers for grey, RGB, and RGB with transparency, by channels."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def data_uri(picture: Any, max_side: int = MAX_SIDE) -> str:
    """A picture as a data URI that an ``<img>`` takes.

    Args:
        picture: a tensor or array (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels, or
            whatever NumPy reads as one (PIL images). Whole numbers from 0 to 255 and fractions
            from 0 to 1 mean what they mean everywhere; other values are stretched from their
            least to their largest.
        max_side: larger pictures are averaged down to this.
    """
    return "data:image/png;base64," + base64.b64encode(png(as_bytes(picture, max_side))).decode()


def as_bytes(picture: Any, max_side: int = MAX_SIDE) -> Array:
    """A picture as (H, W, C) of uint8, C one of 1, 3, 4."""
    if hasattr(picture, "getbands") and hasattr(picture, "convert"):  # PIL: palettes, CMYK, bits
        kept = picture.mode in ("L", "RGB", "RGBA")
        picture = picture if kept else picture.convert("RGBA" if "A" in picture.mode else "RGB")
    if isinstance(picture, torch.Tensor):
        given = picture.detach().cpu()
        picture = given.float().numpy() if given.is_floating_point() else given.numpy()
    try:
        pixels = _channels_last(np.asarray(picture))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"a {type(picture).__name__} is not a picture: {error}") from None
    if not np.isfinite(pixels).all():
        raise ArgumentError("a picture holds NaN or infinity")
    return np.rint(_averaged(_to_255(pixels), max_side)).astype(np.uint8)


def png(pixels: Array) -> bytes:
    """(H, W, C) of uint8 as a PNG file."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(_filtered(pixels), 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(content)) + name + content
        + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )  # fmt: skip


def _channels_last(array: Array) -> Array:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"it holds {array.dtype}, not numbers")
    if array.ndim == 2:
        array = array[None]
    if array.ndim == 3 and array.shape[0] in _COLOUR_TYPE and array.size:
        return np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] in _COLOUR_TYPE and array.size:
        return array
    raise ValueError(
        f"it has shape {array.shape}; give (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels"
    )


def _to_255(pixels: Array) -> Array:
    if pixels.dtype == np.uint8:
        return pixels.astype(np.float64)
    values = pixels.astype(np.float64)
    low, high = values.min(), values.max()
    if pixels.dtype.kind in "iu" and low >= 0 and high <= 255:
        return values
    if low < 0 or high > 1:
        values = (values - low) / max(high - low, np.finfo(np.float64).tiny)
    scaled: Array = 255 * values
    return scaled


def _averaged(pixels: Array, max_side: int) -> Array:
    """Means over squares, so that neither side is longer than ``max_side``."""
    height, width, channels = pixels.shape
    square = -(-max(height, width) // max_side)
    if square == 1:
        return pixels
    grown = np.pad(pixels, ((0, -height % square), (0, -width % square), (0, 0)), mode="edge")
    tiles = grown.reshape(grown.shape[0] // square, square, -1, square, channels)
    means: Array = tiles.mean((1, 3))
    return means


def _filtered(pixels: Array) -> bytes:
    """Rows as PNG wants them, each as its differences from the neighbours that predict it best."""
    height, width, channels = pixels.shape
    row = pixels.astype(np.int16)
    left, above, corner = np.zeros_like(row), np.zeros_like(row), np.zeros_like(row)
    left[:, 1:], above[1:], corner[1:, 1:] = row[:, :-1], row[:-1], row[:-1, :-1]
    guesses = (np.zeros_like(row), left, above, (left + above) // 2, _paeth(left, above, corner))
    differences = np.stack([(row - guess).astype(np.uint8) for guess in guesses])
    differences = differences.reshape(len(guesses), height, width * channels)
    # The usual heuristic: the filter whose differences, read as signed, are smallest in sum.
    best = np.abs(differences.view(np.int8).astype(np.int16)).sum(2, dtype=np.int64).argmin(0)
    chosen = differences[best, np.arange(height)]
    return np.concatenate([best[:, None].astype(np.uint8), chosen], axis=1).tobytes()


def _paeth(left: Array, above: Array, corner: Array) -> Array:
    """Of three neighbours the nearest to ``left + above - corner``; PNG breaks ties in order."""
    from_left, from_above = np.abs(above - corner), np.abs(left - corner)
    from_corner = np.abs(left + above - 2 * corner)
    nearer = np.where(from_above <= from_corner, above, corner)
    use_left = (from_left <= from_above) & (from_left <= from_corner)
    return np.where(use_left, left, nearer)

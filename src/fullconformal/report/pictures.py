"""Many small pictures as one: a sheet of tiles that a page carries as text."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Four thirds of this travel as base64, which leaves a page of 1,000 objects below 2 MB.
SHEET_BYTES = 1_200_000


class Sheet(NamedTuple):
    """A picture of ``columns`` × ``rows`` tiles in reading order, each ``width`` × ``height``, as a data URI."""

    uri: str
    columns: int
    rows: int
    width: int
    height: int

    @property
    def style(self) -> str:
        """The sheet as a background, shown in whole multiples of its pixels where these are few."""
        zoom = max(1, 112 // max(self.width, self.height))
        width, height = self.width * zoom, self.height * zoom
        shrink = min(1.0, 112 / max(width, height))
        return (
            f".picture{{width:{width * shrink:.0f}px;height:{height * shrink:.0f}px;background-image:url({self.uri});"
            f"background-size:{100 * self.columns}% {100 * self.rows}%;"
            f"image-rendering:{'pixelated' if zoom > 1 else 'auto'}}}\n"
        )


def sheet(images: npt.ArrayLike, max_bytes: int = SHEET_BYTES) -> Sheet:
    """One sheet of the images (k, H, W), (k, H, W, channels) or (k, channels, H, W): lossless where it fits, else JPEG, else smaller."""
    from PIL import Image

    pixels = as_bytes(images)
    while True:
        k, height, width, channels = pixels.shape
        columns = int(np.ceil(np.sqrt(k)))
        rows = -(-k // columns)
        tiles = np.zeros((rows * columns, height, width, channels), dtype=np.uint8)
        tiles[:k] = pixels
        whole = tiles.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
        whole = whole.reshape(rows * height, columns * width, channels)
        picture = Image.fromarray(whole[:, :, 0] if channels == 1 else whole)
        for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 85, "subsampling": 0})):
            file = BytesIO()
            picture.save(file, format=kind, **options)
            if file.tell() <= max_bytes or (kind == "jpeg" and max(height, width) <= 8):
                uri = f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}"
                return Sheet(uri, columns, rows, width, height)
        pixels = _halved(pixels)


def as_bytes(images: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Images as bytes (k, H, W, 1 or 3), dark where the numbers are low; bytes stay as they are, others are stretched to 0…255."""
    pixels = np.asarray(images)
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim == 4 and pixels.shape[3] not in (1, 3, 4) and pixels.shape[1] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 1, 3)
    if pixels.ndim != 4 or pixels.shape[3] not in (1, 3, 4) or pixels.size == 0:
        raise ValueError(
            f"images must have shape (m, H, W), (m, H, W, channels) or (m, channels, H, W) with 1, 3 or 4 channels, "
            f"got shape {pixels.shape}; reshape them, for example images.reshape(-1, 28, 28)."
        )
    pixels = pixels[..., :3]  # without transparency
    if pixels.dtype == np.uint8:
        return pixels
    pixels = pixels.astype(np.float64)
    if not np.isfinite(pixels).all():
        raise ValueError("images hold NaN or infinite values; replace them, for example by np.nan_to_num(images).")
    low, high = float(pixels.min()), float(pixels.max())
    stretched: npt.NDArray[Any] = np.rint((pixels - low) * (255 / (high - low) if high > low else 0))
    return stretched.astype(np.uint8)


def _halved(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Images of half the height and width: means of blocks of four; an odd edge is cut."""
    k, height, width, channels = pixels.shape
    even = pixels[:, : max(height // 2 * 2, 1), : max(width // 2 * 2, 1)]
    down, across = max(height // 2, 1), max(width // 2, 1)
    blocks = even.reshape(k, down, min(height, 2), across, min(width, 2), channels)
    halved: npt.NDArray[np.uint8] = np.rint(blocks.mean(axis=(2, 4))).astype(np.uint8)
    return halved

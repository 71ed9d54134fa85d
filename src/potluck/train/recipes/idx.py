"""Owns MNIST's IDX files, plain or gzipped: finding, checking and reading them.

It returns numpy arrays.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from potluck.errors import DataError

Labelled = tuple[np.ndarray, np.ndarray]

_UNSIGNED_BYTES = 0x08
_HINT = "MNIST's files are train-images-idx3-ubyte and train-labels-idx1-ubyte (and t10k-…), plain or .gz"


def read_mnist(folder: Path) -> tuple[Labelled, Labelled | None]:
    """Images (count, height, width) and labels (count,) for training, and for testing where there are any."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}", hint=f"--data takes a folder. {_HINT}")
    training = _read_pair(folder, "train")
    if training is None:
        raise DataError(f"{folder} holds no MNIST files", hint=_HINT)
    test = _read_pair(folder, "t10k")
    if test is not None and test[0].shape[1:] != training[0].shape[1:]:
        raise DataError(
            f"in {folder} training images are {training[0].shape[1:]} and test images {test[0].shape[1:]}",
            hint="use files of one data set",
        )
    return training, test


def read(file: Path, *, dimensions: int) -> np.ndarray:
    """One IDX file of unsigned bytes with this many dimensions."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {file}: {error}", hint="download the file again") from error
    header_bytes = 4 + 4 * dimensions
    magic = struct.pack(">HBB", 0, _UNSIGNED_BYTES, dimensions)
    if raw[:4] != magic or len(raw) < header_bytes:
        raise DataError(
            f"{file} is not an IDX file of bytes in {dimensions} dimensions:"
            f" it starts with {raw[:4].hex(' ') or 'nothing'}, expected {magic.hex(' ')}",
            hint="is it another file, or compressed without .gz in its name?",
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:header_bytes])
    if len(raw) - header_bytes != math.prod(shape):
        raise DataError(
            f"{file} is damaged: {len(raw) - header_bytes:,} bytes for {' x '.join(map(str, shape))}",
            hint="download the file again",
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header_bytes).reshape(shape)


def _read_pair(folder: Path, prefix: str) -> Labelled | None:
    images_file = _find(folder, f"{prefix}-images", "idx3-ubyte")
    labels_file = _find(folder, f"{prefix}-labels", "idx1-ubyte")
    if images_file is None and labels_file is None:
        return None
    if images_file is None or labels_file is None:
        missing = f"{prefix}-images-idx3-ubyte" if images_file is None else f"{prefix}-labels-idx1-ubyte"
        raise DataError(f"{folder} has no {missing}", hint=_HINT)
    images, labels = read(images_file, dimensions=3), read(labels_file, dimensions=1)
    if len(images) != len(labels) or not len(labels):
        raise DataError(
            f"{images_file.name} has {len(images):,} images and {labels_file.name} {len(labels):,} labels",
            hint="use the two files of one data set",
        )
    if labels.max() > 9:
        raise DataError(f"{labels_file} has the label {labels.max()}", hint="labels are the digits 0 to 9")
    return images, labels


def _find(folder: Path, stem: str, kind: str) -> Path | None:
    """The file in the folder itself or where torchvision puts it, in the usual spellings."""
    for place in (folder, folder / "raw", folder / "MNIST" / "raw"):
        for separator in "-.":
            for ending in ("", ".gz"):
                file = place / f"{stem}{separator}{kind}{ending}"
                if file.is_file():
                    return file
    return None

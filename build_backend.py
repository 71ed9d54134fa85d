"""Builds Potluck with setuptools, and adds one file to an editable install.

pip install -e puts no code into the environment, only the path of this folder. torch reads its entry points
from the environment, so `import torch` would fail once the folder has moved. The module that the entry point names
is therefore installed as a file (see src/_potluck_torch.py).
"""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

HOOK = Path(__file__).parent / "src" / "_potluck_torch.py"


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel of an editable install (PEP 660)."""
    name = str(build_meta.build_editable(wheel_directory, config_settings, metadata_directory))
    add(Path(wheel_directory) / name, HOOK)
    return name


def add(wheel: Path, file: Path) -> None:
    """Put a file at the top of a wheel, and its hash into the wheel's record."""
    content = file.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as whole:
        whole.writestr(file.name, content)
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                data = f"{file.name},sha256={digest},{len(content)}\n".encode() + data
            whole.writestr(item, data)
    os.replace(new, wheel)

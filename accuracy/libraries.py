"""Libraries that only measured models need, from a folder of their own: `make accuracy` fills it.

timm is pure Python. Of torchvision only the .py files are taken: its binaries want CUDA, and are
of no use to tensors without memory.

    python -m accuracy.libraries a-wheel.whl a-folder    unpack the .py files of a wheel

OOMPH_ACCURACY_LIBRARIES names another folder.
"""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("OOMPH_ACCURACY_LIBRARIES", Path(sys.prefix) / "accuracy"))
# diffusers and what it imports, which `make recipes` installs.
FOLDER_OF_RECIPES = Path(
    os.environ.get("OOMPH_RECIPES_LIBRARIES", Path(sys.prefix) / "recipes-libraries")
)
_kept_alive: list[Any] = []


def unpack_python(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])


def import_timm() -> Any:
    """timm, as it was when the rows were measured. Raises ImportError if it is not there."""
    _prepare()
    return importlib.import_module("timm")


def import_torchvision() -> Any:
    """torchvision's models. Raises ImportError if they are not there."""
    _prepare()
    return importlib.import_module("torchvision.models")


def import_diffusers() -> Any:
    """diffusers' models. Raises ImportError if they are not there."""
    if str(FOLDER_OF_RECIPES) not in sys.path:
        sys.path.append(str(FOLDER_OF_RECIPES))
    return importlib.import_module("diffusers.models")


def _prepare() -> None:
    import torch

    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if not _kept_alive:  # torchvision registers shapes for these, which its binaries define
        library = torch.library.Library("torchvision", "FRAGMENT")
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            library.define(name + boxes)
        _kept_alive.append(library)


if __name__ == "__main__":
    unpack_python(Path(sys.argv[1]), Path(sys.argv[2]))

"""The verb environment: what an issue about oomph has to say of the machine, without secrets."""

from __future__ import annotations

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGES = (
    *("torch", "transformers", "accelerate", "lightning", "pytorch-lightning", "peft"),
    *("deepspeed", "bitsandbytes", "torchao", "nvidia-ml-py", "numpy"),
)
# Settings that change an answer. No other variable is read: they may hold names and tokens.
_SETTINGS = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_ORDER", "NVIDIA_TF32_OVERRIDE", "OOMPH_REHEARSAL_LIMIT", "OOMPH_WATCHING"),
)


def environment() -> Mapping[str, str]:
    """Return versions, GPUs, driver and settings, in the order in which they are shown."""
    import os
    import platform

    import oomph

    found = {
        "oomph": oomph.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **_installed(),
        **_gpus(),
    }
    return found | {name: os.environ[name] for name in _SETTINGS if name in os.environ}


def _installed() -> dict[str, str]:
    from importlib.metadata import distributions

    found = {one.metadata["Name"].lower(): one.version for one in distributions()}
    shown = {name: found[name] for name in _PACKAGES if name in found}
    return {"torch": "not installed"} | shown


def _gpus() -> dict[str, str]:
    from oomph.units import format_bytes
    from oomph.verbs.gpus import gpus

    machine = gpus()
    found = {"driver": machine.driver_version or "unknown"}
    for gpu in machine.gpus:
        size = "unknown memory" if gpu.total_bytes is None else format_bytes(gpu.total_bytes)
        found[f"GPU {gpu.index}"] = f"{gpu.name or 'unknown name'}, {size}"
    if machine.problem is not None:
        found["GPUs"] = machine.problem
    return found

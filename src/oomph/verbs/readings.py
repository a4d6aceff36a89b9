"""The verbs that read hardware: gpu_utilisation, gpus, free_gpus, and the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oomph.records.catalog import Found, GpuModel
    from oomph.records.machine import GpuReading, Machine
    from oomph.sensing.free import FreeGpus


def gpu_utilisation(device: Any = None) -> GpuReading:
    """How full and how busy the GPU is that torch calls `device`, and whose memory it holds.

    `device` is what torch takes: 1, "cuda:1" or a torch.device. Without one it is torch's
    current device if CUDA runs in this process, else the first that CUDA would show. It never
    raises: what could not be read is None, and `problem` says why. CUDA is not initialised.
    """
    from oomph.sensing.reading import read_gpu

    return read_gpu(device)


def print_gpu_utilisation(device: Any = None) -> None:
    """Print one line on the GPU that torch calls `device`, from inside a training script.

    It never raises, whatever is wrong with the driver or with standard output. What could not
    be read is explained once; later lines only name it.
    """
    try:
        from oomph.showing.line import print_utilisation

        print_utilisation(gpu_utilisation(device))
    except Exception:  # noqa: BLE001, S110 - a closed or full log: there is nowhere to say it,
        pass  # and it must not end a training run


def gpus(*, visible: bool = False, emulate: str | None = None) -> Machine:
    """All GPUs of this machine (or of an emulated one) and who is on them.

    With `visible`, only those that CUDA_VISIBLE_DEVICES shows, in CUDA's order.
    """
    machine = _emulated(emulate) if emulate is not None else _read()
    if not visible:
        return machine
    from oomph.sensing.mapping import only_visible

    return only_visible(machine)


def _read() -> Machine:
    from oomph.sensing.gpus import read_machine

    return read_machine()


def _emulated(description: str) -> Machine:
    import time

    from oomph.sensing.emulated import emulated_machine

    return emulated_machine(description, time.time())


def free_gpus(machine: Machine) -> FreeGpus:
    """The GPUs with nobody on them."""
    from oomph.sensing.free import find_free

    return find_free(machine)


def catalog() -> tuple[GpuModel, ...]:
    """The GPUs that oomph knows without having them."""
    from oomph.sensing.catalog import all_models

    return all_models()


def catalog_sources() -> Mapping[str, str]:
    """What the tags stand for that the catalogue gives as the source of a figure."""
    from oomph.sensing.catalog import sources

    return sources()


def find_gpu(name: str) -> Found:
    """The GPU of the catalogue that a person means by `name`. Raises UnknownGpu."""
    from oomph.sensing.catalog import find

    return find(name)

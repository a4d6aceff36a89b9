"""The verbs that read hardware: gpu_utilisation, gpus, free_gpus, and the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oomph.records.gpu_model import Found, GpuModel
    from oomph.records.machine import GpuReading, Machine
    from oomph.sensing.mapping import FreeGpus


def gpu_utilisation(device: Any = None) -> GpuReading:
    """Return how full and how busy the GPU is that torch calls `device`, and who holds its memory.

    `device` is what torch accepts: 1, "cuda:1" or a torch.device. The default is torch's current
    device if CUDA runs in this process, else the first that CUDA would show. It never raises: what
    could not be read is None, and `problem` says why. CUDA is not initialised.
    """
    from oomph.sensing.reading import read_gpu

    return read_gpu(device)


def print_gpu_utilisation(device: Any = None) -> None:
    """Print one line about the GPU that torch calls `device`, from inside a training script.

    It never raises, whatever is wrong with the driver or with standard output. What could not
    be read is explained once; later lines only name it.
    """
    try:
        from oomph.showing.line import print_utilisation

        print_utilisation(gpu_utilisation(device))
    except Exception:  # noqa: BLE001, S110 - a closed or full log: there is nowhere to say it,
        pass  # and it must not end a training run


def gpus(*, visible: bool = False, emulate: str | None = None) -> Machine:
    """Return all GPUs of this machine (or of an emulated one) and who is using them.

    With `visible`, return only those that CUDA_VISIBLE_DEVICES shows, in CUDA's order.
    """
    machine = _emulated(emulate) if emulate is not None else _read()
    if not visible:
        return machine
    from oomph.sensing.mapping import only_visible

    return only_visible(machine)


def _read() -> Machine:
    from oomph.sensing.devices import read_machine

    return read_machine()


def _emulated(description: str) -> Machine:
    import time

    from oomph.sensing.devices import emulated_machine

    return emulated_machine(description, time.time())


def free_gpus(machine: Machine) -> FreeGpus:
    """Return the GPUs that nobody is using."""
    from oomph.sensing.mapping import find_free

    return find_free(machine)


def catalog() -> tuple[GpuModel, ...]:
    """Return the GPUs that oomph knows from datasheets, whether or not they are here."""
    from oomph.sensing.catalog import all_models

    return all_models()


def catalog_sources() -> Mapping[str, str]:
    """Return what each source tag in the catalogue stands for."""
    from oomph.sensing.catalog import sources

    return sources()


def find_gpu(name: str) -> Found:
    """Return the catalogue's GPU that a person means by `name`. Raises UnknownGpu."""
    from oomph.sensing.catalog import find

    return find(name)

"""Variant -> the command line that starts the planned processes on one or several machines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oomph.errors import UsageError
from oomph.planning.export.nodes import Nodes, spread
from oomph.records.workload import Variant

_SEGMENTS = "expandable_segments:True"
# The name since torch 2.9, and the one before, which newer releases read where the new is not set.
_ALLOC_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command and the environment that it needs."""

    environment: Mapping[str, str]
    arguments: tuple[str, ...]

    @property
    def shell(self) -> str:
        """The same as one line for a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.arguments)])

    def __str__(self) -> str:
        return self.shell


def torchrun_command(
    variant: Variant,
    script: str,
    arguments: Sequence[str] = (),
    *,
    gpus_per_node: int | None = None,
    endpoint: str | None = None,
    threads_per_gpu: int = 1,
) -> Command:
    """torchrun with the planned number of processes; `endpoint` is the first machine's host:port.

    threads_per_gpu is torchrun's own default; more of them serve an optimizer on the host.
    """
    nodes = spread(variant.num_gpus, gpus_per_node)
    if nodes.num_nodes > 1 and endpoint is None:
        raise UsageError(
            f"{nodes.num_nodes} machines need a place to meet",
            because="each of them runs torchrun, and they must find each other",
            attempt='endpoint="FIRST-HOST:29500"',
        )
    start = ["torchrun", *launch_options(nodes, endpoint)]
    return Command(
        environment=environment_of(variant, threads_per_gpu),
        arguments=(*start, *script_words(script, arguments)),
    )


def launch_options(nodes: Nodes, endpoint: str | None) -> list[str]:
    """Torchrun's own options. Alone on a machine it takes a free port itself."""
    each = f"--nproc-per-node={nodes.num_gpus_each}"
    if nodes.num_nodes == 1:
        return ["--standalone", each]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    return [f"--nnodes={nodes.num_nodes}", each, *meeting]


def environment_of(variant: Variant, threads_per_gpu: int) -> dict[str, str]:
    """What must be set before the first process starts."""
    segments = dict.fromkeys(_ALLOC_NAMES, _SEGMENTS) if variant.expandable_segments else {}
    return {
        **segments,
        "OMP_NUM_THREADS": str(threads_per_gpu),
        # Without it a restart of torchrun reads the addresses of the run before, and hangs
        # (https://github.com/pytorch/pytorch/issues/135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def script_words(script: str, arguments: Sequence[str]) -> list[str]:
    """The script and its arguments; a name that begins with a dash is no option of torchrun's."""
    words = [script, *arguments]
    if not script or any("\0" in word for word in words):
        raise UsageError(
            "the script's name or an argument cannot be a word of a command line",
            because="it is empty, or has a zero byte in it",
            attempt='to_torchrun("train.py")',
        )
    return [f"./{script}" if script.startswith("-") else script, *arguments]

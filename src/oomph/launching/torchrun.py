"""Variant -> the torchrun command that starts the planned processes, on one or several machines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks.expandable_segments import ALLOCATOR_VARIABLES, SEGMENTS

MEETING = "FIRST-HOST:29500"  # where machines meet, for the user to fill in


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Machines with the same number of GPUs each."""

    num_nodes: int
    num_gpus_each: int


def spread(variant: Variant, gpus_per_node: int | None = None) -> Nodes:
    """Use one machine if all GPUs fit on it, else as many machines as the GPUs fill evenly.

    A machine has as many as the plan says, unless the caller says otherwise.
    """
    num_gpus = variant.num_gpus
    gpus_per_node = variant.gpus_per_node if gpus_per_node is None else gpus_per_node
    if 0 < num_gpus <= gpus_per_node:
        return Nodes(num_nodes=1, num_gpus_each=num_gpus)
    if gpus_per_node < 1 or num_gpus % gpus_per_node:
        raise UsageError(
            f"{num_gpus} GPUs cannot be spread over machines of {gpus_per_node}",
            because="every machine must have equally many, or the batch would change",
            attempt="a plan whose number of GPUs is a multiple of a machine's",
        )
    return Nodes(num_nodes=num_gpus // gpus_per_node, num_gpus_each=gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command and the environment it needs."""

    environment: Mapping[str, str]
    arguments: tuple[str, ...]

    @property
    def shell(self) -> str:
        """Return the command as one line for a shell."""
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
    """Return the torchrun command for the planned processes.

    endpoint is the first machine's host:port. threads_per_gpu defaults to torchrun's own value;
    more threads help an optimizer on the host.
    """
    nodes = spread(variant, gpus_per_node)
    if nodes.num_nodes > 1 and endpoint is None:
        raise UsageError(
            f"{nodes.num_nodes} machines need a place to meet",
            because="each of them runs torchrun, and they must find each other",
            attempt=f'endpoint="{MEETING}"',
        )
    start = ["torchrun", *launch_options(nodes, endpoint)]
    return Command(
        environment=environment_of(variant, threads_per_gpu),
        arguments=(*start, *script_words(script, arguments)),
    )


def launch_options(nodes: Nodes, endpoint: str | None) -> list[str]:
    """Return torchrun's own options. On a single machine torchrun picks a free port itself."""
    each = f"--nproc-per-node={nodes.num_gpus_each}"
    if nodes.num_nodes == 1:
        return ["--standalone", each]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    return [f"--nnodes={nodes.num_nodes}", each, *meeting]


def environment_of(variant: Variant | None, threads_per_gpu: int) -> dict[str, str]:
    """Return the variables that must be set before the first process starts."""
    is_growing = variant is not None and variant.expandable_segments
    segments = dict.fromkeys(ALLOCATOR_VARIABLES, SEGMENTS) if is_growing else {}
    return {
        **segments,
        "OMP_NUM_THREADS": str(threads_per_gpu),
        # Without this, a restarted torchrun reads the addresses of the previous run and hangs
        # (https://github.com/pytorch/pytorch/issues/135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def script_words(script: str, arguments: Sequence[str]) -> list[str]:
    """Return the script and its arguments; a name with a leading dash must not become an option."""
    words = [script, *arguments]
    if not script or any("\0" in word for word in words):
        raise UsageError(
            "the script's name or an argument cannot be a word of a command line",
            because="it is empty, or has a zero byte in it",
            attempt='to_torchrun("train.py")',
        )
    return [f"./{script}" if script.startswith("-") else script, *arguments]


def split_of(variant: Variant) -> str:
    """Return how a batch is split, for a comment in a script."""
    return (
        f"{variant.micro_batch} examples at a time x {variant.accumulation} times x"
        f" {variant.num_gpus} GPUs = {variant.batch_size} for each step of the optimizer"
    )

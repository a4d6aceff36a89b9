"""GpuModel, Variant -> the links that its collectives use: inside a machine, and between machines.

Inside a machine: NVLink if the GPU has it, else PCIe. Between machines: the network that the user
names; no datasheet of a GPU describes it. In a ring over several machines the slower of the two
decides: of the GPUs of a group on one machine, each hands on a share of what the group sends.
"""

# Not modelled: the GPU bandwidth that communication takes while it runs beside kernels, switches
# that reduce on the way, networks that are oversubscribed, and a latency that grows with the number
# of machines.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from oomph.records.gpu_model import GpuModel
from oomph.records.workload import GPUS_PER_NODE, Variant, casts_parameters, grid_of

# Collectives that overlap with kernels until something waits for them.
COMMUNICATION = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
# Collectives inside of layers that several GPUs share: the next kernel waits for them.
IN_LAYERS = {name: f"{name}_in_layers" for name in sorted(COMMUNICATION)}
_IN_LAYERS = frozenset(IN_LAYERS.values())

# Bytes per second of one lane in one direction, after line coding (PCI-SIG: 8, 16, 32 and 64 GT/s;
# 128 of 130 bits are data). The catalogue has no older generation.
_PCIE_LANE = {"3.0": 985e6, "4.0": 1969e6, "5.0": 3938e6, "6.0": 7563e6}

# Of the datasheet. nvlink: 230 to 250 GB/s of 300 between 8 A100s; pcie: 35 to 45 of 63 between 8
# H100s (https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests), 28 between 8 RTX 5090s
# (https://github.com/NVIDIA/nccl/issues/1639). rdma: 180 GB/s of 200 between 2 machines of 8 A100s
# on RoCE (Oracle's tutorial of nccl-tests for BM.GPU4.8). tcp: without it, the host copies:
# judgement.
_OF_SHEET = {"nvlink": 0.78, "pcie": 0.50, "rdma": 0.90, "tcp": 0.60}
# A collective of a few bytes. One machine: 42 us for 8 bytes on PCIe
# (https://github.com/NVIDIA/nccl/issues/1530), less on NVLink: judgement. Several: an all-reduce of
# 32 KiB among 4 machines of 8 takes 69 us (stas00/ml-engineering, network/benchmarks).
_ON_ONE_MACHINE_S, _ON_SEVERAL_S = 30e-6, 69e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The slowest connection that a group of GPUs uses."""

    kind: Literal["nvlink", "pcie", "rdma", "tcp"]
    bytes_per_s: float  # per GPU, in one direction, from the datasheet
    start_s: float = _ON_ONE_MACHINE_S

    @property
    def reached_bytes_per_s(self) -> float:
        """Return what a collective reaches."""
        return self.bytes_per_s * _OF_SHEET[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The link of each group that a GPU is in; None if there is none, or it is unknown."""

    shards: Link | None = None  # GPUs that a model is sharded among
    copies: Link | None = None  # GPUs with the same shard
    layers: Link | None = None  # GPUs that share each layer

    def of(self, name: str) -> Link | None:
        """Return the link of a collective, by the name of its op."""
        if name in _IN_LAYERS:  # the norm of gradients is summed so, even without such layers
            return self.layers or self.shards or self.copies
        return self.copies if name == "all_reduce" else self.shards


NO_LINKS = Links()


def is_in_layers(name: str) -> bool:
    """Return whether an op is a collective that the next kernel waits for."""
    return name in _IN_LAYERS


def links_of(model: GpuModel, how: Variant) -> Links:
    """Return the links of a variant's groups. Ranks that share layers are neighbours."""
    copies, shards = grid_of(how)
    apart = how.tensor_parallel
    per_node = how.gpus_per_node
    return Links(
        layers=_link(model, how.tensor_parallel, 1, per_node),
        shards=_link(model, shards, apart, per_node),
        copies=_link(model, copies, apart * shards, per_node),
    )


def links_among(model: GpuModel, num_gpus: int, gpus_per_node: int = GPUS_PER_NODE) -> Links:
    """Return the links of GPUs that are one group for everything."""
    link = _link(model, num_gpus, 1, gpus_per_node)
    return Links(shards=link, copies=link, layers=link)


def _link(model: GpuModel, num_gpus: int, apart: int, gpus_per_node: int) -> Link | None:
    """Return the link of a group; its members' ranks are `apart` from each other."""
    if num_gpus == 1:
        return None
    inside = _inside(model)
    if num_gpus * apart <= gpus_per_node:
        return inside
    network = model.network
    if network is None:
        return None
    members = max(gpus_per_node // apart, 1)  # of the group, on one machine
    share = min(members / gpus_per_node, 1.0)
    between = Link(
        kind="rdma" if network.is_rdma else "tcp",
        bytes_per_s=network.bytes_per_s(gpus_per_node) * share,
        start_s=_ON_SEVERAL_S,
    )
    if members == 1:
        return between
    if inside is None:
        return None
    slower = min(inside, between, key=lambda link: link.reached_bytes_per_s)
    return Link(kind=slower.kind, bytes_per_s=slower.bytes_per_s, start_s=_ON_SEVERAL_S)


def _inside(model: GpuModel) -> Link | None:
    """Return the link between the GPUs of one machine; None if unknown."""
    if model.nvlink_bytes_per_s is not None:  # the datasheet adds both directions
        return Link(kind="nvlink", bytes_per_s=model.nvlink_bytes_per_s / 2)
    slot_bytes_per_s = pcie_bytes_per_s(model)
    return Link(kind="pcie", bytes_per_s=slot_bytes_per_s) if slot_bytes_per_s else None


def pcie_bytes_per_s(model: GpuModel) -> float | None:
    """Return what a GPU's slot carries in one direction by its datasheet; None if unknown."""
    generation, _, lanes = (model.pcie or "").partition(" x")
    per_lane = _PCIE_LANE.get(generation)
    return per_lane * int(lanes) if per_lane and lanes.isdecimal() else None


# ---- what is assumed -----------------------------------------------------------------------------


def assumptions(how: Variant, model: GpuModel) -> list[str]:
    """Return the assumptions about sharding and links that may differ on the user's machine."""
    if how.num_gpus == 1:
        return []
    return [*_put_on(how), *_cast(how), *_joined_by(model, how)]


def _put_on(how: Variant) -> list[str]:
    if how.sharding == "ddp":
        said = (
            "DDP with gradient_as_bucket_view=True: its default is False, which keeps the gradients"
            " twice (accumulation does so for a while in any case)"
        )
        return [said]
    found = []
    copies, shards = grid_of(how)
    grid = f"; {copies} copies of the model, each divided among {shards} GPUs" if copies > 1 else ""
    if how.tensor_parallel > 1:
        found.append(
            f"{how.tensor_parallel} neighbouring GPUs share each layer (torch's parallelize_module)"
            " and, between layers, each sequence; logits and loss are divided by vocabulary"
            " (loss_parallel)"
        )
    if how.sharding != "none":
        found.append(
            "FSDP2: fully_shard on each block and on the model, every micro-batch's gradients are"
            f" reduced at once, the model is built on the host or on meta{grid}"
        )
    return found


def _cast(how: Variant) -> list[str]:
    policy = "bf16 is FSDP's own MixedPrecisionPolicy (reduced in float32), without autocast"
    return [policy] if casts_parameters(how) else []


_WORDS: Mapping[str, str] = {
    "layers": "within layers",
    "shards": "of shards",
    "copies": "of copies",
}


def _joined_by(model: GpuModel, how: Variant) -> list[str]:
    links, network = links_of(model, how), model.network
    if how.num_gpus > how.gpus_per_node and network is None:
        said = (
            f"{how.num_gpus} GPUs are several machines, of {how.gpus_per_node} GPUs each:"
            " the network between them is unknown, so there is no time estimate: --link"
        )
        return [said]
    inside = _inside(model)
    if inside is None:
        return ["the link between these GPUs is unknown, so there is no time estimate"]
    name = "NVLink" if inside.kind == "nvlink" else f"PCIe {model.pcie}"
    rate = f"{inside.bytes_per_s / 1e9:.0f} GB/s in each direction"
    if how.num_gpus <= how.gpus_per_node or network is None:
        return [f"the GPUs are in one machine, joined by {name} ({rate})"]
    known = {field.name: getattr(links, field.name) for field in fields(links)}
    reached = ", ".join(
        f"{link.reached_bytes_per_s / 1e9:.0f} {_WORDS[group]}"
        for group, link in known.items()
        if link is not None
    )
    num_nodes = -(-how.num_gpus // how.gpus_per_node)
    said = (
        f"{num_nodes} machines of {how.gpus_per_node} GPUs: {name} inside ({rate}), {network}"
        f" between ({network.bytes_per_s(how.gpus_per_node) / 1e9:.0f} GB/s for a machine);"
        f" collectives reach {reached} GB/s per GPU"
    )
    return [said]

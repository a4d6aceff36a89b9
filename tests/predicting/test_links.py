"""What joins GPUs, inside a machine and between machines: rates worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.errors import UsageError
from oomph.predicting.links import Link, Links, assumptions, links_among, links_of
from oomph.predicting.speed import estimate
from oomph.records.gpu_model import GpuModel, network_of
from oomph.records.trace import Op
from oomph.records.workload import Variant
from oomph.sensing.catalog import find

H100 = find("h100-80gb").model  # NVLink: 450 GB/s in one direction
A100 = find("a100-80gb").model  # NVLink: 300 GB/s
GIGA = 10**9


def joined(model: GpuModel, link: str) -> GpuModel:
    return replace(model, network=network_of(link))


def variant(num_gpus: int, sharding: str, tensor_parallel: int = 1) -> Variant:
    return Variant(
        micro_batch=1,
        num_gpus=num_gpus,
        sharding=sharding,  # type: ignore[arg-type] # one of them
        tensor_parallel=tensor_parallel,
    )


def rate(link: Link | None) -> float:
    assert link is not None
    return link.bytes_per_s / GIGA


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [
        ("infiniband-400", 400.0),  # 8 adapters of 50 GB/s
        ("infiniband-200x4", 100.0),
        ("roce-100", 100.0),
        ("ethernet-100", 12.5),  # one adapter for the machine
        ("ethernet-25x2", 6.25),
    ],
)
def test_a_link_by_name_says_what_a_machine_of_eight_sends(name: str, gb_per_s: float) -> None:
    network = network_of(name)
    assert network is not None
    assert network.bytes_per_s(8) == gb_per_s * GIGA


@pytest.mark.parametrize(
    "name", ["", "infiniband", "400", "infiniband-0", "nvlink-400", "roce-1x0"]
)
def test_an_unknown_link_is_refused_with_names_that_are_known(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown link[^$]*infiniband-400"):
        network_of(name)


def test_on_one_machine_everything_goes_over_nvlink() -> None:
    links = links_of(joined(H100, "ethernet-100"), variant(8, "fsdp"))
    assert links == links_of(H100, variant(8, "fsdp"))
    assert rate(links.shards) == 450
    assert (links.copies, links.layers) == (None, None)


def test_a_ring_over_machines_is_as_fast_as_the_slower_of_nvlink_and_all_adapters() -> None:
    fast = links_of(joined(H100, "infiniband-400"), variant(64, "fsdp"))
    assert rate(fast.shards) == 450  # NVLink reaches 351 of 450, the adapters 360 of 400
    slow = links_of(joined(H100, "infiniband-200"), variant(64, "fsdp"))
    assert rate(slow.shards) == 200


def test_groups_with_one_gpu_on_each_machine_have_one_adapter_each() -> None:
    links = links_of(joined(H100, "infiniband-400"), variant(64, "fsdp", tensor_parallel=8))
    assert rate(links.shards) == 50
    assert rate(links.layers) == 450  # neighbours, on one machine


def test_groups_with_two_gpus_on_each_machine_have_two_adapters() -> None:
    links = links_of(joined(H100, "infiniband-400"), variant(64, "fsdp", tensor_parallel=4))
    assert rate(links.shards) == 100


def test_hybrid_gathers_inside_a_machine_and_sums_between_them() -> None:
    links = links_of(joined(A100, "infiniband-200"), variant(32, "hybrid"))
    assert rate(links.shards) == 300
    assert rate(links.copies) == 25


def test_without_a_named_network_several_machines_have_no_time() -> None:
    ops = [
        Op(name="add", phase="forward", flops=0, moved_bytes=8, dtype="float32"),
        Op(name="all_gather", phase="forward", flops=0, moved_bytes=GIGA, dtype="float32"),
        Op(name="wait", phase="forward", flops=0, moved_bytes=0, dtype=""),
    ]
    how = variant(16, "fsdp")
    assert estimate(ops, H100, links=links_of(H100, how)) is None
    assert any("--link" in said for said in assumptions(how, H100))
    with_network = joined(H100, "infiniband-400")
    assert estimate(ops, with_network, links=links_of(with_network, how)) is not None


def test_a_collective_takes_its_latency_and_its_bytes_over_what_the_link_reaches() -> None:
    """180 GB/s of 200 between 2 machines of 8 A100s (Oracle), 69 us for 32 KiB (ml-engineering)."""
    model = joined(A100, "roce-200")
    links = links_among(model, 16)
    sent = Op(
        name="all_gather_in_layers",
        phase="forward",
        flops=0,
        moved_bytes=9 * GIGA,
        dtype="bfloat16",
    )
    time = estimate([sent], model, links=links)
    assert time is not None
    assert time.step_s == pytest.approx(9 / (200 * 0.9) + 69e-6, rel=0.001)
    assert time.waited_s == pytest.approx(time.step_s, rel=0.01)
    assert time.bound_by == "communication"


def test_kernels_wait_for_what_is_sent_inside_of_layers() -> None:
    kernel = Op(name="mm", phase="forward", flops=10**13, moved_bytes=0, dtype="bfloat16")
    sent = Op(
        name="reduce_scatter_in_layers",
        phase="forward",
        flops=0,
        moved_bytes=GIGA,
        dtype="bfloat16",
    )
    links = links_among(H100, 8)
    both, alone, apart = (
        estimate(ops, H100, links=links) for ops in ([kernel, sent, kernel], [kernel] * 2, [sent])
    )
    assert both
    assert alone
    assert apart
    assert both.step_s == pytest.approx(alone.step_s + apart.step_s, rel=0.01)


@given(
    per_node=st.sampled_from([1, 2, 4, 8]),
    num_nodes=st.integers(2, 16),
    bits=st.sampled_from([10, 100, 400]),
)
def test_no_group_is_faster_than_what_joins_its_machines(
    per_node: int, num_nodes: int, bits: int
) -> None:
    model = joined(H100, f"infiniband-{bits}")
    links = links_among(model, per_node * num_nodes, per_node)
    assert links.shards is not None
    assert links.shards.reached_bytes_per_s <= per_node * bits / 8 * GIGA
    assert links.shards.reached_bytes_per_s <= 450 * GIGA or per_node == 1


def test_a_gpu_alone_has_no_links() -> None:
    assert links_of(joined(H100, "infiniband-400"), Variant(micro_batch=1)) == Links()


def test_the_assumptions_name_the_machines_the_network_and_what_collectives_reach() -> None:
    said = " ".join(assumptions(variant(64, "fsdp", 8), joined(H100, "infiniband-400")))
    assert "8 machines of 8 GPUs" in said
    assert "infiniband-400" in said
    assert "45 of shards" in said
    assert "351 within layers" in said

"""The layout that a convolution writes, and the operands that kernels copy because of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from oomph.pretending.layouts import COPIES, layout_of_convolution
from oomph.rehearsing.child import in_a_child

MIB = 1 << 20


def inside(compute: Callable[[], Any]) -> list[int]:
    """Return the bytes of what kernels take beside their results while something is computed."""

    def work() -> list[int]:
        from oomph.rehearsing.recorder import Recorder
        from oomph.rehearsing.rehearse import prepare

        prepare((8, 0))
        with Recorder((8, 0)) as recorder:
            compute()
        taken = zip(recorder.sizes, recorder.born, strict=True)
        return [size for size, (op, _, _) in taken if op.endswith("(inside)")]

    return in_a_child(work)


def strides_here_and_on_a_gpu(make: Callable[[str], torch.Tensor]) -> tuple[Any, Any]:
    def work() -> Any:
        from oomph.rehearsing.recorder import Recorder
        from oomph.rehearsing.rehearse import prepare

        prepare((8, 0))
        with Recorder((8, 0)):
            return make("cuda").stride()

    return make("cpu").stride(), in_a_child(work)


@pytest.mark.parametrize("edge", [1, 3])
@pytest.mark.parametrize("lies", ["the images", "the filter", "neither"])
def test_a_convolution_writes_channels_last_if_its_input_or_its_filter_lies_so(
    lies: str, edge: int
) -> None:
    def convolved(device: str) -> torch.Tensor:
        images = torch.zeros(2, 8, 9, 9, device=device)
        weight = torch.zeros(16, 8, edge, edge, device=device)
        if lies == "the images":
            images = images.to(memory_format=torch.channels_last)
        elif lies == "the filter":
            weight = weight.to(memory_format=torch.channels_last)
        return F.conv2d(images, weight)

    on_the_cpu, on_a_gpu = strides_here_and_on_a_gpu(convolved)
    assert on_a_gpu == on_the_cpu  # the CPU's kernels follow the same rule
    assert (on_a_gpu[1] == 1) == (lies != "neither")


def test_a_convolution_in_fp64_or_without_cudnn_writes_channels_first() -> None:
    images = torch.zeros(2, 8, 9, 9).to(memory_format=torch.channels_last)
    weight = torch.zeros(16, 8, 3, 3)
    assert layout_of_convolution(images, weight) == torch.channels_last
    assert layout_of_convolution(images.double(), weight.double()) == torch.contiguous_format
    with torch.backends.cudnn.flags(enabled=False):
        assert layout_of_convolution(images, weight) == torch.contiguous_format


def test_tokens_of_a_channels_last_map_are_no_copy() -> None:
    """`permute` of what a convolution wrote is contiguous, as it is on a GPU."""

    def tokens(device: str) -> torch.Tensor:
        images = torch.zeros(2, 8, 9, 9, device=device).to(memory_format=torch.channels_last)
        return F.conv2d(images, torch.zeros(16, 8, 3, 3, device=device)).permute(0, 2, 3, 1)

    on_the_cpu, on_a_gpu = strides_here_and_on_a_gpu(tokens)
    assert on_a_gpu == on_the_cpu == (7 * 7 * 16, 7 * 16, 16, 1)


def test_a_filter_that_lies_otherwise_than_the_images_is_copied() -> None:
    def convolve() -> None:
        images = torch.zeros(2, 64, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        F.conv2d(images, torch.zeros(64, 64, 3, 3, device="cuda"))

    assert inside(convolve) == [4 * 64 * 64 * 9]


def test_the_expanded_gradient_of_a_sum_is_copied_for_each_product_of_backward() -> None:
    """Recorded on a GPU: einsum(weights, V).sum().backward() takes 2 MiB in both products."""

    def train() -> None:
        weights = torch.zeros(8, 4096, 4096, device="cuda", requires_grad=True)
        values = torch.zeros(8, 4096, 16, device="cuda", requires_grad=True)
        torch.bmm(weights, values).sum().backward()

    assert [size for size in inside(train) if size >= MIB] == [2 * MIB, 2 * MIB]


def test_a_linear_layer_under_a_sum_copies_its_gradient_twice() -> None:
    def train() -> None:
        features = torch.zeros(4 * 512, 128, device="cuda", requires_grad=True)
        weight = torch.zeros(1000, 128, device="cuda", requires_grad=True)
        F.linear(features, weight).sum().backward()

    assert [size for size in inside(train) if size >= MIB] == [4 * 512 * 1000 * 4] * 2


def test_layer_norm_copies_a_map_whose_channels_were_moved_to_the_end() -> None:
    def normalise() -> None:
        maps = torch.zeros(64, 96, 56, 56, dtype=torch.float16, device="cuda")
        weight = torch.zeros(96, dtype=torch.float16, device="cuda")
        F.layer_norm(maps.permute(0, 2, 3, 1), (96,), weight, weight)

    assert inside(normalise) == [64 * 96 * 56 * 56 * 2]


def test_batch_norm_keeps_a_copy_of_a_map_that_was_transposed() -> None:
    """As in point clouds and audio: Linear, transpose(1, 2), BatchNorm1d."""

    def kept_bytes() -> int:
        from oomph.rehearsing.recorder import Recorder
        from oomph.rehearsing.rehearse import prepare

        prepare((8, 0))
        norm = torch.nn.BatchNorm1d(32, device="cuda")
        features = torch.zeros(4, 100, 32, device="cuda", requires_grad=True)
        with Recorder((8, 0)) as recorder:
            normed = norm(features.transpose(1, 2))
            assert normed.is_contiguous()
            return sum(recorder.sizes[number] for number in _living(recorder.events))

    whole = 4 * 100 * 32 * 4
    assert in_a_child(kept_bytes) // whole == 2  # the copy and the result


def _living(events: list[int]) -> set[int]:
    freed = {-event - 1 for event in events if event < 0}
    return {event - 1 for event in events if event > 0} - freed


def test_what_lies_in_order_is_not_copied() -> None:
    def compute() -> None:
        images = torch.zeros(2, 8, 32, 32, device="cuda")
        mixed = F.conv2d(images, torch.zeros(8, 8, 3, 3, device="cuda"))
        pooled = F.max_pool2d(mixed.to(memory_format=torch.channels_last), 2)
        rows = pooled.contiguous().flatten(1)
        torch.softmax(rows @ torch.zeros(rows.shape[1], 64, device="cuda"), -1)

    assert inside(compute) == []


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_transposed_operands_are_read_as_they_are(
    batch: int, rows: int, inner: int, columns: int, turns_one: bool, turns_other: bool
) -> None:
    one = torch.zeros(batch, inner, rows, device="meta").mT if turns_one else None
    other = torch.zeros(batch, columns, inner, device="meta").mT if turns_other else None
    one = torch.zeros(batch, rows, inner, device="meta") if one is None else one
    other = torch.zeros(batch, inner, columns, device="meta") if other is None else other
    assert COPIES["bmm"].sizes([one, other]) == ()
    assert COPIES["mm"].sizes([one[0], other[0]]) == ()


@given(st.integers(2, 4), st.integers(2, 4), st.integers(2, 4))
def test_an_expanded_operand_is_copied_whole(rows: int, inner: int, columns: int) -> None:
    one = torch.zeros((), device="meta").expand(2, rows, inner)
    other = torch.zeros(2, inner, columns, device="meta")
    assert COPIES["bmm"].sizes([one, other]) == (4 * 2 * rows * inner,)
    assert COPIES["addmm"].sizes([other, one[0], other[0]]) == (4 * rows * inner,)

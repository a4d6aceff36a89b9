"""PYTORCH_CUDA_ALLOC_CONF, read as torch 2.13 reads it, and the rounding that it changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.errors import UsageError
from oomph.predicting.allocator_settings import (
    AllocatorSettings,
    parse_settings,
    round_size,
    segment_bytes,
)
from oomph.units import GIB, MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", AllocatorSettings(), id="nothing is torch's defaults"),
        pytest.param(
            "expandable_segments:True", AllocatorSettings(expandable_segments=True), id="a flag"
        ),
        pytest.param(
            " max_split_size_mb : 128 ,", AllocatorSettings(max_split_bytes=128 * MIB), id="spaces"
        ),
        pytest.param(
            "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5",
            AllocatorSettings(gc_threshold_ratio=0.8, memory_fraction_ratio=0.5),
            id="ratios",
        ),
        pytest.param(
            "per_process_memory_fraction:1.0", AllocatorSettings(), id="all of it is no limit"
        ),
        pytest.param(
            "max_split_size_mb:40,max_non_split_rounding_mb:60,large_segment_size_mb:32",
            AllocatorSettings(
                max_split_bytes=40 * MIB,
                max_non_split_rounding_bytes=60 * MIB,
                large_segment_bytes=32 * MIB,
            ),
            id="sizes",
        ),
        pytest.param(
            "roundup_power2_divisions:4",
            AllocatorSettings(roundup_power2_divisions=4),
            id="divisions for every size",
        ),
        pytest.param(
            "roundup_power2_divisions:[256:1,512:2,>:4]",
            AllocatorSettings(roundup_power2_divisions=(1,) * 9 + (2,) + (4,) * 6),
            id="divisions by size",
        ),
        pytest.param(
            "roundup_power2_divisions:[64:8,128:2]",
            AllocatorSettings(roundup_power2_divisions=(8,) * 7 + (2,) + (0,) * 8),
            id="what is larger than the last is not rounded",
        ),
        pytest.param(
            "backend:native,pinned_use_background_threads:True,release_lock_on_cudamalloc:True",
            AllocatorSettings(),
            id="what does not matter for memory is accepted",
        ),
    ],
)
def test_a_text_means_these_settings(text: str, expected: AllocatorSettings) -> None:
    assert parse_settings(text) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        pytest.param("max_split_mb:128", "max_split_mb", id="an unknown key"),
        pytest.param("expandable_segments", "expandable_segments", id="no value"),
        pytest.param("expandable_segments=True", "expandable_segments=True", id="no colon"),
        pytest.param("expandable_segments:true", "expandable_segments:true", id="true in small"),
        pytest.param("max_split_size_mb:12", "max_split_size_mb:12", id="less than a segment"),
        pytest.param(
            "max_split_size_mb:30,large_segment_size_mb:40",
            "max_split_size_mb:30",
            id="less than a segment that is set behind it",
        ),
        pytest.param("large_segment_size_mb:10", "large_segment_size_mb:10", id="a small segment"),
        pytest.param("max_split_size_mb:lots", "max_split_size_mb:lots", id="no number"),
        pytest.param("garbage_collection_threshold:1.0", "threshold:1.0", id="a threshold of all"),
        pytest.param("per_process_memory_fraction:2", "fraction:2", id="more than there is"),
        pytest.param("roundup_power2_divisions:3", "'3' is not a power", id="three divisions"),
        pytest.param("roundup_power2_divisions:[300:2]", "'300' is not", id="an odd interval"),
        pytest.param("backend:cudaMallocAsync", "backend:cudaMallocAsync", id="another allocator"),
    ],
)
def test_what_torch_would_not_take_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_settings(text)
    assert named in str(refusal.value)


def test_divisions_are_one_or_one_for_each_interval() -> None:
    with pytest.raises(UsageError, match="3 roundup_power2_divisions"):
        AllocatorSettings(roundup_power2_divisions=(1, 2, 4))


sizes = st.one_of(st.integers(1, 4096), st.integers(1, 8 * MIB), st.integers(1, 100 * GIB))


@given(sizes)
def test_a_request_is_rounded_up_to_512_bytes(size: int) -> None:
    rounded = round_size(size)
    assert rounded % 512 == 0
    assert size <= rounded < size + 512


@given(sizes, st.sampled_from([2, 4, 8, 16]))
def test_divisions_round_up_to_equal_steps_between_powers_of_two(size: int, count: int) -> None:
    rounded = round_size(size, (count,) * 16)
    if size <= 512 * count:
        assert rounded == round_size(size)
        return
    floor = 1 << (size.bit_length() - 1)
    steps = [floor + step * floor // count for step in range(count + 1)]
    assert rounded == min(step for step in steps if step >= size)


@given(sizes, st.sampled_from([0, 2, 4, 8, 16]))
def test_what_is_rounded_is_not_rounded_again(size: int, count: int) -> None:
    divisions = AllocatorSettings(roundup_power2_divisions=count).divisions_by_interval()
    rounded = round_size(size, divisions)
    assert round_size(rounded, divisions) == rounded


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param(512, 2 * MIB, id="the smallest"),
        pytest.param(MIB, 2 * MIB, id="the largest of the small ones"),
        pytest.param(MIB + 512, 20 * MIB, id="the smallest of the large ones"),
        pytest.param(10 * MIB - 512, 20 * MIB, id="just under 10 MiB"),
        pytest.param(10 * MIB, 10 * MIB, id="from 10 MiB on its own size"),
        pytest.param(11 * MIB, 12 * MIB, id="in steps of 2 MiB"),
    ],
)
def test_a_segment_is_larger_than_the_request_for_it(size: int, expected: int) -> None:
    assert segment_bytes(size) == expected

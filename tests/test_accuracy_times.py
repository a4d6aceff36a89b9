"""The published step times, their models, and what is said of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accuracy import (
    bert_squad,
    collectives,
    cs336,
    libraries,
    ssd,
    time_traces,
    times,
    transformer_xl,
    waveglow,
)
from accuracy.time_models import with_growing_blocks, workload_of
from accuracy.time_rows import SOURCES, UNBUILT, TimeRow, read_rows
from accuracy.times import Range, TimeScored
from oomph.records.trace import Op, Phase
from oomph.verbs.gpus import find_gpu

ROWS = read_rows()


def a_row(**changes: Any) -> TimeRow:
    row = next(row for row in ROWS if row.model == "attention/16" and row.size == 256)
    return replace(row, **changes)


def scored(measured_s: float, said: Range | None, before: Range | None = None) -> TimeScored:
    return TimeScored(row=a_row(measured_s=measured_s), now=said, before=before)


# ---- the rows --------------------------------------------------------------------------------


def test_each_run_has_one_row() -> None:
    assert [name for name, num in Counter(row.name for row in ROWS).items() if num > 1] == []


def test_every_source_has_rows_and_some_are_held_out() -> None:
    assert {row.source.name for row in ROWS} == set(SOURCES)
    assert 0 < sum(source.is_held_out for source in SOURCES.values()) < len(SOURCES)


@pytest.mark.parametrize("gpu", sorted({row.gpu for row in ROWS}))
def test_the_speed_of_every_gpu_is_known(gpu: str) -> None:
    model = find_gpu(gpu).model
    assert model.name == gpu
    assert model.memory_bandwidth_bytes_per_s is not None
    assert model.fp32_flops is not None


def test_no_time_is_below_what_the_datasheets_allow() -> None:
    """A wrong unit or batch would be: 1 % of a step's least time is never measured."""
    for row in ROWS:
        assert 1e-5 < row.measured_s < 60


def test_times_fall_with_the_gpus_that_share_a_batch() -> None:
    """Rows on several GPUs have as many examples each, and none is twice as fast."""
    alone = {row.name: row.measured_s for row in ROWS if row.num_gpus == 1}
    pairs = [
        row.measured_s / alone[row.on_one_gpu]
        for row in ROWS
        if row.num_gpus > 1 and row.on_one_gpu in alone
    ]
    assert len(pairs) > 100
    assert min(pairs) > 0.5


def test_more_gpus_than_two_are_held_out_in_every_source() -> None:
    assert all(row.is_held_out for row in ROWS if row.num_gpus > 2)


def test_what_is_not_predicted_is_listed_with_its_reason() -> None:
    assert all(num > 0 and why for _, num, _, why in UNBUILT)
    assert any(what == "compiled" for _, _, what, _ in UNBUILT)


# ---- the models ------------------------------------------------------------------------------


def parameters(make: Callable[[], Any]) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in make().parameters())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # bert-large-uncased has 335,141,888; 6 rows more in its vocabulary, and two answers.
        (lambda: bert_squad.Bert(bert_squad.SIZES["large"]), 335_141_888 + 6 * 1024 + 2 * 1025),
        (lambda: bert_squad.Bert(bert_squad.SIZES["base"]), 109_482_240 + 6 * 768 + 2 * 769),
        # The homework's sizes: embeddings, head, and per layer 4 w^2 + 3 w ffn + 2 w.
        (
            lambda: cs336.Transformer(cs336.SIZES["small"], 128),
            2 * 10_000 * 768 + 768 + 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768),
        ),
        # Transformer-XL base, with clusters of words, as its program prints it ("#params").
        (
            lambda: transformer_xl.TransformerXl(
                transformer_xl.SIZES["base"], 4, 2, transformer_xl.Clusters(512, 1)
            ),
            191_950_298,
        ),
        # 268.29 million with 512 channels in the paper on WaveFlow (Ping et al., 2020).
        (waveglow.WaveGlow, 268_294_760),
    ],
)
def test_models_have_the_published_number_of_parameters(
    make: Callable[[], Any], expected: int
) -> None:
    assert parameters(make) == expected


def test_ssd_has_as_many_boxes_as_its_paper() -> None:
    pytest.importorskip("torch")
    if not (libraries.FOLDER / "torchvision").exists():
        pytest.skip("make accuracy installs torchvision's Python part")
    with torch.device("meta"):
        places, labels = ssd.Ssd300()(torch.zeros(2, 3, 300, 300))
    assert places.shape == (2, 4, 8732)
    assert labels.shape == (2, 81, 8732)


def test_the_older_form_of_a_densenet_computes_the_same() -> None:
    if not (libraries.FOLDER / "torchvision").exists():
        pytest.skip("make accuracy installs torchvision's Python part")
    densenet = libraries.import_torchvision().densenet
    model = densenet.DenseNet(4, (2, 3), 8, bn_size=2, num_classes=3)
    pixels = torch.randn(2, 3, 32, 32)
    expected = model(pixels)
    assert torch.allclose(with_growing_blocks(model)(pixels), expected, atol=1e-5)


def test_the_homeworks_softmax_and_attention_are_those_of_torch() -> None:
    x = torch.randn(3, 5)
    assert torch.allclose(cs336.softmax(x), x.softmax(-1))
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    mask = torch.ones(4, 4).tril().bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(cs336.attend(q, k, v, mask), expected, atol=1e-6)


def test_rotation_head_by_head_is_a_rotation() -> None:
    """Positions turn pairs of numbers: lengths stay, whether heads turn together or one by one."""
    model = cs336.by_heads(cs336.Size(layers=1, width=8, heads=2, ffn=16), 4)
    block: Any = model.layers[0]
    angles = torch.rand(4, 2)
    block.attn.rotary.cached = torch.stack([angles.cos(), angles.sin()])
    x = torch.randn(1, 4, 4)
    turned = block.attn._turned(x, torch.arange(4).expand(1, 4))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-6)


@pytest.mark.parametrize("family", sorted({row.model.partition("/")[0] for row in ROWS}))
def test_every_family_of_models_has_a_workload(family: str) -> None:
    if not (libraries.FOLDER / "torchvision").exists() and family in (
        "convnet",
        "ssd",
        "torchvision",
    ):
        pytest.skip("make accuracy installs torchvision's Python part")
    row = next(row for row in ROWS if row.model.partition("/")[0] == family)
    assert workload_of(row).batch_size == row.micro_batch * row.num_gpus


# ---- parts of a step -------------------------------------------------------------------------


def an_op(name: str, phase: Phase, module: str = "") -> Op:
    return Op(name=name, phase=phase, flops=0, moved_bytes=0, dtype="float32", module=module)


def test_the_forward_pass_ends_with_the_models_last_module_and_the_loss_is_the_rest() -> None:
    ops = [
        an_op("zero_", "zero_grad"),
        an_op("mm", "forward", "head"),
        an_op("nll_loss", "forward"),
        an_op("mm", "backward", "head"),
        an_op("add_", "step"),
    ]
    assert times.of_part(ops, "forward") == [ops[1]]
    assert times.of_part(ops, "loss") == [ops[2]]
    assert times.of_part(ops, "backward") == [ops[3]]
    assert times.of_part(ops, "forward+backward") == ops[:4]
    assert times.of_part(ops, "optimizer") == [ops[4]]
    assert times.of_part(ops, "step") == ops


# ---- figures ---------------------------------------------------------------------------------


def test_errors_are_distances_of_the_ratio_from_one() -> None:
    said = [Range(0.8, 0.7, 0.9), Range(1.0, 0.5, 2.0), Range(1.6, 1.5, 1.7)]
    found = times.errors_of((a_row(measured_s=1.0), each) for each in said)
    assert found is not None
    assert (found.num_rows, found.ratio) == (3, 1.0)
    assert found.error == pytest.approx(0.2)
    assert found.error_p90 == pytest.approx(0.6)
    assert found.inside == pytest.approx(1 / 3)
    assert found.width == pytest.approx(0.9 / 0.7)


def test_rows_without_a_prediction_have_no_errors() -> None:
    assert times.errors_of([(a_row(), None)]) is None


def test_a_table_shows_what_was_before_beside_what_is_now() -> None:
    rows = [scored(1.0, Range(1.1, 1.0, 1.2), Range(2.0, 1.0, 3.0))]
    line = list(times.table(rows, times.by_source, ("source", "")))[-1]
    assert "2.00 -> 1.10" in line
    assert "100 % -> 10 %" in line


def test_efficiency_is_the_time_of_one_gpu_over_that_of_several() -> None:
    one = TimeScored(row=a_row(measured_s=1.0), now=Range(2.0, 1, 3), before=None)
    two = TimeScored(row=a_row(measured_s=1.25, num_gpus=2), now=Range(2.0, 1, 3), before=None)
    line = list(times.efficiency_table([one, two]))[-1]
    assert "| 80% | 100% | 20% |" in line


def test_the_sample_is_the_same_each_time_and_has_every_source() -> None:
    drawn = times.drawn(ROWS)
    assert drawn == times.drawn(ROWS)
    assert {row.source.name for row in drawn} == set(SOURCES)
    names = {row.name for row in drawn}
    assert all(row.on_one_gpu in names for row in drawn if row.num_gpus > 1)


def test_every_row_has_a_figure_from_before() -> None:
    path = Path(times.__file__).with_name("times_before.json")
    before = json.loads(path.read_text("utf-8"))
    assert {row.name for row in ROWS} <= set(before)
    assert {each.name for each in collectives.read_collectives()} <= set(before)
    assert all(low <= step <= high for step, low, high in before.values())


def test_collectives_send_what_nccl_tests_count() -> None:
    every = collectives.read_collectives()
    ring = next(each for each in every if each.gpu == "h200" and each.kind == "all_reduce")
    assert ring.sent_bytes == round(2 * (ring.num_gpus - 1) / ring.num_gpus * ring.size_bytes)
    assert all(each.predicted_s for each in every)


# ---- the store -------------------------------------------------------------------------------


def test_a_run_is_rehearsed_once_and_then_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    row, model = a_row(), find_gpu("a100-80gb").model
    first = time_traces.ops_of(row, model)
    assert not isinstance(first, str)
    assert any(op.phase == "backward" for op in first)
    assert "rehearsing" in capfd.readouterr().err
    assert time_traces.ops_of(row, model) == first
    assert "rehearsing" not in capfd.readouterr().err

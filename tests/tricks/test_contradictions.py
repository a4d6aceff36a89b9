"""What cannot go together on several GPUs is said before anything is built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomph.records.workload import Sharding, Variant
from oomph.tricks.trick import contradiction_in


def against(variant: Variant) -> str:
    found = contradiction_in(variant, clips_gradients=False)
    return "" if found is None else str(found)


def test_ddp_cannot_step_before_gradients_are_averaged_and_fsdp_can() -> None:
    ddp = Variant(micro_batch=2, optimizer_in_backward=True, sharding="ddp", num_gpus=2)
    fsdp = Variant(micro_batch=2, optimizer_in_backward=True, sharding="fsdp", num_gpus=2)
    assert "DDP averages gradients" in against(ddp)
    assert against(fsdp) == ""


@pytest.mark.parametrize(("sharding", "is_possible"), [("ddp", True), ("fsdp", False)])
def test_packed_weights_are_not_divided(sharding: Sharding, is_possible: bool) -> None:
    variant = Variant(
        micro_batch=2, adapters="qlora", precision="bf16", sharding=sharding, num_gpus=4
    )
    assert (against(variant) == "") == is_possible


@pytest.mark.parametrize("sharding", ["fsdp", "hybrid"])
def test_what_fsdp_keeps_on_the_host_has_no_loss_scaler(sharding: Sharding) -> None:
    variant = Variant(micro_batch=2, offload_optimizer=True, sharding=sharding, num_gpus=4)
    assert against(variant) == ""
    assert against(replace(variant, precision="bf16")) == ""
    assert "loss scaler" in against(replace(variant, precision="fp16"))
    assert "loss scaler" not in against(replace(variant, precision="fp16", sharding="ddp"))

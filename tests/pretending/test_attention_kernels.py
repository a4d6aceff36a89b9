"""Which kernel computes attention is the user's choice, where they make one."""

from __future__ import annotations

from pathlib import Path

import pytest

import oomph
from oomph.records.workload import Precision

TRAIN = """
import torch, oomph
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into = torch.nn.Linear(256, 768)

    def forward(self, x):
        q, k, v = self.into(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        HOW

workload = oomph.Workload(
    model=Attention,
    batch=lambda n: torch.zeros(n, 2048, 256),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters),
    batch_size=4,
)
"""
FUSED = "return scaled_dot_product_attention(q, k, v)"
BY_HAND = "return ((q * 64**-0.5) @ k.transpose(-1, -2)).softmax(-1) @ v"
SWITCHED_OFF = f"""torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_flash_sdp(False)
        {FUSED}"""
IN_A_CONTEXT = f"""with sdpa_kernel(SDPBackend.MATH):
            {FUSED}"""
OF_ONE_LAYER_BYTES = 4 * 4 * 4 * 2048 * 2048  # bytes of fp32 x examples x heads x length x length


def allocated_bytes(how: str, directory: Path, precision: Precision) -> int:
    path = directory / "train.py"
    path.write_text(TRAIN.replace("HOW", how))
    found = oomph.predict(f"{path}:workload", gpu="a100-40gb", precision=precision)
    return found.allocated_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", [SWITCHED_OFF, IN_A_CONTEXT], ids=["switched off", "in a context"])
def test_without_fused_kernels_attention_keeps_matrices_of_length_by_length(
    how: str, precision: Precision, tmp_path: Path
) -> None:
    matrix_bytes = OF_ONE_LAYER_BYTES // (2 if precision == "bf16" else 1)
    assert allocated_bytes(FUSED, tmp_path, precision) < matrix_bytes
    assert allocated_bytes(how, tmp_path, precision) > matrix_bytes
    assert allocated_bytes(BY_HAND, tmp_path, precision) > matrix_bytes


# Two heads of keys and values for four of queries.
IN_GROUPS = "return scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)"


def test_groups_of_heads_have_a_fused_kernel_in_half_precision_only(tmp_path: Path) -> None:
    assert allocated_bytes(IN_GROUPS, tmp_path, "fp32") > OF_ONE_LAYER_BYTES
    assert allocated_bytes(IN_GROUPS, tmp_path, "bf16") < OF_ONE_LAYER_BYTES // 2

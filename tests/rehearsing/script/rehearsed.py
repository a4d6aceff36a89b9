"""Scripts and Workloads -> their rehearsals, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 - once, and not in each fork

from oomph.records.script import Overrides, PretendedGpu, Script, Seen
from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.child import in_a_child
from oomph.rehearsing.script.run import rehearse_script

GPU = PretendedGpu(
    name="NVIDIA GeForce RTX 4090",
    total_bytes=24 * 2**30,
    capability=(8, 9),
    multi_processor_count=128,
)

# Of a script that has a model of 16 inputs and 4 classes on the GPU.
LOOP = """
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    loss = F.cross_entropy(model(torch.randn(8, 16).cuda()), torch.randint(4, (8,)).cuda())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def rehearsed(directory: Path, text: str, *arguments: str, **overrides: Any) -> tuple[Trace, Seen]:
    """A script of this text, rehearsed."""
    file = directory / "train.py"
    file.write_text(text)
    script = Script(path=str(file), arguments=arguments, directory=str(directory))
    found = rehearse_script(script, GPU, Overrides(**overrides))
    return found.trace, found.seen


def trained(workload: Workload, variant: Variant) -> Trace:
    def work() -> Trace:
        from oomph.rehearsing.rehearse import prepare, rehearse

        prepare(GPU.capability)
        return rehearse(workload, variant, GPU.capability)

    return in_a_child(work)


def second_step(trace: Trace) -> list[int]:
    """The sizes that the second step takes (> 0) and frees (< 0), runs of frees sorted."""
    found: list[int] = []
    frees: list[int] = []
    for event in trace.events[trace.step_starts[1] :]:
        size_bytes = trace.allocations[abs(event) - 1].size_bytes
        if event < 0:
            frees.append(-size_bytes)
        else:
            found += [*sorted(frees), size_bytes]
            frees = []
    return found + sorted(frees)

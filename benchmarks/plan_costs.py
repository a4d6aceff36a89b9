"""What `oomph plan` costs from the first question on: CPU seconds and memory of whole processes.

python -m benchmarks.plan_costs [NAME ...]: only these rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from oomph.units import KIB, MIB, format_bytes

_HERE = Path(__file__).resolve().parent
_BERT_LARGE = f"{_HERE.parent / 'examples' / 'bert_large.py'}:workload"
_WORKLOADS = _HERE / "workloads.py"
_ALL = "pure-bf16,adafactor,sgd,lora,qlora,batch-size"
WARM_S = 0.5  # the goal when the rehearsals are stored


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    what: str
    arguments: tuple[str, ...]
    goal_s: float  # of CPU, with an empty store


def _case(name: str, what: str, goal_s: float, *options: str) -> Case:
    place = _BERT_LARGE if name.startswith("bert") else f"{_WORKLOADS}:{name.partition(' ')[0]}"
    return Case(name, what, (place, *options), goal_s)


CASES = (
    _case("bert", "BERT-large, one V100", 10, "--gpu", "v100-16gb"),
    _case("bert 4", "BERT-large, up to 4 V100", 25, "--gpu", "v100-16gb", "--max-gpus", "4"),
    _case("resnet_50", "ResNet-50, one V100", 10, "--gpu", "v100-16gb"),
    _case("gpt2_xl", "GPT-2 XL, one A100", 25, "--gpu", "a100-80gb"),
    _case("llama_8b", "Llama 8B, one H100", 25, "--gpu", "h100-80gb"),
    _case(
        "llama_8b all", "Llama 8B, RTX 4090, all allowed", 60, "--gpu", "rtx4090", "--allow", _ALL
    ),
    _case("llama_70b", "Llama 70B, up to 8 H100", 60, "--gpu", "h100-80gb", "--max-gpus", "8"),
    _case(
        "llama_405b", "Llama 405B, up to 1024 H100", 120, "--gpu", "h100-80gb", "--max-gpus", "1024"
    ),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process and all that it started."""

    cpu_s: float
    memory_bytes: int


def cost_of(case: Case, cache: str) -> Cost:
    """Ask once. Raises RuntimeError if there was no answer."""
    command = [sys.executable, "-m", "oomph", "plan", *case.arguments, "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.stderr is not None
    said = child.stderr.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 1, 3):  # a plan fits, none does, uncertain
        raise RuntimeError(f"{case.name}: {said.decode()[-500:]}")
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss * KIB)


def measure(cases: Sequence[Case] = CASES) -> str:
    """Each question with an empty store, and again."""
    width = max(len(case.what) for case in cases)
    lines = [
        f"| {'oomph plan, whole process':<{width}} | CPU s | goal | memory | again, CPU s | goal |",
        f"|{'-' * (width + 2)}|------:|-----:|-------:|-------------:|-----:|",
    ]
    for case in cases:
        with TemporaryDirectory() as cache:
            cold, warm = cost_of(case, cache), cost_of(case, cache)
        memory = format_bytes(round(cold.memory_bytes / MIB) * MIB)
        lines.append(
            f"| {case.what:<{width}} | {cold.cpu_s:5.1f} | {case.goal_s:4.0f} | {memory} |"
            f" {warm.cpu_s:12.2f} | {WARM_S:4.1f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    names = sys.argv[1:]
    print(measure([case for case in CASES if not names or case.name in names]))

"""Rehearsing a script with GPT-2 (124M) as it is, beside the imports that it begins with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "scripts" / "hf_trainer.py"
IMPORTS = "import torch\nfrom transformers import GPT2Config, GPT2LMHeadModel, Trainer"
REHEARSES = f"""
import os, tempfile
from oomph.records.script import Overrides, PretendedGpu, Script
from oomph.rehearsing.script.run import rehearse_script
gpu = PretendedGpu(name="NVIDIA GeForce RTX 4090", total_bytes=24 << 30, capability=(8, 9))
with tempfile.TemporaryDirectory() as directory:  # what the script writes
    script = Script(path={str(SCRIPT)!r}, directory=directory)
    assert rehearse_script(script, gpu, Overrides()).seen.num_parameters > 124e6
"""
# Of the process and of all that it waited for.
TELLS = """
import json, resource
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print()
print(json.dumps([sum(u.ru_utime + u.ru_stime for u in used), max(u.ru_maxrss for u in used)]))
"""


@dataclass(frozen=True, slots=True)
class Used:
    what: str
    cpu_s: float
    most_mib: float


def measure() -> str:
    floor = _used("importing torch and transformers (floor)", IMPORTS)
    return _table([floor, _used("rehearsing it to its second optimizer step", REHEARSES)])


def _used(what: str, program: str) -> Used:
    done = subprocess.run(
        [sys.executable, "-c", program + TELLS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    cpu_s, most_kib = json.loads(done.stdout.splitlines()[-1])
    return Used(what, cpu_s, most_kib / 1024)


def _table(rows: Sequence[Used]) -> str:
    floor, width = rows[0], max(len(row.what) for row in rows)
    title = "a script with GPT-2 (124M)"
    lines = [
        f"| {title:<{width}} | CPU s | x floor | peak RSS MiB |",
        f"|{'-' * (width + 2)}|------:|--------:|-------------:|",
    ]
    lines += [
        f"| {row.what:<{width}} | {row.cpu_s:5.1f} | {row.cpu_s / floor.cpu_s:7.2f} |"
        f" {row.most_mib:12.0f} |"
        for row in rows
    ]
    return "\n".join(lines)

"""Starting rehearsals in processes of their own, and reading what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent


def start(*arguments: str) -> subprocess.Popen[str]:
    """One section of rehearsals.py."""
    return start_module("rehearsing.rehearsals", *arguments)


def start_module(*module: str) -> subprocess.Popen[str]:
    """`python -m` a module of the tests, or one that runs such a module."""
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", *module],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else ranks may fail to find each other
        },
    )


def found_by(child: subprocess.Popen[str]) -> list[dict[str, Any]]:
    told, complaints = child.communicate()
    assert child.returncode == 0, complaints[-3000:]
    return [json.loads(line) for line in told.splitlines()]

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
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "tracing.rehearsals", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )


def found_by(child: subprocess.Popen[str]) -> list[dict[str, Any]]:
    told, complaints = child.communicate()
    assert child.returncode == 0, complaints[-3000:]
    return [json.loads(line) for line in told.splitlines()]

"""A GPU's UUID -> cuda_probe in a child that sees this GPU alone, driven stage by stage."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from oomph.errors import Unreadable

# The package is found in the child wherever it was found here; the working directory, which
# Python would look in first, is not searched: it is not ours.
_START = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]];"
    " from oomph.sensing.cuda_probe import main; main()"
)


class CudaChild:
    """cuda_probe.py in a child that sees one GPU."""

    def __init__(self, uuid: str) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit
        self._child = subprocess.Popen(
            [sys.executable, "-c", _START, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
        )
        self.pid = self._child.pid
        self._is_first = True

    def __enter__(self) -> CudaChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._child.kill()
        self._child.communicate()  # the input ends, and so does the child
        self._complaints.close()

    def next(self) -> dict[str, Any]:
        """Let it do its next stage, and hear what torch says of it."""
        assert self._child.stdin is not None  # noqa: S101 - both are pipes
        assert self._child.stdout is not None  # noqa: S101
        if not self._is_first:
            with contextlib.suppress(BrokenPipeError):  # it has died: below is said of what
                self._child.stdin.write("\n")
                self._child.stdin.flush()
        self._is_first = False
        line = self._child.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" not in answer:
            return answer
        if answer["error"] == "no torch":
            raise Unreadable(
                "torch is not installed, and it is torch's use of CUDA that is measured",
                attempt="pip install torch, in the build for your driver",
            )
        raise Unreadable(
            "CUDA could not be started through torch",
            because=answer["error"],
            attempt="python -c 'import torch; torch.ones(1).cuda()', which says more",
        )

    def _last_words(self) -> str:
        status = self._child.wait()
        self._complaints.seek(0)
        words = self._complaints.read()[-300:].decode("utf-8", "replace").split()
        return f"its process ended with {status}: {' '.join(words)}"

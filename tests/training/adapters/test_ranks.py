"""Each library on two ranks trains as it does by itself, though one rank runs out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two real processes found, joined by gloo."""
    folder = tmp_path_factory.mktemp("ranks")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command, "-m", "training.adapters.replicas", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("library", ["accelerate", "hf", "lightning"])
def test_an_error_of_one_rank_changes_nothing(library: str, ranks: list[Any]) -> None:
    first, second = (rank[library]["with"] for rank in ranks)
    assert first["num_ooms"] == 0
    assert 1 <= second["num_ooms"] <= 4
    assert first["weights"] == second["weights"]
    assert not set(first["used"]) & set(second["used"])
    for rank in ranks:
        some, others = rank[library]["with"], rank[library]["without"]
        assert some["used"] == others["used"]  # each once, in order
        assert some["num_steps"] == others["num_steps"] == 2
        for name, values in some["weights"].items():
            pairs = list(zip(values, others["weights"][name], strict=True))
            most = max(abs(other) for _, other in pairs)
            assert max(abs(one - other) for one, other in pairs) <= 1e-5 * most, name


@pytest.mark.parametrize("library", ["accelerate", "hf", "lightning"])
def test_an_update_that_fails_on_one_rank_happens_on_none(library: str, ranks: list[Any]) -> None:
    first, second = (rank[library]["failing"] for rank in ranks)
    assert "does not fit into memory" in first["said"]
    assert "it failed on rank 1" in first["said"]
    assert "Tried to allocate" in second["said"]
    assert first["is_as_before"]
    assert second["is_as_before"]

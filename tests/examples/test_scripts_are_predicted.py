"""Each example script, as it is, takes what its Workload takes, and leaves no trace."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from examples.commands import COMMANDS, SCRIPTS
from examples.loops import Twin
from examples.twins import TWINS, WITHOUT
from oomph.predicting.prediction import assemble
from oomph.records.prediction import Prediction
from oomph.records.script import Script
from oomph.records.trace import Trace
from oomph.rehearsing.child import in_a_child
from oomph.rehearsing.traces import MOST_MICRO_STEPS
from oomph.sandbox.sandbox import protection
from oomph.sensing.target import find_target
from oomph.verbs.predict import predict

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        protection().kind != "namespaces", reason="this kernel refuses user namespaces"
    ),
]
SMALL = [f"{name} tiny" for name in COMMANDS if name not in WITHOUT]
# A script that looks at its GPU takes the branch that it would take there.
BY_GPU = [name for name in TWINS if " on " in name]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A copy of the scripts, and a home, of which nothing may change."""
    base = tmp_path_factory.mktemp("user")
    scripts, home = base / "scripts", base / "home"
    shutil.copytree(SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (home / ".config").mkdir(parents=True)
    (home / ".config" / "settings").write_text("mine")
    before = {name: os.environ.get(name) for name in ("HOME", "XDG_CACHE_HOME")}
    os.environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(base / "cache")}
    yield scripts, home
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="module")
def predictions(places: tuple[Path, Path]) -> Mapping[str, dict[str, Any]]:
    """Of all scripts in small; a failure is that script's own."""
    before = [state_of(place) for place in places]
    found = {name: predicted(name, places[0]) for name in (*SMALL, *BY_GPU)}
    assert [state_of(place) for place in places] == before
    return found


def predicted(name: str, directory: Path) -> dict[str, Any]:
    """As typed: in a process of its own, whatever other tests have imported into this one."""
    twin = TWINS[name]
    program = twin.program.split()  # "mnist_cnn.py", or "-m tagger.train"
    command = [sys.executable, "-m", "oomph", "predict", *program, "--gpu", twin.gpu, "--json"]
    done = subprocess.run(
        [*command, "--", *twin.arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    told: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr}
    return told


def state_of(place: Path) -> dict[str, tuple[str, int, int]]:
    """Everything below a directory: contents, modes and times."""
    found = {}
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (content, status.st_mode, status.st_mtime_ns)
    return found


@pytest.fixture(scope="module")
def workloads() -> Mapping[str, Prediction]:
    """The same trainings as Workloads; torch is patched once in a process, for one GPU."""
    by_gpu: dict[str, list[str]] = {}
    for name in (*SMALL, *BY_GPU):
        by_gpu.setdefault(TWINS[name].gpu, []).append(name)
    traces: dict[str, Trace] = {}
    for gpu, names in by_gpu.items():
        traces |= in_a_child(partial(rehearsed, gpu, names))
    return {name: as_predicted(TWINS[name], trace) for name, trace in traces.items()}


def rehearsed(gpu: str, names: Sequence[str]) -> dict[str, Trace]:
    from oomph.rehearsing.rehearse import prepare, rehearse

    capability = find_target(gpu, None).capability
    prepare(capability)
    found = {}
    for name in names:
        twin = TWINS[name]
        few = min(twin.variant.accumulation, MOST_MICRO_STEPS)
        trace = rehearse(twin.workload, replace(twin.variant, accumulation=few), capability)
        found[name] = replace(trace, events=list(trace.events))  # its end comes later
    return found


def as_predicted(twin: Twin, trace: Trace) -> Prediction:
    ready = find_target(twin.gpu, None).with_torch(trace.torch_version)
    return assemble(trace, twin.variant, ready.card)


@pytest.mark.parametrize("name", [*SMALL, *BY_GPU])
def test_a_script_takes_exactly_what_its_workload_takes(
    predictions: Mapping[str, dict[str, Any]],
    workloads: Mapping[str, Prediction],
    name: str,
) -> None:
    found, expected = predictions[name], workloads[name]
    assert "error" not in found, found["error"]
    assert found["seen"]["has_stepped"]
    figures = ("allocated_bytes", "reserved_bytes", "device_bytes")
    assert {f: found[f] for f in figures} == {f: getattr(expected, f) for f in figures}


def test_a_script_with_two_optimizers_is_predicted(places: tuple[Path, Path]) -> None:
    command = COMMANDS["dcgan"]
    script = Script(path=command.program, arguments=command.tiny, directory=str(places[0]))
    found = predict(script, gpu="t4")
    assert found.seen is not None
    assert found.seen.num_optimizers == 2
    assert found.seen.has_stepped

"""Jobs for PBS and Kubernetes: held against files and published schemas, as no daemon is here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from planning.plans import plan_of, variants, whatever_it_takes

from oomph.errors import UsageError
from oomph.launching import job_body
from oomph.launching.jobs import render
from oomph.launching.requests import order_of
from oomph.launching.torchrun import spread
from oomph.records.launch import PRINTED, Wanted
from oomph.records.workload import Variant

GOLDEN = Path(__file__).parent / "golden"
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


def wanted(via: str, *script: str, **more: Any) -> Wanted:
    return Wanted(words=script or ("train.py",), via=via, image="registry/train:1", **more)


ASKED: dict[str, Any] = {"time": "12h", "memory": "64GiB", "cpus_per_gpu": 6, "queue": "gpu"}


@pytest.mark.parametrize(
    ("via", "num_gpus", "file"),
    [
        ("pbs", 4, "one-machine.pbs"),
        ("kubernetes", 4, "one-machine.job.yaml"),
        ("kubernetes", 16, "two-machines.job.yaml"),
        ("trainjob", 16, "two-machines.trainjob.yaml"),
    ],
)
def test_a_job_is_written_as_it_was_read(
    via: str, num_gpus: int, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_body, "_oomph", lambda: ["oomph"])
    plan = plan_of(num_gpus=num_gpus, expandable_segments=True)
    text = render(order_of(wanted(via, "train.py", "--run name", "$HOME $(id)", **ASKED), plan))
    assert text == (GOLDEN / file).read_text()


def manifests(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def unescaped(args: list[str]) -> list[str]:
    """What Kubernetes makes of arguments without a variable that it knows."""
    return [word.replace("$$", "$") for word in args]


@whatever_it_takes
@given(variants(), words.filter(bool), st.lists(words, max_size=3))
def test_every_job_is_valid_and_gives_its_words_back(
    variant: Variant, script: str, arguments: list[str]
) -> None:
    plan = plan_of(**vars_of(variant))
    nodes = spread(variant)
    text = render(order_of(wanted("kubernetes", script, *arguments), plan))
    *services, job = manifests(text)
    assert len(services) == (nodes.num_nodes > 1)
    for manifest in (*services, job):
        kubernetes_validate.validate(manifest, "1.30", strict=True)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    args = unescaped(container["args"])
    expected = [f"./{script}" if script.startswith("-") else script, *arguments]
    assert args[len(args) - len(expected) :] == expected
    assert container["resources"]["limits"]["nvidia.com/gpu"] == nodes.num_gpus_each
    assert job["spec"]["completions"] == nodes.num_nodes


def vars_of(variant: Variant) -> dict[str, Any]:
    return {"num_gpus": variant.num_gpus, "expandable_segments": variant.expandable_segments}


@whatever_it_takes
@given(variants(), words.filter(bool), st.lists(words, max_size=3))
def test_every_trainjob_is_one_to_kubeflow(
    variant: Variant, script: str, arguments: list[str]
) -> None:
    plan = plan_of(**vars_of(variant))
    (manifest,) = manifests(render(order_of(wanted("trainjob", script, *arguments), plan)))
    read = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert read is not None
    # What the model does not know it would leave out.
    assert read.to_dict() == manifest
    command = unescaped(manifest["spec"]["trainer"]["command"])
    assert command[0] == "torchrun"
    assert command[2:] == arguments


def test_the_script_for_pbs_is_one_that_bash_reads() -> None:
    text = render(order_of(wanted("pbs", "a b.py", "it's"), plan_of(num_gpus=2)))
    done = subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)
    assert done.returncode == 0
    with pytest.raises(UsageError, match="PBS on one machine"):
        render(order_of(wanted("pbs"), plan_of(num_gpus=16)))


def test_what_a_pod_cannot_have_is_refused() -> None:
    with pytest.raises(UsageError, match="needs an image"):
        render(order_of(Wanted(words=("train.py",), via="kubernetes", num_processes=1), None))
    own = Wanted(own_script="submit.sh", via="trainjob", num_processes=1, image="x")
    with pytest.raises(UsageError, match="does not go into a pod"):
        render(order_of(own, None))
    for via in PRINTED:
        with pytest.raises(UsageError, match="only names the job"):
            render(order_of(wanted(via, name="gpu=4", num_processes=1), None))

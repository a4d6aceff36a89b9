"""A training -> manifests for kubectl: a Job, or a Kubeflow TrainJob. Printed, and not applied.

The image must have the script and torch; oomph need not be in it. Kubernetes chooses the GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from oomph.errors import UsageError
from oomph.launching.here import training_words
from oomph.launching.job_body import told
from oomph.launching.torchrun import Nodes, environment_of, launch_options
from oomph.records.launch import Request, Training
from oomph.records.workload import Variant

Yaml: TypeAlias = "str | int | Mapping[str, Yaml] | Sequence[Yaml]"

_PORT = 29500  # torchrun's; each job has addresses of its own
_GPUS = "nvidia.com/gpu"


def job_manifest(training: Training, request: Request, variant: Variant | None) -> str:
    """Return a Job, with a Service by which several machines meet. Raises UsageError."""
    name = _name(request)
    # An Indexed Job gives its pods the host names NAME-0, NAME-1, ... below the Service.
    meeting = f"{name}-0.{name}:{_PORT}"
    nodes = Nodes(num_nodes=request.num_nodes, num_gpus_each=request.gpus_each)
    options = launch_options(nodes, meeting)
    if request.num_nodes > 1:
        options.append(f"--rdzv-id={name}")
    pod: dict[str, Yaml] = {
        **({"subdomain": name} if request.num_nodes > 1 else {}),
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "train",
                "image": _image(request),
                "command": ["torchrun"],
                "args": [_literal(word) for word in (*options, *_words(training))],
                "env": _environment(request, variant),
                "resources": {"limits": _resources(request)},
                # The default of 64 MiB is too little for the workers of a DataLoader, and for NCCL.
                "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],  # noqa: S108
            }
        ],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    specification: dict[str, Yaml] = {
        "completions": request.num_nodes,
        "parallelism": request.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        **_deadline(request),
        "template": {"spec": pod},
    }
    job: Yaml = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": specification,
    }
    manifests = [job] if request.num_nodes == 1 else [_service(name), job]
    return _text(told(training, request, variant), manifests)


def _service(name: str) -> Yaml:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
        },
    }


def trainjob_manifest(training: Training, request: Request, variant: Variant | None) -> str:
    """Return a TrainJob for Kubeflow Trainer 2, which tells torchrun how to meet."""
    words = ["torchrun", *_words(training)]
    manifest: Yaml = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _name(request)},
        "spec": {
            **_deadline(request),
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": _image(request),
                "command": [_literal(word) for word in words],
                "numNodes": request.num_nodes,
                "numProcPerNode": request.gpus_each,
                "env": _environment(request, variant),
                "resourcesPerNode": {"limits": _resources(request)},
            },
        },
    }
    return _text(told(training, request, variant), [manifest])


def _words(training: Training) -> list[str]:
    if training.own_script is not None:
        raise UsageError(
            "--script does not go into a pod",
            because="torchrun is the pod's command",
            attempt="-- train.py ...",
        )
    return training_words(training)


def _literal(word: str) -> str:
    """Escape what Kubernetes would take for a variable: $(NAME)."""
    return word.replace("$", "$$")


def _environment(request: Request, variant: Variant | None) -> list[Yaml]:
    variables = environment_of(variant, request.cpus_per_gpu or 1)
    return [{"name": name, "value": value} for name, value in variables.items()]


def _resources(request: Request) -> dict[str, Yaml]:
    resource = _GPUS if request.gpu_resource == "gpu" else request.gpu_resource
    limits: dict[str, Yaml] = {resource: request.gpus_each}
    if request.cpus_per_gpu is not None:
        limits["cpu"] = request.cpus_per_gpu * request.gpus_each
    if request.memory_bytes is not None:
        limits["memory"] = str(request.memory_bytes)
    return limits


def _deadline(request: Request) -> dict[str, Yaml]:
    if request.time_s is None:
        return {}
    return {"activeDeadlineSeconds": max(1, round(request.time_s))}


def _name(request: Request) -> str:
    """Return the job's name as a label of DNS."""
    name = re.sub(r"[^a-z0-9-]+", "-", request.name.lower()).strip("-")
    # A pod's host name adds "-" and its number, within 63 characters.
    return name[:50].rstrip("-") or "train"


def _image(request: Request) -> str:
    if request.image is not None:
        return request.image
    raise UsageError(
        "a job of Kubernetes needs an image",
        because="its pods have nothing but the image",
        attempt="--image registry/my-training:latest",
    )


# ---- YAML ----------------------------------------------------------------------------------------
# Text is quoted except for plain names, with every character outside ASCII escaped: such text is
# the same to every reader of YAML.

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def _text(what: str, manifests: Sequence[Yaml]) -> str:
    documents = ("\n".join(_lines(manifest)) for manifest in manifests)
    told_safely = what.encode("ascii", "backslashreplace").decode()
    return f"# {told_safely}\n" + "\n---\n".join(documents) + "\n"


def _lines(value: Yaml, indent: str = "") -> Iterator[str]:
    """Yield a mapping or a sequence as lines of block style."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{indent}{_scalar(key)}:", inner, indent)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            first, *rest = _lines(inner, f"{indent}  ")
            yield f"{indent}- {first.strip()}"
            yield from rest
    else:
        yield f"{indent}{_scalar(value)}"


def _entry(head: str, value: Yaml, indent: str) -> Iterator[str]:
    if isinstance(value, str | int):
        yield f"{head} {_scalar(value)}"
    else:
        yield head
        yield from _lines(value, f"{indent}  ")


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (_PLAIN.fullmatch(value) and value.lower() not in _WORDS):
        return str(value)
    return '"' + "".join(map(_escaped, value)) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    if character in '"\\':
        return f"\\{character}"
    if 0x20 <= code < 0x7F:
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

"""oomph fits PyTorch training into GPU memory, and tells what the GPUs are doing.

    import oomph
    oomph.print_gpu_utilisation()       # in a training script: one line on its GPU

Public names are imported on first use: `import oomph` imports neither torch nor NVML.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own costs half as much as starting Python
if TYPE_CHECKING:
    from typing import Any

    from oomph.errors import OomphError as OomphError
    from oomph.monitoring.in_script import watching as watching
    from oomph.monitoring.memory_history import record as record
    from oomph.records.script import Script as Script
    from oomph.records.workload import Workload as Workload
    from oomph.verbs import hf as hf
    from oomph.verbs import lightning as lightning
    from oomph.verbs.by_name import by_name as by_name
    from oomph.verbs.check import check as check
    from oomph.verbs.explain import explain as explain
    from oomph.verbs.gpus import gpu_utilisation as gpu_utilisation
    from oomph.verbs.gpus import gpus as gpus
    from oomph.verbs.gpus import print_gpu_utilisation as print_gpu_utilisation
    from oomph.verbs.plan import plan as plan
    from oomph.verbs.planned import load_plan as load_plan
    from oomph.verbs.predict import predict as predict
    from oomph.verbs.report import report as report
    from oomph.verbs.run import emulated_gpu as emulated_gpu
    from oomph.verbs.stability import study_stability as study_stability
    from oomph.verbs.training import Stepper as Stepper
    from oomph.verbs.training import accelerate as accelerate
    from oomph.verbs.training import apply as apply
    from oomph.verbs.training import offloaded_activations as offloaded_activations
    from oomph.verbs.training import scale_learning_rate as scale_learning_rate
    from oomph.verbs.verify import verify as verify
    from oomph.verbs.watch import runs as runs

    gpu_utilization = gpu_utilisation
    print_gpu_utilization = print_gpu_utilisation

__version__ = "0.1.0"

# Module, and the name in it; None: the module itself.
_HOMES: dict[str, tuple[str, str | None]] = {
    "OomphError": ("oomph.errors", "OomphError"),
    "Script": ("oomph.records.script", "Script"),
    "Stepper": ("oomph.verbs.training", "Stepper"),
    "Workload": ("oomph.records.workload", "Workload"),
    "accelerate": ("oomph.verbs.training", "accelerate"),
    "by_name": ("oomph.verbs.by_name", "by_name"),
    "check": ("oomph.verbs.check", "check"),
    "emulated_gpu": ("oomph.verbs.run", "emulated_gpu"),
    "apply": ("oomph.verbs.training", "apply"),
    "explain": ("oomph.verbs.explain", "explain"),
    "gpu_utilisation": ("oomph.verbs.gpus", "gpu_utilisation"),
    "gpu_utilization": ("oomph.verbs.gpus", "gpu_utilisation"),
    "gpus": ("oomph.verbs.gpus", "gpus"),
    "hf": ("oomph.verbs.hf", None),
    "lightning": ("oomph.verbs.lightning", None),
    "load_plan": ("oomph.verbs.planned", "load_plan"),
    "offloaded_activations": ("oomph.verbs.training", "offloaded_activations"),
    "plan": ("oomph.verbs.plan", "plan"),
    "predict": ("oomph.verbs.predict", "predict"),
    "print_gpu_utilisation": ("oomph.verbs.gpus", "print_gpu_utilisation"),
    "print_gpu_utilization": ("oomph.verbs.gpus", "print_gpu_utilisation"),
    "record": ("oomph.monitoring.memory_history", "record"),
    "report": ("oomph.verbs.report", "report"),
    "runs": ("oomph.verbs.watch", "runs"),
    "scale_learning_rate": ("oomph.verbs.training", "scale_learning_rate"),
    "study_stability": ("oomph.verbs.stability", "study_stability"),
    "verify": ("oomph.verbs.verify", "verify"),
    "watching": ("oomph.monitoring.in_script", "watching"),
}

__all__ = [
    "OomphError",
    "Script",
    "Stepper",
    "Workload",
    "__version__",
    "accelerate",
    "apply",
    "by_name",
    "check",
    "emulated_gpu",
    "explain",
    "gpu_utilisation",
    "gpu_utilization",
    "gpus",
    "hf",
    "lightning",
    "load_plan",
    "offloaded_activations",
    "plan",
    "predict",
    "print_gpu_utilisation",
    "print_gpu_utilization",
    "record",
    "report",
    "runs",
    "scale_learning_rate",
    "study_stability",
    "verify",
    "watching",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oomph' has no attribute {name!r}")
    import importlib

    home, attribute = _HOMES[name]
    module = importlib.import_module(home)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return __all__

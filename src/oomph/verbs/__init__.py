"""What oomph does, one function per verb: the only room that joins the others.

Everything heavy is imported inside the function that needs it.
"""

from oomph.verbs.checks import check
from oomph.verbs.emulation import emulated_gpu, run_emulated
from oomph.verbs.measurements import calibrate, calibrations, forget_calibrations
from oomph.verbs.plans import load_plan, plan
from oomph.verbs.predictions import predict
from oomph.verbs.readings import (
    catalog,
    catalog_sources,
    find_gpu,
    free_gpus,
    gpu_utilisation,
    gpus,
    print_gpu_utilisation,
)
from oomph.verbs.reports import compare, report
from oomph.verbs.watching import end_like, load_run, runs, sampler, watch

__all__ = [
    "calibrate",
    "calibrations",
    "catalog",
    "catalog_sources",
    "check",
    "compare",
    "emulated_gpu",
    "end_like",
    "find_gpu",
    "forget_calibrations",
    "free_gpus",
    "gpu_utilisation",
    "gpus",
    "load_plan",
    "load_run",
    "plan",
    "predict",
    "print_gpu_utilisation",
    "report",
    "run_emulated",
    "runs",
    "sampler",
    "watch",
]

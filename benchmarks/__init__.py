"""What oomph costs, beside its peers and a floor in the same run."""

import sys
from pathlib import Path

# The emulated NVML and what listens to an emulated GPU are the tests'.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

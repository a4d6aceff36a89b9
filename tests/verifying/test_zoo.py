"""The zoo's models train, are predicted, and mostly request what their rehearsals do."""

from __future__ import annotations

import pytest
import torch._dynamo  # once, for all the children  # noqa: F401

from oomph.errors import OomphError
from oomph.sensing.target import find_target
from oomph.units import GIB
from oomph.verifying.verifier import gpu_here, predict_zoo_model, verify_zoo
from oomph.verifying.zoo import ZOO

# The emulated GPU runs the CPU's kernels, which take other temporaries inside than CUDA's. Those of
# recurrent layers keep something else than cuDNN's.
MATCHED_RATIO, MATCHED_RATIOS = 0.93, {"lstm": 0.6, "embedding-bag": 0.9}


@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_the_zoo_is_predicted_right_on_the_emulated_gpu(name: str) -> None:
    found = verify_zoo(gpu_here("4GiB"), [name], lambda _: None)
    (one,) = found.verified
    assert one.problem is None
    assert one.outcome == "right"
    assert abs(one.worst_error_ratio or 0.0) < 0.01
    assert one.sequence is not None
    assert one.sequence.matched_ratio > MATCHED_RATIOS.get(name, MATCHED_RATIO)


@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_the_zoo_is_small_enough_for_any_gpu(name: str) -> None:
    foreseen = predict_zoo_model(name, "full", find_target("a100-80gb", None))
    assert not isinstance(foreseen, OomphError)
    prediction, trace = foreseen
    assert prediction.reserved_bytes < 2 * GIB
    assert trace.doubt is None
    assert prediction.step_s is not None
    assert 0.001 < prediction.step_s < 0.5  # rates show, and a zoo takes no long

"""What `oomph plan --json` prints."""

from __future__ import annotations

import json

from hypothesis import given

from oomph.records.plan import Plans, as_answer
from planning.plans import any_of, whatever_it_takes

# Scripts read these names: they stay.
PROMISED = {"schema", "workload", "gpu", "fits_as_is", "plans", "rejected"}
PROMISED_OF_A_PLAN = {
    "recommended",
    "micro_batch",
    "accumulate",
    "gpus",
    "precision",
    "checkpointing",
    "optimizer",
    "tricks",
    "stability",
    "device_bytes",
    "low_bytes",
    "high_bytes",
    "host_bytes",
    "step_s",
    "relative_time",
    "why",
}


@whatever_it_takes
@given(any_of(Plans))
def test_the_answer_has_every_name_that_was_promised(plans: Plans) -> None:
    answer = as_answer(plans)
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    assert answer.keys() >= PROMISED
    assert len(answer["plans"]) == len(plans)
    for said, plan in zip(answer["plans"], plans, strict=True):
        assert said.keys() >= PROMISED_OF_A_PLAN
        assert said["micro_batch"] * said["accumulate"] * said["gpus"] == plan.batch_size
        assert said["device_bytes"] == plan.prediction.device_bytes
        assert said["host_bytes"] == plan.prediction.host_bytes
        assert said["why"] == plan.why

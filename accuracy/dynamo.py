"""Models of the dynamo dashboards: benchmarks/dynamo/huggingface.py, training, eager.

Models come from their class's default configuration, batches from random tokens, and the loss from
labels. In early 2023 the timed iteration had no optimizer. transformers is the installed version,
with the attention that was the only one then.
"""

from __future__ import annotations

from typing import Any

import torch

from accuracy import by_tensor
from oomph.records.workload import Workload

# Model of the dashboard -> class of transformers.
_CLASSES = {"YituTechConvBert": "ConvBertForMaskedLM"}


def workload(name: str, length: int, batch_size: int) -> Workload:
    import transformers

    made_of: Any = getattr(transformers, _CLASSES.get(name, name))

    def make() -> Any:
        return made_of(made_of.config_class(attn_implementation="eager"))

    return Workload(
        model=make,
        batch=lambda n: _batch(name, n, length),
        loss=lambda model, batch: model(**batch)[0],
        optimizer=lambda parameters: by_tensor.Plain(parameters, by_tensor.nothing),
        batch_size=batch_size,
    )


def _batch(name: str, num_examples: int, length: int) -> dict[str, Any]:
    def tokens() -> Any:
        return torch.zeros(num_examples, length, dtype=torch.long)

    if name.endswith("ForQuestionAnswering"):
        places = torch.zeros(num_examples, dtype=torch.long)
        ends = {"start_positions": places, "end_positions": places.clone()}
        return {"input_ids": tokens(), **ends}
    if name.endswith("ForConditionalGeneration"):
        return {"input_ids": tokens(), "decoder_input_ids": tokens(), "labels": tokens()}
    return {"input_ids": tokens(), "labels": tokens()}

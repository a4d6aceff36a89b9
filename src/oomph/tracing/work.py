"""A call -> what its kernel computes and moves."""

from __future__ import annotations

from typing import Any

import torch

from oomph.records.trace import Op, Phase
from oomph.tracing.behaviour import Behaviour
from oomph.tracing.known_outputs import tensors_in
from oomph.tracing.pretend import is_pretended


def work_of(
    behaviour: Behaviour, args: Any, kwargs: Any, outputs: Any, phase: Phase, module: str = ""
) -> Op | None:
    """None if nothing of it runs on the GPU."""
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if is_pretended(tensor)]
    tensors += [out for out in outputs if isinstance(out, torch.Tensor) and is_pretended(out)]
    if not tensors:
        return None
    written_again = tensors_in(tuple(args[i] for i in behaviour.updated if i < len(args)))
    moved = [*tensors, *(tensor for tensor in written_again if is_pretended(tensor))]
    flops = 0
    if behaviour.flops is not None and outputs:
        out = outputs[0] if len(outputs) == 1 else tuple(outputs)
        # torch's formulas know no overloads that are given the dtype of their result.
        given = [arg for arg in args if not isinstance(arg, torch.dtype)]
        flops = int(behaviour.flops(*given, **kwargs, out_val=out))
    return Op(
        name=behaviour.name,
        phase=phase,
        flops=flops,
        moved_bytes=sum(tensor.numel() * tensor.element_size() for tensor in moved),
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        module=module,
    )

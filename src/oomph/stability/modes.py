"""A look at every op, below autograd and autocast: what sees true dtypes, in backward, too."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class EveryOp(TorchDispatchMode):
    """torch's own, without the compiler, which it would import for seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def name_of(op: Any) -> str:
    """ "mm" of aten::mm.default."""
    return str(op._schema.name).partition("::")[2]

"""`flex_attention`, whose kernel torch.compile writes -> the fused attention that torch has.

Both keep what they were given, their output and one figure for each query, and neither ever holds
the scores. What a `score_mod` or a mask is made of gets no gradient by this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

FLEX = "flex_attention: rehearsed as scaled_dot_product_attention, which keeps as much"


def install(approximate: Callable[[str], None]) -> None:
    """Patch the name: who has compiled it has compiled this."""

    def attention(query: Any, key: Any, value: Any, *_: Any, **options: Any) -> Any:
        approximate(FLEX)
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            scale=options.get("scale"),
            enable_gqa=bool(options.get("enable_gqa")),
        )
        return _with_figures(out, query, options)

    vars(flex)["flex_attention"] = attention


def _with_figures(out: Any, query: Any, options: dict[str, Any]) -> Any:
    """The output, and what else is asked for of each query."""
    asked = options.get("return_aux")
    if asked is None and not options.get("return_lse"):
        return out
    figures = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    if asked is None:
        return out, figures
    most = torch.empty_like(figures) if asked.max_scores else None
    return out, flex.AuxOutput(lse=figures if asked.lse else None, max_scores=most)

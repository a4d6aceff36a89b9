"""A model of Hugging Face with eager attention -> the same with torch's fused attention.

Eager attention keeps a matrix of length x length per head; the fused one keeps none. The sums are
the same in another order. Models of other libraries, and one's own, call their attention
themselves: nobody can exchange it from outside.
"""

from __future__ import annotations

from typing import Any, Literal

from oomph.errors import UsageError

AttentionIs = Literal["eager", "sdpa", "unknown"]

_FUSED = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def attention_is(model: Any) -> AttentionIs:
    """What a model says of its attention.

    "unknown" where it is not one of Hugging Face, or where transformers has no other attention for
    it: it calls itself "eager" then, though it may have none at all (ResNet, Mamba).
    """
    parts = _of_transformers(model)
    told = {getattr(getattr(m, "config", None), "_attn_implementation", None) for m in parts}
    told.discard(None)
    if not told:
        return "unknown"
    if all(name in _FUSED for name in told):
        return "sdpa"
    has_other = all(getattr(module, "_supports_sdpa", True) for module in parts)
    return "eager" if has_other else "unknown"


def _of_transformers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_attn_implementation")]


def use_sdpa(model: Any) -> None:
    """Let the model use F.scaled_dot_product_attention. Nothing happens if it does already."""
    if attention_is(model) == "sdpa":
        return
    if not _of_transformers(model):
        raise UsageError(
            f"the attention of {type(model).__name__} cannot be exchanged from outside",
            because="it is no model of Hugging Face's transformers",
            attempt="calling torch.nn.functional.scaled_dot_product_attention in the model",
        )
    try:
        model.set_attn_implementation("sdpa")
    except (ValueError, ImportError) as error:
        raise _refusal(model, str(error)) from error
    if attention_is(model) != "sdpa":
        raise _refusal(model, "transformers has no other attention for it")


def _refusal(model: Any, because: str) -> UsageError:
    return UsageError(
        f"{type(model).__name__} has no fused attention",
        because=" ".join(because.split())[:200],
        attempt="attention as it is",
    )

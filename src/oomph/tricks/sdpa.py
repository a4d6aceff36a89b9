"""Switch a Hugging Face model from eager attention to torch's fused attention.

Eager attention keeps a length x length matrix per head; fused attention keeps none. The sums are
the same in another order. Models of other libraries, and users' own, call their attention directly,
so it cannot be replaced from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from oomph.errors import UsageError
from oomph.tricks.definition import Definition, Fragment, by_hand

if TYPE_CHECKING:
    import torch

AttentionIs = Literal["eager", "sdpa", "unknown"]

_FUSED = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def attention_is(model: torch.nn.Module) -> AttentionIs:
    """Return what a model says about its attention.

    "unknown" if it is not a Hugging Face model, or if transformers has no other attention for it.
    Such a model calls itself "eager", though it may have no attention at all (ResNet, Mamba).
    """
    parts = _of_transformers(model)
    named = {getattr(getattr(m, "config", None), "_attn_implementation", None) for m in parts}
    named.discard(None)
    if not named:
        return "unknown"
    if all(name in _FUSED for name in named):
        return "sdpa"
    has_other = all(getattr(module, "_supports_sdpa", True) for module in parts)
    return "eager" if has_other else "unknown"


def _of_transformers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_attn_implementation")]


def use_sdpa(model: torch.nn.Module) -> None:
    """Make the model use F.scaled_dot_product_attention. Nothing happens if it already does."""
    if attention_is(model) == "sdpa":
        return
    if not _of_transformers(model):
        raise UsageError(
            f"the attention of {type(model).__name__} cannot be exchanged from outside",
            because="it is not a model of Hugging Face's transformers",
            attempt="calling torch.nn.functional.scaled_dot_product_attention in the model",
        )
    try:
        model.set_attn_implementation("sdpa")  # type: ignore[operator] # of transformers
    except (ValueError, ImportError) as error:
        raise _refusal(model, str(error)) from error
    if attention_is(model) != "sdpa":
        raise _refusal(model, "transformers has no other attention for it")


def _refusal(model: torch.nn.Module, because: str) -> UsageError:
    return UsageError(
        f"{type(model).__name__} has no fused attention",
        because=" ".join(because.split())[:200],
        attempt="attention as it is",
    )


_WHY_NOT = {
    "eager": None,
    "sdpa": "the model already uses it",
    "none": "no attention was seen in the model",
    "unknown": "the model's attention is its own: use"
    " torch.nn.functional.scaled_dot_product_attention in it",
}


SDPA = Definition(
    name="sdpa",
    stability="same",
    setting="attention",
    value="sdpa",
    what="attention that never holds the matrix of all pairs of tokens",
    code='model.set_attn_implementation("sdpa")',
    is_in_every_plan=True,  # exact, and saves memory and time
    why_not=lambda request: _WHY_NOT[request.possible.attention_is],
    put_on_model=lambda model, _: use_sdpa(model),
    by_hand=by_hand('attention: model.set_attn_implementation("sdpa")'),
    in_code=lambda _: Fragment(
        on_model=['model.set_attn_implementation("sdpa")  # of a Hugging Face model']
    ),
    in_script=lambda _, __: Fragment(on_model=['model.set_attn_implementation("sdpa")']),
)

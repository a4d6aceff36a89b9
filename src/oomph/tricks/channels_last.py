"""Store a convolutional model's images as height x width x channels.

cuDNN's tensor-core kernels are made for that layout; with the usual one they first transpose every
image (https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional, "Tensor
Layouts"). Shapes, sizes and the state dict do not change; sums run in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomph.errors import UsageError
from oomph.records.generation import generation_of
from oomph.records.workload import Variant, divides_parameters
from oomph.tricks.definition import Definition, Fragment, by_hand

if TYPE_CHECKING:
    import torch


def _conflict(variant: Variant, _: bool) -> UsageError | None:
    if not divides_parameters(variant):
        return None
    return UsageError(
        "channels last does not work with FSDP",
        because="fully_shard takes only parameters that are contiguous in the usual layout",
        attempt="ddp, or FSDP without channels-last",
    )


def _why_not_on(model: torch.nn.Module) -> str | None:
    import torch

    has_images = any(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    return None if has_images else "the model has no Conv2d layers"


def use_channels_last(model: torch.nn.Module) -> None:
    """Change the layout of convolution weights and of the images that the model receives."""
    import torch

    untyped: Any = model  # torch's type hints for Module.to omit memory_format
    untyped.to(memory_format=torch.channels_last)
    model.register_forward_pre_hook(_lay_out_images, with_kwargs=True)


def _lay_out_images(
    _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_laid_out, args)), {name: _laid_out(one) for name, one in kwargs.items()}


def _laid_out(given: Any) -> Any:
    import torch

    is_image = isinstance(given, torch.Tensor) and given.dim() == 4
    return given.contiguous(memory_format=torch.channels_last) if is_image else given


_LAY_OUT = '''
def lay_out_images(_model, images):
    """Channels last for what the model is given by place, as its weights have it."""
    last = {"memory_format": torch.channels_last}
    return tuple(one.contiguous(**last) if num_axes(one) == 4 else one for one in images)


def num_axes(given):
    return given.dim() if isinstance(given, torch.Tensor) else 0
'''

_IN_CODE = Fragment(
    functions=[_LAY_OUT],
    on_model=[
        "model.to(memory_format=torch.channels_last)",
        "model.register_forward_pre_hook(lay_out_images)",
    ],
)

CHANNELS_LAST = Definition(
    name="channels-last",
    stability="rounding",
    setting="channels_last",
    what="images as height x width x channels in memory, as tensor cores read them",
    code="model.to(memory_format=torch.channels_last), and images likewise",
    caveat="its time is computed, not measured: measure a step with it and one without",
    why_not=lambda request: (
        None
        if generation_of(request.capability).has_tensor_cores
        else "it needs tensor cores, which this GPU does not have"
    ),
    why_not_on=_why_not_on,
    conflict=_conflict,
    put_on_model=lambda model, _: use_channels_last(model),
    by_hand=by_hand(
        "channels last: model.to(memory_format=torch.channels_last), and"
        " images.contiguous(memory_format=torch.channels_last)"
    ),
    in_code=lambda _: _IN_CODE,
    in_script=lambda _, __: _IN_CODE,
)

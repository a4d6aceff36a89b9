"""New batch size -> the learning rate and Adam's decay that go with it.

Only for a batch size that must change: accumulating the same batch needs none of this. For SGD the
rate scales with the batch (Goyal et al. 2017, arXiv 1706.02677). For Adam it scales with the square
root, and the second moment's half-life stays constant in examples (Malladi et al. 2022, arXiv
2205.10287; Marek et al. 2025, arXiv 2507.07101). Both hold well below the gradient noise scale,
which is unknown before training; above it the rate hardly grows any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from oomph.tricks.definition import Severity

SEVERITY = Severity.BATCH
PRICE = "each update sees fewer examples: scale the learning rate"
_WITH_MOMENTS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lamb", "Adafactor")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRate:
    """The factor for the learning rate and the exponent for Adam's second beta."""

    factor: float
    beta2_power: float | None  # None: the optimizer has no second beta

    @property
    def advice(self) -> str:
        advice = f"learning rate x {self.factor:.3g}"
        if self.beta2_power is not None:
            advice += f", Adam's beta2 to the power of {self.beta2_power:.3g}"
        return f"{advice}; right as long as the batch is below the gradient's noise scale"


def new_rate(optimizer_class: str, ratio: float) -> NewRate:
    """Return the new rate for a batch that is `ratio` times as large as before.

    >>> new_rate("torch.optim.sgd.SGD", 0.25).factor
    0.25
    >>> new_rate("torch.optim.adamw.AdamW", 0.25)
    NewRate(factor=0.5, beta2_power=0.25)
    """
    if optimizer_class.rpartition(".")[2].removesuffix("8bit") in _WITH_MOMENTS:
        return NewRate(factor=ratio**0.5, beta2_power=ratio)
    return NewRate(factor=ratio, beta2_power=None)

"""Another batch -> the learning rate, and Adam's decay, that go with it.

Only for a batch that must change: the same batch in smaller pieces needs none of this. For SGD the
rate goes with the batch (Goyal et al. 2017, arXiv 1706.02677). For Adam it goes with its root, and
the second moment's half-life is kept in examples (Malladi et al. 2022, arXiv 2205.10287; Marek et
al. 2025, arXiv 2507.07101). Both hold well below the noise scale of the gradient, which nobody
knows before training; above it the rate hardly grows any more.
"""

from __future__ import annotations

from dataclasses import dataclass

_WITH_MOMENTS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lamb", "Adafactor")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRate:
    """By what a learning rate is multiplied, and to what power Adam's second beta goes."""

    factor: float
    beta2_power: float | None  # None: there is none

    @property
    def advice(self) -> str:
        said = f"learning rate x {self.factor:.3g}"
        if self.beta2_power is not None:
            said += f", Adam's beta2 to the power of {self.beta2_power:.3g}"
        return f"{said}; right as long as the batch is below the gradient's noise scale"


def new_rate(optimizer_class: str, ratio: float) -> NewRate:
    """For a batch that is `ratio` times what it was.

    >>> new_rate("torch.optim.sgd.SGD", 0.25).factor
    0.25
    >>> new_rate("torch.optim.adamw.AdamW", 0.25)
    NewRate(factor=0.5, beta2_power=0.25)
    """
    if optimizer_class.rpartition(".")[2].removesuffix("8bit") in _WITH_MOMENTS:
        return NewRate(factor=ratio**0.5, beta2_power=ratio)
    return NewRate(factor=ratio, beta2_power=None)

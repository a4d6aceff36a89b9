"""oomph.hf: oomph for Hugging Face's Trainer.

trainer = oomph.hf.Trainer(model=model, args=args, train_dataset=data)      # splits batches
trainer = Trainer(..., callbacks=[oomph.hf.Watching()])                     # watches its steps
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomph.training.adapters.hf import TrainerMixin as TrainerMixin


def __getattr__(name: str) -> Any:
    if name != "Watching":
        from oomph.training.adapters import hf

        return getattr(hf, name)
    from transformers import TrainerCallback

    from oomph.monitoring.callbacks import HfCallback

    made = type("Watching", (HfCallback, TrainerCallback), {"__doc__": HfCallback.__doc__})
    made.__module__ = __name__
    globals()["Watching"] = made
    return made

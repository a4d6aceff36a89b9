"""oomph.lightning: oomph for Lightning's Trainer.

trainer = pytorch_lightning.Trainer(callbacks=[oomph.lightning.Guard()])       # splits batches
trainer = pytorch_lightning.Trainer(callbacks=[oomph.lightning.Watching()])    # watches its steps
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from oomph.training.adapters import lightning

    if name != "Watching":
        return getattr(lightning, name)
    from oomph.monitoring.callbacks import LightningCallback

    made = globals()["Watching"] = lightning.as_callback("Watching", LightningCallback, __name__)
    return made

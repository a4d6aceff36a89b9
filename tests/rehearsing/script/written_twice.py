"""The same trainings, written as scripts and as Workloads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oomph.records.workload import Variant, Workload

WIDTH, CLASSES, EXAMPLES = 64, 10, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 256)
        self.norm = nn.BatchNorm1d(256)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(256, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))


class Transformer(nn.Module):
    """With blocks that are checkpointed and a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True, norm_first=True)
            for _ in range(3)
        ]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def pictures(num_examples: int) -> Any:
    return {
        "x": torch.zeros(num_examples, WIDTH),
        "y": torch.zeros(num_examples, dtype=torch.long),
    }


def sentences(num_examples: int) -> Any:
    return {"x": torch.zeros(num_examples, 32, dtype=torch.long)}


def net_loss(model: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def sentence_loss(model: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten())


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-3)


def workload(kind: str, **changes: Any) -> Workload:
    of = {"net": (Net, pictures, net_loss), "transformer": (Transformer, sentences, sentence_loss)}
    model, batch, loss = of[kind]
    given = {"model": model, "batch": batch, "loss": loss, "optimizer": adam}
    return Workload(**{**given, "batch_size": EXAMPLES, **changes})


# kind, lines of the script, what the Workload has beside, how it is trained
PREAMBLE = """
import torch
from rehearsing.script.written_twice import *
model = {model}().to("cuda")
optimizer = adam(model.parameters())
loader = torch.utils.data.DataLoader(
    [{{name: row for name, row in zip(batch, rows)}} for batch in [{batch}(64)]
     for rows in zip(*batch.values())], batch_size=EXAMPLES)
"""
PLAIN = """
for batch in loader:
    optimizer.zero_grad()
    batch = {k: v.to("cuda") for k, v in batch.items()}
    loss = LOSS(model, batch)
    loss.backward()
    optimizer.step()
"""
CLIPPED = PLAIN.replace(
    "    optimizer.step",
    "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step",
)
AUTOCAST = PLAIN.replace(
    "    loss = LOSS(model, batch)",
    "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = LOSS(model, batch)",
)
SCALED = "scaler = torch.amp.GradScaler('cuda')\n" + AUTOCAST.replace(
    "loss.backward()", "scaler.scale(loss).backward()"
).replace("optimizer.step()", "scaler.step(optimizer); scaler.update()").replace(
    "bfloat16", "float16"
)
ACCUMULATED = """
batches = iter(loader)
for step in range(4):
    optimizer.zero_grad()
    for micro_step in range(2):
        batch = None
        batch = {k: v.to("cuda") for k, v in next(batches).items()}
        loss = LOSS(model, batch) / 2
        loss.backward()
    optimizer.step()
"""
LOOPS: dict[str, tuple[str, dict[str, Any], Variant]] = {
    "plain": (PLAIN, {}, Variant(micro_batch=EXAMPLES)),
    "clipped": (CLIPPED, {"clip_grad_norm": 1.0}, Variant(micro_batch=EXAMPLES)),
    "autocast": (AUTOCAST, {}, Variant(micro_batch=EXAMPLES, precision="bf16")),
    "scaled": (SCALED, {}, Variant(micro_batch=EXAMPLES, precision="fp16")),
    "accumulated": (ACCUMULATED, {}, Variant(micro_batch=EXAMPLES, accumulation=2)),
}


def script(kind: str, loop: str) -> str:
    of = {
        "net": ("Net", "pictures", "net_loss"),
        "transformer": ("Transformer", "sentences", "sentence_loss"),
    }
    model, batch, loss = of[kind]
    return PREAMBLE.format(model=model, batch=batch) + LOOPS[loop][0].replace("LOSS", loss)

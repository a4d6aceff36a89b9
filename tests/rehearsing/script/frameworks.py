"""Scripts that leave their loop to a framework."""

from __future__ import annotations

_TEXTS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
class Texts(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        ids = torch.randint(0, 500, (32,))
        return {"input_ids": ids, "labels": ids}
config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=500)
model = GPT2LMHeadModel(config)
"""

FRAMEWORKS: dict[str, tuple[str, dict[str, object]]] = {
    "trainer": (
        _TEXTS
        + """
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True,
    gradient_checkpointing=True, max_steps=10, report_to=[], save_steps=1, logging_steps=1,
    dataloader_num_workers=2, dataloader_pin_memory=True,
)
Trainer(model, arguments, train_dataset=Texts()).train()
""",
        {
            "model": "GPT2LMHeadModel",
            "micro_batch": 4,
            "accumulation": 2,
            "precision": "bf16",
            "checkpointing": "by the script",
            "clips_gradients": True,
            "longest_sequence": 32,
        },
    ),
    "trainer with evaluation": (
        _TEXTS
        + """
import numpy as np
def metrics(found):
    return {"accuracy": float((np.argmax(found.predictions, -1) == found.label_ids).mean())}
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, per_device_eval_batch_size=16, fp16=True, max_steps=10,
    report_to=[], eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True,
    eval_on_start=True,
)
Trainer(
    model, arguments, train_dataset=Texts(), eval_dataset=Texts(), compute_metrics=metrics
).train()
""",
        {"micro_batch": 8, "accumulation": 1, "precision": "fp16", "uses_grad_scaler": True},
    ),
    "pretrained": (
        _TEXTS
        + """
model.save_pretrained("saved")
model = GPT2LMHeadModel.from_pretrained("saved", dtype=torch.bfloat16).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for batch in torch.utils.data.DataLoader(Texts(), batch_size=2):
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    loss = model(**batch).loss
    loss.backward(); optimizer.step(); optimizer.zero_grad()
""",
        {"micro_batch": 2, "precision": "pure-bf16", "num_parameters": 74_240},
    ),
    "accelerate": (
        """
import torch
from torch import nn
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
data = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randint(0, 4, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients: accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
    accelerator.print("loss", loss.item(), accelerator.gather(loss).mean())
""",
        {"micro_batch": 8, "accumulation": 2, "precision": "fp16", "clips_gradients": True},
    ),
    "lightning": (
        """
import torch, pytorch_lightning as pl
from torch import nn
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss
    def validation_step(self, batch, _):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randint(0, 4, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
pl.Trainer(
    max_epochs=2, accelerator="gpu", devices=1, precision="16-mixed", gradient_clip_val=1.0,
    accumulate_grad_batches=2,
).fit(Lit(), loader, loader)
""",
        {"micro_batch": 8, "accumulation": 2, "precision": "fp16", "uses_grad_scaler": True},
    ),
}

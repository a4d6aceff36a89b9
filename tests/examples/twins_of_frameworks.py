"""The twins of the example scripts whose loop is another library's.

What such a loop does to memory is written out here, as transformers 5.22, accelerate 1.15 and
Lightning 2.6 do it, down to tensors of one figure.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from examples.loops import let_go, names_of, script, whole, workload
from oomph.records.workload import Variant, Workload

Made = tuple[Workload, Variant]


def accelerate_loop(
    *,
    vocab: int = 32_000,
    dim: int = 512,
    heads: int = 8,
    layers: int = 6,
    length: int = 256,
    batch_size: int = 32,
    **_: Any,
) -> Made:
    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.batch = batch  # the loader has the next one on the GPU before it hands it out
        names.logits = model(batch["source"], batch["target"])
        names.loss = functional.cross_entropy(names.logits.flatten(0, 1), batch["labels"].flatten())
        return names.loss / 1  # accelerator.backward divides by the accumulation

    made = workload(
        lambda: script("accelerate_loop").Seq2Seq(vocab, dim, heads, layers, length),
        lambda _, n: {name: whole(n, length) for name in ("source", "target", "labels")},
        loss,
        lambda _, parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size,
        clip=1.0,
    )
    return made, Variant(micro_batch=batch_size)


def hf_trainer(
    *,
    n_embd: int = 768,
    n_layer: int = 12,
    n_head: int = 12,
    vocab_size: int = 50257,
    block_size: int = 1024,
    per_device_train_batch_size: int = 8,
    logging_steps: int = 500,
    **_: Any,
) -> Made:
    def make() -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=vocab_size,
            n_embd=n_embd,
            n_layer=n_layer,
            n_head=n_head,
            n_positions=block_size,
            use_cache=False,
        )
        model = GPT2LMHeadModel(config)
        model.gradient_checkpointing_enable()
        return model

    def computed(model: Any, batch: Any) -> Any:
        """Trainer.compute_loss, with the forward that accelerate puts around the model's."""
        from accelerate.utils import convert_to_fp32

        outputs = model(**batch, num_items_in_batch=names_of(model).count)
        torch.clear_autocast_cache()  # autocast ends with the model's forward
        outputs = convert_to_fp32(outputs)
        loss = outputs["loss"]
        loss *= 1  # the number of processes
        return loss

    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.count = batch["labels"].ne(-100).sum() + 0
        names.count = names.count // 1
        names.inputs = batch  # the old ones were there while these were copied
        names.loss = computed(model, batch)
        return names.loss / 1  # accelerator.backward divides by the accumulation

    def optimizer(model: Any, _: Any) -> Any:
        from transformers import Trainer

        decayed = Trainer.get_decay_parameter_names(None, model)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        names = names_of(model)
        groups = [
            {"params": [p for name, p in named if name in decayed]},
            {"params": [p for name, p in named if name not in decayed]},
        ]
        made = torch.optim.AdamW(groups, lr=5e-5, fused=True)
        names.total = torch.tensor(0.0).to("cuda")
        made.register_step_pre_hook(lambda *_: clip(model))
        return made

    def clip(model: Any) -> None:
        names = names_of(model)
        names.tr_loss_step = names.loss.detach()
        torch.isnan(names.tr_loss_step)
        torch.isinf(names.tr_loss_step)
        names.norm = None
        names.norm = clip_grad_norm_(model.parameters(), 1.0)

    def log(model: Any) -> None:
        if logging_steps == 1:
            names_of(model).total.mean()

    made = workload(
        make,
        lambda _, n: {"input_ids": whole(n, block_size), "labels": whole(n, block_size)},
        loss,
        optimizer,
        per_device_train_batch_size,
        after_step=log,
    )
    return made, Variant(micro_batch=per_device_train_batch_size, precision="bf16")


def _metric() -> list[torch.Tensor]:
    """What Lightning holds for a name that is logged: a value, a count, and their defaults."""
    return [torch.tensor(number).to("cuda") for number in (0.0, 0, 0.0, 0)]


def lightning_resnet(
    *, width: int = 64, blocks: int = 2, batch_size: int = 512, size: int = 20_000, **_: Any
) -> Made:
    def batch(n: int) -> Any:
        return torch.zeros(n, 3, 32, 32), whole(n)

    def optimizer(model: Any, parameters: Any) -> Any:
        made = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
        model.eval()
        held_out = size - size * 4 // 5
        with torch.no_grad():  # two batches, before training
            for start in range(0, min(held_out, 2 * batch_size), batch_size):
                x, y = (t.to("cuda") for t in batch(min(batch_size, held_out - start)))
                (model(x).argmax(dim=1) == y).float().mean()
        names_of(model).val_acc = _metric()
        model.train()
        return made

    def loss(model: Any, given: Any) -> Any:
        names = names_of(model)
        loss = functional.cross_entropy(model(given[0]), given[1])
        if not hasattr(names, "train_loss"):
            names.train_loss = _metric()
        names.train_loss[0] = loss.detach().clone()
        names.closure_loss = loss / 1
        names.loss = names.closure_loss.detach().clone()
        return names.closure_loss

    def drop_losses(model: Any) -> None:
        names = names_of(model)
        let_go(names.closure_loss)
        del names.closure_loss, names.loss

    made = workload(
        lambda: script("lightning_resnet").LitResnet(width, blocks).model,
        lambda _, n: batch(n),
        loss,
        optimizer,
        batch_size,
        clears="before backward",
        after_step=drop_losses,
    )
    return made, Variant(micro_batch=batch_size)

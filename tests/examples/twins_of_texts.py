"""The twins of the example scripts that train on tokens.

Each takes a script's arguments, with the script's own defaults.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from examples.loops import OneByOne, names_of, script, whole, workload
from oomph.records.workload import Precision, Variant, Workload

Made = tuple[Workload, Variant]


def pick_batch_by_gpu(
    *,
    vocab: int = 30522,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    length: int = 512,
    batch_size: int = 16,
    precision: Precision = "bf16",
    **_: Any,
) -> Made:
    """Batch and precision are what the script chooses on the GPU of the twin."""

    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.logits = model(batch[0])
        return functional.cross_entropy(names.logits.view(-1, vocab), batch[1].view(-1))

    made = workload(
        lambda: script("pick_batch_by_gpu").Encoder(vocab, width, layers, heads, length),
        lambda _, n: (whole(n, length), whole(n, length)),
        loss,
        lambda _, parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch_size,
    )
    return made, Variant(micro_batch=batch_size, precision=precision)


def compiled_llama(
    *,
    vocab: int = 32000,
    dim: int = 768,
    layers: int = 12,
    heads: int = 12,
    length: int = 1024,
    batch_size: int = 16,
    **_: Any,
) -> Made:
    """In eager mode, as torch.compile is rehearsed."""

    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.x, names.y = batch["x"], batch["y"]
        return model(names.x, names.y)

    made = workload(
        lambda: script("compiled_llama").Llama(vocab, dim, layers, heads, length),
        lambda model, n: OneByOne(names_of(model), {"x": whole(n, length), "y": whole(n, length)}),
        loss,
        lambda _, parameters: torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95)),
        batch_size,
        clears="before backward",
    )
    return made, Variant(micro_batch=batch_size, precision="bf16")


def lstm_lm(*, bptt: int = 35, batch_size: int = 128, **sizes: Any) -> Made:
    config: dict[str, Any] = {}

    def make() -> Any:
        module = script("lstm_lm")
        fields = vars(module.Config())
        config.update({name: sizes.get(name, fields[name]) for name in fields})
        return module.RNNModel(module.Config(**config))

    def batch(model: Any, n: int) -> Any:
        names = names_of(model)
        if not hasattr(names, "hidden"):
            names.hidden = model.init_hidden(n)
        rows = torch.zeros(n, 0)  # time comes first in the others: this one tells n
        source_and_target = {"source": whole(bptt, n), "target": whole(bptt, n)}
        return OneByOne(names, {**source_and_target, "rows": rows})

    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.source, names.target = batch["source"], batch["target"]
        names.hidden = script("lstm_lm").detach(names.hidden)
        names.output, names.hidden = model(names.source, names.hidden)
        flat = names.output.view(-1, config["vocab"])
        loss = functional.cross_entropy(flat, names.target.reshape(-1))
        torch.isnan(loss)
        return loss

    made = workload(
        make,
        batch,
        loss,
        lambda _, parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch_size,
        clip=0.25,
        clears="before forward",
    )
    return made, Variant(micro_batch=batch_size)


def nano_gpt(
    *,
    gradient_accumulation_steps: int = 8,
    batch_size: int = 12,
    block_size: int = 1024,
    vocab_size: int = 50304,
    n_layer: int = 12,
    n_head: int = 12,
    n_embd: int = 768,
    **_: Any,
) -> Made:
    def fetched(n: int) -> Any:
        return whole(n, block_size).to("cuda"), whole(n, block_size).to("cuda")

    def loss(model: Any, batch: Any) -> Any:
        names, n = names_of(model), len(batch)
        if not hasattr(names, "batch"):
            names.batch = fetched(n)
        names.logits, loss = model(*names.batch)
        names.batch = fetched(n)  # the next one, before backward
        return loss

    made = workload(
        lambda: script("nano_gpt_model").GPT(vocab_size, block_size, n_layer, n_head, n_embd),
        lambda _, n: torch.zeros(n, 0),
        loss,
        lambda model, _: model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda"),
        batch_size * gradient_accumulation_steps,
        clip=1.0,
    )
    return made, Variant(
        micro_batch=batch_size, accumulation=gradient_accumulation_steps, precision="bf16"
    )


def eval_first(
    *,
    examples: int = 4000,
    vocab: int = 20_000,
    dim: int = 512,
    heads: int = 8,
    layers: int = 6,
    length: int = 256,
    batch: int = 32,
    eval_batch: int = 128,
    **_: Any,
) -> Made:
    def optimizer(model: Any, parameters: Any) -> Any:
        made = torch.optim.AdamW(parameters, lr=3e-4)
        sizes = [min(eval_batch, examples // 5 - i) for i in range(0, examples // 5, eval_batch)]
        loader = [(whole(size, length), whole(size)) for size in sizes]
        script("eval_first").evaluate(model, loader, "cuda")
        model.train()
        return made

    made = workload(
        lambda: script("eval_first").Classifier(vocab, dim, heads, layers, 4, length),
        lambda _, n: (whole(n, length), whole(n)),
        lambda model, given: functional.cross_entropy(model(given[0]), given[1]),
        optimizer,
        batch,
        clears="before backward",
    )
    return made, Variant(micro_batch=batch)


def tagger(
    *,
    vocab: int = 100_000,
    tags: int = 50,
    dim: int = 300,
    hidden: int = 512,
    layers: int = 2,
    dropout: float = 0.3,
    longest: int = 128,
    batch_size: int = 64,
    **_: Any,
) -> Made:
    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.scores = model(batch[0])
        flat = names.scores.flatten(0, 1)
        return functional.cross_entropy(flat, batch[1].flatten(), ignore_index=-1)

    made = workload(
        lambda: script("tagger.model").Tagger(vocab, tags, dim, hidden, layers, dropout),
        lambda _, n: (whole(n, longest), whole(n, longest)),
        loss,
        lambda _, parameters: torch.optim.Adam(parameters, lr=3e-3),
        batch_size,
    )
    return made, Variant(micro_batch=batch_size)


def optimizer_before_cuda(
    *,
    users: int = 200_000,
    items: int = 50_000,
    dim: int = 128,
    hidden: int = 1024,
    batch_size: int = 8192,
    **_: Any,
) -> Made:
    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.u, names.i = batch["u"], batch["i"]
        names.rating = ((names.u + names.i) % 5).float()
        names.prediction = model(names.u, names.i)
        names.loss = functional.mse_loss(names.prediction, names.rating)
        return names.loss

    def add_up(model: Any) -> None:
        names = names_of(model)
        names.running_loss = getattr(names, "running_loss", 0.0)
        names.running_loss += names.loss

    made = workload(
        lambda: script("optimizer_before_cuda").Recommender(users, items, dim, hidden),
        lambda model, n: OneByOne(names_of(model), {"u": whole(n), "i": whole(n)}),
        loss,
        lambda _, parameters: torch.optim.Adam(parameters, lr=0.01),
        batch_size,
        clears="before backward",
        after_step=add_up,
    )
    return made, Variant(micro_batch=batch_size)


def tied_weights(
    *,
    vocab: int = 50_000,
    dim: int = 512,
    heads: int = 8,
    ff: int = 2048,
    layers: int = 8,
    dropout: float = 0.1,
    length: int = 256,
    batch: int = 16,
    **_: Any,
) -> Made:
    def loss(model: Any, given: Any) -> Any:
        names = names_of(model)
        names.x, names.y = given
        names.out = model(names.x, names.mask)
        return functional.cross_entropy(names.out.transpose(1, 2), names.y)

    def optimizer(model: Any, parameters: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=torch.device("cpu"))
        names_of(model).mask = mask.to("cuda")
        return torch.optim.Adam(parameters, lr=2.5e-4)

    made = workload(
        lambda: script("tied_weights").TiedLM(vocab, dim, heads, ff, layers, dropout),
        lambda _, n: (whole(n, length), whole(n, length)),
        loss,
        optimizer,
        batch,
        clip=0.5,
        clears="before forward",
    )
    return made, Variant(micro_batch=batch)


def checkpointed_transformer(
    *,
    vocab: int = 50257,
    dim: int = 1024,
    heads: int = 16,
    depth: int = 24,
    length: int = 1024,
    batch_size: int = 4,
    **_: Any,
) -> Made:
    """The model recomputes by itself: `checkpointing` stays "none"."""

    def loss(model: Any, ids: Any) -> Any:
        names = names_of(model)
        names.logits = model(ids[:, :-1])
        flat = names.logits.reshape(-1, vocab)
        return functional.cross_entropy(flat, ids[:, 1:].reshape(-1))

    made = workload(
        lambda: script("checkpointed_transformer").Decoder(vocab, dim, heads, depth, length),
        lambda _, n: whole(n, length + 1),
        loss,
        lambda _, parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1),
        batch_size,
        clears="before backward",
    )
    return made, Variant(micro_batch=batch_size)


def finetune_checkpoint(
    *, filters: int = 1024, length: int = 512, batch_size: int = 256, **_: Any
) -> Made:
    vocab, dim = 500, 32  # of word_vectors.pt

    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.target = batch[1]
        names.logit = model(batch[0])
        return functional.cross_entropy(names.logit, names.target)

    def print_accuracy(model: Any) -> None:
        names = names_of(model)
        if not hasattr(names, "accuracy"):  # in every twentieth step
            names.corrects = (
                torch.max(names.logit, 1)[1].view(names.target.size()).data == names.target.data
            ).sum()
            names.accuracy = 100.0 * names.corrects / len(names.target)
        del names.target

    made = workload(
        lambda: script("finetune_checkpoint").TextCNN(vocab, dim, filters, 20),
        lambda _, n: (whole(n, length), whole(n)),
        loss,
        lambda _, parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch_size,
        clears="before forward",
        after_step=print_accuracy,
    )
    return made, Variant(micro_batch=batch_size)


class Towers(nn.Module):
    """The models of clip_contrastive.py, which trains when it is imported."""

    def __init__(self, width: int, dim: int, layers: int, embed: int) -> None:
        super().__init__()
        self.visual = _image_tower(width, embed)
        layer = nn.TransformerEncoderLayer(
            dim, dim // 64 or 1, 4 * dim, 0.0, "gelu", batch_first=True
        )
        encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.textual = nn.Sequential(nn.Embedding(49408, dim), encoder, nn.Linear(dim, embed))
        self.logit_scale = nn.Parameter(torch.tensor(2.659))


def _image_tower(width: int, embed: int) -> nn.Module:
    stages: list[nn.Module] = []
    cin = 3
    for i in range(4):
        cout = width * 2**i
        stages.append(nn.Conv2d(cin, cout, 4, 4) if i == 0 else nn.Conv2d(cin, cout, 2, 2))
        deep = nn.Conv2d(cout, cout, 7, padding=3, groups=cout)
        stages += [nn.GroupNorm(1, cout), deep, nn.GELU()]
        cin = cout
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, embed))


def clip_contrastive(
    *,
    image_width: int = 96,
    text_dim: int = 512,
    text_layers: int = 6,
    embed: int = 512,
    resolution: int = 128,
    context: int = 77,
    batch: int = 128,
    **_: Any,
) -> Made:
    def made_batch(model: Any, n: int) -> Any:
        names = names_of(model)
        if not hasattr(names, "labels"):
            names.labels = torch.arange(n, device="cuda")
        return torch.zeros(n, 3, resolution, resolution), whole(n, context)

    def loss(model: Any, given: Any) -> Any:
        names, (images, texts) = names_of(model), given
        names.image_features = functional.normalize(model.visual(images), dim=-1)
        names.text_features = functional.normalize(model.textual(texts).mean(1), dim=-1)
        names.logits = model.logit_scale.exp() * names.image_features @ names.text_features.t()
        cross_entropy, labels = functional.cross_entropy, names.labels
        return (cross_entropy(names.logits, labels) + cross_entropy(names.logits.t(), labels)) / 2

    def optimizer(_: Any, parameters: Any) -> Any:
        scale, *towers = parameters
        return torch.optim.AdamW([*towers, scale], lr=5e-4)

    def clamp(model: Any) -> None:
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.605)
        model.logit_scale.exp()  # printed, in every tenth step

    made = workload(
        lambda: Towers(image_width, text_dim, text_layers, embed),
        made_batch,
        loss,
        optimizer,
        batch,
        clears="before backward",
        after_step=clamp,
    )
    return made, Variant(micro_batch=batch, precision="bf16")

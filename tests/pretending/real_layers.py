"""Run by torchrun on the CPU: what real ranks compute and allocate that share each layer, as JSON.

torchrun --nproc-per-node 2 -m pretending.real_layers layers
torchrun --nproc-per-node 4 -m pretending.real_layers "layers and shards"
Ranks that share layers train on the same examples; what each way ends with is compared with one
process that has trained on all of them. The first rank prints.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

from oomph.pretending import ranks
from oomph.records.workload import Variant
from oomph.rehearsing.self_test import Counting
from oomph.tricks import apply
from pretending import real_ranks

EXAMPLES, LENGTH, WIDTH, HEADS, HIDDEN, VOCABULARY = 2, 16, 64, 4, 96, 160
WAYS = {
    "layers": Variant(micro_batch=EXAMPLES, num_gpus=2, tensor_parallel=2),
    "layers, accumulated": Variant(
        micro_batch=EXAMPLES, num_gpus=2, tensor_parallel=2, accumulation=2
    ),
    "layers, recomputed": Variant(
        micro_batch=EXAMPLES, num_gpus=2, tensor_parallel=2, checkpointing="blocks"
    ),
    "layers and shards": Variant(
        micro_batch=EXAMPLES, num_gpus=4, tensor_parallel=2, sharding="fsdp"
    ),
}


class Attention(nn.Module):
    """Written out: a GPU has other fused kernels than the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Any) -> Any:
        examples, length, _ = x.shape
        q, k, v = (
            layer(x).view(examples, length, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.wo((scores @ v).transpose(1, 2).reshape(examples, length, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(self.w1(x).relu() * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Transformer(nn.Module):
    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def examples(count: int) -> Any:
    torch.manual_seed(1)
    return torch.randint(0, VOCABULARY, (count, LENGTH))


def loss_of(model: Any, tokens: Any) -> Any:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def compared(way: str, variant: Variant) -> dict[str, Any]:
    torch.manual_seed(0)
    alone = Transformer()
    count = variant.micro_batch * variant.accumulation
    batch = examples(count * variant.num_data_gpus)
    place = distributed.get_rank() // variant.tensor_parallel
    mine = list(batch[place * count : (place + 1) * count].chunk(variant.accumulation))
    recorder = Counting()
    gc.collect()
    gc.disable()
    with ranks.local_parts_are_seen(recorder):
        with recorder:
            model = apply.put_on_model(copy.deepcopy(alone), variant)
        recorder.begin_with_the_living()
        num_built = len(recorder.events)
        real_ranks.train(model, variant, mine, recorder, loss_of)
    gc.enable()
    real_ranks.train(alone, Variant(micro_batch=len(batch)), [batch], None, loss_of)
    pairs = list(zip(alone.parameters(), model.parameters(), strict=True))
    return {
        "way": way,
        "weights_differ_by": max(_difference(a, b) for a, b in pairs),
        "gradients_differ_by": max(_difference(a.grad, b.grad) for a, b in pairs),
        "taken": real_ranks.curve(recorder.events[num_built:], recorder.sizes),
        "held": sum(ranks.local_part(parameter).nbytes for parameter in model.parameters()),
    }


def _difference(one: Any, other: Any) -> float:
    return float((one - real_ranks.whole(other)).detach().abs().max())


def main(*ways: str) -> None:
    distributed.init_process_group("gloo")
    for way in ways:
        found = compared(way, WAYS[way])
        if distributed.get_rank() == 0:
            sys.stdout.write(json.dumps(found) + "\n")
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in real_ranks.py


if __name__ == "__main__":
    main(*sys.argv[1:])

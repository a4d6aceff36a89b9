"""Two ranks with GPUs of their own size, emulated, of which one is too small for its part.

torchrun --nproc-per-node 2 replicas.py FOLDER: trains in all ways of below, and writes what became
of it as FOLDER/RANK.json. By itself it asserts nothing.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F  # noqa: N812 - as torch names it
from torch.nn.parallel import DistributedDataParallel

import oomph
from oomph.errors import OomphError, UsageError

WIDTH, NUM, NUM_STEPS = 128, 32, 4
BUDGETS = ("512MiB", "56MiB")  # by rank
LENGTHS = (32, 72)  # by rank: what is the same on all would hide what is not


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    """With a head that only some batches use, and a buffer that each forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[Block() for _ in range(4)])
        self.head, self.other, self.never = (nn.Linear(WIDTH, 10) for _ in range(3))
        self.num_seen: torch.Tensor
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, x: Any, is_other: bool) -> Any:
        self.num_seen += len(x)
        return (self.other if is_other else self.head)(self.body(x))


def loss_of(model: Any, batch: Any) -> Any:
    logits = model(batch["x"], batch["is_other"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def made(*, find_unused_parameters: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    options["find_unused_parameters"] = find_unused_parameters
    return DistributedDataParallel(Model().to(device()), **options)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def batches(rank: int, num: int = NUM_STEPS) -> Iterator[dict[str, Any]]:
    """A rank's own; the second rank uses the other head in each second step."""
    chance = torch.Generator().manual_seed(rank)
    for number in range(num):
        x = torch.randn(NUM, LENGTHS[rank], WIDTH, generator=chance)
        y = torch.randint(0, 10, (NUM, LENGTHS[rank]), generator=chance)
        y[torch.rand(y.shape, generator=chance) < 0.1 * (1 + rank + number)] = -100
        yield {"x": x, "labels": y, "is_other": rank == 1 and number % 2 == 1}


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stepper(model: Any, loss: Any = loss_of, **options: Any) -> Any:
    quiet: dict[str, Any] = {"weight": "tokens", "device": device(), "say": lambda _: None}
    return oomph.Stepper(model, optimizer_of(model), loss, **{**quiet, **options})


def num_labels(batch: Any) -> float:
    return float((batch["labels"] != -100).sum())


# ---- ways to train -----------------------------------------------------------------------------


def by_torch(rank: int) -> dict[str, Any]:
    """DDP as it is, which has memory enough; each label counts the same on both ranks."""
    model = made()
    optimizer = optimizer_of(model)
    norms = []
    counts = [[num_labels(batch) for batch in batches(each)] for each in (0, 1)]
    for batch, *both in zip(batches(rank), *counts, strict=True):
        (loss_of(model, batch) * (2 * both[rank] / sum(both))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, **state_of(model)}


def by_batches(rank: int) -> dict[str, Any]:
    model = made()
    step = stepper(model, clip_grad_norm=0.5)
    results = [step(batch) for batch in batches(rank)]
    norms = [float(result.grad_norm) for result in results]
    return {"norms": norms, "num_ooms": step.num_ooms, "size": step.micro_batch, **state_of(model)}


def by_pieces(rank: int) -> dict[str, Any]:
    model = made()
    step = stepper(model, None, clip_grad_norm=0.5)
    norms = []
    for batch in batches(rank):
        batch = {**batch, "x": batch["x"].to(device()), "labels": batch["labels"].to(device())}
        for micro in step.micro(batch):
            with micro:
                micro.backward(loss_of(model, micro.data))
        norms.append(float(step.result.grad_norm))
    return {"norms": norms, "num_ooms": step.num_ooms, "size": step.micro_batch, **state_of(model)}


def accumulated_by_one(_: int) -> dict[str, Any]:
    """Two batches to a step on two ranks, weighted by their tokens."""
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model)
    both = [list(batches(rank)) for rank in (0, 1)]
    for first in range(0, NUM_STEPS, 2):
        four = [batch for mine in both for batch in mine[first : first + 2]]
        total = sum(map(num_labels, four))
        for batch in four:
            (loss_of(model, batch) * (num_labels(batch) / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def accumulated(rank: int) -> dict[str, Any]:
    model = made()
    step = stepper(model, accumulate=2)
    for batch in batches(rank):
        step(batch)
    return {"num_ooms": step.num_ooms, **state_of(model)}


def without_a_way(rank: int) -> dict[str, Any]:
    """The second rank has one example that is too long. Then both go on with others."""
    model = made()
    step = stepper(model, last_resorts=())
    before = state_of(model)
    long = {"x": torch.randn(1, 20_000, WIDTH), "labels": torch.zeros(1, 20_000, dtype=torch.long)}
    first = {**long, "is_other": False} if rank == 1 else next(batches(rank))
    said = error_of(lambda: step(first))
    is_as_before = state_of(model) == before
    for batch in batches(rank, 2):
        step(batch)
    return {"said": said, "is_as_before": is_as_before, **state_of(model)}


def coupled(rank: int) -> dict[str, Any]:
    """The second rank has to split a loss that compares examples. Then both go on with another."""

    def compared(model: Any, batch: Any) -> Any:
        means = model(batch["x"], batch["is_other"]).mean(1)
        return (means @ means.t()).logsumexp(1).mean()

    model = made()
    before = state_of(model)
    step = stepper(model, compared, weight=None)
    said = error_of(lambda: step(next(batches(rank))))
    is_as_before = state_of(model) == before
    again = stepper(model, weight=None)
    for batch in batches(rank, 2):
        again(batch)
    return {"said": said, "is_as_before": is_as_before, **state_of(model)}


def with_hook() -> Any:
    model = made()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return stepper(model)


def with_builtin_hook() -> Any:
    model = made()
    kinds: Any = distributed
    model._register_builtin_comm_hook(kinds.BuiltinCommHookType.FP16_COMPRESS)
    return stepper(model)


def joined() -> Any:
    model = made()
    with model.join():
        return stepper(model)(next(batches(0)))


def normed() -> Any:
    with oomph.emulated_gpu("72MiB"):
        model = nn.SyncBatchNorm(3).cuda()
        return stepper(DistributedDataParallel(model))


def divided(model: Any = None, change: Callable[[Any], Any] = lambda _: None, **more: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4) if model is None else model
    change(fully_shard(model, **more))
    return stepper(model)


def divided_in_part() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return divided(model, ignored_params={model[0].weight})


def divided_by_tensors_too() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(nn.Linear(4, 4), mesh["tensor"], ColwiseParallel())
    return divided(model, mesh=mesh["data"])


def divided_late() -> Any:
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(nn.Linear(4, 4))
    step = stepper(model)
    model.set_requires_gradient_sync(False)
    return step({"x": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.long)})


def late_hook() -> Any:
    model = made()
    step = stepper(model)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return step(next(batches(0)))


def late_wrapper() -> Any:
    model = Model()
    wrappers: list[Any] = []
    step = stepper(model, lambda _, batch: loss_of(wrappers[0], batch))
    wrappers.append(DistributedDataParallel(model, find_unused_parameters=True))
    return step(next(batches(0)))


def fsdp1() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return stepper(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))


def replicated() -> Any:
    from torch.distributed._composable.replicate import replicate

    return stepper(replicate(nn.Linear(4, 4)))


def replicated_by_fsdp() -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    inner: Any = replicate(nn.Linear(4, 4))
    return stepper(nn.Sequential(inner))


def tensor_parallel() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    return stepper(parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()))


def zero() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = made()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return oomph.Stepper(model, optimizer, loss_of)


def two_groups() -> Any:
    group = distributed.new_group([0, 1])
    replicas = [DistributedDataParallel(nn.Linear(4, 4), process_group=group), made()]
    return stepper(nn.ModuleList(replicas))


def named(name: str, place: str) -> Any:
    """A model of a library that is not here."""
    return type(name, (nn.Linear,), {"__module__": place})(4, 4)


def hook_of_one(rank: int) -> dict[str, Any]:
    model = made()
    step = stepper(model)
    if rank == 1:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return {"said": error_of(lambda: step(next(batches(rank))))}


def apart(rank: int) -> dict[str, Any]:
    """The second rank ends its epoch before the first, once with a batch in hand, once without."""
    model = made()
    step = stepper(model, accumulate=2)
    said = []
    for num in (1, 2):
        for batch in batches(rank, num):
            step(batch)
        third = functools.partial(step, next(batches(rank)))
        said.append(error_of(step.flush if rank == 1 else third))
    for batch in batches(rank, 2):
        step(batch)
    return {"said": said, **state_of(model)}


def overflown(rank: int) -> dict[str, Any]:
    """Gradients of the second rank are infinite, once."""
    model = made()
    scaler = torch.amp.GradScaler(device())
    step = stepper(model, scaler=scaler)
    first, second = batches(rank, 2)
    step(first)
    before, scales = state_of(model), [scaler.get_scale()]
    handle = model.module.body[0].first.weight.register_hook(
        lambda g: g * float("inf") if rank else g
    )
    step(second)
    handle.remove()
    scales.append(scaler.get_scale())
    after = state_of(model)
    is_as_before = all(
        after["state"][name] == before["state"][name] for name, _ in model.module.named_parameters()
    )
    step(first)
    return {"is_as_before": is_as_before, "scales": scales, **state_of(model)}


def votes(rank: int) -> dict[str, Any]:
    """How often ranks agree in each call, when nothing fails."""
    all_reduce, num = distributed.all_reduce, 0

    def counted(tensor: Any, *args: Any, **keywords: Any) -> Any:
        nonlocal num
        num += tensor.dtype == torch.int32
        return all_reduce(tensor, *args, **keywords)

    by_step = []
    distributed.all_reduce = counted
    try:
        for options in ({}, {"clip_grad_norm": 0.5}, {"accumulate": 2}):
            step, nums = stepper(made(), **options), []
            for batch in batches(rank):
                num = 0
                step({**batch, "is_other": False})
                nums.append(num)
            by_step.append(nums)
    finally:
        distributed.all_reduce = all_reduce
    return {"by_step": by_step}


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except (OomphError, UsageError) as error:
        return str(error)
    return ""


def state_of(model: Any) -> dict[str, Any]:
    state = getattr(model, "module", model).state_dict()
    return {"state": {name: value.cpu().flatten().tolist() for name, value in state.items()}}


REFUSED: dict[str, Callable[[], Any]] = {
    "builtin_hook": with_builtin_hook,
    "late_hook": late_hook,
    "late_wrapper": late_wrapper,
    "fsdp1": fsdp1,
    "replicate": replicated,
    "replicate_of_fsdp": replicated_by_fsdp,
    "tensor_parallel": tensor_parallel,
    "data_parallel": lambda: stepper(nn.DataParallel(nn.Linear(4, 4))),
    "deepspeed": lambda: stepper(named("DeepSpeedEngine", "deepspeed.runtime.engine")),
    "apex": lambda: stepper(named("DistributedDataParallel", "apex.parallel")),
    "zero": zero,
    "norm_alone": lambda: stepper(nn.SyncBatchNorm(3)),
    "two_groups": two_groups,
    "static_graph": lambda: stepper(made(static_graph=True, find_unused_parameters=False)),
    "hook": with_hook,
    "join": joined,
    "norm": normed,
    "fsdp_unsynced": lambda: divided(change=lambda m: m.set_requires_gradient_sync(False)),
    "fsdp_late": divided_late,
    "fsdp_kept": lambda: divided(change=lambda m: m.set_reshard_after_backward(False)),
    "fsdp_norm": lambda: divided(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))),
    "fsdp_in_part": divided_in_part,
    "fsdp_and_tensors": divided_by_tensors_too,
    "fsdp_scaler": lambda: oomph.Stepper(
        sharded := divided().model, optimizer_of(sharded), loss_of, precision="fp16"
    ),
}


def refused(_: int) -> dict[str, Any]:
    return {name: error_of(ask) for name, ask in REFUSED.items()}


ALONE = (by_torch, accumulated_by_one, refused)


def main(folder: Path) -> None:
    distributed.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank = distributed.get_rank()
    torch.set_num_threads(1)
    found = {work.__name__: work(rank) for work in (*ALONE, hook_of_one, apart, votes)}
    found["overflown"] = overflown(rank)
    for work in (by_batches, by_pieces, accumulated, without_a_way, coupled):
        with oomph.emulated_gpu(BUDGETS[rank]):
            found[work.__name__] = work(rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    os._exit(0)  # a thread of gloo that drops a tensor while Python shuts down aborts the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Models sharded by a plan on several gloo ranks, in many ways, in one start of the processes.

sharded.py FOLDER RANK NUM_RANKS SCENARIO...: writes FOLDER/RANK.json. By itself it asserts nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from planning.plans import plan_of
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import oomph
from oomph.errors import OomphError, UsageError

dcp: Any = checkpoint
WIDTH, BATCH = 8, 8  # examples of all ranks together
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB (injected)"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.two(torch.tanh(self.one(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(x))


def batch_of(step: int) -> dict[str, Any]:
    """What all ranks have of a step together."""
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=chance, dtype=torch.float64)
    return {"x": x, "y": torch.randn(BATCH, 3, generator=chance, dtype=torch.float64)}


def part_of(step: int, rank: int, num_ranks: int) -> dict[str, Any]:
    """A rank's own: the first rank has twice as many as the last."""
    cuts = [BATCH * (3 * r) // (3 * num_ranks) for r in range(num_ranks + 1)]
    if num_ranks == 2:
        cuts = [0, 5, BATCH]
    return {name: whole[cuts[rank] : cuts[rank + 1]] for name, whole in batch_of(step).items()}


class Loss:
    """Runs out of memory where more examples than `most` are run at a time, or in a backward."""

    def __init__(self) -> None:
        self.most, self.num_in_backward = 10**9, 0

    def __call__(self, model: Any, batch: Any) -> Any:
        found = model(batch["x"])
        if len(batch["x"]) > self.most:
            raise torch.OutOfMemoryError(OOM)
        if self.num_in_backward and found.requires_grad:
            self.num_in_backward -= 1
            found.register_hook(self._fail)
        return (found.double() - batch["y"]).square().mean()

    def _fail(self, _: Any) -> None:
        raise torch.OutOfMemoryError(OOM)


def make(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


class Job:
    """A model to which a plan has been applied, and its Stepper."""

    def __init__(self, num_ranks: int, sharding: str = "fsdp", seed: int = 0, **more: Any) -> None:
        torch.manual_seed(seed)
        options = {name: more.pop(name) for name in [*more] if name in OPTIONS}
        num_here = BATCH // num_ranks
        plan: Any = plan_of(
            num_gpus=num_ranks,
            sharding=sharding,
            micro_batch=num_here,
            accumulation=1,
            **{"gpus_per_node": 2, **more},
        )
        dtype = torch.float64 if plan.precision == "fp32" else torch.float32
        model: Any = oomph.apply(plan, Model().to(dtype), make)
        self.model, self.optimizer = model
        self.loss = Loss()
        self.step = oomph.Stepper(
            self.model,
            self.optimizer,
            self.loss,
            plan,
            **{"weight": "mean", "say": lambda _: None, **options},
        )


OPTIONS = ("last_resorts", "micro_batch", "on_difference", "weight", "restart_file", "copies")


def whole_of(model: Any) -> dict[str, list[float]]:
    found = {}
    for name, parameter in getattr(model, "module", model).named_parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        found[name] = whole.double().flatten().tolist()
    return found


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except (OomphError, UsageError, ValueError) as error:
        return str(error)
    return ""


# ---- scenarios: (folder, rank, number of ranks) -> what is found ---------------------------------


def by_one(*_: Any) -> dict[str, Any]:
    """A single process, with the batches of all ranks."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer, after = make(model.parameters()), {}
    for step in range(9):
        Loss()(model, batch_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after[f"after {step + 1}"] = whole_of(model)
    return after


def planned(_: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """Each way to share a model, with an error of memory on the last rank in every step."""
    found = {}
    for sharding in ("ddp", "fsdp", *(["hybrid"] if num_ranks == 4 else [])):
        # Each rank begins with other weights: those of the first count.
        job = Job(num_ranks, sharding, seed=0 if rank == 0 else 7)
        losses = []
        for step in range(3):
            job.step.forget_sizes()
            losses.append(float(job.step.evaluate(part_of(step, rank, num_ranks))))
            job.loss.num_in_backward = int(rank == num_ranks - 1)
            losses.append(float(job.step(part_of(step, rank, num_ranks)).loss))
        kind = type(job.model)
        found[sharding] = {
            "kind": "ddp" if kind is DistributedDataParallel else kind.__mro__[1].__name__,
            "has_views": getattr(job.model, "gradient_as_bucket_view", None),
            "num_ooms": job.step.num_ooms,
            "losses": losses,
            "state": whole_of(job.model),
            "places": str([p.placements for p in job.model.parameters() if isinstance(p, DTensor)]),
        }
    return found


def precise(_: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """bf16 with sums in fp32; and the parameters on the host."""
    job = Job(num_ranks, precision="bf16")
    half = [float(job.step(part_of(step, rank, num_ranks)).loss) for step in range(3)]
    group = job.model._get_fsdp_state()._fsdp_param_groups[0]
    job = Job(num_ranks, offload_optimizer=True)
    for step in range(3):
        job.step(part_of(step, rank, num_ranks))
    offload = job.model._get_fsdp_state()._fsdp_param_groups[0].offload_policy
    return {
        "losses": half,
        "dtypes": [str(group.mp_policy.param_dtype), str(group.mp_policy.reduce_dtype)],
        "offload": type(offload).__name__,
        "state": whole_of(job.model),
    }


def resorts(_: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """The first rank finds no size, and recomputes or offloads instead."""
    found = {}
    for name in ("checkpointing", "offload"):
        job = Job(num_ranks, last_resorts=(name,))
        for step in range(3):
            if rank == 0 and step == 1:
                job.loss.num_in_backward = 3  # 4, 2 and 1 examples at a time
            job.step(part_of(step, rank, num_ranks))
        tricks = job.step.state_dict()["tricks"]
        found[name] = {"tricks": tricks, "state": whole_of(job.model)}
    return found


def evaluated(_: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """Each rank evaluates in pieces of its own, or raises: the others then raise, too."""
    job = Job(num_ranks)
    job.step(part_of(0, rank, num_ranks))
    mine = part_of(1, rank, num_ranks)
    job.loss.most = 2 if rank == 0 else 10**9
    pieces = float(job.step.evaluate(mine))
    job.loss.most = 10**9
    whole = float(job.step.evaluate(mine))

    handle = job.model.blocks[1].register_forward_pre_hook(raise_error)
    if rank:
        handle.remove()
    said = error_of(lambda: job.step.evaluate(mine))
    handle.remove()
    for step in (1, 2):
        job.step(part_of(step, rank, num_ranks))
    return {"pieces": pieces, "whole": whole, "said": said, "state": whole_of(job.model)}


def alone(_: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """Each rank has a mesh of its own, and the whole batch; in every step it runs out of memory."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("others", "own"))["own"]
    model, loss = Model().double(), Loss()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = oomph.Stepper(model, make(model.parameters()), loss, say=lambda _: None)
    for number in range(3):
        step.forget_sizes()
        loss.num_in_backward = rank + 1
        step(batch_of(number))
    return {"num_ooms": step.num_ooms, "state": whole_of(model)}


def votes(_: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """How often ranks agree in each call, when nothing fails."""
    all_reduce, num = distributed.all_reduce, 0

    def counted(tensor: Any, *args: Any, **keywords: Any) -> Any:
        nonlocal num
        num += tensor.dtype == torch.int32
        return all_reduce(tensor, *args, **keywords)

    found = {}
    distributed.all_reduce = counted
    try:
        for weight in (None, "mean"):
            job, nums = Job(num_ranks, weight=weight, micro_batch=3), []
            for number in range(3):
                num = 0
                job.step(part_of(number, rank, num_ranks))
                nums.append(num)
            found[str(weight)] = nums
    finally:
        distributed.all_reduce = all_reduce
    return found


def raise_error(*_: Any) -> None:
    raise ValueError("of the user")


def refused(_: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """One rank finds no way, or an error, or is elsewhere; all raise and go on together."""
    job, said = Job(num_ranks, last_resorts=()), []
    first = part_of(0, rank, num_ranks)
    job.loss.most = 0 if rank == 0 else 10**9
    said.append(error_of(lambda: job.step(first)))
    job.loss.most = 10**9
    said.append(error_of(lambda: job.step(None if rank == 0 else first)))
    said.append(error_of((lambda: job.step.evaluate(first)) if rank else lambda: job.step(first)))
    job.step.forget_sizes()
    for step in range(3):
        job.step(part_of(step, rank, num_ranks))
    return {"said": said, "state": whole_of(job.model)}


def saved(folder: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """Trains three steps on from the last checkpoint in the folder, and saves another one."""
    job = Job(num_ranks, seed=rank)
    done = sorted(folder.glob("after-*"))
    begun = int(done[-1].name.split("-")[1]) if done else 0
    if done:
        load(job, done[-1])
    else:
        job.loss.most = 2  # the sizes that it learns are saved, too
    size = job.step.state_dict()["sizes"][0]["limits"]
    for step in range(begun, begun + 3):
        job.step(part_of(step, rank, num_ranks))
    distributed.barrier()  # all have looked
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "stepper": job.step}
    dcp.save(state, checkpoint_id=folder / f"after-{begun + 3}")
    return {"begun": begun, "num_limits": len(size), "state": whole_of(job.model)}


def load(job: Job, path: Path) -> None:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "stepper": job.step}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def restarted(folder: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """The last rank cannot even follow. Under torchrun all start again, with smaller pieces."""
    job = Job(num_ranks, restart_file=folder / "restart.json")
    done = sorted(folder.glob("after-*"))
    if done:
        load(job, done[-1])
    begun = 1 if done else 0
    sizes = []
    for step in range(begun, 3):
        part = part_of(step, rank, num_ranks)
        if not (folder / "restart.json").exists() and step == 1 and rank == num_ranks - 1:
            job.step._attempts._ranks._shards._issue = fail  # type: ignore[attr-defined]
            job.loss.most = len(part["x"]) - 1
        sizes.append(job.step(part).micro_batch)
        if step == 0:
            model, optimizer = get_state_dict(job.model, job.optimizer)
            state = {"model": model, "optimizer": optimizer, "stepper": job.step}
            dcp.save(state, checkpoint_id=folder / "after-1")
    return {"sizes": sizes, "state": whole_of(job.model)}


def fail(*_: Any) -> None:
    raise torch.OutOfMemoryError(OOM)


SCENARIOS = (by_one, planned, precise, resorts, evaluated, refused, alone, votes, saved, restarted)


def main(folder: Path, rank: int, num_ranks: int, *names: str) -> None:
    init = "env://" if "MASTER_ADDR" in os.environ else f"file://{folder}/store"
    distributed.init_process_group(
        "cpu:gloo", init, timedelta(minutes=2), rank=rank, world_size=num_ranks
    )
    torch.set_num_threads(1)
    scenarios = [each for each in SCENARIOS if each.__name__ in names]
    found = {each.__name__: each(folder, rank, num_ranks) for each in scenarios}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    os._exit(0)  # a thread of gloo that drops a tensor while Python shuts down aborts the process


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    if "RANK" in os.environ:
        arguments = [os.environ["RANK"], os.environ["WORLD_SIZE"], *arguments]
    main(Path(folder), int(arguments[0]), int(arguments[1]), *arguments[2:])

"""Random failures on random ranks, at every place of a step, many in one start of the processes.

injections.py FOLDER BACKEND RANK NUM_RANKS SEED NUM_CASES, on each rank: writes FOLDER/RANK.json.
Each case is trained call by call beside a reference of one process that nothing happens to, which
drops the batches of calls that raised. It asserts nothing; a rank that is left waiting ends it by
the group's time-out.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import oomph
from oomph.training import update

WIDTH, MOST_EXAMPLES = 6, 6
REPLICATED = ("ddp", "compile(ddp)", "ddp(compile)", "inside", "around")
# "fsdp(unused)": ranks use different parameters. "hybrid": copies of shards, for 4 ranks.
SHARDED = ("fsdp", "fsdp(blocks)", "fsdp(unused)", "compile(fsdp)", "hybrid")
PLACES = (
    "take",
    "forward",
    "after-forward",
    "backward",
    "ready",
    "zeros",
    "clip",
    "copy",
    "update-begin",
    "update-middle",
    "update-end",
)
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB (injected)"
# What one error of memory on some of the ranks does not stop.
MENDED = {
    f"memory in {place}"
    for place in ("take", "zeros", "clip", "copy", "update-begin", "update-middle", "update-end")
}
# Nobody has another rank's shards: only a copy undoes an update of them.
MENDED_SHARDS = {f"memory in {place}" for place in ("take", "clip", "copy")}
# What errors say where the weights are not those of the last whole step.
HALF, STEPPED = "in the middle of its step", "are those after this step"
NOTED = "some parameters may have been updated and others not"
KINDS: dict[str, Callable[[], BaseException]] = {
    "memory": lambda: torch.OutOfMemoryError(OOM),
    "error": lambda: ValueError("injected"),
    "interrupt": lambda: KeyboardInterrupt(),
}


class Model(nn.Module):
    """Two heads, of which a batch uses one: some ranks have gradients that others have not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.rest = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)])
        self.num_seen: torch.Tensor
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, x: Any, head: int) -> Any:
        self.num_seen += len(x)
        return self.heads[head](self.rest(self.body(x)))


class Around(nn.Module):
    """A module of the user's, that has the wrapper inside."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any, head: int) -> Any:
        return self.inner(x, head)


@dataclass
class Strike:
    rank: int
    place: str
    kind: str
    call: int  # of the case
    times: int  # in that call
    left: int = 0


@dataclass
class Case:
    """The same on all ranks."""

    seed: int
    wrap: str
    way: str  # "step" or "micro"
    accumulate: int
    num_calls: int
    clip: float | None
    copies: Any
    optimizer: str
    weight: Any
    strikes: list[Strike] = field(default_factory=list)


def wraps_of(num_ranks: int) -> list[str]:
    return [*REPLICATED, *(each for each in SHARDED if each != "hybrid" or num_ranks == 4)]


def case_of(seed: int, num_ranks: int) -> Case:
    chance = random.Random(seed)  # noqa: S311
    case = Case(
        seed,
        wrap=chance.choice(wraps_of(num_ranks)),
        way=chance.choice(["step", "step", "micro"]),
        accumulate=chance.choice([1, 1, 2, 3, 4, chance.randint(5, 8)]),
        num_calls=chance.randint(3, 9),
        clip=chance.choice([None, 0.05]),
        copies=chance.choice(["first", "first", "always"]),
        optimizer=chance.choice(["sgd", "adam"]),
        weight=chance.choice([None, "mean"]),
    )
    for _ in range(chance.randint(1, 3)):
        place, call = chance.choice(PLACES), chance.randrange(case.num_calls)
        kind = chance.choice(["memory", "memory", "memory", "error", "interrupt"])
        ranks = chance.sample(range(num_ranks), chance.randint(1, num_ranks))
        times = chance.choice([1, 1, 2, 9])
        case.strikes += [Strike(rank, place, kind, call, times) for rank in ranks]
    return case


def batch_of(case: Case, rank: int, call: int) -> dict[str, Any]:
    """A rank's own, of its own size."""
    chance = torch.Generator().manual_seed(case.seed * 1000 + rank * 100 + call)
    num = int(torch.randint(1, MOST_EXAMPLES + 1, (), generator=chance))
    head = int(torch.randint(0, 2, (), generator=chance))
    # Without set_reduce_scatter_unused_params, FSDP2 needs all ranks to use the same parameters.
    is_free = case.wrap not in SHARDED or case.wrap == "fsdp(unused)"
    return {
        "x": torch.randn(num, WIDTH, generator=chance, dtype=torch.float64),
        "y": torch.randn(num, 3, generator=chance, dtype=torch.float64),
        "head": head if is_free else call % 2,
    }


def optimizer_of(case: Case, model: Any) -> Any:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def loss_of(model: Any, batch: Any) -> Any:
    return (model(batch["x"], batch["head"]) - batch["y"]).square().mean()


# ---- what is to be had --------------------------------------------------------------------------


class Reference:
    """One process that has the batches of all ranks."""

    def __init__(self, case: Case, state: dict[str, Any], rank: int, num_ranks: int) -> None:
        self.model = Model().double()
        self.model.load_state_dict(state)
        self._case, self._rank, self._num_ranks = case, rank, num_ranks
        self._optimizer = optimizer_of(case, self.model)
        self._num_seen = 0

    def step(self, calls: list[int]) -> None:
        for rank, batches in enumerate(self._batches(calls)):
            for batch in batches:
                (loss_of(self.model, batch) * self._share(rank, batch, calls)).backward()
        if self._case.wrap == "fsdp(unused)":  # it reduces zeros for what no rank has used
            for parameter in self.model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        if self._case.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._case.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_seen += self.num_of(calls)

    def _batches(self, calls: list[int]) -> list[list[Any]]:
        """By rank."""
        ranks = range(self._num_ranks)
        return [[batch_of(self._case, rank, call) for call in calls] for rank in ranks]

    def _share(self, rank: int, batch: Any, calls: list[int]) -> float:
        """Of a batch in the update: all examples count the same if the weight is given."""
        batches = self._batches(calls)
        totals = [sum(len(each["x"]) for each in mine) for mine in batches]
        if self._case.weight is not None:
            return float(len(batch["x"]) / sum(totals))
        if self._case.wrap in SHARDED:  # all batches, which are weighed as they come
            return 1 / len(calls) / self._num_ranks
        return float(len(batch["x"]) / totals[rank] / self._num_ranks)

    def num_of(self, calls: list[int]) -> int:
        """How many examples this rank has in some calls."""
        return sum(len(batch_of(self._case, self._rank, call)["x"]) for call in calls)

    def off_by(self, model: Any, window: list[int]) -> float:
        """The largest difference of weights, and of a buffer where each rank has its own.

        window: the calls since the last update.
        """
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        off = max(float((one - whole_of(other)).detach().abs().max()) for one, other in pairs)
        if self._case.wrap in SHARDED:
            off = max(off, abs(float(model.num_seen) - self._num_seen - self.num_of(window)))
        return off


def whole_of(tensor: Any) -> Any:
    """All ranks have to call it for the shards of a tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    own: Any = tensor.detach()
    return own.full_tensor()


# ---- what strikes -------------------------------------------------------------------------------


class Strikes:
    """Those of this rank. `now` is the call that runs."""

    def __init__(self, case: Case, rank: int) -> None:
        self._mine = [each for each in case.strikes if each.rank == rank]
        self.num_fired = 0
        self.fired: list[str] = []  # in this call

    def arm(self, call: int) -> None:
        self.fired = []
        for each in self._mine:
            each.left = each.times if each.call == call else 0

    def at(self, place: str) -> None:
        for each in self._mine:
            if each.place == place and each.left:
                each.left -= 1
                self.num_fired += 1
                self.fired.append(f"{each.kind} in {place}")
                raise KINDS[each.kind]()


def before(strikes: Strikes, place: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def struck(*args: Any, **keywords: Any) -> Any:
        strikes.at(place)
        return work(*args, **keywords)

    return struck


def strike_in_update(strikes: Strikes, optimizer: Any) -> None:
    """Before anything is changed, when some of it is, and when all of it is."""
    step = optimizer.step

    def struck(*args: Any, **keywords: Any) -> Any:
        strikes.at("update-begin")
        first = optimizer.param_groups[0]["params"][0]
        before = first.detach().clone()
        with torch.no_grad():
            first.add_(1)
        strikes.at("update-middle")
        with torch.no_grad():
            first.copy_(before)
        result = step(*args, **keywords)
        strikes.at("update-end")
        return result

    optimizer.step = struck


@contextmanager
def everywhere(strikes: Strikes, step: Any, bare: Any) -> Iterator[None]:
    """Strikes wherever a step of a Stepper can fail."""
    attempts = step._attempts
    is_sharded = attempts._ranks.is_sharded
    for thing, name, place in (
        (attempts._rollback, "take", "take"),
        (attempts._ranks, "ready", "ready"),
        (attempts._ranks, "_fill", "zeros"),
    ):
        setattr(thing, name, before(strikes, place, getattr(thing, name)))
    if is_sharded:  # gradients reach a shard only once they are reduced
        ranks = attempts._ranks
        ranks.clip = before(strikes, "clip", ranks.clip)
        handle = bare.body[1].register_forward_hook(strike_in_backward(strikes))
    else:
        middle = bare.body[2].weight
        handle = middle.register_hook(lambda _: strikes.at("backward"))
    clip = before(strikes, "clip", nn.utils.clip_grad_norm_)
    copy = before(strikes, "copy", update.UpdateCopy)
    with ExitStack() as stack:
        stack.callback(handle.remove)
        stack.enter_context(mock.patch.object(torch.nn.utils, "clip_grad_norm_", clip))
        stack.enter_context(mock.patch.object(update, "UpdateCopy", copy))
        yield


def strike_in_backward(strikes: Strikes) -> Callable[..., None]:
    def hook(_: Any, __: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: strikes.at("backward"))

    return hook


# ---- one case -----------------------------------------------------------------------------------


def digest(model: Any, optimizer: Any) -> str:
    """Of weights, buffers and the optimizer's states: the same where all bits are."""
    parameters = list(model.parameters())
    is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    buffers = () if is_sharded else model.buffers()  # FSDP2 leaves each rank its own
    parts = [whole_of(t).numpy().tobytes() for t in (*parameters, *buffers)]
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        tensors = {k: v for k, v in sorted(state.items()) if isinstance(v, torch.Tensor)}
        parts += [k.encode() + whole_of(v).numpy().tobytes() for k, v in tensors.items()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def run(case: Case, rank: int, num_ranks: int, wrapped: Any, bare: Any) -> dict[str, Any]:
    """Each call of a case: what it came to on this rank, and what it left."""
    torch.manual_seed(case.seed)
    state = Model().double().state_dict()
    load(bare, state)
    bare.zero_grad(set_to_none=True)
    reference = Reference(case, state, rank, num_ranks)
    strikes = Strikes(case, rank)
    optimizer = optimizer_of(case, bare)
    model = bare if case.wrap == "around" else wrapped
    called = wrapped if case.wrap == "around" else None

    def loss(model: Any, batch: Any) -> Any:
        strikes.at("forward")
        found = loss_of(called or model, batch)
        strikes.at("after-forward")
        return found

    step = oomph.Stepper(
        model,
        optimizer,
        loss if case.way == "step" else None,
        accumulate=case.accumulate,
        clip_grad_norm=case.clip,
        weight=case.weight,
        copies=case.copies,
        last_resorts=(),
        say=lambda _: None,
    )
    strike_in_update(strikes, optimizer)
    calls: list[dict[str, Any]] = []
    window: list[int] = []
    with everywhere(strikes, step, bare):
        for call in range(case.num_calls + 1):
            is_flush = call == case.num_calls
            strikes.arm(call)
            error = ""
            try:
                if is_flush:
                    result = step.flush()
                elif case.way == "step":
                    result = step(batch_of(case, rank, call))
                else:
                    for micro in step.micro(batch_of(case, rank, call)):
                        with micro:
                            micro.backward(loss(model, micro.data))
                    result = step.result
            except BaseException as raised:  # noqa: BLE001 - what became of it is written down
                notes = " ".join(getattr(raised, "__notes__", ()))
                error, result = f"{type(raised).__name__}: {raised} {notes}", None
            window = [*window, call] if not is_flush else window
            if window and (result is not None and result.has_stepped):
                reference.step(window)
            if error or (result is not None and result.has_stepped):
                window = []
            calls.append(
                {
                    "error": error,
                    "has_stepped": bool(result is not None and result.has_stepped),
                    "fired": strikes.fired,
                    "digest": digest(bare, optimizer),
                    "off": reference.off_by(bare, window),
                }
            )
            if ends_here(error):
                break
    return {"case": repr(case), "calls": calls, "num_fired": strikes.num_fired}


def ends_here(mine: str) -> bool:
    """Does a rank say that weights are not those of the step before? All know it then."""
    said: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(said, mine)
    return any(text in each for each in said for text in (HALF, STEPPED, NOTED))


def load(model: Any, state: dict[str, Any]) -> None:
    """Load a whole state, of which each rank takes its shards."""
    own = model.state_dict()
    for name, whole in state.items():
        if isinstance(own[name], DTensor):
            places = own[name].device_mesh, own[name].placements
            whole = distribute_tensor(whole, *places, src_data_rank=None)
        own[name].copy_(whole)


def sharded_in(wrap: str, model: Any, backend: str, num_ranks: int) -> Any:
    options: dict[str, Any] = {}
    if wrap == "hybrid":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    else:
        options["mesh"] = init_device_mesh("cpu", (num_ranks,))
    if wrap != "fsdp":
        fully_shard(model.body, **options)
        fully_shard(model.rest, **options)
    if wrap == "fsdp(blocks)":
        for head in model.heads:
            fully_shard(head, **options)
    fully_shard(model, **options)
    if wrap == "fsdp(unused)":
        model.set_reduce_scatter_unused_params(True)
    return torch.compile(model, backend=backend) if wrap == "compile(fsdp)" else model


def wrapped_in(wrap: str, model: Any, backend: str) -> Any:
    options: dict[str, Any] = {"find_unused_parameters": True}
    if wrap == "ddp(compile)":
        return DistributedDataParallel(torch.compile(model, backend=backend), **options)
    replica = DistributedDataParallel(model, **options)
    if wrap == "compile(ddp)":
        return torch.compile(replica, backend=backend)
    return Around(replica) if wrap == "inside" else replica


def main(folder: Path, backend: str, *numbers: int) -> None:
    rank, num_ranks, seed, num_cases = numbers
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(minutes=2),
    )
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    gc.collect()
    gc.freeze()  # each recovery collects garbage, and what was imported is none
    models = {}
    for wrap in wraps_of(num_ranks):
        bare = Model().double()
        if wrap in SHARDED:
            models[wrap] = sharded_in(wrap, bare, backend, num_ranks), bare
        else:
            models[wrap] = wrapped_in(wrap, bare, backend), bare
    cases = [case_of(seed + number, num_ranks) for number in range(num_cases)]
    found = [run(case, rank, num_ranks, *models[case.wrap]) for case in cases]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    os._exit(0)  # a thread of gloo that drops a tensor while Python shuts down aborts the process


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))

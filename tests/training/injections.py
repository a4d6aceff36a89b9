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
from torch.nn.parallel import DistributedDataParallel

import oomph
from oomph.training import update

WIDTH, MOST_EXAMPLES = 6, 6
WRAPS = ("ddp", "compile(ddp)", "ddp(compile)", "inside", "around")
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
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)])
        self.num_seen: torch.Tensor
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, x: Any, head: int) -> Any:
        self.num_seen += len(x)
        return self.heads[head](self.body(x))


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
    strikes: list[Strike] = field(default_factory=list)


def case_of(seed: int, num_ranks: int) -> Case:
    chance = random.Random(seed)  # noqa: S311
    case = Case(
        seed,
        wrap=chance.choice(WRAPS),
        way=chance.choice(["step", "step", "micro"]),
        accumulate=chance.choice([1, 1, 2, 3, 4]),
        num_calls=chance.randint(3, 7),
        clip=chance.choice([None, 0.05]),
        copies=chance.choice(["first", "first", "always"]),
        optimizer=chance.choice(["sgd", "adam"]),
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
    return {
        "x": torch.randn(num, WIDTH, generator=chance, dtype=torch.float64),
        "y": torch.randn(num, 3, generator=chance, dtype=torch.float64),
        "head": int(torch.randint(0, 2, (), generator=chance)),
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

    def __init__(self, case: Case, state: dict[str, Any], num_ranks: int) -> None:
        self.model = Model().double()
        self.model.load_state_dict(state)
        self._case, self._num_ranks = case, num_ranks
        self._optimizer = optimizer_of(case, self.model)

    def step(self, calls: list[int]) -> None:
        for rank in range(self._num_ranks):
            batches = [batch_of(self._case, rank, call) for call in calls]
            total = sum(len(batch["x"]) for batch in batches)
            for batch in batches:
                share = len(batch["x"]) / total / self._num_ranks
                (loss_of(self.model, batch) * share).backward()
        if self._case.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._case.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def off_by(self, model: nn.Module) -> float:
        """The largest difference of weights."""
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        return max(float((one - other).detach().abs().max()) for one, other in pairs)


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
    for thing, name, place in (
        (attempts._rollback, "take", "take"),
        (attempts._ranks, "ready", "ready"),
        (attempts._ranks, "_fill", "zeros"),
    ):
        setattr(thing, name, before(strikes, place, getattr(thing, name)))
    middle = bare.body[2].weight
    handle = middle.register_hook(lambda _: strikes.at("backward"))
    clip = before(strikes, "clip", nn.utils.clip_grad_norm_)
    copy = before(strikes, "copy", update.UpdateCopy)
    with ExitStack() as stack:
        stack.callback(handle.remove)
        stack.enter_context(mock.patch.object(torch.nn.utils, "clip_grad_norm_", clip))
        stack.enter_context(mock.patch.object(update, "UpdateCopy", copy))
        yield


# ---- one case -----------------------------------------------------------------------------------


def digest(model: Any, optimizer: Any) -> str:
    """Of weights, buffers and the optimizer's states: the same where all bits are."""
    parts = [t.detach().numpy().tobytes() for t in (*model.parameters(), *model.buffers())]
    for state in optimizer.state.values():
        tensors = {k: v for k, v in sorted(state.items()) if isinstance(v, torch.Tensor)}
        parts += [k.encode() + v.numpy().tobytes() for k, v in tensors.items()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def run(case: Case, rank: int, num_ranks: int, wrapped: Any, bare: Any) -> dict[str, Any]:
    """Each call of a case: what it came to on this rank, and what it left."""
    torch.manual_seed(case.seed)
    state = Model().double().state_dict()
    bare.load_state_dict(state)
    bare.zero_grad(set_to_none=True)
    reference = Reference(case, state, num_ranks)
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
                    "off": reference.off_by(bare),
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
    for wrap in WRAPS:
        bare = Model().double()
        models[wrap] = wrapped_in(wrap, bare, backend), bare
    cases = [case_of(seed + number, num_ranks) for number in range(num_cases)]
    found = [run(case, rank, num_ranks, *models[case.wrap]) for case in cases]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    os._exit(0)  # a thread of gloo that drops a tensor while Python shuts down aborts the process


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))

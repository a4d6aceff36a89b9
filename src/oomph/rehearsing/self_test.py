"""The installed torch -> whether rehearsals can be trusted on it. Runs once per version.

Rehearsals rely on private parts of torch. So a tiny model is trained for real on the CPU, then
rehearsed, and both are compared allocation by allocation. Intended differences between CPU and GPU
are left out: workspaces and temporaries inside kernels, where parameters and batches come from, and
scalars (Adam counts its steps on the host). Attention is written out, because a GPU has other fused
kernels. The test does not cover the rules for these differences.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.recorder import Recorder
from oomph.rehearsing.rehearse import prepare, rehearse
from oomph.store import Store, digest, surroundings

_SCALAR_BYTES = 8
_EXAMPLES, _WIDTH, _LENGTH, _TOKENS = 3, 24, 10, 50  # judgement: small, no two equal

# ---- two recordings of the same training -> where they differ ------------------------------------


class Counting(Recorder):
    """Counts tensors on every device, and nothing that only a GPU would allocate."""

    counts = staticmethod(lambda _: True)
    counts_storage = staticmethod(lambda _: True)

    def __init__(self) -> None:
        super().__init__((8, 0))

    def take_temporaries(self, behaviour: Any, args: Any, kwargs: Any, outputs: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Recording:
    """The allocations and frees in the order of `Trace.events`, and the op of each."""

    sizes: Sequence[int]
    ops: Sequence[str]
    events: Sequence[int]

    def only(self, counts: Callable[[int], bool]) -> Recording:
        """Return the recording without the allocations that do not count."""
        numbers = [number for number in range(len(self.sizes)) if counts(number)]
        place = {number + 1: i + 1 for i, number in enumerate(numbers)}
        return Recording(
            sizes=[self.sizes[number] for number in numbers],
            ops=[self.ops[number] for number in numbers],
            events=[
                place[abs(event)] * (1 if event > 0 else -1)
                for event in self.events
                if abs(event) in place
            ],
        )


def recording_of(recorder: Recorder) -> Recording:
    return Recording(recorder.sizes, [op for op, _, _ in recorder.born], list(recorder.events))


def in_order(events: Sequence[int]) -> list[int]:
    """Return the events with each run of frees sorted: their order does not matter."""
    ordered: list[int] = []
    frees: list[int] = []
    for event in events:
        if event < 0:
            frees.append(event)
        else:
            ordered += [*sorted(frees), event]
            frees = []
    return ordered + sorted(frees)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event that differs."""

    number: int
    one: str
    other: str
    op: str
    num_bytes: int  # allocated or freed on one side only

    def __str__(self) -> str:
        return f"event {self.number}: {self.one} | {self.other}"


def first_difference(one: Recording, other: Recording) -> Difference | None:
    pairs = zip_longest(_steps(one), _steps(other), fillvalue=_NOTHING)
    for number, (here, there) in enumerate(pairs):
        if here[:2] != there[:2]:
            op = here[2] or there[2] or "nothing"
            num_bytes = abs(here[1] - there[1])
            return Difference(number, _described(*here), _described(*there), op, num_bytes)
    return None


_Step = tuple[int, int, str]  # an event, its bytes (negative if they are freed), and their op
_NOTHING: _Step = (0, 0, "")


def _steps(recording: Recording) -> Iterator[_Step]:
    for event in in_order(recording.events):
        size_bytes = recording.sizes[abs(event) - 1]
        yield event, size_bytes if event > 0 else -size_bytes, recording.ops[abs(event) - 1]


def _described(event: int, num_bytes: int, op: str) -> str:
    if not event:
        return "nothing"
    takes = "takes" if event > 0 else "frees"
    return f"{takes} {abs(num_bytes)} B of {op} ({abs(event) - 1})"


# ---- the test ------------------------------------------------------------------------------------

_PASSED = Store("self-tests", most_entries=40)  # tiny: one per set of packages


def prepare_and_test(capability: tuple[int, int]) -> str | None:
    """Patch torch in this process. Return what is wrong with rehearsals on it, or None."""
    name = f"{digest(str(torch.__version__), *surroundings())}.json.gz"
    if _PASSED.read(name) is not None:
        prepare(capability)
        return None
    real = _unless_it_fails(_real_run)  # torch is not patched yet
    prepare(capability)
    variant = Variant(micro_batch=_EXAMPLES)
    rehearsed = _unless_it_fails(
        lambda: _comparable(rehearse(tiny_workload(), variant, capability))
    )
    found = _judged(real, rehearsed)
    if found is None:
        _PASSED.write_json(name, {"torch_version": str(torch.__version__)})
        return None
    return (
        f"torch {torch.__version__} is not one that rehearsals were checked with: the self-test"
        f" {found}"
    )


def _judged(real: Recording | str, rehearsed: Recording | str) -> str | None:
    if isinstance(real, str) or isinstance(rehearsed, str):
        return f"failed with {real if isinstance(real, str) else rehearsed}"
    if not real.events:
        return "recorded nothing of a real run"
    difference = first_difference(real, rehearsed)
    if difference is None:
        return None
    return f"differs by {difference.num_bytes} bytes at {difference.op} ({difference})"


def _unless_it_fails(run: Callable[[], Recording]) -> Recording | str:
    try:
        with _plain_torch():
            return run()
    except Exception as error:  # noqa: BLE001 - any failure of an untested torch is the answer
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Undo global settings of the user's file; use one thread, as a fork has no thread pool."""
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)


# ---- the tiny model --------------------------------------------------------------------------


class _Tiny(nn.Module):
    """A model with one layer of each common kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)
        self.projections = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.out = nn.Linear(4 * _WIDTH, _TOKENS)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        query, key, value = self.projections(self.norm(x)).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2) / _WIDTH**0.5).softmax(dim=-1)
        x = x + scores @ value
        pictures = nn.functional.gelu(self.convolution(x[:, None]))
        return self.out(pictures.transpose(1, 2).flatten(2))


def tiny_workload() -> Workload:
    def batch(num_examples: int) -> Any:
        tokens = torch.arange(num_examples * _LENGTH, device="cpu") % _TOKENS
        return {"tokens": tokens.reshape(num_examples, _LENGTH)}

    def loss(model: torch.nn.Module, given: Any) -> Any:
        predicted = model(given["tokens"])
        return nn.functional.cross_entropy(predicted.flatten(0, 1), given["tokens"].flatten())

    return Workload(
        model=_Tiny,
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
        batch_size=_EXAMPLES,
    )


def _real_run() -> Recording:
    """Train two steps on the CPU, in the same order as `rehearse`."""
    workload = tiny_workload()
    gc.collect()
    gc.disable()
    try:
        with torch.device("cpu"):
            model = workload.model().train()
            optimizer = workload.optimizer(list(model.parameters()))
            batch = workload.batch(_EXAMPLES)
            with Counting() as recorder:
                for _ in range(2):
                    optimizer.zero_grad()
                    loss = workload.loss(model, batch)
                    loss.backward()
                    optimizer.step()
                recording = recording_of(recorder)
    finally:
        gc.enable()
    return recording.only(lambda number: recording.sizes[number] > _SCALAR_BYTES)


def _comparable(trace: Trace) -> Recording:
    """Return the part of a trace that a run on the CPU also has."""
    allocations = trace.allocations

    def counts(number: int) -> bool:
        one = allocations[number]
        is_of_a_gpu = one.category == "workspace" or one.op.endswith("(inside)")
        is_given = one.phase in ("build", "input")
        return not is_of_a_gpu and not is_given and one.size_bytes > _SCALAR_BYTES

    everything = Recording(
        [one.size_bytes for one in allocations], [one.op for one in allocations], trace.events
    )
    return everything.only(counts)

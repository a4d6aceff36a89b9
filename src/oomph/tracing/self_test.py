"""A torch that is here -> may rehearsals be trusted on it? Tested once for each version.

Rehearsals lean on private parts of torch. So a tiny model is trained for real on the CPU and then
rehearsed, and the two are compared allocation by allocation. What differs between the CPU and a
GPU by intent is left out: workspaces and temporaries inside kernels, where parameters and batches
come from, and scalars (Adam counts its steps on the host). Attention is written out, because its
fused kernels are others on a GPU. Those rules are not tested by this.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.tracing.cache import cache_directory, hashes_of_the_tracer, write
from oomph.tracing.recordings import Counting, Recording, first_difference, recording_of
from oomph.tracing.rehearse import Apply, prepare, rehearse

_EXAMPLES = 3
_SCALAR_BYTES = 8
_WIDTH, _LENGTH, _TOKENS = 24, 10, 50


def prepare_and_test(capability: tuple[int, int], apply: Apply) -> str | None:
    """Patch torch in this process, and tell what is wrong with rehearsals on it; None: nothing."""
    if _passed_before().exists():
        prepare(capability)
        return None
    real = _unless_it_fails(_real_run)  # on a torch that is not patched yet
    prepare(capability)
    rehearsed = _unless_it_fails(lambda: _rehearsed(capability, apply))
    found = _judged(real, rehearsed)
    if found is None:
        write(_passed_before(), json.dumps({"torch_version": torch.__version__}).encode())
        return None
    return (
        f"torch {torch.__version__} is not one that rehearsals were checked with: the self-test"
        f" {found}"
    )


def _passed_before() -> Path:
    decided_by = (str(torch.__version__), hashes_of_the_tracer())
    digest = hashlib.sha256(json.dumps(decided_by).encode()).hexdigest()
    return cache_directory() / f"self-test-{digest[:32]}.json"


def _judged(real: Recording | str, rehearsed: Recording | str) -> str | None:
    for found in (real, rehearsed):
        if isinstance(found, str):
            return f"failed with {found}"
    assert isinstance(real, Recording)  # noqa: S101 - the loop has seen to it
    assert isinstance(rehearsed, Recording)  # noqa: S101
    if not real.events:
        return "recorded nothing of a real run"
    difference = first_difference(real, rehearsed)
    if difference is None:
        return None
    return f"differs by {difference.num_bytes} bytes at {difference.op} ({difference})"


def _unless_it_fails(run: Any) -> Recording | str:
    try:
        with _plain_torch():
            made: Recording = run()
            return made
    except Exception as error:  # noqa: BLE001 - whatever another torch does wrong is the answer
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Whatever the user's file has set; and one thread, as a fork has only one of a pool's."""
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
    """One of each kind of layer that most models are made of."""

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

    def loss(model: Any, given: Any) -> Any:
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
    """Two steps on the CPU, as `rehearse` takes them."""
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


def _rehearsed(capability: tuple[int, int], apply: Apply) -> Recording:
    return _comparable(rehearse(tiny_workload(), Variant(micro_batch=_EXAMPLES), capability, apply))


def _comparable(trace: Trace) -> Recording:
    """What of a trace a run on the CPU has, too."""
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

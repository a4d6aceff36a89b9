"""What the emulated GPU costs: the same training steps beside plain CPU, in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.tables import Measured, as_table
from oomph.rehearsing.child import in_a_child

FLOOR = "plain CPU, MLP of small ops, a step (floor)"
_STEPS = 30


def measure() -> str:
    rows = [
        Measured(FLOOR, _best(small_ops)),
        Measured("torch's dispatch mode that does nothing", _best(small_ops, within=_idle)),
        Measured("emulated, MLP of small ops, a step", _best(small_ops, within=_emulated)),
        Measured("plain CPU, GPT-2 of 4 layers, a step", _best(gpt2)),
        Measured("emulated, GPT-2 of 4 layers, a step", _best(gpt2, within=_emulated)),
        Measured("plain CPU, the same, a new length each step", _best(lengths)),
        Measured("emulated, the same, a new length each step", _best(lengths, within=_emulated)),
    ]
    return as_table("training steps on the emulated GPU", FLOOR, rows)


def _emulated() -> AbstractContextManager[Any]:
    import oomph

    return oomph.emulated_gpu("8GiB")


def _idle() -> AbstractContextManager[Any]:
    """What no dispatch mode that is written in Python can do without."""
    from torch.utils._python_dispatch import BaseTorchDispatchMode

    mode: Any = BaseTorchDispatchMode
    return mode()  # type: ignore[no-any-return]


def _best(
    make: Callable[[str], Callable[[int], None]],
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    device = "cuda" if within is _emulated else "cpu"
    return min(in_a_child(lambda: _timed(make, device, within)) for _ in range(2))


def _timed(make: Any, device: str, within: Callable[[], AbstractContextManager[Any]]) -> float:
    """Milliseconds of CPU for a step, on one core: the time of threads that wait is no cost."""
    import torch

    torch.set_num_threads(1)
    with within():
        step = make(device)
        for number in range(3):
            step(number)
        began_s = time.process_time()
        for number in range(3, 3 + _STEPS):
            step(number)
        return (time.process_time() - began_s) * 1000 / _STEPS


def small_ops(device: str) -> Callable[[int], None]:
    import torch
    from torch import nn

    model = nn.Sequential(*[m for _ in range(20) for m in (nn.Linear(32, 32), nn.ReLU())])
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)

    def step(_: int) -> None:
        model(torch.ones(8, 32, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gpt2(device: str) -> Callable[[int], None]:
    step_of = _gpt2(device)
    return lambda _: step_of(128)


def lengths(device: str) -> Callable[[int], None]:
    step_of = _gpt2(device)
    return lambda number: step_of(112 + number)


def _gpt2(device: str) -> Callable[[int], None]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=4096)
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step_of(length: int) -> None:
        tokens = torch.zeros(4, length, dtype=torch.long, device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step_of

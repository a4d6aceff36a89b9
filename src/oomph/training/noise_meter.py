"""Gradients of the pieces of a step -> a sample of the gradient noise scale.

A hook on each parameter sees the gradient of one piece before it is added to the others, so no
second gradient is kept: all it takes is three numbers. What is measured waits on the GPU until
somebody asks, so that training does not wait for it. Gradients are read and never changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from oomph.errors import UsageError
from oomph.out_of_memory import is_out_of_memory
from oomph.records.stability import NoiseScale
from oomph.stability.noise import NoiseEstimate, Sample

NoiseScaleMode = Literal["free", "probe", "off"]
# On a CPU, with micro-batches that are small beside the weights, a measured step takes up to twice
# as long (make bench): one in fifty keeps the mean below 2 %.
EVERY = 50
PROBE_EVERY = 50
FIRST = 4  # not the first step: checks and the optimizer's states are more than a usual one


_MOST_ROWS, _NUM_COLUMNS = 16, 5


@dataclass(slots=True)
class _Open:
    """A step that is being measured."""

    weight: float = 0.0  # of all pieces
    num: int = 0
    num_pieces: int = 0
    is_spoiled: bool = False
    is_probe: bool = False  # its pieces are run beside those of the step


class NoiseMeter:
    """Measures one step in `EVERY`. The same steps on all ranks, since all of them step together.

    parameters: those whose gradients belong to the step.
    """

    def __init__(
        self, parameters: Callable[[], Sequence[torch.Tensor]], mode: NoiseScaleMode = "free"
    ) -> None:
        if mode not in ("free", "probe", "off"):
            raise UsageError(
                f"noise_scale={mode!r:.40} is unknown",
                attempt='noise_scale="free", "probe" or "off"',
            )
        self.mode = mode
        self._parameters = parameters
        self._hooks: list[Any] = []
        self._scale = 0.0  # of the piece that is being run; 0 outside of pieces
        self._open: _Open | None = None
        self._hooked: set[int] = set()
        self._fired: set[int] = set()  # in this piece
        self._used: set[int] = set()  # in any piece
        self._square = self._sum = torch.empty(0)
        self._rows = torch.empty(0)  # samples that nobody has asked for yet
        self._num_rows = 0
        self._estimate = NoiseEstimate()
        self.num_steps = 0

    @property
    def is_on(self) -> bool:
        return self.mode != "off"

    @property
    def is_due(self) -> bool:
        """Return whether this step is one of those that are measured."""
        return self.is_on and self.num_steps % EVERY == FIRST

    @property
    def noise_scale(self) -> NoiseScale | None:
        """Return what is known so far; waits for the GPU if there is anything new."""
        self._take_in()
        return self._estimate.scale

    def _take_in(self) -> None:
        for sample in self.samples():
            self._estimate.add(sample)

    # ---- pieces --------------------------------------------------------------------------------

    def begin(self, *, may_measure: bool = True) -> None:
        """Begin a step, or begin it again."""
        if self._open is not None and self._open.is_probe:
            return
        self._unhook()
        with self._without_memory_unmeasured():
            if self.is_on and not self._rows.numel():
                self._prepare()  # in the first step: later ones take no more memory
            if self.is_due and may_measure:
                self._hook()

    @contextmanager
    def _without_memory_unmeasured(self) -> Iterator[None]:
        """Give up measuring this step if memory runs out here; the training goes on."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._unhook()

    def piece(self, num: int, weight: float) -> None:
        """Begin a piece of `num` examples; its gradient is that of its mean times `weight`."""
        if self._open is not None and not self._open.is_probe and weight > 0:
            self._fired.clear()
            self._scale = 1 / weight
            self._open.num += num
            self._open.weight += weight
            self._open.num_pieces += 1

    @property
    def is_probe_due(self) -> bool:
        return self.mode == "probe" and self.num_steps % PROBE_EVERY == FIRST

    def begin_probe(self) -> None:
        """Begin to measure halves of a batch, which then also runs as a whole."""
        self._unhook()
        self._hook()
        if self._open is not None:
            self._open.is_probe, self._open.weight = True, 1.0

    def piece_of_probe(self, num: int, total: int) -> None:
        """Begin a part of `num` examples of `total`, whose gradient is that of its mean."""
        if self._open is not None:
            self._fired.clear()
            self._scale = num / total
            self._open.num += num
            self._open.num_pieces += 1

    def end_probe(self) -> None:
        """Keep what was measured for the end of the step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def stop_probing(self) -> None:
        self.mode = "free"
        self._unhook()

    def end_piece(self) -> None:
        """End a piece: gradients of other backwards, such as checks, are none of its."""
        self._scale = 0.0

    def _prepare(self) -> list[torch.Tensor]:
        """Return the parameters to hook; none if what they get cannot be added up."""
        parameters = [p for p in self._parameters() if p.requires_grad]
        devices = {p.device for p in parameters}
        if len(devices) != 1 or any(type(p).__name__ == "DTensor" for p in parameters):
            self.mode = "off"  # several devices, or gradients that are only a part
            return []
        self._make_room(parameters[0].device, parameters)
        return parameters

    def _hook(self) -> None:
        parameters = self._prepare()
        if not parameters:
            return
        self._sum.zero_()
        self._used.clear()
        self._open, self._hooked = _Open(), {id(p) for p in parameters}
        for parameter in parameters:
            self._hooks.append(parameter.register_hook(self._noting(id(parameter))))

    def _make_room(self, device: torch.device, parameters: Sequence[torch.Tensor]) -> None:
        """Allocate all that is kept, once. It has no less precision than any gradient."""
        is_wide = any(p.dtype is torch.float64 for p in parameters)
        dtype = torch.float64 if is_wide else torch.float32
        if self._rows.numel() and self._sum.device == device and self._sum.dtype is dtype:
            return
        numbers = torch.zeros(2 + _MOST_ROWS * _NUM_COLUMNS, dtype=dtype, device=device)
        self._sum, self._square = numbers[:2].unbind()
        self._rows, self._num_rows = numbers[2:].view(_MOST_ROWS, _NUM_COLUMNS), 0

    def _noting(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            if not self._scale or self._open is None:
                return
            if number in self._fired:  # reentrant backward: parts of one gradient
                self._open.is_spoiled = True
            self._fired.add(number)
            self._used.add(number)
            self._add(gradient, self._sum, self._scale)

        return note

    @torch.no_grad()
    def _add(self, gradient: torch.Tensor, total: torch.Tensor, factor: float) -> None:
        """Add a squared norm, without temporaries of the gradient's size."""
        if gradient.layout is not torch.strided or gradient.is_complex():
            self._spoil()
            return
        try:
            is_on_host = gradient.device.type == "cpu"  # on a GPU, dot takes cuBLAS's workspace
            if is_on_host and gradient.dtype is total.dtype and gradient.is_contiguous():
                flat = gradient.detach().view(-1)
                torch.dot(flat, flat, out=self._square)
            else:
                torch.linalg.vector_norm(
                    gradient.detach(), dtype=total.dtype, out=self._square
                ).square_()
            total.add_(self._square, alpha=factor)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._spoil()  # a kernel's own workspace did not fit; training goes on without

    def _spoil(self) -> None:
        if self._open is not None:
            self._open.is_spoiled = True

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._open, self._scale = [], None, 0.0

    # ---- the whole step ------------------------------------------------------------------------

    def shared(self, num_ranks: int) -> torch.Tensor | None:
        """Return this rank's part of the sample, to be added up over the ranks; None if not due.

        All ranks return one or none does; a part that is not known is not a number.
        """
        if num_ranks > 1:  # where memory runs out on one of them, no rank steps
            return self._part(num_ranks)
        with self._without_memory_unmeasured():
            return self._part(num_ranks)
        return None

    def _part(self, num_ranks: int) -> torch.Tensor | None:
        is_probed = self._open is not None and self._open.is_probe
        if not (self.is_due or is_probed):
            return None
        at, device = self._open, next(iter(self._parameters())).device
        if at is None or at.is_spoiled or not at.num or not at.weight:
            return torch.full((4,), torch.nan, device=device)
        shares = [at.num_pieces / at.num / num_ranks, 1 / at.num / num_ranks**2, at.num]
        part = torch.tensor([0.0, *shares], device=device)
        part[0] = self._sum / (at.weight * num_ranks)
        return part

    def finish(self, part: torch.Tensor | None, factor: float = 1.0) -> None:
        """End the step, with the gradients of all pieces and ranks, before they are clipped.

        factor: what the gradients have been multiplied by since the pieces.
        """
        at, self.num_steps = self._open, self.num_steps + 1
        if part is not None and at is not None and at.num_pieces > 0:
            with self._without_memory_unmeasured():
                self._keep(at, part, factor)
        self._unhook()

    def _keep(self, at: _Open, part: torch.Tensor, factor: float) -> None:
        parameters = [p for p in self._parameters() if id(p) in self._hooked]
        whole = torch.zeros_like(self._sum)
        for parameter in parameters:
            if parameter.grad is not None:
                self._add(parameter.grad, whole, 1 / (factor * at.weight) ** 2)
        has_all = all(p.grad is not None for p in parameters if id(p) in self._used)
        if has_all and not at.is_spoiled:  # not moved elsewhere by the optimizer
            row = self._rows[self._num_rows]
            row[:-1], row[-1] = part, whole
            self._num_rows += 1
            if self._num_rows == _MOST_ROWS:
                self._take_in()

    def samples(self) -> list[Sample]:
        """Return what was measured since the last call; waits for the GPU if there is anything."""
        if not self._num_rows:
            return []
        rows, self._num_rows = self._rows[: self._num_rows].tolist(), 0
        return [
            Sample(pieces, _mean_of(pieces, whole), pieces_share, whole_share, round(num))
            for pieces, pieces_share, whole_share, num, whole in rows
            if num == num  # not a number: unknown on some rank
        ]


def _mean_of(pieces_square: float, whole_square: float) -> float:
    """Return the squared norm of a mean, where the loss may be a sum over examples.

    A mean of pieces is at most as long as they are. The halves of a batch are measured without
    knowing what its loss divides by: if it is a sum, the whole is twice their mean, and at least
    twice as long in the square.
    """
    return whole_square / 4 if whole_square > math.sqrt(2) * pieces_square else whole_square

"""Plans to draw, made by the real predictor from a model of beads: no torch is needed.

python tests/web/sample.py plan.html
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oomph.predicting.overhead import Interval
from oomph.predicting.prediction import Card, assemble
from oomph.predicting.timeline import timeline_of
from oomph.records.plan import Plan, Plans, Rejected, Shortfall, Stability, Timeline, Trick
from oomph.records.prediction import Prediction
from oomph.records.trace import Allocation, Category, Phase, Trace
from oomph.records.workload import Variant
from oomph.showing.plan import write_plan_page
from oomph.units import GIB, MIB

BLOCKS = 24
BATCH = 64
BLOCK_BYTES = 48 * MIB  # of its parameters
PIECES = 8  # tensors that a block keeps for backward
PIECE_BYTES = 8 * MIB  # of one example, in fp32


@dataclass
class Beads:
    """A chain of equal blocks, trained: writes down what it allocates and frees."""

    variant: Variant
    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    phases: list[tuple[int, Phase]] = field(default_factory=list)

    def take(self, size_bytes: int, op: str, category: Category, module: str = "") -> int:
        phase = self.phases[-1][1] if self.phases else "build"
        self.allocations.append(
            Allocation(size_bytes=size_bytes, op=op, module=module, phase=phase, category=category)
        )
        self.events.append(len(self.allocations))
        return len(self.allocations)

    def give(self, numbers: Iterable[int]) -> None:
        self.events += [-number for number in numbers]

    def enter(self, phase: Phase) -> None:
        self.phases.append((len(self.events), phase))

    def train(self) -> Trace:
        for block in range(BLOCKS):
            self.take(BLOCK_BYTES, "build", "parameters", f"encoder.layer.{block}")
        gradients: list[int] = []
        for step in range(2):
            self.steps.append(len(self.events))
            self.enter("zero_grad")
            self.give(gradients)
            gradients = self._micro_steps()
            self.enter("step")
            if step == 0:
                for _ in range(2 * BLOCKS):
                    self.take(BLOCK_BYTES, "_foreach_zero", "optimizer")
            size = 1 if self.variant.optimizer == "fused" else BLOCK_BYTES
            self.give([self.take(size, "_foreach_sqrt", "temporaries") for _ in range(BLOCKS)])
        return Trace(
            allocations=self.allocations,
            events=self.events,
            step_starts=self.steps,
            phase_starts=self.phases,
            ops=[],
            micro_batch=self.variant.micro_batch,
            torch_version="2.13.0",
            compute_capability=(7, 0),
        )

    def _micro_steps(self) -> list[int]:
        gradients: list[int] = []
        for _ in range(min(self.variant.accumulation, 2)):
            self.enter("input")
            batch = self.take(self.variant.micro_batch * MIB, "copy_", "inputs")
            self.enter("forward")
            kept = [self._forward(block) for block in range(BLOCKS)]
            self.enter("backward")
            new = [self._backward(block, kept[block]) for block in reversed(range(BLOCKS))]
            if gradients:
                self.give(new)
            gradients = gradients or new
            self.give([batch])
        return gradients

    def _is_recomputed(self, block: int) -> bool:
        return self.variant.checkpointing == "blocks" or (
            self.variant.checkpointing == "every-2" and block % 2 == 0
        )

    def _pieces(self, block: int, count: int) -> list[int]:
        size = PIECE_BYTES * self.variant.micro_batch
        size = size if self.variant.precision == "fp32" else size * 11 // 20
        name = f"encoder.layer.{block}.attention"
        return [self.take(size, "bmm", "activations", name) for _ in range(count)]

    def _forward(self, block: int) -> list[int]:
        kept = self._pieces(block, 1 if self._is_recomputed(block) else PIECES)
        self._pass_through(block)
        return kept

    def _pass_through(self, block: int) -> None:
        size = PIECE_BYTES * self.variant.micro_batch
        self.give([self.take(size, "gelu", "temporaries", f"encoder.layer.{block}.mlp")])

    def _backward(self, block: int, kept: list[int]) -> int:
        if self._is_recomputed(block):
            kept = kept + self._pieces(block, PIECES - 1)
        while kept:
            self._pass_through(block)
            self.give([kept.pop()])
        return self.take(BLOCK_BYTES, "mm", "gradients", f"encoder.layer.{block}")


CARD = Card(
    name="v100-16gb",
    usable=Interval(int(15.7 * GIB), int(15.77 * GIB), int(15.8 * GIB), "as measured"),
    context=Interval(300 * MIB, 420 * MIB, 530 * MIB, "published"),
)
FASTEST_S = 1.31


def predicted(variant: Variant, relative_time: float | None) -> tuple[Prediction, Timeline]:
    trace = Beads(variant).train()
    told = assemble(trace, variant, CARD)
    if relative_time is not None:
        step_s = FASTEST_S * relative_time
        told = replace(told, step_s=step_s, samples_per_s=BATCH / variant.num_gpus / step_s)
    return told, timeline_of(trace)


_TRICKS = {
    "accumulation": Trick(
        name="accumulation",
        what="the batch of 64 in micro-batches of {micro}, gradients summed",
        stability="same",
        caveat="costs 3 % of the time here: kernels at {micro} are still large enough",
        code="for micro in batch.split({micro}): ...",
    ),
    "fp16": Trick(
        name="fp16",
        what="autocast to fp16 with a gradient scaler",
        stability="rounding",
        caveat="this GPU has no bf16; the scaler skips a step when a gradient overflows",
        code="torch.autocast('cuda', torch.float16)",
    ),
    "checkpointing": Trick(
        name="checkpointing",
        what="recompute {blocks} of 24 blocks in backward",
        stability="same",
        caveat=None,
        code="checkpoint(block, hidden, use_reentrant=False)",
    ),
    "fused": Trick(
        name="optimizer",
        what="the fused AdamW instead of foreach",
        stability="rounding",
        caveat=None,
        code="torch.optim.AdamW(..., fused=True)",
    ),
    "8-bit": Trick(
        name="8-bit",
        what="optimizer states in 8 bits",
        stability="changes",
        caveat="another optimizer in all but name: consent was given with --allow 8-bit",
        code="bitsandbytes.optim.AdamW8bit(...)",
    ),
}
_ORDER: tuple[Stability, ...] = ("same", "rounding", "changes")


def _tricks(variant: Variant, names: Sequence[str]) -> tuple[Trick, ...]:
    blocks = {"blocks": 24, "every-2": 12}.get(variant.checkpointing, 0)

    def told(text: str) -> str:
        return text.replace("{micro}", str(variant.micro_batch)).replace("{blocks}", str(blocks))

    return tuple(
        replace(
            _TRICKS[name],
            what=told(_TRICKS[name].what),
            code=told(_TRICKS[name].code),
            caveat=told(_TRICKS[name].caveat or "") or None,
        )
        for name in names
    )


_SAMPLES: tuple[tuple[Variant, tuple[str, ...], float, str], ...] = (
    (
        Variant(micro_batch=8, accumulation=8, precision="fp16", optimizer="fused"),
        ("accumulation", "fp16", "fused"),
        1.06,
        "the fastest that fits with room to spare; every trick in it is checked against rounding",
    ),
    (
        Variant(micro_batch=4, accumulation=16),
        ("accumulation",),
        2.41,
        "exactly the same update as the whole batch at once",
    ),
    (
        Variant(micro_batch=16, accumulation=4, precision="fp16", checkpointing="every-2"),
        ("accumulation", "fp16", "checkpointing"),
        1.31,
        "larger kernels, but half of the blocks are computed twice",
    ),
    (
        Variant(micro_batch=16, accumulation=4, precision="fp16", checkpointing="blocks"),
        ("accumulation", "fp16", "checkpointing"),
        1.45,
        "the least memory at this speed",
    ),
    (
        Variant(micro_batch=8, accumulation=4, num_gpus=2, precision="fp16", sharding="ddp"),
        ("accumulation", "fp16"),
        0.71,
        "half of the batch on each of two GPUs",
    ),
    (
        Variant(micro_batch=2, accumulation=32, checkpointing="blocks", optimizer="8-bit"),
        ("accumulation", "checkpointing", "8-bit"),
        3.2,
        "the least memory of all",
    ),
)

CODE = """scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

for batch in loader:  # {batch} examples
    for micro in split(batch, {micro}):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(model, micro) / {accumulate}
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def sample(
    workload: str = "bert_large.py:workload", *, timed: bool = True
) -> tuple[Plans, list[Timeline], list[str]]:
    """Six plans of all kinds, with what was rejected and what is to be known."""
    plans, timelines, code = [], [], []
    for place, (variant, tricks, relative_time, why) in enumerate(_SAMPLES):
        prediction, timeline = predicted(variant, relative_time if timed else None)
        its_tricks = _tricks(variant, tricks)
        plans.append(
            Plan(
                gpu="v100-16gb",
                workload=workload,
                variant=variant,
                prediction=prediction,
                tricks=its_tricks,
                stability=max((t.stability for t in its_tricks), key=_ORDER.index),
                relative_time=relative_time if timed else None,
                recommended=place == 0,
                why=why,
            )
        )
        timelines.append(timeline)
        code.append(
            CODE.format(batch=BATCH, micro=variant.micro_batch, accumulate=variant.accumulation)
        )
    return _answer(workload, tuple(plans)), timelines, code


def nothing_fits() -> Plans:
    """The answer no."""
    return replace(
        _answer("bert_large.py:workload", ()),
        shortfall=Shortfall(
            missing_bytes=3 * GIB,
            largest_part="optimizer 12.4 GiB",
            smallest_gpu="a100-40gb",
            num_gpus=2,
        ),
    )


def _answer(workload: str, plans: tuple[Plan, ...]) -> Plans:
    as_is, _ = predicted(Variant(micro_batch=BATCH), 1.0)
    return Plans(
        workload=workload,
        gpu="v100-16gb",
        batch_size=BATCH,
        capacity_bytes=as_is.capacity_bytes,
        fits_as_is=as_is.fits,
        as_is=as_is,
        plans=plans,
        rejected=(
            Rejected(what="bf16", why="a V100 has no bf16 tensor cores: slower than fp32"),
            Rejected(what="micro-batch 64", why="takes 151.3 GiB of 15.8 GiB"),
            Rejected(what="LoRA", why="changes training, and --allow lora was not given"),
        ),
        shortfall=None,
        caveats=(
            "Accumulation costs 3 % of the time here: a micro-batch of 8 still fills the GPU.",
            "The model has no BatchNorm: micro-batches see the same statistics as the batch.",
        ),
        num_candidates=1284,
    )


if __name__ == "__main__":
    write_plan_page(*sample(), Path(sys.argv[1]))

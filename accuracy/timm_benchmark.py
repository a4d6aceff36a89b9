"""timm's training benchmark: batches that fit on an RTX 3090, and the next larger that did not.

The largest published set of verdicts: 417 models, 319 of them with a batch that failed. The
script (benchmark.py) tries 512, 384, 256, 192, 128, 96, ... examples until no error is raised: it
does not tell what the error was, almost always it is "out of memory". Nothing here has a figure
in bytes, so only verdicts can be right or wrong.

    python -m accuracy.timm_benchmark          25 models, drawn once
    python -m accuracy.timm_benchmark --all    all of them: some 40 minutes
    python -m accuracy.timm_benchmark --all --part 0/2    every second one
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import logging
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accuracy.rows import Source
from oomph.errors import OomphError
from oomph.records.prediction import Verdict
from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload

_SEED, _NUM_DRAWN = 2022, 25
_TRACED_AT = (2, 3)

TIMM = Source(
    name="timm-benchmark-train",
    reference="huggingface/pytorch-image-models@aa4b585 "
    "results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv",
    metric="fits, or fails with the next larger batch",
    gpu="rtx3090",
    torch_version="1.12.0+cu113",
    context_mib=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """A model with images of so many pixels an edge, the batch that fits and the one that fails."""

    model: str
    edge: int
    fits_at: int
    fails_at: int | None  # None: the largest that was tried fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What was said of both batches."""

    bracket: Bracket
    where_it_fits: Verdict | None = None
    where_it_fails: Verdict | None = None
    problem: str = ""


def brackets() -> list[Bracket]:
    with Path(__file__).with_name("timm_benchmark.csv").open(encoding="utf-8") as file:
        return [
            Bracket(
                model=row["model"],
                edge=int(row["edge"]),
                fits_at=int(row["fits_at"]),
                fails_at=int(row["fails_at"]) if row["fails_at"] else None,
            )
            for row in csv.DictReader(file)
        ]


def drawn() -> list[Bracket]:
    """A sample that was drawn before it was looked at, the same each time."""
    return random.Random(_SEED).sample(brackets(), _NUM_DRAWN)  # noqa: S311


# ---- the script, as far as memory goes -------------------------------------------------------


def workload_of(bracket: Bracket) -> Workload:
    """create_model, autocast without a scaler, SGD of timm's, gradients that are kept."""
    import torch

    from accuracy.libraries import import_timm

    timm = import_timm()
    torch.backends.cudnn.benchmark = True  # as the script does
    edge = bracket.edge
    return Workload(
        model=lambda: timm.create_model(bracket.model),
        batch=lambda n: (torch.zeros(n, 3, edge, edge), torch.zeros(n, dtype=torch.long)),
        loss=_loss,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=1e-4, momentum=0.9, nesterov=True, foreach=False
        ),
        batch_size=bracket.fits_at,
        zero_grad_to_none=False,  # torch's default before 2.0
    )


def _loss(model: Any, batch: Any) -> Any:
    import torch
    from torch.nn import functional as F  # noqa: N812

    with torch.autocast("cuda", dtype=torch.float16), _interpolating_in_half():
        output = model(batch[0])
        output = output[0] if isinstance(output, tuple) else output
        return F.cross_entropy(output, batch[1])


@contextlib.contextmanager
def _interpolating_in_half() -> Iterator[None]:
    """autocast runs interpolation in fp32 today, and did not in torch 1.12 (docs: amp.html)."""
    import torch
    from torch.nn import functional as F  # noqa: N812

    original = F.interpolate

    def as_it_comes(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", enabled=False):
            return original(*args, **kwargs)

    F.interpolate = as_it_comes
    try:
        yield
    finally:
        F.interpolate = original


# ---- verdicts --------------------------------------------------------------------------------


def judge(bracket: Bracket) -> Judged:
    """What would be said of both batches."""
    from oomph.rehearsing.child import in_a_child

    try:
        fits, fails = in_a_child(lambda: _verdicts(bracket))
    except OomphError as error:
        return Judged(bracket=bracket, problem=" ".join(str(error).split()))
    return Judged(bracket=bracket, where_it_fits=fits, where_it_fails=fails)


def _verdicts(bracket: Bracket) -> tuple[Verdict, Verdict | None]:
    from accuracy.__main__ import card_of
    from oomph.predicting.prediction import assemble
    from oomph.predicting.scaling import affine
    from oomph.rehearsing.rehearse import prepare, rehearse
    from oomph.verbs.gpus import find_gpu

    capability = find_gpu(TIMM.gpu).model.compute_capability
    assert capability is not None
    prepare(capability)
    workload, card = workload_of(bracket), card_of(TIMM)

    def traced(batch: int) -> Trace:
        return rehearse(workload, Variant(micro_batch=batch), capability)

    at_any = affine(*map(traced, _TRACED_AT))

    def said(batch: int) -> Verdict:
        trace = at_any.at(batch) if batch >= _TRACED_AT[0] else traced(batch)
        return assemble(trace, Variant(micro_batch=batch), card).fits

    return said(bracket.fits_at), None if bracket.fails_at is None else said(bracket.fails_at)


def judge_all(chosen: Sequence[Bracket]) -> Iterator[Judged]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm is older than this torch
        logging.disable(logging.WARNING)
        from accuracy.libraries import import_timm

        import_timm()
        for number, bracket in enumerate(chosen, 1):
            began = time.perf_counter()
            judged = judge(bracket)
            took = f"{time.perf_counter() - began:.1f} s"
            said = f"{judged.where_it_fits} {judged.where_it_fails}"
            told = f"{bracket.model} {bracket.fits_at} {bracket.fails_at}: {said}"
            print(f"{number}/{len(chosen)} {told}, {took}", file=sys.stderr, flush=True)
            yield judged


# ---- tables ----------------------------------------------------------------------------------


def summary(judged: Sequence[Judged]) -> Iterator[str]:
    """A line for each end of the brackets, and what was wrong or could not be judged."""
    yield "| batches | runs | right | uncertain | wrong |"
    yield "|---|--:|--:|--:|--:|"
    fits = [each.where_it_fits for each in judged if each.where_it_fits]
    fails = [each.where_it_fails for each in judged if each.where_it_fails]
    yield _line("fit", fits, right="yes", wrong="no")
    yield _line("do not fit", fails, right="no", wrong="yes")
    yield ""
    for each in judged:
        bracket = each.bracket
        if each.problem:
            yield f"- {bracket.model}: not rehearsed. {each.problem}"
        if each.where_it_fits == "no":
            yield f"- {bracket.model}: {bracket.fits_at} images fit, and oomph said they do not."
        if each.where_it_fails == "yes":
            yield f"- {bracket.model}: {bracket.fails_at} images failed, and oomph said they fit."


def _line(what: str, said: Sequence[Verdict], *, right: Verdict, wrong: Verdict) -> str:
    counted = Counter(said)
    shares = [f"{counted[each]} ({counted[each] / max(len(said), 1):.1%})" for each in
              (right, "uncertain", wrong)]  # fmt: skip
    return f"| that {what} | {len(said)} | {' | '.join(shares)} |"


def told() -> Iterator[str]:
    """The sample's summary, or why there is none."""
    try:
        yield from summary(list(judge_all(drawn())))
    except ImportError as error:
        yield f"Not judged: {error}; `make accuracy` installs what is missing."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m accuracy.timm_benchmark")
    parser.add_argument("--all", action="store_true", help="all 417 instead of a sample")
    parser.add_argument("--part", default="0/1", help="of several runs at a time, this one")
    options = parser.parse_args()
    chosen = brackets() if options.all else drawn()
    part, parts = map(int, options.part.split("/"))
    print("\n".join(summary(list(judge_all(chosen[part::parts])))))


if __name__ == "__main__":
    main()

"""Checks -> what `oomph check` prints: a verdict for each, then where, what to do, and how sure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.records.check import (
    AccumulationCheck,
    Check,
    CheckpointingCheck,
    Checks,
    Finding,
    PrecisionCheck,
)
from oomph.showing.terminal import new_console, print_command, print_prose

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    "passes": "bold green",
    "fails": "bold red",
    "uncertain": "bold yellow",
    "skipped": "dim",
}
_INDENT = 2


def print_checks(checks: Checks, *, then: str | None = None) -> None:
    """Print all checks; `then` is next."""
    console = new_console()
    for name, check in checks:
        print_prose(console, f"{name} {check.verdict}: {check.conclusion}", _STYLES[check.verdict])
        for finding in check.findings:
            _print_finding(console, finding)
        figures = _figures(check)
        if figures:
            print_prose(console, f"measured: {figures}", indent=_INDENT)
        if check.verdict != "skipped":
            print_prose(console, _confidence(check), "dim", indent=_INDENT)
    print_prose(console, f"with {checks.num_examples} examples, on the CPU", "dim")
    if then is not None:
        print_command(console, then)


def _print_finding(console: Console, finding: Finding) -> None:
    op = f" ({finding.op})" if finding.op else ""
    print_prose(console, f"in {finding.where}{op}: {finding.what}", indent=_INDENT)
    print_prose(console, f"do: {finding.do}", indent=2 * _INDENT)


def _confidence(check: Check) -> str:
    because = f": {'; '.join(check.limits)}" if check.limits else ""
    return f"confidence {check.confidence}{because}"


def _figures(check: Check) -> str:
    """Return the evidence, in one line."""
    if isinstance(check, AccumulationCheck):
        return _of_accumulation(check)
    if isinstance(check, PrecisionCheck):
        return _of_precision(check)
    if isinstance(check, CheckpointingCheck) and check.gradient_error_ratio is not None:
        return f"gradient with all blocks recomputed differs by {check.gradient_error_ratio:.1g}"
    return ""


def _of_accumulation(check: AccumulationCheck) -> str:
    if check.residual_ratio is None or check.divided_ratio is None:
        return ""
    pieces = " + ".join(map(str, check.piece_sizes))
    weights = ", ".join(f"{weight:.4g}" for weight in check.weights)
    by_weights = f", with the weights {weights}" if weights else ", with the best weights"
    return (
        f"pieces of {pieces}{by_weights}, are off by {check.residual_ratio:.1g}; each divided by"
        f" {len(check.piece_sizes)}, by {check.divided_ratio:.1g}"
    )


def _of_precision(check: PrecisionCheck) -> str:
    if check.largest_value is None:
        return ""
    parts = []
    if check.gradient_error_ratio is not None:
        parts.append(f"gradient off by {check.gradient_error_ratio:.1g}")
    if check.sensitivity_ratio is not None:
        parts.append(f"by {check.sensitivity_ratio:.1g} if weights and inputs are rounded")
    if check.fp32_error_ratio is not None:
        parts.append(f"by {check.fp32_error_ratio:.1g} in fp32")
    if check.zeroed_ratio is not None:
        parts.append(f"{check.zeroed_ratio:.1%} of it became 0")
    parts.append(f"largest value {check.largest_value:.3g}")
    return ", ".join(parts)

"""The verb verify: predict, train a few real steps on the GPU here, and compare -> Verification."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from oomph.records.script import Script
    from oomph.records.verification import Verification
    from oomph.records.workload import Precision, Workload


def verify(
    workload: Workload | Script | str,
    *,
    emulate: str | int | None = None,
    micro_batch: int | None = None,
    precision: Precision | None = None,
    checkpointing: str = "none",
    optimizer: str = "as-is",
    expandable_segments: bool = False,
    unprotected: bool = False,
    fresh: bool = False,
    say: Callable[[str], None] | None = None,
) -> Verification:
    """Predict a training step, train a few on the GPU of this machine, and compare.

    `workload` and the settings are as in `predict`. The visible GPU with the most free memory is
    taken; `emulate` is the memory of an emulated one instead, on which times are not compared. A
    workload trains in a child process. A script runs unchanged in a sandbox and is stopped after
    the steps that are measured: what it writes is thrown away. The settings are for workloads
    alone.

    Raises Unreadable if there is no GPU or torch cannot use it.
    """
    from oomph.planning.predictions import what_to_train
    from oomph.progress import silent
    from oomph.records.script import Script
    from oomph.records.workload import Variant, Workload, check_checkpointing, check_optimizer
    from oomph.rehearsing.traces import Request
    from oomph.verifying import verifier

    tell, trained = say or silent, what_to_train(workload)
    tricks = Variant(
        micro_batch=1,
        precision=precision or "fp32",
        checkpointing=check_checkpointing(checkpointing),
        optimizer=check_optimizer(optimizer),
    )
    request = Request(tricks=tricks, micro_batch=micro_batch)
    if isinstance(trained, Script):
        _refuse_settings(
            micro_batch=micro_batch,
            precision=precision,
            checkpointing=checkpointing != "none",
            optimizer=optimizer != "as-is",
            expandable_segments=expandable_segments,
        )
    here = verifier.gpu_here(emulate)
    tell(f"verifying on {here.target.name}")
    if isinstance(trained, Script):
        name = trained.path or f"-m {trained.module}"
        return verifier.verify_script(
            name, trained, here, is_unprotected=unprotected, is_fresh=fresh, say=tell
        )
    name = "the workload" if isinstance(trained, Workload) else f"{trained[0].name}:{trained[1]}"
    return verifier.verify_workload(
        name, trained, here, request, expandable_segments=expandable_segments, say=tell
    )


def verify_zoo(
    *,
    only: Sequence[str] = (),
    emulate: str | int | None = None,
    say: Callable[[str], None] | None = None,
) -> Verification:
    """Verify a dozen small models on the GPU of this machine, in about two minutes.

    `only` are the names of some. After Ctrl-C the verification has the models until then. On an
    emulated GPU the models are tiny.
    """
    from oomph.progress import silent
    from oomph.verifying import verifier

    tell = say or silent
    here = verifier.gpu_here(emulate)
    tell(f"verifying on {here.target.name}")
    return verifier.verify_zoo(here, verifier.zoo_names(only), tell)


def save_verification(verification: Verification, path: str | os.PathLike[str]) -> None:
    """Write a verification to a file that can be posted. Raises UsageError."""
    from oomph.records.stored import as_json
    from oomph.records.verification import without_private_parts
    from oomph.store import write_whole

    write_whole(path, as_json(without_private_parts(verification)) + "\n")


def load_verification(path: str | os.PathLike[str]) -> Verification:
    """Read a verification that was written to a file. Raises Unreadable."""
    from oomph.records.stored import from_json_file, no_record
    from oomph.records.verification import VERSION, Verification

    found = from_json_file(Verification, path, what="verification")
    if found.version != VERSION:
        raise no_record("verification", path, f"its version is {found.version}, not {VERSION}")
    return found


def _refuse_settings(**settings: object) -> None:
    """Raise UsageError for settings that would change a script."""
    from oomph.errors import UsageError

    given = [name.replace("_", "-") for name, value in settings.items() if value]
    if given:
        raise UsageError(
            f"a script is verified as it is, without {', '.join(given)}",
            because="its own loop decides the batch, the precision and the rest",
            attempt="the script's own options, after --, or a Workload",
        )

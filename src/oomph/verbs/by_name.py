"""The verb by_name: the name of a model -> a Workload in a file that trains it."""

from __future__ import annotations


def by_name(name: str, *, seq_len: int | None = None, batch_size: int | None = None) -> str:
    """Return the place of a Workload for a model that is known by its name, for plan and predict.

    oomph.plan(oomph.by_name("hf:gpt2", seq_len=1024, batch_size=64), gpu="rtx4090")

    `name` is "hf:" and a bundled model, or a directory or file with a config.json of transformers.
    The file is an ordinary one: open it, copy it, change it. Raises UsageError and Unreadable.
    """
    from oomph.rehearsing.models_by_name import workload_file

    return workload_file(name, seq_len=seq_len, batch_size=batch_size)

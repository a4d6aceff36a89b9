"""Writes the parts of the documentation that are output: `make fix` runs it.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
tests/test_docs.py fails where a document and the output have parted.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def replace_block(document: str, name: str, content: str) -> str:
    """The document with the generated part of that name replaced."""
    start, end = f"<!-- generated: {name} -->", "<!-- end -->"
    pattern = re.compile(rf"{re.escape(start)}\n.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(document):
        raise LookupError(f"there is no {start}")
    return pattern.sub(lambda _: f"{start}\n{content}\n{end}", document, count=1)


def as_console(command: str, output: str) -> str:
    return f"```console\n$ {command}\n{output.rstrip()}\n```"


@contextlib.contextmanager
def inside(directory: Path) -> Iterator[None]:
    """Work in this directory, so that no path of this machine is printed."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def oomph(*arguments: str) -> str:
    """What `oomph ARGUMENTS` prints on a terminal of 100 columns."""
    from oomph.cli import main

    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main(arguments)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def the_line() -> str:
    """What print_gpu_utilisation prints, on the test machine."""
    from nvml.machine import GIB, Gpu, NvmlMachine, Proc

    import oomph as package
    from oomph.sensing.backends import session

    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as directory:
        busy = Gpu(util=97, used_bytes=62 * GIB, processes=[Proc(os.getpid(), 61 * GIB)])
        machine = NvmlMachine(Path(directory), [Gpu(), Gpu(), Gpu(), busy])
        with (
            machine.active(),
            mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": machine.uuid(3)}),
            contextlib.redirect_stdout(printed),
        ):
            session.forget()
            package.print_gpu_utilisation()
        session.forget()
    return f"```\n{printed.getvalue().strip()}\n```"


def gpus_table() -> str:
    command = "gpus --emulate 8xa100-80gb"
    return as_console(f"oomph {command}", oomph(*command.split()))


def live_view() -> str:
    command = "watch --once --emulate 8xa100-80gb"
    printed = re.sub(r"\b\d\d:\d\d:\d\d\b", "12:00:00", oomph(*command.split()))
    return as_console(f"oomph {command}", printed)


def prediction() -> str:
    example, options = "examples/small_gpt.py", "--gpu rtx4090 --micro-batch 8 --precision bf16"
    with inside(ROOT):
        printed = oomph("predict", f"{example}:workload", *options.split())
    return as_console(f"oomph predict {example}:workload {options}", printed)


def zoo() -> str:
    """What `oomph verify --zoo` prints on the emulated GPU, for some models."""
    command = "verify --zoo --only mlp,cnn,unet,gpt --emulate 4GiB"
    # It writes a file there.
    with tempfile.TemporaryDirectory() as directory, inside(Path(directory)):
        printed = oomph(*command.split())
    return as_console(f"oomph {command}", printed)


def cli_help() -> str:
    commands = [(), *((verb,) for verb in verbs())]
    return "\n\n".join(
        f"## {' '.join(('oomph', *command))}\n\n```\n{oomph(*command, '--help')}\n```"
        for command in commands
    )


def verbs() -> Iterator[str]:
    from oomph.cli import _COMMANDS

    yield from _COMMANDS


def report() -> str:
    """The report of the run that the tests of the page draw."""
    import time

    from web.report_sample import sample

    from oomph.showing.report import print_report
    from oomph.verbs.report import report as report_on

    run, printed = sample(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100", "TZ": "UTC"}),
        contextlib.redirect_stdout(printed),
    ):
        time.tzset()
        print_report(report_on(run), run)
    time.tzset()
    lines = (line.rstrip() for line in printed.getvalue().splitlines())
    return as_console("oomph report last", "\n".join(lines))


def causes() -> str:
    """What the report says of causes that are known, simulated by tests/explaining/causes.py."""
    from explaining.causes import CAUSES, NEAR_MISSES, Cause

    def row(cause: Cause) -> str:
        report = cause.report()
        lead = report.verdict
        beside = [found.kind for found in report.findings[1:] if found is not lead]
        told = ", ".join(f"`{kind}`" for kind in beside) or "-"
        unsaid = ", ".join(f"`{kind}`" for kind in cause.silent) or "-"
        said = f"`{lead.kind}` [{lead.confidence}]"
        return f"| {cause.name} | {cause.shows} | {said} | {told} | {unsaid} |"

    head = "| what is the matter | how it shows | what leads | beside it | must stay unsaid |"
    line = "|---|---|---|---|---|"
    near = head.replace("what is the matter", "nothing is the matter")
    return "\n".join(
        [head, line, *map(row, CAUSES), "", near, line, *map(row, NEAR_MISSES)],
    )


def rooms() -> str:
    """The order of the rooms, as tests/test_house.py holds it."""
    from test_house import GROUND, ROOMS

    ground = [f"| `{name}.py` | {purpose} | |" for name, purpose in GROUND.items()]
    records = "| `records/` | the nouns: frozen records, no torch, no hardware | |"
    rows = [
        f"| `{name}/` | {room.purpose} | {', '.join(f'`{one}`' for one in room.may_import)} |"
        for name, room in ROOMS.items()
    ]
    return "\n".join(
        ["| room | what it does | may import |", "|---|---|---|", *ground, records, *rows]
    )


def bars() -> str:
    """How wide the error bars are, and which published runs they cover."""
    from accuracy.bars import coverage
    from oomph.predicting.residuals import published_residuals

    return "\n".join(coverage(published_residuals()))


def diffs() -> str:
    """The results of `python -m accuracy.diffs --keep`; tests/test_diffs.py makes them again."""
    from accuracy.diffs import kept, table

    return table(kept())


GENERATED: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"line": the_line},
    "docs/architecture.md": {"rooms": rooms},
    "docs/cli.md": {"help": cli_help},
    "docs/predicting.md": {"predict": prediction, "bars": bars},
    "docs/reading-gpus.md": {"gpus": gpus_table},
    "docs/scripts.md": {"diffs": diffs},
    "docs/reports.md": {"report": report, "causes": causes},
    "docs/live.md": {"live": live_view},
    "docs/verifying.md": {"zoo": zoo},
}


def up_to_date(document: str) -> str:
    """The text of a document as it should be."""
    text = (ROOT / document).read_text()
    for name, content in GENERATED[document].items():
        text = replace_block(text, name, content())
    return text


def main() -> None:
    for document in GENERATED:
        (ROOT / document).write_text(up_to_date(document))


if __name__ == "__main__":
    main()

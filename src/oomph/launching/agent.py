"""`python agent.py`: torchrun, which also writes down which rank failed first.

Everything after the file's name is torchrun's command line. It exits with the code of the rank
that failed first, where torchrun's own is always 1, and prints no traceback of torchrun's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from oomph.launching.failures import first_failure, read_errors, write_failure
from oomph.launching.in_ranks import AGENT
from oomph.sensing.ownership import RUN_DIRECTORY


def main(arguments: Sequence[str]) -> int:
    """Run torchrun and return the exit code of the rank that failed first."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ[AGENT] = str(os.getpid())
    try:
        run(parse_args(list(arguments)))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return _failed(codes)
    except SignalException as error:
        return _end_by(signal.Signals(error.sigval))
    except KeyboardInterrupt:
        return _end_by(signal.SIGINT)
    return 0


def _failed(exit_codes: dict[int, int]) -> int:
    directory = os.environ.get(RUN_DIRECTORY)
    errors = read_errors(Path(directory)) if directory else []
    failure = first_failure(errors, exit_codes)
    if directory and failure is not None:
        with contextlib.suppress(OSError):  # a full disk: the exit code still tells
            write_failure(Path(directory), failure)
    return failure.exit_code or 1 if failure else 1


def _end_by(number: signal.Signals) -> int:
    """End as a program does that has no handler; the ranks are gone."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.path.pop(0)  # the directory of this file, which is no place for imports
    sys.exit(main(sys.argv[1:]))

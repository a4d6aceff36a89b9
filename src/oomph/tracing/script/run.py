"""Script, PretendedGpu, Overrides -> Trace, Seen: the program run as Python runs it.

In a child of its own: torch is patched for good, and the script may do what it likes with its
process. What it writes, it writes: whoever starts this keeps it in a sandbox.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import runpy
import sys
import threading
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from oomph.errors import OomphError, UsageError, UserCodeError
from oomph.records.pace import SWITCH
from oomph.records.script import PROGRESS, Overrides, PretendedGpu, Script
from oomph.tracing import limits
from oomph.tracing.script import missing_modules
from oomph.tracing.script.last_words import LastWords, listen
from oomph.tracing.script.process import HandOver, in_a_group
from oomph.tracing.script.users_line import OURS, in_words, is_users, know_own, users_line

if TYPE_CHECKING:
    from oomph.tracing.rehearse import Apply
    from oomph.tracing.script.answers import Rehearsed
    from oomph.tracing.script.invention import Inventions
    from oomph.tracing.script.rehearsal import Inspect, Rehearsal

LIMIT_S = 600.0
TELLS_EVERY_S = 15.0


def rehearse_script(
    script: Script,
    gpu: PretendedGpu,
    overrides: Overrides,
    apply: Apply,
    *,
    inspect: Inspect | None = None,
    limit_s: float = LIMIT_S,
) -> Rehearsed:
    """Run a script up to its second optimizer step, in a child that is thrown away."""
    if overrides.micro_batch is not None and overrides.first is None:
        as_it_is = replace(overrides, micro_batch=None, how=None)
        first = rehearse_script(script, gpu, as_it_is, apply, limit_s=limit_s).seen
        overrides = replace(overrides, first=first)
    found: Rehearsed = in_a_group(
        lambda hand_over: run_script(
            script, gpu, overrides, apply, hand_over, inspect=inspect, limit_s=limit_s
        ),
        limit_s,
    )
    return found


def run_script(
    script: Script,
    gpu: PretendedGpu,
    overrides: Overrides,
    apply: Apply,
    hand_over: HandOver,
    *,
    inspect: Inspect | None = None,
    limit_s: float = LIMIT_S,
) -> Rehearsed:
    """The same in this process, for good. Answers by `hand_over`, or returns at the end."""
    _as_python_starts(script)
    words = listen()
    from oomph.tracing.script.rehearsal import Rehearsal

    rehearsal = Rehearsal(gpu, overrides, apply, hand_over, inspect)
    _watch_the_clock(limit_s, rehearsal, hand_over)
    gc.collect()
    gc.freeze()
    gc.disable()  # on a GPU, too, frees follow reference counts; cycles would die at random times
    with rehearsal:
        try:
            _run(script)
        except SystemExit as error:
            if error.code not in (None, 0) or not rehearsal.has_trained():
                _raise_exit(error, script, words)
        except OomphError:
            raise
        except BaseException as error:
            told = explained(error, script, rehearsal.recorder.inventions)
            is_batch_alone = overrides.how is None  # else it may be the trick
            failure = (rehearsal.batch_size.blamed(told) if is_batch_alone else None) or told
            raise _lasting(failure, error, rehearsal) from error
        return rehearsal.answer()


def _as_python_starts(script: Script) -> None:
    os.chdir(script.directory)
    if script.path is not None:
        file = Path(script.path)
        if not file.is_file():
            raise UsageError(f"there is no file {script.path!r:.200}", attempt="its path")
        know_own(script.path)
        sys.path.insert(0, str(file.resolve().parent))
        sys.argv = [script.path, *script.arguments]
    else:
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = ["-m", *script.arguments]
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # weights in one order each time
    os.environ[SWITCH] = "off"
    _warn_as_python_does()


def _warn_as_python_does() -> None:
    """Whatever this process has set: a warning is no error to the script."""
    warnings.resetwarnings()
    hidden = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
    for category in hidden:
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")


def _run(script: Script) -> None:
    if script.path is not None:
        runpy.run_path(script.path, run_name="__main__")
    else:
        assert script.module is not None  # noqa: S101 - one of the two is given
        _know_package(script.module)
        runpy.run_module(script.module, run_name="__main__", alter_sys=True)


def _know_package(module: str) -> None:
    """The whole package of `-m package.module`, which may be installed, is what is asked about."""
    package, _, inner = module.partition(".")
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return
    know_own(str(Path(found.origin).parent) + os.sep if inner else found.origin)


def _raise_exit(error: SystemExit, script: Script, words: LastWords) -> NoReturn:
    place = in_words(_line_of(error))
    code = f"exit({error.code!r})"[:300]
    is_text = isinstance(error.code, str)  # which says why by itself
    said = None if is_text else words.told()
    raise UserCodeError(
        f"the script ended itself at {place}",
        because=code if said is None else f"{code}, and the last that it said was: {said}",
        attempt=f"running `python {script.path or '-m ' + str(script.module)}` by itself",
    ) from error


def explained(error: BaseException, script: Script, inventions: Inventions) -> OomphError:
    """An error of the script's, with its own line; or a limit of oomph's, called one."""
    told = " ".join(str(error).split())[:500]
    place = _line_of(error)
    because, attempt = f"{type(error).__name__}: {told}", _advice(error, script)
    limit = limits.refused(error, in_words(place))
    if limit is not None:
        return limit
    if limits.is_in_doubt(error):
        found = limits.report(limits.pretended_op(error))
        attempt += f"; if it works there, the error is oomph's own: please report {found}"
    if place is not None and inventions.has_read(place):
        because += "; that line read a value that only training would have, and that is made up"
        attempt = "a stand-in for what reads it while rehearsing, or a Workload"
    return UserCodeError(
        f"the script failed at {in_words(place)}", because=because, attempt=attempt
    )


def _lasting(failure: OomphError, error: BaseException, rehearsal: Rehearsal) -> OomphError:
    """Of torch's ops, and of ours. Others may come of a file that nobody saw being opened."""
    from oomph.tracing.script.answers import lasting

    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename if frames else ""
    is_of_op = "/torch/" in last or last.startswith(OURS)
    is_of_files = isinstance(error, OSError | ImportError | MemoryError) or _is_of_network(error)
    if not isinstance(error, Exception) or is_of_files or not is_of_op:
        return failure
    return lasting(failure, rehearsal.touched())


def _advice(error: BaseException, script: Script) -> str:
    if isinstance(error, FileNotFoundError):
        return "putting that file where the script looks for it"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return missing_modules.advice(str(error.name), _file_of(script), Path.cwd())
    if isinstance(error, ImportError) and "relative import" in str(error):
        found = missing_modules.advice_on_relative_import(_file_of(script))
        if found is not None:
            return found
    if isinstance(error, KeyError) and error.args and error.args[0] in _OF_LAUNCHERS:
        return f"setting {error.args[0]} as torchrun does for one process: {_ALONE}"
    if _is_of_network(error):
        return "starting it once by itself, for its downloads: a rehearsal has no network"
    if _is_of_triton(error):
        return limits.STAND_IN
    return f"running `python {script.path or '-m ' + str(script.module)}` by itself"


def _file_of(script: Script) -> Path:
    """The script; of a module, what would lie where it is started."""
    return Path(script.path or f"{str(script.module).replace('.', '/')}.py").absolute()


# What torchrun sets: https://docs.pytorch.org/docs/stable/elastic/run.html
_OF_LAUNCHERS = frozenset({"LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})
_ALONE = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 before the command"

# Of urllib, requests, urllib3 and Hugging Face, none of which need be there.
_OF_NETWORK = frozenset(
    {"URLError", "MaxRetryError", "NameResolutionError", "OfflineModeIsEnabled"}
    | {"LocalEntryNotFoundError", "ConnectError", "gaierror"}
)


def _is_of_network(error: BaseException) -> bool:
    """Did it, or what led to it, want something of the network?"""
    known: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in known:
        known.append(one)
        one = one.__cause__ or one.__context__
    return any(isinstance(e, ConnectionError) or type(e).__name__ in _OF_NETWORK for e in known)


def _is_of_triton(error: BaseException) -> bool:
    """A kernel of Triton's finds no GPU to be compiled for."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("/triton/" in frame.filename for frame in frames)


def _line_of(error: BaseException) -> tuple[str, int] | None:
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)]
    return (own[-1].filename, own[-1].lineno or 0) if own else None


def _watch_the_clock(limit_s: float, rehearsal: Any, hand_over: HandOver) -> None:
    """A thread that tells how far a script is, and ends one that makes no second step."""
    main = threading.main_thread().ident
    start = time.monotonic()

    def place() -> str:
        return in_words(users_line(sys._current_frames().get(main or 0)))

    def watch() -> None:
        told_at = start
        while (now := time.monotonic()) < start + limit_s:
            if now - told_at >= TELLS_EVERY_S:
                told_at = now
                _tell(f"{rehearsal.told()}; it is at {place()}", now - start, limit_s)
            time.sleep(min(1.0, max(start + limit_s - now, 0.01)))
        hand_over((False, _too_long(limit_s, place(), rehearsal)))

    threading.Thread(target=watch, daemon=True).start()


def _tell(how_far: str, passed_s: float, limit_s: float) -> None:
    """Where the script cannot have replaced it. Whoever has no terminal may keep what is told."""
    left = f"oomph gives up after {limit_s:.0f} s"
    with contextlib.suppress(OSError):
        os.write(2, f"{PROGRESS}after {passed_s:.0f} s {how_far} ({left})\n".encode())


def _too_long(limit_s: float, place: str, rehearsal: Any) -> UserCodeError:
    return UserCodeError(
        f"the script made no second optimizer step in {limit_s:.0f} s; it is at {place}",
        because=f"{rehearsal.told()}",
        attempt="an option of the script for less data or fewer evaluations, a Workload, or, if it"
        " is merely slow, OOMPH_REHEARSAL_LIMIT=1h",
    )

"""Script, PretendedGpu, Overrides -> Trace, Seen: run the program as Python would.

It needs a child process: the patches of torch are permanent, and the script may do anything to its
process. The script's writes are real, so the caller must run this in a sandbox.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib.util
import os
import re
import runpy
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from oomph.errors import OomphError, UsageError, UserCodeError
from oomph.records.run import SWITCH
from oomph.records.script import PROGRESS, Overrides, PretendedGpu, Script
from oomph.records.workload import Workload
from oomph.rehearsing import fault
from oomph.rehearsing.child import HandOver, in_a_group
from oomph.rehearsing.fault import STAND_IN, count_as_users, in_words, line_of, users_line
from oomph.rehearsing.script.answers import Rehearsed, mark_repeatable
from oomph.rehearsing.script.edited import read_instead

if TYPE_CHECKING:
    from oomph.rehearsing.script.recorder import Inventions
    from oomph.rehearsing.script.rehearsal import Rehearsal

LIMIT_S = 600.0  # judgement: as long as a user would wait; OOMPH_REHEARSAL_LIMIT changes it
TELLS_EVERY_S = 5.0  # judgement: often enough to show that it is still running
_MOST_REMEMBERED, _MOST_QUOTED = 2000, 300  # judgement: characters of the script's output


def rehearse_script(
    script: Script, gpu: PretendedGpu, overrides: Overrides, *, limit_s: float = LIMIT_S
) -> Rehearsed:
    """Run a script up to its second optimizer step, in a child that is thrown away."""
    if overrides.micro_batch is not None and overrides.first is None:
        as_it_is = replace(overrides, micro_batch=None, how=None)
        first = rehearse_script(script, gpu, as_it_is, limit_s=limit_s).seen
        overrides = replace(overrides, first=first)
    run = partial(_run_here, script, gpu, overrides, limit_s)
    return in_a_group(run, limit_s)


def _run_here(
    script: Script, gpu: PretendedGpu, overrides: Overrides, limit_s: float, hand_over: HandOver
) -> Rehearsed:
    """Run a script in this process, which stays patched. Answers by `hand_over` or returns."""
    start_as_python_does(script)
    read_instead(script.edited)
    output = LastOutput(sys.stderr)
    stream: Any = output
    sys.stdout = sys.stderr = stream
    from oomph.rehearsing.script.rehearsal import Rehearsal

    rehearsal = Rehearsal(gpu, overrides, hand_over)
    _watch_the_clock(limit_s, rehearsal, hand_over)
    gc.collect()
    gc.freeze()
    gc.disable()  # on a GPU, too, frees follow reference counts; cycles would die at random times
    with rehearsal:
        try:
            names = run_as_main(script)
            if not rehearsal.has_trained():
                _refuse_file_of_workloads(names, script)
        except SystemExit as error:
            if error.code not in (None, 0) or not rehearsal.has_trained():
                _raise_exit(error, script, output)
        except OomphError:
            raise
        except BaseException as error:
            failure = _explained(error, script, rehearsal.recorder.inventions)
            if overrides.how is None:  # else a trick may be to blame, not the batch size
                failure = rehearsal.batch_size.blamed(failure) or failure
            if _would_recur(error):
                failure = mark_repeatable(failure, rehearsal.touched())
            raise failure from error
        return rehearsal.answer()


def start_as_python_does(script: Script) -> None:
    """Set up this process as `python SCRIPT ARGUMENTS` would."""
    os.chdir(script.directory)
    if script.path is not None:
        file = Path(script.path)
        if not file.is_file():
            raise UsageError(
                f"there is no file {script.path!r:.200}", attempt="the path of your script"
            )
        count_as_users(script.path)
        sys.path.insert(0, str(file.resolve().parent))
        sys.argv = [script.path, *script.arguments]
    else:
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = ["-m", *script.arguments]
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # weights load in the same order
    os.environ[SWITCH] = "off"
    _warn_as_python_does()


def _warn_as_python_does() -> None:
    """Reset this process's warning filters, so that a warning is no error to the script."""
    warnings.resetwarnings()
    hidden = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
    for category in hidden:
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")


def run_as_main(script: Script) -> dict[str, Any]:
    """Run a script in this process, as Python would, and return its global names."""
    if script.path is not None:
        return runpy.run_path(script.path, run_name="__main__")
    assert script.module is not None  # noqa: S101 - either path or module is given
    _count_package_as_users(script.module)
    return runpy.run_module(script.module, run_name="__main__", alter_sys=True)


def _refuse_file_of_workloads(names: dict[str, Any], script: Script) -> None:
    """Raise UsageError if a file that trains nothing defines workloads."""
    workloads = [name for name, value in names.items() if isinstance(value, Workload)]
    if workloads:
        raise UsageError(
            f"{script.path or script.module} trains nothing when it is run",
            because=f"it defines a Workload, {workloads[0]!r}",
            attempt=f"{script.path}:{workloads[0]}" if script.path else "FILE:NAME, without -m",
        )


def _count_package_as_users(module: str) -> None:
    """Count the whole package of `-m package.module` as the user's, even if it is installed."""
    package, _, inner = module.partition(".")
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return
    count_as_users(str(Path(found.origin).parent) + os.sep if inner else found.origin)


def _raise_exit(error: SystemExit, script: Script, output: LastOutput) -> NoReturn:
    code = f"exit({error.code!r})"[:300]
    last = None if isinstance(error.code, str) else output.last_line()  # a text is its own reason
    raise UserCodeError(
        f"the script ended itself at {in_words(line_of(error))}",
        because=code if last is None else f"{code}; its last output was: {last}",
        attempt=_by_itself(script),
    ) from error


class LastOutput:
    """A stream that passes everything on and remembers the end of it.

    A script that exits by itself often says why only in its output.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._text = stream, ""

    def write(self, text: str) -> Any:
        self._text = (self._text + text)[-_MOST_REMEMBERED:]
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def last_line(self) -> str | None:
        """Return the last line with content; a progress bar has none."""
        lines = without_bars(self._text)
        return lines[-1].strip()[-_MOST_QUOTED:] if lines else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)

    def __enter__(self) -> LastOutput:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)


def without_bars(text: str) -> list[str]:
    """Return the lines with content, in their final state.

    A tqdm bar, `3%|# | 3/100 [...]`, is drawn once more when its loop ends.
    """
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return [
        line for line in lines if line.strip() and not ("%|" in line and line.strip().endswith("]"))
    ]


def _watch_the_clock(limit_s: float, rehearsal: Rehearsal, hand_over: HandOver) -> None:
    """Start a thread that shows progress, and ends a script that makes no second step in time."""
    main = threading.main_thread().ident
    start = time.monotonic()

    def place() -> str:
        return in_words(users_line(sys._current_frames().get(main or 0)))

    def watch() -> None:
        shown_at = start
        while (now := time.monotonic()) < start + limit_s:
            if now - shown_at >= TELLS_EVERY_S:
                shown_at = now
                progress = f"rehearsing: {rehearsal.progress()}; it is at {place()}"
                line = f"{PROGRESS}{progress} (oomph gives up after {limit_s:.0f} s)\n"
                with contextlib.suppress(OSError):
                    os.write(2, line.encode())  # the script may have replaced sys.stderr
            time.sleep(min(1.0, max(start + limit_s - now, 0.01)))
        error = UserCodeError(
            f"the script made no second optimizer step in {limit_s:.0f} s; it is at {place()}",
            because=rehearsal.progress(),
            attempt="an option of the script for less data or fewer evaluations, a Workload, or,"
            " if it is merely slow, OOMPH_REHEARSAL_LIMIT=1h",
        )
        hand_over((False, error))

    threading.Thread(target=watch, daemon=True).start()


# ---- an exception from a script -> an error with the script's own line, the reason, and a remedy -

# Variables that torchrun sets: https://docs.pytorch.org/docs/stable/elastic/run.html
_OF_LAUNCHERS = frozenset({"LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})
_ALONE = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 before the command"
# From urllib, requests, urllib3 and Hugging Face, which may not be installed.
_OF_NETWORK = frozenset(
    {"URLError", "MaxRetryError", "NameResolutionError", "OfflineModeIsEnabled"}
    | {"LocalEntryNotFoundError", "ConnectError", "gaierror"}
)


def _explained(error: BaseException, script: Script, inventions: Inventions) -> OomphError:
    """Return an error in the script with its own line, or one that names oomph's limit."""
    found = fault.explained(error, "script", _advice(error, script))
    place = line_of(error)
    if isinstance(found, UserCodeError) and place is not None and inventions.has_read(place):
        found.because = (
            f"{found.because}; that line read a value that only training would have, and that is"
            " made up"
        )
        found.attempt = "a stand-in for what reads it while rehearsing, or a Workload"
    return found


def _would_recur(error: BaseException) -> bool:
    """Return whether an op failed, torch's or ours, so the error recurs with the same files.

    Other errors may depend on a file that oomph did not see being opened.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename if frames else ""
    is_of_op = "/torch/" in last or fault.is_in_ours(error)
    is_of_files = isinstance(error, OSError | ImportError | MemoryError) or _is_of_network(error)
    return isinstance(error, Exception) and is_of_op and not is_of_files


def _by_itself(script: Script) -> str:
    return f"running `python {script.path or '-m ' + str(script.module)}` by itself"


def _advice(error: BaseException, script: Script) -> str:
    if isinstance(error, FileNotFoundError):
        return "putting that file where the script looks for it"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _advice_on_import(str(error.name), _file_of(script), Path.cwd())
    if isinstance(error, ImportError) and "relative import" in str(error):
        found = _advice_on_relative_import(_file_of(script))
        if found is not None:
            return found
    if isinstance(error, KeyError) and error.args and error.args[0] in _OF_LAUNCHERS:
        return f"setting {error.args[0]} as torchrun does for one process: {_ALONE}"
    if _is_of_network(error):
        return "starting it once by itself, for its downloads: a rehearsal has no network"
    if _is_of_triton(error):
        return STAND_IN
    return _by_itself(script)


def _file_of(script: Script) -> Path:
    """Return the script; for a module, the file that would lie in the starting directory."""
    return Path(script.path or f"{str(script.module).replace('.', '/')}.py").absolute()


def _is_of_network(error: BaseException) -> bool:
    """Return whether the error or one of its causes needed the network."""
    known: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in known:
        known.append(one)
        one = one.__cause__ or one.__context__
    return any(isinstance(e, ConnectionError) or type(e).__name__ in _OF_NETWORK for e in known)


def _is_of_triton(error: BaseException) -> bool:
    """Return whether a Triton kernel found no GPU to compile for."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("/triton/" in frame.filename for frame in frames)


# ---- modules that cannot be imported -------------------------------------------------------------
# Most missing modules are the script's own: their folder is on the path only if the script is
# started from elsewhere, or by its repository's Makefile. So oomph must not advise installing an
# unrelated PyPI package that happens to have the same name.

_MOST_PARENTS, _MOST_FOLDERS = 4, 200  # judgement
_ROOTS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
# Packages whose module has another name, among those that training scripts import most.
_PACKAGES = {
    "cv2": "opencv-python",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "torch_geometric": "torch-geometric",
    "pytorch_lightning": "pytorch-lightning",
    "attr": "attrs",
    "dotenv": "python-dotenv",
    "Levenshtein": "python-Levenshtein",
    "faiss": "faiss-cpu",
}
# Names that scripts give to their own modules, and that PyPI has as unrelated packages.
_OWN_NAMES = frozenset(
    {
        "args", "base", "callbacks", "common", "config", "configs", "core", "criterion", "data",
        "data_utils", "dataloader", "dataloaders", "dataset", "engine", "eval", "evaluate",
        "evaluation", "helper", "helpers", "layers", "lib", "libs", "logger", "loss", "losses",
        "main", "metric", "metrics", "misc", "model", "models", "modules", "net", "nets", "network",
        "networks", "options", "optim", "params", "preprocess", "preprocessing", "sampler",
        "scheduler", "scripts", "settings", "src", "test", "tools", "train", "trainer", "trainers",
        "transforms", "util", "utils", "visualize",
    }
)  # fmt: skip


def _advice_on_import(missing: str, script: Path, directory: Path) -> str:
    """Return what to try if `import missing` failed in a script started in `directory`."""
    package = missing.partition(".")[0]
    folders = list(_folders(script.parent, directory))
    for folder in folders:
        if _lies_in(folder, missing):
            return f"PYTHONPATH={_short(folder)} before the command: {missing} is there"
    root = next((folder for folder in folders if _is_project(folder, package)), None)
    if root is not None:
        return f"pip install -e {_short(root)}: {package} is the project that the script belongs to"
    if missing != package and _is_there(package):
        return f"another version of {package}: the one that is installed has no {missing}"
    alike = difflib.get_close_matches(package, _names_near(folders), 1, cutoff=0.75)
    if alike:
        return f"the spelling: there is no {package} near the script, but there is {alike[0]}"
    if package in _OWN_NAMES:
        return f"PYTHONPATH=... before the command, with the folder that holds {package}"
    known = _PACKAGES.get(package)
    if known is not None:
        return f"pip install {known}"
    return f"pip install {package}, if that is the package's name"


def _advice_on_relative_import(script: Path) -> str | None:
    """Return how to start a file that imports from its own package; None if it is in none."""
    root, names = script.parent, [script.stem]
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    if len(names) == 1 and root.name.isidentifier():  # a package without an __init__.py
        names.insert(0, root.name)
        root = root.parent
    if len(names) == 1:
        return None
    return f"-m {'.'.join(names)} instead of its path, from {_short(root)}"


def _folders(*starts: Path) -> Iterator[Path]:
    """Yield folders that may hold a script's modules: above it and beside it, nearest first."""
    seen: set[Path] = set()
    for start in starts:
        own = start.resolve()
        for folder in (own, *list(own.parents)[:_MOST_PARENTS]):
            if folder in (Path.home(), Path(folder.anchor)):
                break
            for one in (folder, *_below(folder)):
                if one not in seen:
                    seen.add(one)
                    yield one
            if any((folder / mark).exists() for mark in _ROOTS):
                break


def _below(folder: Path) -> list[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    return [Path(e.path) for e in entries if not e.name.startswith((".", "_")) and e.is_dir()][
        :_MOST_FOLDERS
    ]


def _lies_in(folder: Path, module: str) -> bool:
    place = folder.joinpath(*module.split("."))
    if place.with_name(f"{place.name}.py").is_file():
        return True
    return place.is_dir() and (
        (place / "__init__.py").is_file() or next(place.glob("*.py"), None) is not None
    )


def _is_project(folder: Path, package: str) -> bool:
    """Return whether this folder builds the package, perhaps from another language."""
    for name in ("pyproject.toml", "setup.cfg", "setup.py"):
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")[:100_000]
        except OSError:
            continue
        called = re.search(r"""^\s*name\s*=\s*["']?([\w.-]+)""", text, re.MULTILINE)
        if called and re.sub(r"[-_.]+", "_", called[1]).lower() == package.lower():
            return True
    return False


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _names_near(folders: list[Path]) -> list[str]:
    found = {path.stem for folder in folders for path in folder.glob("*.py")}
    return sorted(found | {folder.name for folder in folders})


def _short(folder: Path) -> str:
    """Return the folder's path as the user would type it here."""
    there = os.path.relpath(folder)
    return there if len(there) < len(str(folder)) else str(folder)

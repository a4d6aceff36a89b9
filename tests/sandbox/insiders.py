"""What runs inside a sandbox in these tests, and processes to start one from."""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401 - loaded while it can be read: another user cannot
import errno
import glob
import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pytest

from oomph.sandbox import linux
from oomph.sandbox.conversation import read_frame, write_frame
from oomph.sandbox.inside import NAMESPACES
from oomph.sandbox.sandbox import Sandbox, protection

T = TypeVar("T")

USER = 12345


def why_the_kernel_refuses() -> str:
    """By two bare system calls: the tests must not skip because the sandbox is broken."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            linux.unshare(NAMESPACES)
            code = 2
            linux.mount("none", "/proc", "tmpfs", 0)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ("", "no namespaces", "no mounts in namespaces")[code]


REFUSED = why_the_kernel_refuses()
HERE = protection()
needs_namespaces = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and be another user")
_MODULES = (ctypes, errno, glob, os, shutil, signal, socket, subprocess, sys, tempfile, time)


def run_python(requests: BinaryIO, answers: BinaryIO) -> None:
    """Run each request as Python code; the answer is what it leaves in `answer`, as JSON."""
    names: dict[str, Any] = {module.__name__: module for module in _MODULES}
    while (request := read_frame(requests)) is not None:
        names["answer"] = None
        try:
            exec(request, names)  # noqa: S102 - it is what these tests are about
        except Exception as error:  # noqa: BLE001 - it is the answer
            names["answer"] = f"{type(error).__name__}: {error}"
        write_frame(answers, json.dumps(names["answer"]).encode())


def run_inside(code: str, **settings: Any) -> Any:
    """What `code` leaves in `answer`, from a sandbox of its own."""
    with Sandbox(run_python, **settings) as sandbox:
        return ask(sandbox, code)


def ask(sandbox: Sandbox, code: str) -> Any:
    return json.loads(sandbox.ask(code.encode()))


def in_a_process(work: Callable[[], T], *, user: int | None = None) -> T:
    """Do `work` in a fork, as another user if so asked; its mounts are seen by nobody else."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome = _outcome(work, user)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(pickle.dumps(outcome))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    is_done, result = pickle.loads(told)  # noqa: S301 - written by our own fork
    if not is_done:
        raise AssertionError(result)
    done: T = result
    return done


def _outcome(work: Callable[[], T], user: int | None) -> tuple[bool, T | str]:
    try:
        if os.geteuid() == 0:
            linux.unshare(linux.CLONE_NEWNS)
            linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        if user is not None:
            become(user)
        return True, work()
    except BaseException:  # noqa: BLE001 - the parent raises it
        return False, traceback.format_exc()


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    # A process that has changed its user cannot be looked into; one that a user starts can.
    linux.call("prctl", 4, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3)  # PR_SET_DUMPABLE


def give(path: Path, user: int) -> None:
    """Make a tree somebody's."""
    for found in (path, *path.rglob("*")):
        os.chown(found, user, user, follow_symlinks=False)


def fingerprint(*roots: Path) -> dict[str, tuple[object, ...]]:
    """Every entry below, with its owner, mode, times and content."""
    found: dict[str, tuple[object, ...]] = {}
    for root in roots:
        for path in (root, *sorted(root.rglob("*"))):
            status = path.lstat()
            content = hashlib.sha1(path.read_bytes()).hexdigest() if path.is_file() else ""  # noqa: S324
            owner = (status.st_uid, status.st_gid)
            times = (status.st_mtime_ns, status.st_ctime_ns)
            found[str(path)] = (status.st_mode, owner, times, status.st_size, content)
    return found


def processes_with(mark: str) -> list[int]:
    """Those that have an argument, of which there is one such in the world."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):  # noqa: PTH207
        try:
            arguments = Path(path).read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if mark.encode() in arguments:
            found.append(int(path.split("/")[2]))
    return found


def wait_until(is_so: Callable[[], bool]) -> bool:
    """Wait for something that happens by itself."""
    while not is_so():
        time.sleep(0.02)
    return True

"""What the kernel allows -> how well a program can be kept from doing harm, in words."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oomph.running.failures import NoSandbox

NAMESPACED = (
    "the script runs in user, mount, process, network and IPC namespaces of its own: what it "
    "writes goes to a scratch in memory that is thrown away, it reaches no network, and nothing of "
    "it survives"
)
LIMITS = (
    "it can read whatever you can read",
    "it can use the CPU and the memory that you can use",
    "unix sockets that other network namespaces hold open in a shared directory stay reachable",
    "it guards against accidents and careless code, not against an attack on the kernel",
)
NESTED = (
    "it can create namespaces of its own and have capabilities there, but not over your files: "
    "/proc/sys is read-only here"
)
BY_LANDLOCK = (
    "writes outside a scratch directory are refused by the kernel (Landlock), not redirected: a "
    "script that writes elsewhere fails"
)
BY_PYTHON = (
    "writes outside a scratch directory are refused by a hook in Python, which native code passes "
    "by: an extension that opens files itself can overwrite and delete whatever you can"
)
UNPROTECTED_LIMITS = (
    "Python's usual ways to start programs and to reach the network are refused; others are not",
    "a process that kills the one that watches it survives",
    "shared memory and sockets are those of everyone",
    *LIMITS[:2],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How a script is kept from doing harm, why so, and what is not kept from it."""

    kind: Literal["namespaces", "none"]
    why: str
    limits: tuple[str, ...]


def unprotected_by(error: NoSandbox, has_landlock: bool) -> Protection:
    """What is left without namespaces, named exactly as weak as it is."""
    weaker = BY_LANDLOCK if has_landlock else BY_PYTHON
    why = f"{error.because or error.what}. With --unprotected {weaker}"
    return Protection(kind="none", why=why, limits=UNPROTECTED_LIMITS)


def refusal(told: str, number: int | None) -> NoSandbox:
    """The error for what the kernel refused, with the likeliest cause on this machine."""
    return NoSandbox(
        "the script cannot be kept from writing to your files here",
        because=f"the kernel refuses it: {told}{_cause(told, number)}",
        attempt=f"{_way_out()}or --unprotected, which protects less (docs/sandbox.md)",
    )


def _cause(told: str, number: int | None) -> str:
    """Which setting of this machine refuses namespaces, where it can be told."""
    is_of_unshare = "unshare" in told
    if is_of_unshare and number == errno.ENOSPC:
        return "; user.max_user_namespaces is used up, or 0"
    if is_of_unshare and _setting("kernel/unprivileged_userns_clone") == "0":
        return "; kernel.unprivileged_userns_clone is 0"
    if number in (errno.ENOSYS, errno.EINVAL):
        return "; Linux 5.12 or later is needed, with user namespaces"
    if number not in (errno.EPERM, errno.EACCES):
        return ""
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "; kernel.apparmor_restrict_unprivileged_userns is 1 (Ubuntu since 23.10)"
    if is_in_container():
        return "; this is a container, whose seccomp profile forbids namespaces by default"
    return ""


def _way_out() -> str:
    if is_in_container():
        return "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined, "
    return ""


def is_in_container() -> bool:
    """Whether Docker or Podman left its mark."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:  # this kernel does not have it
        return None

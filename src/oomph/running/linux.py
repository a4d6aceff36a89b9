"""The few system calls of Linux that Python does not have, by ctypes.

Numbers and structures are those of the kernel's own headers, named beside each. Every call
raises OSError with the call's name where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
from functools import cache
from pathlib import Path

# include/uapi/linux/sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

# include/uapi/linux/mount.h
MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4

# include/uapi/linux/capability.h
CAP_CHOWN = 0
CAP_DAC_OVERRIDE = 1
CAP_FOWNER = 3
CAP_FSETID = 4
_CAPABILITY_VERSION_3 = 0x20080522
_MOST_CAPABILITIES = 64

# include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4

# include/uapi/asm-generic/unistd.h; the same on every architecture that torch runs on
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

# include/uapi/linux/sockios.h, if.h
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """Call a function of libc that returns -1 and sets errno where it fails."""
    result = int(getattr(_libc(), name)(*arguments))
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)
    return result


def system_call(number: int, name: str, *arguments: object) -> int:
    """A system call that libc has no function for, or only a new libc."""
    try:
        return call("syscall", ctypes.c_long(number), *arguments)
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


def unshare(flags: int) -> None:
    call("unshare", flags)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2). The error names the target."""
    try:
        call(
            "mount",
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            os.fsencode(options) if options else None,
        )
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"mount {kind or 'bind'} on {target}") from None


def set_mount_attributes(
    path: str, *, add: int = 0, remove: int = 0, is_recursive: bool = False
) -> None:
    """mount_setattr(2), Linux 5.12. Recursively, it looks up no path below `path`."""
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
    attributes = struct.pack("=QQQQ", add, remove, 0, 0)
    system_call(
        _SYS_MOUNT_SETATTR,
        f"mount_setattr {path}",
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(path),
        ctypes.c_uint(_AT_RECURSIVE if is_recursive else 0),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )


def _prctl(option: int, argument: int, third: int = 0) -> None:
    number = ctypes.c_ulong
    call("prctl", option, number(argument), number(third), number(0), number(0))


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Be sent a signal when the thread that forked this process ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Be the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def gain_no_privileges() -> None:
    """No program started from now on gives more than this process has: no setuid, no sudo."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities(kept: frozenset[int] = frozenset()) -> None:
    """Keep only these capabilities, for this process and whatever it starts, for good."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(_MOST_CAPABILITIES):
        if capability not in kept and not _drop_for_good(capability):
            break
    mask = sum(1 << capability for capability in kept)  # all of them are below 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    # two of struct __user_cap_data_struct: effective, permitted, inheritable
    call("capset", header, struct.pack("=IIIIII", mask, mask, 0, 0, 0, 0))
    gain_no_privileges()


def _drop_for_good(capability: int) -> bool:
    """Whether the kernel knows such a capability."""
    try:
        _prctl(_PR_CAPBSET_DROP, capability)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def refuse_to_be_traced() -> None:
    """Nobody without CAP_SYS_PTRACE can attach to this process, nor to what it forks.

    A fork that is to be like any other says so by prctl(PR_SET_DUMPABLE, 1), and a program that is
    started is so by itself.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def forbid_namespaces() -> bool:
    """No namespace of any kind can be made in this user namespace. Whether the kernel took it.

    In one of its own a process would have every capability again. The limits are of the user
    namespace that writes them (kernel/ucount.c), and CAP_SYS_RESOURCE of it is needed to.
    """
    try:
        for limit in sorted(Path("/proc/sys/user").glob("max_*_namespaces")):
            limit.write_text("0")
    except OSError:  # some containers have /proc/sys read-only
        return False
    return True


def bring_up_loopback() -> None:
    """In a fresh network namespace even 127.0.0.1 is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))

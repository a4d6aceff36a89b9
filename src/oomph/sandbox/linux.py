"""Call the few Linux system calls that Python lacks, through ctypes.

Numbers and structures come from the kernel headers named next to them. Every function raises
OSError with the call's name if the kernel refuses.
"""

from __future__ import annotations

import contextlib
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

# include/uapi/asm-generic/unistd.h; identical on every architecture that torch runs on
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
    """Call a libc function that returns -1 and sets errno if it fails."""
    result = int(getattr(_libc(), name)(*arguments))
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)
    return result


def system_call(number: int, name: str, *arguments: object) -> int:
    """Make a system call that libc has no function for, or only a recent libc."""
    try:
        return call("syscall", ctypes.c_long(number), *arguments)
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


def unshare(flags: int) -> None:
    call("unshare", flags)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call mount(2). The error names the target."""
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
    """Call mount_setattr(2), Linux 5.12. A recursive call looks up no path below `path`."""
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
    """Receive a signal when the thread that forked this process ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def gain_no_privileges() -> None:
    """Keep programs started from now on from gaining privileges: no setuid, no sudo."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities(except_for: frozenset[int] = frozenset()) -> None:
    """Keep only these capabilities, permanently, for this process and everything it starts."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(_MOST_CAPABILITIES):
        if capability not in except_for and not _drop_for_good(capability):
            break
    mask = sum(1 << capability for capability in except_for)  # all of them are below 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    # two of struct __user_cap_data_struct: effective, permitted, inheritable
    call("capset", header, struct.pack("=IIIIII", mask, mask, 0, 0, 0, 0))
    gain_no_privileges()


def _drop_for_good(capability: int) -> bool:
    """Return whether the kernel knows the capability."""
    try:
        _prctl(_PR_CAPBSET_DROP, capability)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def refuse_to_be_traced() -> None:
    """Forbid attaching to this process and its forks, except with CAP_SYS_PTRACE."""
    _prctl(_PR_SET_DUMPABLE, 0)


def allow_tracing() -> None:
    """Undo `refuse_to_be_traced` in a fork. A newly started program allows tracing by itself."""
    _prctl(_PR_SET_DUMPABLE, 1)


def forbid_namespaces() -> None:
    """Forbid new namespaces in this user namespace, if the kernel lets us.

    In a new user namespace a process would have every capability again. The limits apply to the
    user namespace that writes them (kernel/ucount.c), which takes CAP_SYS_RESOURCE there.
    """
    with contextlib.suppress(OSError):  # some containers have a read-only /proc/sys
        for limit in sorted(Path("/proc/sys/user").glob("max_*_namespaces")):
            limit.write_text("0")


def bring_up_loopback() -> None:
    """Bring up 127.0.0.1, which is down in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


# ---- Landlock: let a process write only below some directories -----------------------------------
# Unlike an overlay, Landlock refuses writes instead of redirecting them. It also binds native code
# and every started program, and needs no namespace and no privilege: Linux 5.13, if enabled.

# include/uapi/asm-generic/unistd.h
_SYS_CREATE_RULESET = 444
_SYS_ADD_RULE = 445
_SYS_RESTRICT_SELF = 446
# include/uapi/linux/landlock.h
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13  # since version 2
_TRUNCATE = 1 << 14  # since version 3
_BIND_AND_CONNECT_TCP = 0b11  # since version 4
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11  # since version 6
# Devices that keep nothing of what is written to them.
SINKS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts")


def version() -> int:
    """Return the kernel's Landlock version; 0 if it has none."""
    nothing = ctypes.c_void_p(None)
    flags = ctypes.c_uint(_CREATE_RULESET_VERSION)
    try:
        return system_call(
            _SYS_CREATE_RULESET, "landlock_create_ruleset", nothing, ctypes.c_size_t(0), flags
        )
    except OSError:
        return 0


def write_only_below(directories: tuple[str, ...], devices: tuple[str, ...] = ()) -> bool:
    """Forbid this process, permanently, to write anywhere else. Return whether the kernel can."""
    known = version()
    if known == 0:
        return False
    rights = _WRITE_FILE | _REMOVE_AND_MAKE
    rights |= (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0)
    ruleset = _create(known, rights)
    for directory in directories:
        _allow(ruleset, directory, rights)
    for sink in filter(os.path.exists, (*SINKS, *devices)):
        _allow(ruleset, sink, _WRITE_FILE)
    gain_no_privileges()
    system_call(
        _SYS_RESTRICT_SELF, "landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint(0)
    )
    os.close(ruleset)
    return True


def _create(known: int, rights: int) -> int:
    # struct landlock_ruleset_attr: handled_access_fs, handled_access_net, scoped
    network = _BIND_AND_CONNECT_TCP if known >= 4 else 0
    scoped = _ABSTRACT_SOCKETS_AND_SIGNALS if known >= 6 else 0
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    attributes = struct.pack("=QQQ", rights, network, scoped)[:size]
    flags = ctypes.c_uint(0)
    return system_call(
        _SYS_CREATE_RULESET, "landlock_create_ruleset", attributes, ctypes.c_size_t(size), flags
    )


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    # struct landlock_path_beneath_attr, packed: allowed_access, parent_fd
    rule = struct.pack("=Qi", rights, descriptor)
    system_call(
        _SYS_ADD_RULE,
        "landlock_add_rule",
        ctypes.c_int(ruleset),
        ctypes.c_uint(_RULE_PATH_BENEATH),
        rule,
        ctypes.c_uint(0),
    )
    os.close(descriptor)

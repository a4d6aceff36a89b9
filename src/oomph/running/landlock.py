"""A directory -> a process that can write only below it, where the kernel has Landlock.

Unlike an overlay it refuses writes and does not redirect them. It binds native code and every
program that is started, and needs no namespace and no privilege: Linux 5.13, if it is switched on.
"""

from __future__ import annotations

import ctypes
import os
import struct

from oomph.running import linux

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
_SINKS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts")


def version() -> int:
    """Which Landlock the kernel has; 0 for none."""
    nothing = ctypes.c_void_p(None)
    flags = ctypes.c_uint(_CREATE_RULESET_VERSION)
    try:
        return linux.system_call(
            _SYS_CREATE_RULESET, "landlock_create_ruleset", nothing, ctypes.c_size_t(0), flags
        )
    except OSError:
        return 0


def write_only_below(directories: tuple[str, ...]) -> bool:
    """Refuse this process, for good, to write anywhere else. Whether the kernel can do so."""
    known = version()
    if known == 0:
        return False
    rights = _rights(known)
    ruleset = _create(known, rights)
    for directory in directories:
        _allow(ruleset, directory, rights)
    for sink in filter(os.path.exists, _SINKS):
        _allow(ruleset, sink, _WRITE_FILE)
    linux.gain_no_privileges()
    linux.system_call(
        _SYS_RESTRICT_SELF, "landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint(0)
    )
    os.close(ruleset)
    return True


def _rights(known: int) -> int:
    rights = _WRITE_FILE | _REMOVE_AND_MAKE
    if known >= 2:
        rights |= _REFER
    if known >= 3:
        rights |= _TRUNCATE
    return rights


def _create(known: int, rights: int) -> int:
    # struct landlock_ruleset_attr: handled_access_fs, handled_access_net, scoped
    network = _BIND_AND_CONNECT_TCP if known >= 4 else 0
    scoped = _ABSTRACT_SOCKETS_AND_SIGNALS if known >= 6 else 0
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    attributes = struct.pack("=QQQ", rights, network, scoped)[:size]
    flags = ctypes.c_uint(0)
    return linux.system_call(
        _SYS_CREATE_RULESET, "landlock_create_ruleset", attributes, ctypes.c_size_t(size), flags
    )


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    # struct landlock_path_beneath_attr, packed: allowed_access, parent_fd
    rule = struct.pack("=Qi", rights, descriptor)
    linux.system_call(
        _SYS_ADD_RULE,
        "landlock_add_rule",
        ctypes.c_int(ruleset),
        ctypes.c_uint(_RULE_PATH_BENEATH),
        rule,
        ctypes.c_uint(0),
    )
    os.close(descriptor)

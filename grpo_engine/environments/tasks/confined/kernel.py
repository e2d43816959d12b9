"""What the kernel takes from a process before it scores: the network, other processes, all files but those to read.

A filter of system calls (seccomp) lets through what computing needs, and opening files to read; all others fail with
EPERM. Where the kernel has Landlock, only the files of Python and of libraries can be read: not the token of the run,
nor `/proc`. Linux on x86-64 and arm64.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from contextlib import suppress
from pathlib import Path

MEMORY_BYTES = 2**30
"""What a score may add to the address space that the process has."""
_MAX_DESCRIPTORS = 64


class Unconfinable(Exception):
    """The kernel does not take the filter."""


def confine() -> None:
    """Confine this process, which has one thread, for the rest of its life.

    Raises:
        Unconfinable: it cannot be; limits of memory and files hold all the same.
    """
    _limit_resources()
    libc = ctypes.CDLL(None, use_errno=True)
    machine = platform.machine()
    if machine not in _AUDITED or sys.platform != "linux" or sys.byteorder != "little" or sys.maxsize < 2**32:
        raise Unconfinable(f"there is no filter of system calls for {sys.platform} on {machine}")
    _called(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    with suppress(Unconfinable):  # it adds to the filter, and kernels may be without
        _hide_files(libc)
    program = filter_program(machine)
    instructions = ctypes.create_string_buffer(program, len(program))
    header = _Program(len(program) // _INSTRUCTION.size, ctypes.addressof(instructions))
    _called(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0), "seccomp")


def _limit_resources() -> None:
    """CPU time has no limit here: the process has one thread, and is killed by the clock."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_AS: used + MEMORY_BYTES,
        resource.RLIMIT_NOFILE: _MAX_DESCRIPTORS,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lower, lower))


def _called(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise Unconfinable(f"{what}: {os.strerror(number)}")
    return result


# --- system calls ----------------------------------------------------------------------------------------------------

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


_AUDITED = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""`AUDIT_ARCH_…`, by machine: a process may use the numbers of another architecture."""
_ALLOWED = """
read 0 63, write 1 64, close 3 57, lseek 8 62, pread64 17 67, readv 19 65
stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439
getcwd 79 17, readlink 89 -, readlinkat 267 78, getdents64 217 61
mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216, madvise 28 233
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, restart_syscall 219 128
alarm 37 -, getitimer 36 102, setitimer 38 103
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72
sched_yield 24 124, sched_getaffinity 204 123, futex 202 98, set_robust_list 273 99, membarrier 324 283, rseq 334 293
nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -
getrusage 98 165, getrandom 318 278, uname 63 160, sysinfo 99 179
getpid 39 172, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177
exit 60 93, exit_group 231 94
"""
"""System calls with their numbers on x86-64 and arm64: computing, looking at files, time, signals of its own."""
_OPENING = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
"""`open` and `openat`: their numbers, and the place of the flags among the arguments."""

_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _AUDIT, _ARGUMENTS = 0, 4, 16
"""Places in `struct seccomp_data`; an argument has eight bytes, of which the lower four come first."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001
"""The latter: EPERM."""
_TO_WRITE = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def filter_program(machine: str) -> bytes:
    """The filter, a classic BPF program."""
    refuse, allow = _INSTRUCTION.pack(_RETURN, 0, 0, _REFUSE), _INSTRUCTION.pack(_RETURN, 0, 0, _ALLOW)
    program = [
        _INSTRUCTION.pack(_LOAD, 0, 0, _AUDIT),
        _INSTRUCTION.pack(_JUMP_IF_EQUAL, 1, 0, _AUDITED[machine]),
        refuse,
        _INSTRUCTION.pack(_LOAD, 0, 0, _NUMBER),
    ]
    column = 1 + list(_AUDITED).index(machine)
    for call in _ALLOWED.strip().replace("\n", ", ").split(", "):
        if (number := call.split()[column]) != "-":
            program += [_INSTRUCTION.pack(_JUMP_IF_EQUAL, 0, 1, int(number)), allow]
    for opening, place in _OPENING[machine]:
        program += [
            _INSTRUCTION.pack(_JUMP_IF_EQUAL, 0, 4, opening),
            _INSTRUCTION.pack(_LOAD, 0, 0, _ARGUMENTS + 8 * place),
            _INSTRUCTION.pack(_JUMP_IF_ANY, 0, 1, _TO_WRITE),
            refuse,
            allow,
        ]
    return b"".join([*program, refuse])


# --- files -----------------------------------------------------------------------------------------------------------

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_OF_THE_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/dev/urandom")


def _hide_files(libc: ctypes.CDLL) -> None:
    """Let this process read what modules and their data are in, and nothing else."""
    reads = _READ_FILE | _READ_FOLDER
    ruleset = struct.pack("=Q", reads)
    rules = _called(libc.syscall(_LANDLOCK_CREATE, ruleset, len(ruleset), 0), "landlock")
    try:
        for path in _readable():
            with suppress(OSError):  # there is none
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                rights = reads if os.path.isdir(path) else _READ_FILE
                libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, descriptor), 0)
                os.close(descriptor)
        _called(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    finally:
        os.close(rules)


def _readable() -> set[str]:
    """Libraries, and what is loaded already; not all of `sys.path`: a run folder may be below a folder of modules."""
    libraries = {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    loaded: set[str] = set()
    for name, module in sys.modules.copy().items():
        if "." not in name:
            files = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
            loaded.update(path for path in files if isinstance(path, str))
    return {*_OF_THE_SYSTEM, sys.prefix, sys.base_prefix, *libraries, *loaded}

"""`grpo-tui …` without the fifth of a second of its imports: forked from a process that has made them.

A real process with a folder, an environment, output and an exit code of its own, but not started by a command line:
`Workplace.start` and the tests of the terminal do that. This file is also the program of the process that forks. It
reads requests (JSON) from the socket that is its stdin, with three file descriptors each: stdout and stderr of the
command, and a pipe for its exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_LONGEST_REQUEST = 1 << 17
_IMPORTED = [
    *(f"grpo_tui.cli.{name}" for name in ("act", "compare", "follow", "look", "metrics", "planning", "up", "waiting")),
    *("grpo_tui.client.launch", "grpo_tui.client.local", "grpo_tui.client.api", "grpo_tui.profile.loading", "asyncio"),
]


def run_command(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `grpo-tui` with `words` and wait for its end.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout_s`.
    """
    request = {"words": list(words), "cwd": str(cwd), "env": dict(env), "timeout_s": int(timeout_s)}
    outcome, reply = os.pipe()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, open(outcome) as exit_code:
        socket.send_fds(_fork_server(), [json.dumps(request).encode()], [output.fileno(), errors.fileno(), reply])
        os.close(reply)
        returncode = int(exit_code.read())
        for file in (output, errors):
            file.seek(0)
        texts = output.read().decode(), errors.read().decode()
    if returncode == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(["grpo-tui", *words], timeout_s, *texts)
    return subprocess.CompletedProcess(["grpo-tui", *words], returncode, *texts)


@cache
def _fork_server() -> socket.socket:
    """The connection to the process that forks; it exits when this process has."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen([sys.executable, "-P", __file__], stdin=theirs, stdout=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def _serve() -> None:
    """Fork a command for each request, with a parent of its own that waits for it."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait are not waited for
    requests = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, 3)
        if not data:
            return
        output, errors, reply = descriptors
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            command = os.fork()
            if command == 0:
                os.close(reply)
                _become_command(json.loads(data), null, output, errors)
                return
            _, status = os.waitpid(command, 0)
            os.write(reply, str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        for fd in (output, errors, reply):
            os.close(fd)


def _become_command(request: dict[str, object], stdin: int, stdout: int, stderr: int) -> None:
    for number, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(request["timeout_s"])  # type: ignore[arg-type]
    os.chdir(request["cwd"])  # type: ignore[arg-type]
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[arg-type]
    sys.argv = ["grpo-tui", *request["words"]]  # type: ignore[misc]
    from grpo_tui.cli import main

    main()


if __name__ == "__main__":
    _serve()

"""The processes that score: a template, which has imported everything, and a confined worker, which it forks.

The template never sees an answer. It reads what to prepare (`PREPARE`, the setting of a scorer) and when to fork
(`FORK`, with the worker's end of a socket), and ends its worker before the next one. The worker reads answers as
pickles and writes eight bytes for each. Both end with the environment.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from grpo_engine.environments.tasks.confined.kernel import Unconfinable, confine
from grpo_engine.processes import die_with_parent

PREPARE, FORK = b"P", b"F"
LENGTH, SCORE = struct.Struct("<Q"), struct.Struct("<d")
EVALUATED, SCORED, RAISED = b"e", b"s", b"x"
"""What a worker writes: first that Python compiled something, before it runs; then the score, or that there is none."""
MAX_ANSWER_BYTES = len(EVALUATED) + len(SCORED) + SCORE.size
MAX_SETTING_BYTES = 2**16

Scorer = Callable[..., float]


def main(module: str, descriptor: int, *, must_confine: bool) -> None:
    """Be the template of the scorers that a module's `load_scorer(setting)` makes, until the environment ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the environment handles it
    control = socket.socket(fileno=descriptor)
    problem = _problem_of_a_trial()
    load = None if problem and must_confine else importlib.import_module(module).load_scorer
    control.send(problem.encode() or b"\0")
    if load is None:
        return
    scorers: dict[str, Scorer] = {}
    worker = 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_SETTING_BYTES + 1, 1)
        if not message:
            return
        if message[:1] == PREPARE:
            setting = message[1:].decode()
            scorers[setting] = load(setting)
            gc.collect()
            gc.freeze()  # a worker that collects garbage would copy every page
            control.send(b"\0")
            continue
        if worker:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
        (theirs,) = descriptors
        worker = _fork(partial(_work, theirs, control, scorers, must_confine=must_confine))
        os.close(theirs)


def _problem_of_a_trial() -> str:
    """Why a process here cannot be confined; "" if it can."""
    reads, writes = os.pipe()

    def try_it() -> None:
        try:
            confine()
        except (Unconfinable, OSError, ValueError) as error:
            os.write(writes, str(error).encode())

    trial = _fork(try_it)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        problem = pipe.read(1000).decode()
    _, status = os.waitpid(trial, 0)
    return problem or (f"a confined process ended with status {status}" if status else "")


def _fork(work: Callable[[], None]) -> int:
    """Do something in a process of its own; returns its pid."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        die_with_parent(parent)
        work()
        status = 0
    finally:
        os._exit(status)


def _work(descriptor: int, control: socket.socket, scorers: dict[str, Scorer], *, must_confine: bool) -> None:
    """Score until the environment closes the socket."""
    control.close()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)  # an answer could fill the log
    try:
        confine()
    except Unconfinable:
        if must_confine:
            raise
    was_evaluated = False

    def note(event: str, _: tuple[Any, ...]) -> None:
        nonlocal was_evaluated
        if event == "compile" and not was_evaluated:
            was_evaluated = True
            os.write(descriptor, EVALUATED)

    sys.addaudithook(note)
    with suppress(EOFError):
        while True:
            (length,) = LENGTH.unpack(_read(descriptor, LENGTH.size))
            setting, arguments = pickle.loads(_read(descriptor, length))
            was_evaluated = False
            try:
                answer = SCORED + SCORE.pack(float(scorers[setting](*arguments)))
            # A scorer raises what its library raises on texts that it does not expect.
            except Exception:
                answer = RAISED
            os.write(descriptor, answer)


def _read(descriptor: int, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = os.read(descriptor, min(length - len(parts), 2**20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), must_confine=sys.argv[3] == "confined")

"""Processes in which inductor compiles, and signals."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import psutil

STOPPED_WHILE_IT_COMPILES = """
import os, signal, time
from torch._inductor.async_compile import AsyncCompile
from grpo_engine.models.inductor import shield_compilers

if __name__ == "__main__":
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: print("asked", flush=True))
    shield_compilers()
    shield_compilers()
    pool = AsyncCompile.process_pool()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    compiling = pool.submit(time.sleep, 0.5)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.killpg(0, number)
    compiling.result(timeout=100)
    print(pool.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stop_signal_to_the_group_ends_no_compilation_for_which_torch_would_wait_without_end() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", STOPPED_WHILE_IT_COMPILES],
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    *asked, compiler = ran.stdout.split()
    assert asked == ["asked", "asked"], ran.stderr
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(compiler)).wait(timeout=60)

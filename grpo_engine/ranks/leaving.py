"""Lets a rank exit after another rank has failed: its collective operations, which cannot complete, are aborted.

An NCCL kernel that waits for a dead rank runs on the GPU until its process is killed, since no signal reaches it there.
Under MPS, killing a process within a kernel is a fault for every process on the card: vLLM fails too, and the MPS
server. Torch-free to import.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress

LEAVE_SIGNAL = signal.SIGUSR2
"""From the launcher to ranks whose peer has failed, with SIGTERM."""
EXITS_WITHIN_S = 2.0
"""For the main thread to exit by itself after its operations have ended: the launcher kills the process soon after."""

log = logging.getLogger(__name__)


class Leaving:
    """Waits in a thread for the signal of the launcher, and then ends the operations of NCCL in this process.

    The main thread may be within such an operation, where no handler of Python runs. The kernel may give the signal to
    any thread, also to one of CUDA: Python's part in C then writes its number to a pipe, which the thread reads.
    """

    def __init__(self, device: str) -> None:
        """Begin to wait; in the main thread.

        Args:
            device: `cpu` or `cuda:n`, of this rank.
        """
        self.is_asked = False
        """Whether another rank has failed: results of collective operations are wrong since then."""
        self._device = device
        self._signals, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(LEAVE_SIGNAL, lambda number, frame: None)
        threading.Thread(target=self._wait, name="leaving", daemon=True).start()

    def _wait(self) -> None:
        while LEAVE_SIGNAL not in os.read(self._signals, 4096):
            pass
        self.is_asked = True
        _abort_operations()
        if self._device.startswith("cuda"):
            time.sleep(EXITS_WITHIN_S)
            log.warning("this rank waits for another one that has failed: it ends now")
            wait_for_gpu(self._device)
            os._exit(1)


def _abort_operations() -> None:
    """Make all operations of NCCL return, and later ones fail."""
    from torch.distributed import distributed_c10d as c10d

    if c10d.is_nccl_available() and c10d.is_initialized():
        try:
            c10d._abort_process_group()
        except (RuntimeError, ValueError) as error:  # the launcher kills this process after a while
            log.warning("operations with ranks that are gone could not be ended: %s", error)


def wait_for_gpu(device: str) -> None:
    """Return when nothing runs on the GPU: a process may exit then without a fault of MPS."""
    import torch

    if device.startswith("cuda"):
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)

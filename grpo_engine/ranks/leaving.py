"""Lets a rank exit after another rank has failed: its collective operations, which cannot complete, are aborted.

An NCCL kernel that waits for a dead rank runs on the GPU until its process is killed, since no signal reaches it there.
Under MPS, killing a process within a kernel is a fault for every process on the card: vLLM fails too, and the MPS
server. Torch-free to import.
"""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import suppress

LEAVE_SIGNAL = signal.SIGUSR2
"""From the launcher to ranks whose peer has failed, with SIGTERM."""

log = logging.getLogger(__name__)


class Leaving:
    """Waits in a thread for the signal of the launcher, and then ends the operations of NCCL in this process.

    The main thread may be within such an operation, so that no handler of Python would run.
    """

    def __init__(self) -> None:
        """Begin to wait; in the main thread.

        A thread from before may receive the signal instead, and no more happens than with SIGTERM.
        """
        self.is_asked = False
        """Whether another rank has failed: results of collective operations are wrong since then."""
        signal.signal(LEAVE_SIGNAL, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {LEAVE_SIGNAL})
        threading.Thread(target=self._wait, name="leaving", daemon=True).start()

    def _wait(self) -> None:
        signal.sigwait({LEAVE_SIGNAL})
        self.is_asked = True
        _abort_operations()


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

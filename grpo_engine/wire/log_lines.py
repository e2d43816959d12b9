"""Lines in the logs of services that the supervisor or the screen looks for; each stands here only."""

from __future__ import annotations

from typing import NamedTuple


class LogLine(NamedTuple):
    """A line as a service logs it, and as the supervisor finds it."""

    text: str
    """Format string for `logging`."""
    pattern: str
    """Regular expression; its groups are the numbers and names that a start-up phase shows."""


TRAINER_READY = LogLine("trainer ready: %s by %s, step %d of %d", r"trainer ready")
"""Training begins: the readiness probe of a trainer."""
ENVIRONMENT_READY = LogLine("environment ready: %s, group size %d", r"environment ready")
"""The task is loaded and both servers have answered: the readiness probe of an environment."""
PREPARED = LogLine("prepared in %.1f s; begins when its turn comes", r"prepared in [0-9.]+ s")
"""A service that was started held has done what it can before its turn."""
STOPPED = LogLine("stopped by a signal%s", r"stopped by a signal")
"""A trainer or environment exits with 0, as it was told to, though its work is not done."""

FORK_SERVER_IMPORTS = LogLine("Fork server: importing what an inference server needs", r"Fork server: importing")
FORK_SERVER_HAS_IMPORTED = LogLine("Fork server: imports took %.1f s", r"Fork server: imports took")
FORK_SERVER_RESTARTS = LogLine(
    "Fork server: all processes of the last inference server have exited; starting the next one",
    r"Fork server: all processes .* have exited",
)
MODEL_MADE = LogLine("making %s in %s (once; later starts use it)", r"making (\S+) in .* \(once")
WEIGHTS_LOADING = LogLine("loading the weights of %s", r"loading the weights of ")
WEIGHTS_EXPORTED = LogLine("✓ Exported %d params to %s", r"Exported (\d+) params")
WEIGHTS_ATTACHED = LogLine("attached to %d shared tensors of %s, version %d", r"attached to (\d+) shared tensors")
WEIGHT_GROUP_CREATED = LogLine("[Bridge] ✓ %s group created: %d servers, %d processes", r"✓ (\w+) group created")
"""As early stock trainers log it, whose readers search for it."""
WAITING_FOR_STEP = LogLine(
    "Loading when the trainer has computed its step, since both use the memory of the device in turn",
    r"Loading when the trainer has computed its step",
)
WAITING_FOR_WEIGHTS = LogLine(
    "Loading when the parameter service of this machine has the newest weights (%s)",
    r"Loading when the parameter service of this machine has the newest weights",
)
PARAMETERS_TRAINED = LogLine("training %d of %d parameters", r"training (\d+) of (\d+) parameters")
REHEARSAL_BEGINS = LogLine(
    "rehearsing a step with the longest rows; the first one on a machine compiles its kernels",
    r"rehearsing a step with the longest rows",
)
REHEARSED = LogLine("the longest micro-batch fits: %d x %d tokens, %s at the peak", r"the longest micro-batch fits")
RESUMED = LogLine("resumed from %s", r"resumed from (\S+)")
OUT_OF_GPU_MEMORY = LogLine(
    "the GPU's memory ran out %s, with micro-batches of up to %d x %d tokens", r"the GPU's memory ran out"
)
GPU_MEMORY_MISSING = LogLine("%s more were asked for", r"(?<!\S)(\S+(?: [kMG]B)?) more were asked for")
"""In the trainer's last error; the GPU screen shows the amount."""
WAITING_FOR_PEER = LogLine("%s %s%s: %s; trying for %g s", r"; trying for (\S+) s")

"""How an attempt ended, in words; for its reason, its crash report and the hints on screen."""

from __future__ import annotations

import signal


def exit_text(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "ended with an unknown exit code"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"ended by {known.get(-code, f'signal {-code}')}"
    return f"exit code {code}"


def has_ended_alone(exit_code: int | None, why: str) -> bool:
    """Whether an attempt counts as failed since it ended; else the supervisor ended it, for the reason `why`."""
    return exit_code is not None and why.startswith(exit_text(exit_code))


def kill_text(exit_code: int | None, why: str, oom_kills: int | None) -> str | None:
    """Who killed a service, as far as that is known; None where nobody did, or the supervisor.

    Args:
        exit_code: of the attempt; 128 + 9 is of a shell, for a program below it.
        why: why the attempt counts as failed: the supervisor's own words where it ended it.
        oom_kills: as in `machine.Exited`.
    """
    if oom_kills:
        times = "a process" if oom_kills == 1 else f"{oom_kills} processes"
        return f"the kernel's out-of-memory killer killed {times} on this machine during this attempt: use less memory"
    if exit_code not in {-signal.SIGKILL, 128 + signal.SIGKILL} or not has_ended_alone(exit_code, why):
        return None
    if oom_kills is None:
        return "not killed by the supervisor, probably by the kernel's out-of-memory killer: `dmesg | grep -i oom`"
    return "neither the supervisor nor the out-of-memory killer sent SIGKILL: a person or another program did"

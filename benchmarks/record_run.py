"""Packs an ended run as a small recording for the screen's tests: its folder, thinned and anonymised.

    python benchmarks/record_run.py RUN_FOLDER FILE.tar.gz

The archive holds one folder with all that `grpo-tui attach` and the command line read of such a run. Paths, the
machine's and the user's name, addresses and the GPUs' numbers are replaced; where that or thinning moves the lines of
a log, the ends of logs that the timeline tells are moved with them.
"""

from __future__ import annotations

import argparse
import getpass
import gzip
import io
import json
import re
import socket
import tarfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from grpo_engine.wire.metrics import RolloutLine
from grpo_engine.wire.run_folder import METRICS_FILE, PLAN_FILE, RESOLVED_FILE, ROLLOUTS_FILE, STATE_FILE, TIMELINE_FILE
from grpo_engine.wire.supervisor import Event, RunStatus, Snapshot, UsageSampled, read_from_daemon
from grpo_tui.client.local import look_at, stored_status
from grpo_tui.profile.plan_file import Plan
from grpo_tui.run_files.log_file import place

MAX_BYTES = 400_000
MAX_METRICS, MAX_USAGE, MAX_ROLLOUTS, MAX_COMPLETIONS = 400, 240, 120, 8
FIRST_LOG_LINES, LAST_LOG_LINES = 400, 1200

_PATH = re.compile(
    r"(?<![\w./~:-])/(?:work|root|home|tmp|mnt|opt|usr|var|data|srv|run|dev|etc|proc)/(?:[\w.@%+~=-]+/)*"
)
_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?=:\d|\b[^.\w-])")
_GPU = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

ThingT = TypeVar("ThingT")


def read_events(run_folder: Path) -> list[Snapshot | Event]:
    """Events of its supervisors, the oldest first."""
    path = run_folder / TIMELINE_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    messages = (read_from_daemon(line) for line in lines if line.endswith(b"\n"))
    return [message for message in messages if isinstance(message, Snapshot | Event)]


def pack(run_folder: Path, archive: Path) -> int:
    """Write the recording; its size in bytes.

    Raises:
        ValueError: it is larger than a fixture may be, however it is thinned.
    """
    for share in (1.0, 0.5, 0.25, 0.1):
        content = _archive(run_folder, share)
        if len(content) <= MAX_BYTES:
            archive.write_bytes(content)
            return len(content)
    raise ValueError(f"{run_folder}: {len(content)} bytes when thinned, {MAX_BYTES} are allowed; record a shorter run")


def _archive(run_folder: Path, share: float) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, text in sorted(_files(run_folder, share).items()):
            content = without_names(text).encode()
            entry = tarfile.TarInfo(f"{run_folder.name}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for checkpoint in sorted((run_folder / "checkpoints").glob("step_*")):  # only that it existed, and when
            entry = tarfile.TarInfo(f"{run_folder.name}/checkpoints/{checkpoint.name}")
            entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, checkpoint.stat().st_mtime
            tar.addfile(entry)
    return packed.getvalue()


def _files(run_folder: Path, share: float) -> dict[str, str]:
    """Name → text of everything in the recording."""
    status = stored_status(look_at(run_folder))
    plan = Plan(profile_name=status.profile, profile_folder=Path("profiles"), launches=())
    files = {
        STATE_FILE: RunStatus.model_dump_json(_with_own_logs(status), indent=1) + "\n",
        PLAN_FILE: plan.to_json() + "\n",  # the plan has paths and environments, and no reader needs it
        METRICS_FILE: _lines(thinned(_read_lines(run_folder / METRICS_FILE), int(MAX_METRICS * share))),
        ROLLOUTS_FILE: _lines(
            _fewer_completions(line)
            for line in thinned(_read_lines(run_folder / ROLLOUTS_FILE), int(MAX_ROLLOUTS * share))
        ),
        RESOLVED_FILE: (run_folder / RESOLVED_FILE).read_text(),
    }
    logs = {name: _packed_log(run_folder / f"{name}.log", share) for name in _names(status)}
    files |= {f"{name}.log": log.text for name, log in logs.items()}
    files[TIMELINE_FILE] = _lines(_with_own_log_lines(read_events(run_folder), int(MAX_USAGE * share), logs))
    return files


def _names(status: RunStatus) -> list[str]:
    return [*(service.name for service in status.services), "supervisor"]


@dataclass(frozen=True, slots=True)
class PackedLog:
    """A log as it is in the recording."""

    text: str
    ends_before: list[int]
    """Absolute offsets in the run's own log, of the ends of its lines."""
    ends_after: list[int]
    """Offsets in `text` of the ends of the same lines, or of their replacement."""

    def moved(self, offset: int) -> int:
        """Where the line that ended before an offset ends in the recording."""
        found = bisect_right(self.ends_before, offset)
        return self.ends_after[found - 1] if found else 0


def _packed_log(path: Path, share: float) -> PackedLog:
    """The beginning and the end of a log, without names."""
    raw = path.read_bytes() if path.exists() else b""
    before = _dropped(path) if raw else 0
    pieces = raw.decode("utf-8", errors="replace").split("\n")
    plain = without_names("\n".join(pieces)).split("\n")
    sizes = [len(piece) + 1 for piece in raw.split(b"\n")]
    first, last = int(FIRST_LOG_LINES * share), int(LAST_LOG_LINES * share)
    num_left_out = max(0, len(plain) - first - last)
    text, size, ends_before, ends_after = [], 0, [], []
    for number, (line, raw_bytes) in enumerate(zip(plain, sizes, strict=True)):
        before += raw_bytes
        if line.startswith("=== capped"):
            continue
        if number == first and num_left_out:
            text.append(f"··· {num_left_out} lines are not in this recording\n")
            size += len(text[-1].encode())
        if not num_left_out or number < first or number >= first + num_left_out:
            text.append(f"{line}\n")
            size += len(text[-1].encode())
        ends_before.append(before)
        ends_after.append(size)
    if text and text[-1] == "\n":
        text.pop()  # no line follows the last line end
    return PackedLog("".join(text), ends_before, ends_after)


def _dropped(path: Path) -> int:
    with path.open("rb") as file:
        return place(file.fileno()).dropped


def _with_own_logs(status: RunStatus) -> RunStatus:
    """The same, with log paths relative to the recording."""
    services = [service.model_copy(update={"log": Path(service.log).name}) for service in status.services]
    return status.model_copy(update={"services": services})


def _with_own_log_lines(
    messages: Sequence[Snapshot | Event], num_usage: int, logs: Mapping[str, PackedLog]
) -> list[str]:
    """Events as lines, with the samples of usage thinned, and logs as they are in the recording."""
    kept = {id(sample) for sample in thinned([each for each in messages if isinstance(each, UsageSampled)], num_usage)}
    lines = []
    for message in messages:
        if isinstance(message, UsageSampled) and id(message) not in kept:
            continue
        if isinstance(message, UsageSampled):
            ends = {name: logs[name].moved(offset) for name, offset in message.log_bytes.items() if name in logs}
            message = message.model_copy(update={"log_bytes": ends})
        if isinstance(message, Snapshot):
            message = message.model_copy(update={"status": _with_own_logs(message.status)})
        elif (service := getattr(message, "service", None)) is not None and not isinstance(service, str):
            message = message.model_copy(update={"service": service.model_copy(update={"log": Path(service.log).name})})
        lines.append(message.model_dump_json())
    return lines


def thinned(things: Sequence[ThingT], count: int) -> list[ThingT]:
    """At most `count` of them, evenly spaced, the first and the last among them."""
    if len(things) <= count:
        return list(things)
    last = len(things) - 1
    return [things[place * last // (count - 1)] for place in range(count)]


def _fewer_completions(line: str) -> str:
    rollout = RolloutLine.model_validate_json(line)
    return rollout.model_copy(update={"completions": rollout.completions[:MAX_COMPLETIONS]}).model_dump_json()


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def without_names(text: str) -> str:
    """The text without host, user and GPU identifiers."""
    text = _PATH.sub("…/", text)
    text = _ADDRESS.sub("192.0.2.1", text)
    cards = {
        card: f"GPU-{number:08d}-0000-0000-0000-000000000000"
        for number, card in enumerate(sorted(set(_GPU.findall(text))))
    }
    for card, plain in cards.items():
        text = text.replace(card, plain)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "gpu-server", text)
    user = getpass.getuser()
    return text if user == "root" else re.sub(rf"\b{re.escape(user)}\b", "user", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("archive", type=Path)
    options = parser.parse_args()
    print(json.dumps({"bytes": pack(options.run_folder, options.archive)}))


if __name__ == "__main__":
    main()

"""A run as a small recording for the screen's tests: what its daemon said, and its folder, thinned and without names.

    python benchmarks/record_run.py listen RUN_FOLDER            beside a run: keeps its events until it is over
    python benchmarks/record_run.py pack RUN_FOLDER FILE.tar.gz  afterwards

The archive holds one folder with all that `grpo-tui attach` and the command line read of a run that is over, and
`events.jsonl`: the daemon's lines in the protocol of `grpo_engine.wire.supervisor`, for a test to play.
Paths, the machine's and the user's name, addresses and the GPUs' numbers are replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import gzip
import io
import json
import re
import socket
import tarfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import to_line
from grpo_engine.wire.metrics import RolloutLine
from grpo_engine.wire.supervisor import Bye, Event, RunStatus, Snapshot, UsageSampled, read_from_daemon
from grpo_tui.client.local import is_over, look_at, stored_status
from grpo_tui.client.socket import Daemon
from grpo_tui.paths import METRICS_FILE, PLAN_FILE, ROLLOUTS_FILE, STATE_FILE
from grpo_tui.profile.plan_file import Plan

EVENTS_FILE = "events.jsonl"
MAX_BYTES = 300_000
MAX_METRICS, MAX_USAGE, MAX_ROLLOUTS, MAX_COMPLETIONS = 400, 120, 8, 4
FIRST_LOG_LINES, LAST_LOG_LINES = 120, 160
RETRY_S = 0.1

_PATH = re.compile(
    r"(?<![\w./~:-])/(?:work|root|home|tmp|mnt|opt|usr|var|data|srv|run|dev|etc|proc)/(?:[\w.@%+~=-]+/)*"
)
_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?=:\d|\b[^.\w-])")
_GPU = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

ThingT = TypeVar("ThingT")


# --- while it runs --------------------------------------------------------------------------------------------------


def listen_until_over(run_folder: Path) -> None:
    """Keep what the daemon says in the run's folder; returns when the run is over."""
    asyncio.run(_listen(run_folder))


async def _listen(run_folder: Path) -> None:
    with (run_folder / EVENTS_FILE).open("ab") as file:
        while True:
            try:
                async for message in Daemon(run_folder).events():
                    file.write(to_line(message))
                    file.flush()
                    if isinstance(message, Bye):
                        return
            except PeerError:  # not there yet, or lost: its successor goes on
                pass
            if is_over(run_folder):
                return
            await asyncio.sleep(RETRY_S)


def read_events(run_folder: Path) -> list[Snapshot | Event | Bye]:
    """What was kept, the oldest first."""
    path = run_folder / EVENTS_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    messages = (read_from_daemon(line) for line in lines if line.endswith(b"\n"))
    return [message for message in messages if isinstance(message, Snapshot | Event | Bye)]


# --- afterwards -----------------------------------------------------------------------------------------------------


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
    return packed.getvalue()


def _files(run_folder: Path, share: float) -> dict[str, str]:
    """Name → text of everything in the recording."""
    status = stored_status(look_at(run_folder))
    plan = Plan(profile_name=status.profile, profile_folder=Path("profiles"), launches=())
    files = {
        STATE_FILE: RunStatus.model_dump_json(_with_own_logs(status), indent=1) + "\n",
        PLAN_FILE: plan.to_json() + "\n",  # what was launched has paths and environments, and nobody reads it any more
        METRICS_FILE: _lines(thinned(_read_lines(run_folder / METRICS_FILE), int(MAX_METRICS * share))),
        ROLLOUTS_FILE: _lines(
            _fewer_completions(line) for line in thinned(_read_lines(run_folder / ROLLOUTS_FILE), MAX_ROLLOUTS)
        ),
        EVENTS_FILE: _lines(_with_own_log_lines(read_events(run_folder), int(MAX_USAGE * share))),
    }
    for service in status.services:
        files[f"{service.name}.log"] = _lines(_ends(_read_lines(run_folder / f"{service.name}.log"), share))
    files["supervisor.log"] = _lines(_ends(_read_lines(run_folder / "supervisor.log"), share))
    return files


def _with_own_logs(status: RunStatus) -> RunStatus:
    """The same, with logs that are found wherever the recording is unpacked."""
    services = [service.model_copy(update={"log": Path(service.log).name}) for service in status.services]
    return status.model_copy(update={"services": services})


def _with_own_log_lines(messages: Sequence[Snapshot | Event | Bye], num_usage: int) -> list[str]:
    """Events as lines, with the samples of usage thinned."""
    kept = {id(sample) for sample in thinned([each for each in messages if isinstance(each, UsageSampled)], num_usage)}
    lines = []
    for message in messages:
        if isinstance(message, UsageSampled) and id(message) not in kept:
            continue
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


def _ends(lines: list[str], share: float) -> list[str]:
    """The beginning and the end of a log."""
    first, last = int(FIRST_LOG_LINES * share), int(LAST_LOG_LINES * share)
    if len(lines) <= first + last:
        return lines
    return [*lines[:first], f"··· {len(lines) - first - last} lines are not in this recording", *lines[-last:]]


def _read_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line for line in text.splitlines() if not line.startswith("=== capped")]


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def without_names(text: str) -> str:
    """The text without what tells where, by whom and on which card it was made."""
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
    does = parser.add_subparsers(dest="do", required=True)
    does.add_parser("listen").add_argument("run_folder", type=Path)
    packing = does.add_parser("pack")
    packing.add_argument("run_folder", type=Path)
    packing.add_argument("archive", type=Path)
    options = parser.parse_args()
    if options.do == "listen":
        began = time.monotonic()
        listen_until_over(options.run_folder)
        print(json.dumps({"events": len(read_events(options.run_folder)), "s": round(time.monotonic() - began)}))
    else:
        print(json.dumps({"bytes": pack(options.run_folder, options.archive)}))


if __name__ == "__main__":
    main()

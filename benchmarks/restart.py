"""Seconds from a start or restart request to a healthy vLLM: ours in place, beside stock vLLM.

    python benchmarks/restart.py --model MODEL [--device cpu] [--rounds 3] [--cold] [--no-stock] [--imports]
        [--flag=--cuda-graph-sizes …] [--stock-flag=--cudagraph-capture-sizes …] [--lines] [--stacks]

Ours is started once and then restarted in place, as the supervisor does it: a signal to its fork server, and healthy
once the next server answers. Stock vLLM with the same settings is started twice, each time from nothing. `--cold` gives
both empty caches of compiled code first, so that the first figure of each is that of a machine that never served it.
Below the figures stands what each restart was at, by the lines of the log, in seconds from the key press; `--lines`
tells all of them, and `--stacks` where vLLM's engine is every half second, by py-spy.

`--imports` tells instead which modules the processes of a restarted server import after the fork, and their
milliseconds: what belongs into `grpo_engine/server/preloading.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from _gpu_servers import Failed, Fleet, Gpu, Server

from grpo_engine.models.loading import resolve_model
from grpo_engine.wire.fork_server import RESTART_SIGNAL
from grpo_engine.wire.log_lines import FORK_SERVER_RESTARTS
from grpo_tui.services.inference import VLLM_PHASES
from grpo_tui.supervisor.keeper import proc

TARGET_S = 9.0
LIMIT_S = 400.0
POLL_S = 0.01
CPU_CACHE_BYTES = 1 << 30
"""As our server uses on a CPU."""
GONE_LINE = re.escape(FORK_SERVER_RESTARTS.text)
PHASES = (*VLLM_PHASES, (r"server\.main: Ready", "healthy"))
IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| (\s*)(\S+)$", re.MULTILINE)
SHOWN_IMPORTS = 40
SHOWN_OF_LINES = 160
ENGINE = "VLLM::EngineCor"
"""Kernel name of the process that holds the GPU."""
STACK_EVERY_S, SHOWN_FRAMES = 0.5, 12


def main() -> None:
    options = flags().parse_args()
    if options.stacks and shutil.which("py-spy") is None:
        raise SystemExit("--stacks needs py-spy: pip install py-spy")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    folder = Path(tempfile.mkdtemp(prefix="grpo-restart-"))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", "VLLM_NO_USAGE_STATS": "1"}
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(folder=folder, environment=environment, within_s=LIMIT_S))
        if options.imports:
            tell_imports(options, fleet)
            return
        figures = ours(options, fleet)
        if options.stock:
            figures |= stock(options, fleet)
    print(json.dumps(figures | {"target_s": TARGET_S, "logs": str(folder)}), flush=True)


def ours(options: argparse.Namespace, fleet: Fleet) -> dict[str, object]:
    """Start it, restart it in place repeatedly, and end it."""
    server = start_ours(options, fleet)
    server.wait(within_s=LIMIT_S)
    print(f"ours   start                {server.loaded_s:6.2f} s", flush=True)
    restarts = []
    for number in range(1, options.rounds + 1):
        seconds, lines = restart_in_place(server, tells_all=options.lines, tells_stacks=options.stacks)
        restarts.append(round(seconds, 2))
        print(f"ours   restart in place {number}   {seconds:6.2f} s  (target {TARGET_S:g} s)", flush=True)
        for at_s, words in lines:
            print(f"         {at_s:6.2f}  {words}", flush=True)
    end(server)
    return {"ours_start_s": round(server.loaded_s, 2), "ours_in_place_s": restarts}


def stock(options: argparse.Namespace, fleet: Fleet) -> dict[str, object]:
    """Start it twice as a new process."""
    starts = []
    for number in (1, 2):
        server = start_stock(options, fleet, f"stock-{number}")
        server.wait(within_s=LIMIT_S)
        starts.append(round(server.loaded_s, 2))
        print(f"stock  start {number}              {server.loaded_s:6.2f} s", flush=True)
        end(server)
    return {"stock_start_s": starts}


def restart_in_place(
    server: Server, *, tells_all: bool = False, tells_stacks: bool = False
) -> tuple[float, list[tuple[float, str]]]:
    """Seconds from the signal to the next server's first successful answer, and the time of each phase."""
    offset = server.log.stat().st_size
    began = time.monotonic()
    server.process.send_signal(RESTART_SIGNAL)
    lines: list[tuple[float, str]] = []
    num_looks = 0
    heard = LineReader(server.log, offset, lambda line: note(line, lines, time.monotonic() - began, tells_all))
    while not any(words == "the last server is gone" for _, words in lines) or not server._is_healthy():
        heard.read()
        if tells_stacks and time.monotonic() - began > (num_looks + 1) * STACK_EVERY_S:
            num_looks += 1
            lines += [(time.monotonic() - began, stack) for stack in engine_stacks(server)]
        if server.process.poll() is not None:
            raise Failed(f"{server.name} ended with {server.process.returncode}:\n{server.told()}")
        if time.monotonic() - began > LIMIT_S:
            raise Failed(f"{server.name} is not healthy after {LIMIT_S:g} s:\n{server.told()}")
        time.sleep(POLL_S)
    seconds = time.monotonic() - began
    heard.read()
    return seconds, lines


def engine_stacks(server: Server) -> list[str]:
    """Stack of each engine's main thread, the innermost call first."""
    engines = [process for process in proc.processes_of_run(server.mark) if process.comm == ENGINE]
    told = []
    for engine in engines:
        command = ["py-spy", "dump", "--nonblocking", "--pid", str(engine.pid)]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        _, _, main_thread = said.partition('"MainThread"')
        frames = [line.strip() for line in main_thread.partition("\nThread ")[0].splitlines()[1:]]
        told.append(" < ".join(frames[:SHOWN_FRAMES]) or "no stack to be had")
    return told


def note(line: str, lines: list[tuple[float, str]], at_s: float, tells_all: bool) -> None:
    """Record when a phase begins, or every line."""
    if re.search(GONE_LINE, line):
        words: str | None = "the last server is gone"
    else:
        found = ((re.search(pattern, line), words) for pattern, words in PHASES)
        words = next((words.format(*match.groups(default="")) for match, words in found if match), None)
    if words is None and tells_all:
        words = line[:SHOWN_OF_LINES]
    if words is not None and (not lines or lines[-1][1] != words):
        lines.append((at_s, words))


class LineReader:
    """Reads the whole lines that are added to a log."""

    def __init__(self, log: Path, offset: int, take: Callable[[str], None]) -> None:
        self._log = log
        self._offset = offset
        self._take = take

    def read(self) -> None:
        """Return the lines added since the last call."""
        with self._log.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.decode(errors="replace").splitlines():
            self._take(line)


def tell_imports(options: argparse.Namespace, fleet: Fleet) -> None:
    """Print modules that a restarted server imports after the fork, in all of its processes, slowest first."""
    server = start_ours(options, fleet, PYTHONPROFILEIMPORTTIME="1")
    server.wait(within_s=LIMIT_S)
    restart_in_place(server)
    told = server.log.read_text(errors="replace")
    end(server)
    after = told[told.rindex(FORK_SERVER_RESTARTS.text) :]
    found = [(int(own), int(all_), len(indent), name) for own, all_, indent, name in IMPORT_LINE.findall(after)]
    print(
        f"{len(found)} imports after the fork, {sum(own for own, *_ in found) / 1e3:.0f} ms in all processes together"
    )
    outermost = [(all_, name) for _, all_, indent, name in found if indent == 0]
    for all_us, name in sorted(outermost, reverse=True)[:SHOWN_IMPORTS]:
        print(f"  {all_us / 1e3:8.1f} ms  {name}")


def start_ours(options: argparse.Namespace, fleet: Fleet, **environment: str) -> Server:
    """Our server on vLLM, with a fork server."""
    argv = ["grpo_engine", "server", "--engine", "vllm", "--standby", "--model-name", options.model]
    argv += ["--device", options.device, "--dtype", options.dtype, "--max-model-len", str(options.max_model_len)]
    argv += ["--gpu-memory-utilization", str(options.share), "--served-model-name", "m"]
    return fleet.start("ours", [*argv, *options.flag], **caches(options, fleet, "ours"), **environment)


def start_stock(options: argparse.Namespace, fleet: Fleet, name: str) -> Server:
    """Stock vLLM with the flags that our server passes to it."""
    argv = ["vllm.entrypoints.openai.api_server", "--model", resolve_model(options.model), "--served-model-name", "m"]
    argv += ["--dtype", options.dtype, "--max-model-len", str(options.max_model_len), "--max-num-seqs", "256"]
    argv += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
    argv += ["--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)] if options.device == "cpu" else []
    argv += ["--gpu-memory-utilization", str(options.share)] if options.device != "cpu" else []
    return fleet.start(name, [*argv, *options.stock_flag], **caches(options, fleet, "stock"))


def caches(options: argparse.Namespace, fleet: Fleet, whose: str) -> dict[str, str]:
    """Empty cache folders for compiled code, if requested."""
    if not options.cold:
        return {}
    names = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {name: str(fleet.folder / f"{whose}-cache" / folder) for name, folder in names.items()}


def end(server: Server) -> None:
    """End it with SIGTERM and check that no process is left."""
    left = server.end(signal.SIGTERM, Gpu())["processes_left"]
    if left:
        raise Failed(f"{server.name} left {left}")


def flags() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="local/llama-8b-random")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--share", type=float, default=0.45, help="of the GPU's memory")
    parser.add_argument("--rounds", type=int, default=3, help="restarts in place")
    parser.add_argument("--cold", action="store_true", help="start with empty caches of compiled code")
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--lines", action="store_true", help="print every log line of a restart")
    parser.add_argument("--stacks", action="store_true", help="print vLLM's stack every half second; needs py-spy")
    parser.add_argument("--imports", action="store_true")
    parser.add_argument("--flag", action="append", default=[], help="a further word for our server")
    parser.add_argument("--stock-flag", action="append", default=[], help="a further word for stock vLLM")
    return parser


if __name__ == "__main__":
    main()

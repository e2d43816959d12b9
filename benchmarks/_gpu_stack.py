"""Whole training runs for `gpu.py`: started by `grpo-tui`, followed, ended, and checked for leftovers.

A run is given as PROFILE[:MODE]:STEPS[:finished][+KEY=VALUE…]. It is ended after that many optimizer steps; with
`finished` it has that many steps and runs to its end. Figures are read from the run folder only, so measuring slows
nothing. With `--restart-at`, vLLM is restarted once, as by the key of the screen; with `--kill SERVICE@STEP`, the first
process of a service is killed, of a trainer with several ranks the last one; with SERVICE+@STEP the one that the first
has forked: the server below its fork server.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record_run
from _gpu_bench import Bench

from grpo_engine.wire.metrics import PHASE_METRICS, SLEEP_METRICS, MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE
from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    RunChanged,
    RunState,
    ServiceState,
    ServiceStatus,
    Snapshot,
    UsageSampled,
)
from grpo_tui.client.api import look_at, stored_status
from grpo_tui.supervisor.keeper import proc

BEYOND = 10
"""Factor on the steps of a run that is ended, so that it does not finish before."""
LOOK_EVERY_S = 0.2
SPEEDS = {
    "train/tokens_per_second": "tokens_per_s",
    "train/data_fetch_time": "waits_s",
    "train/mfu": "mfu",
    "rollout/busy_fraction": "sampling_busy",
    "rollout/length_mean": "completion_tokens",
    "rollout/staleness_mean": "staleness",
}
"""Metrics → their names in the figures."""
LEFT_OUT = 3
"""First steps without which these are given: compilation, and groups that were sampled before."""
ENDS = 3
"""First and last steps whose mean reward is printed."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A run, parsed from its text."""

    profile: str
    mode: str | None
    steps: int
    finishes: bool
    settings: tuple[str, ...]

    @staticmethod
    def read(text: str) -> Spec:
        """`smollm-gpu:lora_only:60`, `smollm-gpu:120:finished`, `smollm-gpu:20+gpu.mps=false+bridge.mode=none`."""
        text, *settings = text.split("+")
        words = text.split(":")
        finishes = words[-1] == "finished"
        profile, *mode, steps = words[: -1 if finishes else None]
        return Spec(
            profile=profile,
            mode=mode[0] if mode else None,
            steps=int(steps),
            finishes=finishes,
            settings=tuple(settings),
        )


def run_stack(text: str, number: int, bench: Bench) -> None:
    """Run it and print its figures; those until then, where it fails or its time is over."""
    spec, used_before_mb, began = Spec.read(text), bench.gpu.used_mb(), time.monotonic()
    folder, figure = _bring_up(spec, bench), "run_cut_short"
    try:
        until = began + bench.options.run_limit
        for restart_at in bench.options.restart_at:
            _follow(folder, spec, until, num_steps=restart_at)
            restart_began = time.monotonic()
            _grpo(bench, "restart", folder.name, "vllm", "--wait")
            bench.tell("restart_s", text, round(time.monotonic() - restart_began, 2), at_step=_num_steps(folder))
        for each in bench.options.kill:
            _kill(folder, each, spec, until, bench)
        _follow(folder, spec, until)
        status = _grpo(bench, "status", folder.name, "--json")
        figure = "run"
    finally:
        down_began = time.monotonic()
        limit = ["--timeout", str(bench.options.down_limit)] if bench.options.down_limit is not None else []
        said = _grpo(bench, "down", folder.name, *limit, may_fail=True)
        down_s = time.monotonic() - down_began
        left = proc.processes_of_run(folder.name)
        for process in left:
            proc.send_signal(process, signal.SIGKILL)
        free_s, left_mb = _when_free(bench, used_before_mb)
        lines = read_metrics(folder)
        figures = {
            **_starts_s(folder, lines),
            **what_it_did(lines),
            **_memory(folder),
            "down_s": round(down_s, 2),
            "gpu_free_after_down_s": free_s,
            "gpu_mb_left": left_mb,
            "processes_left": [process.comm for process in left],
            "wall_s": round(time.monotonic() - began, 1),
        }
        bench.tell(figure, text, figures)
    services = {each["name"]: each["state"] for each in json.loads(status)["services"]}
    bench.tell("run_details", text, services, down=said.splitlines()[-4:])
    if bench.options.record == number:
        record_run.pack(folder, bench.options.out / f"{spec.profile}-{spec.mode or 'own'}.tar.gz")


def _kill(folder: Path, text: str, spec: Spec, until: float, bench: Bench) -> None:
    """Kill a process of a service, and print what that cost, once it is ready and two more steps are done."""
    name, _, step = text.partition("@")
    _follow(folder, spec, until, num_steps=int(step))
    service = _service(folder, name.removesuffix("+"))
    made, pid = _num_steps(folder), service.ranks[-1].pid if service.ranks else service.pid
    assert pid is not None, f"{name} has no process"
    if name.endswith("+"):
        forked = [each.pid for each in proc.descendants(pid) if each.parent == pid]
        if not forked:
            raise RuntimeError(f"{name}: {service.name} has forked nothing")
        pid = forked[0]
    os.kill(pid, signal.SIGKILL)
    killed_at = time.time()
    _follow(folder, spec, until, num_steps=made + 2)
    # Not by its attempt, which ranks keep: they are started again within it.
    while (
        again := _service(folder, service.name)
    ).ready_at == service.ready_at or again.state is not ServiceState.READY:
        if time.monotonic() > until:
            raise RuntimeError(f"{folder.name}: {name} is {again.state} after it was killed\n{_why(folder)}")
        time.sleep(LOOK_EVERY_S)
    trained = [line.time for line in read_metrics(folder) if "train/loss" in line.metrics]
    assert again.ready_at is not None
    figures = {
        "at_step": made,
        "ready_again_s": round(again.ready_at - killed_at, 1),
        "next_step_s": round(trained[made] - killed_at, 1),  # of those that are new; the journal is repeated first
        "median_step_s": round(statistics.median(b - a for a, b in itertools.pairwise(trained[:made])), 2),
    }
    bench.tell("killed", f"{folder.name}: {name}", figures)


def _service(folder: Path, name: str) -> ServiceStatus:
    return next(each for each in stored_status(look_at(folder)).services if each.name == name)


def what_it_did(lines: list[MetricsLine]) -> dict[str, Any]:
    """Speed, alignment and reward of a run's optimizer steps."""
    trained = [line for line in lines if "train/loss" in line.metrics]
    if not trained:
        return {"steps": 0}
    alignment = [line.metrics["alignment/diff_abs_mean"] for line in trained]
    rewards = [line.metrics["reward/mean"] for line in trained if "reward/mean" in line.metrics]
    spans = [later.time - sooner.time for sooner, later in itertools.pairwise(trained)]
    sync = [line.metrics["train/sync_time"] for line in trained if "train/sync_time" in line.metrics]
    return {
        "steps": len(trained),
        "first_step_s": round(trained[0].metrics["train/step_time"], 1),
        "s_a_step": round(statistics.median(spans), 3) if spans else None,
        "steps_per_s": round(1 / statistics.mean(spans), 3) if spans else None,
        **_medians(trained[LEFT_OUT:]),
        "sync_ms": round(1e3 * statistics.median(sync), 1) if sync else None,
        "sync_ms_at_most": round(1e3 * max(sync), 1) if sync else None,
        **what_turns_took(trained),
        "alignment_mean": round(statistics.mean(alignment), 5),
        "alignment_max": round(max(alignment), 5),
        "reward_first": round(statistics.mean(rewards[:ENDS]), 3) if rewards else None,
        "reward_last": round(statistics.mean(rewards[-ENDS:]), 3) if rewards else None,
        "evaluated": {
            name: round(value, 3)
            for line in lines
            for name, value in line.metrics.items()
            if name.startswith("eval/avg@") and not name.endswith("_se")
        },
    }


def _medians(lines: list[MetricsLine]) -> dict[str, float]:
    """Of the metrics of speed that the steps have, over these steps."""
    values = {name: [line.metrics[name] for line in lines if name in line.metrics] for name in SPEEDS}
    return {SPEEDS[name]: round(statistics.median(each), 3) for name, each in values.items() if each}


def what_turns_took(trained: list[MetricsLine]) -> dict[str, Any]:
    """Where inference sleeps during steps: medians of its phases, of falling asleep, and what that freed."""
    figures = {}
    for name in (*PHASE_METRICS, *SLEEP_METRICS):
        values = [line.metrics[name] for line in trained[1:] if name in line.metrics]
        if values:
            figures[name] = {"median": round(statistics.median(values), 3), "most": round(max(values), 3)}
    return figures


def read_metrics(folder: Path) -> list[MetricsLine]:
    """The whole lines of a run's metrics."""
    path = folder / METRICS_FILE
    text = path.read_text() if path.exists() else ""
    return [MetricsLine.model_validate_json(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _bring_up(spec: Spec, bench: Bench) -> Path:
    """Start the run and return its folder; it may not be ready yet."""
    settings = [f"services.trainer.training_steps={spec.steps if spec.finishes else spec.steps * BEYOND}"]
    settings += [f"bridge.mode={spec.mode}"] if spec.mode else []
    settings += [
        f"services.{each.partition('@')[0].removesuffix('+')}.restart=on-failure" for each in bench.options.kill
    ]
    settings += [*bench.options.run_set, *spec.settings]
    words = ["up", "--profile", spec.profile, "--detach", "--json"]
    said = _grpo(bench, *words, *(word for each in settings for word in ("--set", each)))
    return bench.fleet.folder / json.loads(said.splitlines()[0])["folder"]


def _follow(folder: Path, spec: Spec, until: float, num_steps: int | None = None) -> None:
    """Return when the run has `num_steps` steps (default: those of the spec, or its end if it is to finish).

    Raises:
        RuntimeError: the run ended in another way, or the limit passed.
    """
    wanted = None if spec.finishes and num_steps is None else num_steps or spec.steps
    while True:
        state = stored_status(look_at(folder)).state if (folder / "state.json").exists() else None
        made = _num_steps(folder)
        if state in ENDED_RUN_STATES if wanted is None else made >= wanted:
            return
        if state in ENDED_RUN_STATES or time.monotonic() > until:
            raise RuntimeError(f"{folder.name} is {state} after {made} of {spec.steps} steps\n{_why(folder)}")
        time.sleep(LOOK_EVERY_S)


def _num_steps(folder: Path) -> int:
    """Number of optimizer steps so far."""
    return sum("train/loss" in line.metrics for line in read_metrics(folder))


def _why(folder: Path) -> str:
    """State, reason and last log lines of every service."""
    services = stored_status(look_at(folder)).services
    return "\n".join(
        f"{service.name} {service.state} {service.why or ''}\n{Path(service.log).read_text(errors='replace')[-600:]}"
        for service in services
        if Path(service.log).exists()
    )


def _starts_s(folder: Path, lines: list[MetricsLine]) -> dict[str, float | None]:
    """Seconds from the start of the daemon until every service was ready, and until the first step had ended."""
    events = record_run.read_events(folder)
    began = next((each.status.started_at for each in events if isinstance(each, Snapshot)), None)
    ready = next(
        (each.time for each in events if isinstance(each, RunChanged) and each.state is RunState.RUNNING), None
    )
    trained = next((line.time for line in lines if line.step > 0), None)
    moments = {"ready_s": ready, "first_step_ended_s": trained}
    return {
        name: round(at - began, 1) if at is not None and began is not None else None for name, at in moments.items()
    }


def _memory(folder: Path) -> dict[str, Any]:
    """Most GPU memory of each service, as the supervisor sampled it, and the least after that: asleep, if it sleeps."""
    most: dict[str, int] = {}
    least: dict[str, int] = {}
    for event in record_run.read_events(folder):
        if isinstance(event, UsageSampled):
            for service, held in event.gpu_memory_bytes.items():
                if held > 0.9 * most.get(service, 0):
                    most[service] = max(most.get(service, 0), held)
                elif held:
                    least[service] = min(least.get(service, held), held)
    sides = {"gpu_gb_at_most": most, "gpu_gb_at_least_later": least}
    return {name: {service: round(held / 1e9, 1) for service, held in side.items()} for name, side in sides.items()}


def _when_free(bench: Bench, before_mb: float | None) -> tuple[float | None, float | None]:
    """Seconds until GPU memory is back to its value before the run, and the difference left (after 5 s at most)."""
    began = time.monotonic()
    while (used_mb := bench.gpu.used_mb()) is not None and before_mb is not None:
        free_s = time.monotonic() - began
        if used_mb <= before_mb + 1 or free_s > 5:
            return round(free_s, 2), round(used_mb - before_mb, 1)
        time.sleep(0.02)
    return None, None


def _grpo(bench: Bench, *words: str, may_fail: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "grpo_tui", *words],
        cwd=bench.fleet.folder,
        env={**bench.fleet.environment, "GRPO_BENCH_STAGE": os.environ.get("GRPO_BENCH_STAGE", "")},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode and not may_fail:
        raise RuntimeError(f"grpo-tui {' '.join(words)}: {done.returncode}\n{done.stdout[-800:]}{done.stderr[-1500:]}")
    return done.stdout + (done.stderr if may_fail else "")

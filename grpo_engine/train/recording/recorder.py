"""Writes metrics.jsonl, rollouts.jsonl, console lines, and trackers; takes no tensors.

Console lines have the stock trainer's wording, so that scripts which parse them keep working.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from grpo_engine.errors import ConfigError
from grpo_engine.serving.reporting import Reporter
from grpo_engine.trackers import Tracker
from grpo_engine.train.recording.line_file import LineFile
from grpo_engine.wire.codec import to_line
from grpo_engine.wire.metrics import HEALTHY_BANDS, MetricsLine, RolloutLine
from grpo_engine.wire.run_folder import METRICS_FILE, ROLLOUTS_FILE

log = logging.getLogger(__name__)


class Recorder:
    """Records steps; a context manager, so that trackers are always closed."""

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        show_times: bool,
        trackers: Sequence[Tracker] = (),
        max_rollout_bytes: int | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        """Open the files.

        Args:
            max_rollout_bytes: size limit of rollouts.jsonl, above which every second step is dropped; None: no limit.
            reporter: takes which of the files cannot be written.

        Raises:
            ConfigError: the folder is not writable.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._metrics = LineFile(folder / METRICS_FILE, reporter=reporter)
            self._rollouts = LineFile(folder / ROLLOUTS_FILE, max_bytes=max_rollout_bytes, reporter=reporter)
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: not writable: {error.strerror}; choose another --run-folder, or another "
                "--log-dir without one"
            ) from error
        self._last_step = 0
        self._has_told_logprobs = False
        self._total_steps = total_steps
        self._show_times = show_times
        self._trackers = trackers

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._rollouts.close()
        for tracker in self._trackers:
            tracker.close()

    def resume_after(self, step: int) -> None:
        """Resume after this step: records of later steps, which are repeated, move to another file."""
        self._last_step = self._metrics.keep_through(step or -1)  # from 0 on, what was before it too
        self._rollouts.keep_through(self._last_step)  # a step's groups are written before its metrics

    def has(self, step: int) -> bool:
        """Whether an earlier trainer recorded this step, and it is only repeated."""
        return step <= self._last_step

    def step(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Record one optimizer step; values that are not finite are logged instead."""
        finite = self._written(step, policy_version, metrics)
        lines = console_lines(step, self._total_steps, finite, show_times=self._show_times)
        self._print("\n".join(["", *lines, ""]))  # no log prefix: parsers match at the start of a line

    def found_logprobs(self, sample_length: int) -> None:
        """Print, once, that batches have log-probabilities of inference.

        Args:
            sample_length: tokens of the first sequence, prompt included.
        """
        if not self._has_told_logprobs:
            self._has_told_logprobs = True
            self._print(f"    [Data] ✓ inference_logprobs found in batch (sample len: {sample_length})\n")

    def record_untrained(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Record what was measured before the first step, if anything, as step 0."""
        if metrics:
            self._written(0, policy_version, metrics)

    def _written(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> dict[str, float]:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name in metrics.keys() - finite.keys():
            log.warning("step %d: %s is %s", step, name, metrics[name])
        self._metrics.append(
            to_line(MetricsLine(time=time.time(), step=step, policy_version=policy_version, metrics=finite))
        )
        for tracker in self._trackers:
            tracker.log(finite, step)
        return finite

    def rollouts(self, lines: Sequence[RolloutLine]) -> None:
        """Record sampled groups for the viewer."""
        for line in lines:
            self._rollouts.append(to_line(line))

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def console_lines(step: int, total: int, metrics: Mapping[str, float], *, show_times: bool) -> list[str]:
    """The lines of one step, as the stock trainer words them (its `Step`, `Loss` and `GRPO` lines)."""
    loss = metrics.get("train/loss", math.nan)
    digits = 6 if abs(loss) < 0.01 else 4
    summary = f"  Loss: {loss:.{digits}f}, Grad norm: {metrics.get('train/grad_norm', math.nan):.4f}"
    if show_times:
        summary += (
            f", Step time: {metrics.get('train/step_time', 0):.2f}s"
            f", Sync time: {metrics.get('train/sync_time', 0):.2f}s"
            f", Data fetch: {metrics.get('train/data_fetch_time', 0):.2f}s"
            f", GPU mem: {metrics.get('train/gpu_memory_gb', 0):.2f}GB"
        )
    ratio, clipped = metrics.get("grpo/mean_ratio", math.nan), metrics.get("grpo/clipped_fraction", math.nan)
    step_lines = [
        f"Step {step}/{total}",
        summary,
        f"    GRPO: ratio={ratio:.3f}, clipped={clipped * 100:.1f}%",
        f"    Reward: mean={metrics.get('reward/mean', math.nan):.3f}, "
        f"alignment: mean={metrics.get('alignment/diff_mean', math.nan):+.4f}, "
        f"abs={metrics.get('alignment/diff_abs_mean', math.nan):.4f}",
    ]
    return [*step_lines, *_alignment_lines(metrics)]


def _alignment_lines(metrics: Mapping[str, float]) -> list[str]:
    """The stock trainer's sentences for log-probabilities that disagree; none where they agree."""
    if HEALTHY_BANDS["alignment/diff_abs_mean"].holds(metrics.get("alignment/diff_abs_mean", 0.0)):
        return []
    inference, training = (metrics.get(f"logprobs/{name}_mean", math.nan) for name in ("inference", "training"))
    return [
        "    [WARNING] This suggests inference_logprobs alignment is wrong",
        f"    [DEBUG] Logprob gap: ref={inference:.3f}, train={training:.3f}",
    ]

"""`grpo-tui simulate`: a run on paper, with the real rules of staleness and recorded or measured speeds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from grpo_engine.errors import GrpoError
from grpo_tui.cli.arguments import JsonOption, SetOption
from grpo_tui.cli.overrides import own_overrides
from grpo_tui.cli.planning import ProfileOption
from grpo_tui.cli.printing import table, write_file, write_line

if TYPE_CHECKING:
    from grpo_engine.simulate.figures import Figures

ValueT = TypeVar("ValueT")
BOUNDS = (0, 1, 2, 4)
"""Of staleness, simulated beside the profile's own."""
MOST_MACHINES = 1024
MOST_ENVIRONMENTS = 20_000
USUAL_STEPS = 40
SIMULATED_WITHIN_S = 120.0
"""Longest time for all rows, which take seconds; in proportion for more `--steps`. With a `max_staleness` of a billion
the steps that are not counted, until that much is sampled ahead, have no end."""


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("simulate")(simulate_command)


def simulate_command(
    profile: ProfileOption,
    set_: SetOption = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="RUN", help="A run, or its folder, with its lengths and speeds.")
    ] = None,
    max_staleness: Annotated[
        str | None, typer.Option(metavar="N,N…", help="Bounds to compare, `unset` among them; default: 0,1,2,4.")
    ] = None,
    machines: Annotated[
        str | None, typer.Option(metavar="N,N…", help="Machines to compare, as 1,2,4,64; default: the profile's GPUs.")
    ] = None,
    gpus_per_machine: Annotated[int | None, typer.Option(min=1, max=1024, help="With --machines; default: 8.")] = None,
    trainers: Annotated[
        int | None, typer.Option(min=1, help="With --machines: GPUs of the trainer; default: what balances both sides.")
    ] = None,
    scale_batch: Annotated[
        bool, typer.Option("--scale-batch", help="With --machines: a batch of the profile for each machine.")
    ] = False,
    environments: Annotated[
        int | None, typer.Option(min=1, max=MOST_ENVIRONMENTS, help="Environments; default: those of the profile.")
    ] = None,
    server_speed: Annotated[
        str | None,
        typer.Option(metavar="N:TOKENS,…", help="Tokens/s of a server at so many sequences, as 1:202,64:9957."),
    ] = None,
    train_speed: Annotated[float | None, typer.Option(min=1e-9, help="Tokens/s of one trainer rank.")] = None,
    update_pause: Annotated[float | None, typer.Option(min=0, help="Seconds of a weight update.")] = None,
    length_mean: Annotated[float | None, typer.Option(min=1, help="Tokens of a completion, on average.")] = None,
    length_spread: Annotated[
        float | None, typer.Option(min=0, help="Standard deviation of the logarithm of lengths; default: 0.5.")
    ] = None,
    reward_seconds: Annotated[float | None, typer.Option(min=0, help="From a completion to its reward.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=5, max=10_000, help="Steps that are counted; default: 40, with --machines 12.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths and variations.")] = 0,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it, as SVG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a profile: throughput, who waits for whom, staleness. Starts nothing, and needs no GPU.

    Speeds and lengths are those of a recorded run (--from), or given by options, or measured figures of the 8B shape
    on H200, as stderr says. Rules of admission, staleness and the buffer are those of the rollout API itself.
    """
    from grpo_engine.simulate.machines import divided
    from grpo_engine.simulate.result import run
    from grpo_engine.simulate.stack import TooLong
    from grpo_tui.profile.loading import load
    from grpo_tui.profile.simulated import assumed_figures, gpus_per_server, layout_of, recorded_figures
    from grpo_tui.view.simulation import Simulated, advice, bars_of, document, rows_of
    from grpo_tui.view.simulation_picture import to_svg

    loaded = load(profile, own_overrides(profile, set_ or []))
    layout = layout_of(loaded)
    figures = assumed_figures(loaded) if from_ is None else recorded_figures(_folder(from_))
    figures = _given(
        figures,
        server_speed=server_speed,
        train_speed=train_speed,
        update_pause=update_pause,
        length_mean=length_mean,
        length_spread=length_spread,
        reward_seconds=reward_seconds,
    )
    if layout.shares_device and machines is None:
        shared = (
            f"trainer and servers share GPUs: a step is taken to last {figures.trainer.beside_sampling:g} times as "
            "long while a server decodes, as SmolLM2-135M with MPS on H200 (docs/simulate.md)"
        )
        figures = replace(figures, sources=(*figures.sources, shared))
    if machines is None and (gpus_per_machine is not None or trainers is not None or scale_batch):
        raise typer.BadParameter("--gpus-per-machine, --trainers and --scale-batch go with --machines")
    counts = [None] if machines is None else _list("--machines", machines, _machines)
    bounds = _bounds(max_staleness, layout.max_staleness, is_few=machines is not None)
    within_s = SIMULATED_WITHIN_S * max(1.0, (steps or 0) / USUAL_STEPS)
    until = time.monotonic() + within_s
    all_ = []
    for count in counts:
        for bound in bounds:
            row = replace(
                layout,
                max_staleness=bound,
                num_environments=environments or layout.num_environments,
                num_steps=steps or (USUAL_STEPS if count is None else 12),
                num_warmup=4 + 2 * (1 + (bound or 0)),
                seed=seed,
            )
            if count is not None:
                row = replace(row, batch_size=layout.batch_size * (count if scale_batch else 1))
                row = divided(
                    row,
                    figures,
                    num_gpus=count * (gpus_per_machine or 8),
                    gpus_per_server=gpus_per_server(loaded),
                    num_ranks=trainers,
                )
            try:
                result = run(row, figures, is_late=lambda: time.monotonic() > until)
            except TooLong as error:
                raise GrpoError(
                    f"{loaded.path}: not simulated within {within_s:g} s (with max_staleness {bound}, {error}): "
                    "compare lower bounds, --max-staleness 0,1,2,4, or lower batch_size"
                ) from None
            all_.append(Simulated(result=result, machines=count))
    lines = advice(all_, layout.max_staleness)
    if svg is not None:
        try:
            write_file(svg, to_svg(loaded.name, all_).encode())
        except OSError as error:
            raise GrpoError(f"{svg} cannot be written: {error.strerror or error}") from None
    if as_json:
        write_line(json.dumps(document(all_, lines, figures.sources), indent=1))
        return
    write_line(table(rows_of(all_)))
    write_line("\n" + "\n".join(bars_of(all_)))
    write_line("\n" + "\n".join(lines))
    write_line("\n" + "\n".join(figures.sources), to_stderr=True)


def _folder(run: str) -> Path:
    """The folder of a run, by its path or its name."""
    if Path(run).is_dir():
        return Path(run)
    from grpo_tui.client.local import find_run

    return find_run(run, also_ended=True).folder


def _bounds(text: str | None, of_profile: int | None, *, is_few: bool) -> Sequence[int | None]:
    """The bounds to compare, each once.

    Args:
        is_few: whether other settings are compared too.
    """
    if text is not None:
        return _list("--max-staleness", text, _bound)
    if is_few:
        return [1 if of_profile is None else of_profile]
    if of_profile is None:
        return [*BOUNDS, None]
    return sorted({*BOUNDS, of_profile})


def _machines(word: str) -> int | None:
    count = int(word)
    if not 1 <= count <= MOST_MACHINES:
        raise ValueError
    return count


def _bound(word: str) -> int | None:
    from grpo_engine.wire.rollouts import LARGEST_WHOLE

    if word == "unset":
        return None
    bound = int(word)
    if not 0 <= bound < LARGEST_WHOLE:
        raise ValueError
    return bound


def _list(option: str, text: str, read: Callable[[str], ValueT]) -> list[ValueT]:
    try:
        return list(dict.fromkeys(read(word.strip()) for word in text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: numbers separated by commas") from None


def _given(
    figures: Figures,
    *,
    server_speed: str | None,
    train_speed: float | None,
    update_pause: float | None,
    length_mean: float | None,
    length_spread: float | None,
    reward_seconds: float | None,
) -> Figures:
    """The figures with those that were given by options, which their sources then say."""
    said = []
    if server_speed is not None:
        points = _points(server_speed)
        figures = replace(figures, server=replace(figures.server, points=points))
        said.append(f"a server {server_speed} tokens/s")
    if train_speed is not None:
        figures = replace(figures, trainer=replace(figures.trainer, tokens_per_s=train_speed))
        said.append(f"training {train_speed:g} tokens/s a rank")
    if update_pause is not None:
        figures = replace(figures, update_s=update_pause)
        said.append(f"weight update {update_pause:g} s")
    if length_mean is not None:
        figures = replace(figures, lengths=replace(figures.lengths, groups=(), mean=length_mean))
        said.append(f"completions of {length_mean:g} tokens")
    if length_spread is not None:
        if figures.lengths.groups:
            raise typer.BadParameter("--length-spread has no effect on recorded lengths: add --length-mean")
        figures = replace(figures, lengths=replace(figures.lengths, spread=length_spread))
        said.append(f"spread of lengths {length_spread:g}")
    if reward_seconds is not None:
        figures = replace(figures, reward_s=reward_seconds)
        said.append(f"rewards {reward_seconds:g} s")
    return replace(figures, sources=(*figures.sources, *(["given: " + ", ".join(said)] if said else [])))


def _points(text: str) -> tuple[tuple[int, float], ...]:
    """`1:202,64:9957` as a curve."""
    try:
        points = tuple((int(count), float(speed)) for count, speed in (word.split(":") for word in text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"--server-speed {text}: write it like 1:202,8:1611,64:9957") from None
    counts = [count for count, _ in points]
    if counts != sorted({*counts}) or counts[0] < 1 or any(not 0 < speed < float("inf") for _, speed in points):
        raise typer.BadParameter(f"--server-speed {text}: rising numbers of sequences, and speeds above 0")
    return points

"""`grpo-tui plan | doctor | profiles`: what would start, and whether it could; starts nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from grpo_engine.config import unreadable
from grpo_tui.cli.arguments import JsonOption, NewOption, SetOption
from grpo_tui.cli.overrides import own_overrides
from grpo_tui.cli.printing import write_line
from grpo_tui.exit_codes import ExitCode
from grpo_tui.paths import LOGS, new_run_id
from grpo_tui.profile.listed import listed_profiles
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.loading import load, require_needs
from grpo_tui.profile.plan import Plan, describe, make_plan, plan_text

ProfileOption = Annotated[str, typer.Option("--profile", "-p", help="Name in ./profiles or installed, or a TOML file.")]


def register(app: typer.Typer) -> None:
    """Add the three commands to the command line."""
    app.command("plan")(plan_command)
    app.command("doctor")(doctor_command)
    app.command("profiles")(profiles_command)


def plan_command(
    profile: ProfileOption, set_: SetOption = None, as_json: JsonOption = False, new: NewOption = False
) -> None:
    """Show what would start, without starting it. The order, and each command with its ports and GPUs.

    Exit code 2 if it could not start on this machine; stderr says what is lacking.
    """
    loaded, plan = planned(profile, own_overrides(profile, set_ or []), is_second=new)
    write_line(json.dumps(describe(plan, loaded), indent=1) if as_json else plan_text(plan, loaded))
    require_needs(loaded)


def doctor_command(
    profile: Annotated[str | None, typer.Option("--profile", "-p", help="Also check this profile here.")] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, and a profile on it. Each finding says what to do."""
    import asyncio

    from grpo_tui.mps_process import of_driver, refusal
    from grpo_tui.profile.doctor import GpuFacts, Machine, examine
    from grpo_tui.profile.doctor_ranks import Links
    from grpo_tui.supervisor.keeper.ports import port_holders
    from grpo_tui.supervisor.preflight import Gpu, look_at_gpus
    from grpo_tui.supervisor.report.machine_facts import nvidia_driver
    from grpo_tui.supervisor.usage.gpus import GpuReader, GpuSample

    loaded, plan = planned(profile, own_overrides(profile, set_ or [])) if profile else (None, None)

    async def seen() -> tuple[GpuSample, list[Gpu], Links]:  # in one event loop, of which a late answer is a part
        reader = GpuReader()
        sample = await reader.sample({})
        return sample, await look_at_gpus(plan.launches if plan else (), reader), await reader.links()

    sample, gpus, links = asyncio.run(seen())
    taken = {gpu.memory.index: gpu for gpu in gpus}
    machine = Machine(
        gpus=[
            GpuFacts(
                index=gpu.index,
                name=gpu.name,
                total_bytes=gpu.memory_total_bytes,
                free_bytes=gpu.memory_total_bytes - gpu.memory_used_bytes,
                uuid=gpu.uuid,
                holders=taken[gpu.index].in_words(None) if gpu.index in taken else (),
                left_over_bytes=taken[gpu.index].left_over_bytes if gpu.index in taken else 0,
            )
            for gpu in sample.gpus
            if gpu.memory_total_bytes is not None and gpu.memory_used_bytes is not None
        ],
        gpu_note=sample.note,
        driver=nvidia_driver(),
        port_holders=lambda ports: [
            each.words() for each in port_holders(ports) if not each.owner.is_left_over(None, None)
        ],
        port_leftovers=lambda ports: [
            each.words() for each in port_holders(ports) if each.owner.is_left_over(None, None)
        ],
        mps_refusal=lambda gpus: of_driver(lambda nvml: refusal(nvml, gpus)),
        links=links,
    )
    findings = examine(machine, loaded, plan, LOGS)
    if as_json:
        levels = {"ok": "ok", "warning": "note", "error": "problem"}  # the documented names of the JSON
        rows = [
            {"check": each.id, "level": levels[each.severity], "text": each.text, "hint": each.hint or ""}
            for each in findings
        ]
        write_line(json.dumps(rows, indent=1))
    else:
        marks = {"ok": "✓", "warning": "·", "error": "✗"}
        for finding in findings:
            hint = f"\n  {'':14} → {finding.hint}" if finding.hint else ""
            write_line(f"{marks[finding.severity]} {finding.id:<14} {finding.text}{hint}")
    problems = sum(finding.severity == "error" for finding in findings)
    if problems and not as_json:
        noun = "problem" if problems == 1 else "problems"
        write_line(f"\n{problems} {noun} to fix" + ("" if profile is None else f" before {profile} can start here"))
    if problems:
        raise typer.Exit(ExitCode.FAILED)


def profiles_command(as_json: JsonOption = False) -> None:
    """List the available profiles with their descriptions."""
    rows = []
    for listed in listed_profiles():
        text = str(listed.table.get("description", ""))
        if (error := listed.error) is not None:
            why = unreadable(listed.path, error) if isinstance(error, OSError) else error
            text = f"not valid: {str(why).splitlines()[0]}"
        rows.append((listed.name, str(listed.path), text))
    if as_json:
        write_line(
            json.dumps([{"name": name, "file": file, "description": text} for name, file, text in rows], indent=1)
        )
        return
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, _, text in rows:
        write_line(f"{name:<{width}}  {text}")


def planned(profile: str, overrides: list[str], *, is_second: bool = False) -> tuple[LoadedProfile, Plan]:
    """Load a profile and make its plan for a folder in ./logs, as a start would; a second run on free ports."""
    loaded = load(profile, overrides)
    if is_second or loaded.chosen_ports:
        from grpo_tui.client.second_run import chosen_ports, free_ports

        moves = free_ports(loaded, LOGS) if is_second else {}
        loaded = load(profile, overrides, moved_ports=moves, chosen_ports=chosen_ports(loaded, moves, LOGS))
    return loaded, make_plan(loaded, run_folder=Path(LOGS) / new_run_id(loaded.name), python=sys.executable)

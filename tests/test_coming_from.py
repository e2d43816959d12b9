"""docs/coming-from.md: what it says of flags, defaults, metrics and commands is so.

Its form: every table ends in a column `here`, whose cells are `the same`, `the same: …` or `differs: …, because …`. A
table whose first column is `flag of train` (or of another command of grpo-engine) has the documented default in its
second. A fenced block of commands is marked with what the test does: `bash run` (runs it, exit code 0), `bash serve`
(starts it, ends it with its section), `bash gpu` (reads its flags only), `bash theirs` (nothing: it is another
program's). Commands run in the order of the page, those below one heading in one folder, with the replacements below.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import typer
from ports import free_ports

from grpo_engine import aliases
from grpo_engine.check.config import CheckConfig
from grpo_engine.colocate.config import TrainerConfig
from grpo_engine.config import Config
from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.export.config import ExportConfig
from grpo_engine.flags import add_flags, parse_flags
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.server.config import ServerConfig
from grpo_engine.train.launch import LaunchConfig
from grpo_engine.wire.metrics import METRIC_NAMES, SYNC_METRICS, USE_METRICS
from grpo_tui.cli import build_app
from grpo_tui.cli.overrides import with_set

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
DOCUMENTS = (
    "Co-located GRPO Training",
    "GRPO Example Trainer",
    "GRPO: Generalized Reward-Conditioned Policy Optimization",
    "Distributed Async GRPO",
    "GRPO Trainer",
)
COMMANDS: Mapping[str, type[Config]] = {
    "api": ApiConfig,
    "server": ServerConfig,
    "env": EnvironmentConfig,
    "atropos-env": AtroposEnvConfig,
    "train": TrainerConfig,
    "launch": LaunchConfig,
    "check": CheckConfig,
    "export": ExportConfig,
}
METRICS = {*METRIC_NAMES, *SYNC_METRICS, *USE_METRICS}
MARKS = ("run", "serve", "gpu", "theirs")

PROGRAMS: Mapping[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
ALIASES = {"run-api": "api", "run-colocated-grpo": "train", "atropos-grpo": "train", "atropos-grpo-run": "launch"}
"""Programs that are a command of grpo-engine."""
ON_A_CPU = {
    "server": ["--engine", "torch", "--device", "cpu", "--threads", "1"],
    "train": ["--device", "cpu"],
    "launch": ["--engine", "torch", "--device", "cpu"],
}
"""Flags that the test adds where a command runs."""
SMALL = {
    "NousResearch/Hermes-3-Llama-3.1-8B": "local/tiny",
    "Qwen/Qwen3-4B-Instruct-2507": "local/tiny",
    "Qwen/Qwen2.5-3B-Instruct": "local/tiny",
    "gsm8k": "sort6",
}
"""A locally made model and task, instead of those from the hub."""
PORTS = ("8000", "8001", "8002", "9001", "9002")
"""Replaced by free ones."""


@dataclass(frozen=True)
class Block:
    """A fenced block of commands."""

    mark: str
    text: str


@dataclass(frozen=True)
class Section:
    """What stands below one heading, up to the next heading of any depth."""

    document: str
    heading: str
    blocks: list[Block] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)
    """Cells by line, the header first."""


def sections() -> list[Section]:
    found = [Section("", "")]
    fence: list[str] | None = None
    mark = document = previous = ""
    for line in PAGE.splitlines():
        if fence is not None:
            if line == "```":
                found[-1].blocks.append(Block(mark, "\n".join(fence)))
                fence = None
            else:
                fence.append(line)
        elif line.startswith("```"):
            fence, mark = [], line[3:]
        elif heading := re.match(r"(#+) (.*)", line):
            document = heading[2] if heading[1] == "##" else document
            found.append(Section(document, heading[2]))
        elif line.startswith("|"):
            cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not previous.startswith("|"):
                found[-1].tables.append([])
            if not set("".join(cells)) <= set("-: "):
                found[-1].tables[-1].append(cells)
        previous = line
    assert fence is None, "a block is not closed"
    return found


SECTIONS = sections()
TABLES = [(section, table) for section in SECTIONS for table in section.tables]


def words_of(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def commands_of(block: Block, program: str) -> Iterator[list[str]]:
    """The arguments of each call of `program`, lines joined, variables of the shell before it left out."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and words[0] == program:
            yield [word for word in words[1:] if word != "&"]


def defaults(model: type[Config]) -> dict[str, str]:
    """Every flag with the default that `--help` says."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, model)
    said = {flag: action.help or "" for action in parser._actions for flag in action.option_strings}
    return {flag: re.sub(r".*\((?:default: )?(.*?)\)$", r"\1", text, flags=re.DOTALL) for flag, text in said.items()}


def test_every_document_has_its_part() -> None:
    assert [heading for heading in re.findall(r"^## (.*)", PAGE, re.MULTILINE) if heading in DOCUMENTS] == [*DOCUMENTS]


def test_every_row_says_the_same_or_how_it_differs_and_why() -> None:
    for section, (header, *rows) in TABLES:
        assert header[-1] == "here", (section.heading, header)
        for row in rows:
            assert len(row) == len(header), row
            assert re.fullmatch(r"the same(: .+)?|differs: .+, because .+", row[-1]), row


def test_flags_that_are_the_same_exist_with_their_default() -> None:
    num_checked = 0
    for section, (header, *rows) in TABLES:
        if not header[0].startswith("flag of "):
            continue
        flags = defaults(COMMANDS[header[0].removeprefix("flag of ")])
        for row in rows:
            if not row[-1].startswith("the same"):
                continue
            names = [word for word in words_of(row[0]) if word.startswith("-")]
            assert set(names) <= set(flags), (section.heading, row)
            [expected] = words_of(row[1]) or [row[1]]
            assert flags[names[0]].lower() == expected.lower(), (section.heading, row, flags[names[0]])
            num_checked += 1
    assert num_checked > 20


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("run_colocated_grpo.py", ["train", "--weight-bridge-mode", "colocate"]),
        ("grpo_colocated.py", ["train", "--weight-bridge-mode", "colocate"]),
        ("example_trainer/grpo.py", ["train"]),
        ("example_trainer/run.py", ["launch"]),
        ("example_trainer/vllm_api_server.py", ["server"]),
        ("environments/gsm8k_server.py", ["env", "--task", "gsm8k"]),
    ],
)
def test_files_that_are_run_by_their_path_are_programs_of_ours(
    file: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliases, "main", lambda: 7)
    monkeypatch.setattr(sys, "argv", [file, "serve", "--vllm-port=1"])
    with pytest.raises(SystemExit, match="7"):
        runpy.run_path(str(ROOT / file), run_name="__main__")
    assert sys.argv[1 : len(words) + 1] == words


def test_metrics_that_are_the_same_are_written() -> None:
    for section, (header, *rows) in TABLES:
        if header[0] == "metric":
            named = {word for row in rows if row[-1].startswith("the same") for word in words_of(row[0])}
            assert named <= METRICS, section.heading


def test_every_block_says_what_a_test_does_with_it() -> None:
    for section in SECTIONS:
        for block in section.blocks:
            language, _, mark = block.mark.partition(" ")
            assert language != "bash" or mark in MARKS, (section.heading, block)


def test_the_flags_of_every_command_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    group = typer.main.get_group(build_app())
    num_checked = 0
    for block in (block for section in SECTIONS for block in section.blocks if block.mark.startswith("bash")):
        for command, *argv in commands_of(block, "grpo-engine"):
            own = argv[1:] if argv[:1] == ["serve"] else argv  # as `grpo-engine env serve`
            parse_flags(COMMANDS[command], own, prog=command, description="")
            num_checked += 1
        for alias, command in ALIASES.items():
            for argv in commands_of(block, alias):
                parse_flags(COMMANDS[command], argv, prog=command, description="")
                num_checked += 1
        for words in commands_of(block, "grpo-tui"):
            argv = with_set(words)
            context = group.make_context("grpo-tui", list(argv))
            if argv and not argv[0].startswith("-"):
                _, command_of_group, rest = group.resolve_command(context, list(argv))
                assert command_of_group is not None
                command_of_group.make_context(argv[0], list(rest), parent=context)
            num_checked += 1
    assert num_checked >= 20


RUNNABLE = [section for section in SECTIONS if any(block.mark == "bash run" for block in section.blocks)]


@pytest.mark.extended("test_the_flags_of_every_command_are_understood reads the same commands")
@pytest.mark.slow
@pytest.mark.parametrize("section", RUNNABLE, ids=lambda section: section.heading)
def test_commands_of_the_page_run(section: Section, tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    replaced = {**SMALL, **dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))}
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for number, block in enumerate(block for block in section.blocks if block.mark in ("bash run", "bash serve")):
            text = re.sub(rf"\b({'|'.join(map(re.escape, replaced))})\b", lambda found: replaced[found[1]], block.text)
            text = re.sub(r"--training-steps \d+", "--training-steps 3", text)
            log = tmp_path / f"{number}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    ["bash", "-ec", text],
                    cwd=tmp_path,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            servers.append(process)
            if block.mark == "bash run":
                logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
                assert process.wait() == 0, f"{text}\n{log.read_text()}\n{logs}"
    finally:
        _end(servers)


def _environment(folder: Path) -> dict[str, str]:
    """The programs as the page names them, in front of those of the path, with `ON_A_CPU`."""
    programs = folder / "bin"
    programs.mkdir()
    for program, target in PROGRAMS.items():
        module, _, function = target.partition(":")
        command = "sys.argv[1]" if program == "grpo-engine" else repr(ALIASES.get(program))
        (programs / program).write_text(
            f"#!{sys.executable}\nimport sys\nfrom {module} import {function} as main\n"
            f"sys.argv += {ON_A_CPU!r}.get({command}, [])\nraise SystemExit(main())\n"
        )
        (programs / program).chmod(0o755)
    for name in ("configs", "training_configs"):
        (folder / name).symlink_to(ROOT / name)
    return {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

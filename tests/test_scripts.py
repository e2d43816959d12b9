"""The scripts: what they write is what they promise, and it installs without a package index."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pydantic
import pytest

from grpo_engine.environments.tasks.jsonl import Jsonl

SCRIPTS = Path(__file__).parents[1] / "scripts"
PTX, MACHINE_CODE = 1, 2


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module pack_offline, found beside its own imports."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("pack_offline")


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """A container of GPU code: (kind, architecture, payload) of each entry."""
    body = b""
    for kind, architecture, payload in entries:
        header = bytearray(64)
        struct.pack_into("<HHIQ", header, 0, kind, 0x101, len(header), len(payload))
        struct.pack_into("<I", header, 28, architecture)
        body += bytes(header) + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(section: bytes) -> bytes:
    """A 64-bit ELF file with one section of GPU code."""
    names = b"\0.shstrtab\0.nv_fatbin\0"
    headers_at = 64 + len(names) + len(section)
    elf = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", elf, 40, headers_at)
    struct.pack_into("<HHH", elf, 58, 64, 3, 1)
    no, strings, code = bytearray(64), bytearray(64), bytearray(64)
    struct.pack_into("<IIQQQQ", strings, 0, 1, 3, 0, 0, 64, len(names))
    struct.pack_into("<IIQQQQ", code, 0, 11, 1, 0, 0, 64 + len(names), len(section))
    return bytes(elf) + names + section + bytes(no + strings + code)


LIBRARY = library(
    container((MACHINE_CODE, 80, b"eighty--"), (MACHINE_CODE, 90, b"ninety--"), (PTX, 90, b"ptx-90--"))
    + bytes(8)  # containers are aligned
    + container((MACHINE_CODE, 80, b"old-code"), (PTX, 80, b"old-ptx-"), (PTX, 100, b"new-ptx-"))
)


def test_pruning_keeps_the_code_of_one_gpu_and_where_there_is_none_what_its_driver_can_compile(
    scripts: ModuleType,
) -> None:
    pruned = bytearray(LIBRARY)
    assert scripts.prune(pruned, 90) == 4 * 8
    assert len(pruned) == len(LIBRARY)
    payloads = (b"eighty--", b"ninety--", b"ptx-90--", b"old-code", b"old-ptx-", b"new-ptx-")
    assert [payload for payload in payloads if payload in pruned] == [b"ninety--", b"old-ptx-"]


def test_what_is_no_library_of_cuda_stays_as_it_is(scripts: ModuleType) -> None:
    for content in (b"", b"not an ELF file at all", library(b"")):
        same = bytearray(content)
        assert scripts.prune(same, 90) == 0
        assert same == content


def test_a_slimmed_wheel_installs_and_its_record_holds(scripts: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    files = {
        "thing/__init__.py": b"",
        "thing/kernels.so": LIBRARY,
        "thing/only_for_others.so": b"x" * 100,
        "thing-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
        "thing-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{name},sha256={digest(content)},{len(content)}" for name, content in files.items()]
    files["thing-1.0.dist-info/RECORD"] = "\n".join([*rows, "thing-1.0.dist-info/RECORD,,", ""]).encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    scripts.slim(wheel, 90, ("thing/only_for",))
    with zipfile.ZipFile(wheel) as archive:
        assert "thing/only_for_others.so" not in archive.namelist()
        assert b"eighty--" not in archive.read("thing/kernels.so")
        for name, hashed, size in csv.reader(archive.read("thing-1.0.dist-info/RECORD").decode().splitlines()):
            if hashed:
                assert hashed == f"sha256={digest(archive.read(name))}"
                assert int(size) == len(archive.read(name))
    before = wheel.read_bytes()
    scripts.slim(wheel, 90, ("thing/only_for",))  # nothing left to take away
    assert wheel.read_bytes() == before


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


@pytest.mark.parametrize(
    ("flags", "left_out", "carried"),
    [
        ((), set(), {"torch", "nvidia-nccl-cu13", "vllm", "flashinfer-python", "textual"}),
        (("--torch-is-there",), {"torch", "nvidia-nccl-cu13", "triton"}, {"vllm", "nvidia-ml-py", "flashinfer-python"}),
        (("--lean",), {"flashinfer-python", "nvidia-cutlass-dsl"}, {"vllm", "torch", "xgrammar"}),
        (("--without", "pyarrow"), {"pyarrow"}, {"vllm"}),
    ],
)
def test_what_is_carried_follows_from_what_is_there(
    scripts: ModuleType, flags: tuple[str, ...], left_out: set[str], carried: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pack_offline.py", "out", *flags])
    names = {pin.partition("==")[0] for pin in scripts._pins(scripts.PINS.read_text(), scripts._options())}
    assert not names & left_out
    assert carried <= names


def test_what_the_other_machine_has_in_the_same_release_is_not_carried(
    scripts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there.txt"
    there.write_text("torch==2.11.0+cu130\nPyYAML==6.0.3\nnumpy==1.26.4\nodd @ file:///x\n")
    monkeypatch.setattr(sys, "argv", ["pack_offline.py", "out", "--there", str(there)])
    pins = "torch==2.11.0\npyyaml==6.0.3\nnumpy==2.3.5\n"
    assert list(scripts._pins(pins, scripts._options())) == ["numpy==2.3.5"]


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts with one wheel in them, and a file."""
    folder = tmp_path_factory.mktemp("carried")
    bundle = tmp_path_factory.mktemp("bundle")
    (bundle / "wheels").mkdir()
    (bundle / "environment").write_text("VLLM_USE_DEEP_GEMM=0\n")
    (bundle / "also").mkdir()
    (bundle / "also" / "problems.jsonl").write_text("{}\n" * 1000)
    files = {
        "grpo_tui/__init__.py": "",
        "grpo_tui/__main__.py": "import os, sys; print('asked', sys.argv[1:], os.environ['VLLM_USE_DEEP_GEMM'])",
        "grpo_tui-0.0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: grpo-tui\nVersion: 0.0.1\n",
        "grpo_tui-0.0.1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "grpo_tui-0.0.1.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(bundle / "wheels" / "grpo_tui-0.0.1-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    code = "import sys, pathlib, pack_offline; pack_offline.write_parts(*map(pathlib.Path, sys.argv[1:3]), 4096)"
    command = [sys.executable, "-c", code, str(bundle), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(SCRIPTS)})
    (folder / "unpack_offline.sh").write_bytes((SCRIPTS / "unpack_offline.sh").read_bytes())
    return folder


def unpack(carried: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(carried / "unpack_offline.sh"), str(site)]
    environment = {**os.environ, "PYTHON": sys.executable, "PIP_INDEX_URL": "http://127.0.0.1:9/"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_parts_are_joined_installed_without_an_index_and_asked_for_the_doctor(carried: Path, tmp_path: Path) -> None:
    assert len(list(carried.glob("part-*"))) > 1
    done = unpack(carried, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("asked ['doctor'] 0\n")
    assert (tmp_path / "site" / "also" / "problems.jsonl").is_file()
    assert f"PYTHONPATH={tmp_path}/site" in (tmp_path / "site" / "environment.sh").read_text()
    assert not list((tmp_path / "site").glob(".unpacked-*"))


@pytest.mark.slow
def test_a_damaged_part_is_named_before_anything_is_installed(carried: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    for file in carried.iterdir():
        (parts / file.name).write_bytes(file.read_bytes())
    (parts / "part-001").write_bytes(b"\0" * (parts / "part-001").stat().st_size)
    done = unpack(parts, tmp_path / "site")
    assert done.returncode == 1
    assert "part-001: FAILED" in done.stdout + done.stderr
    assert "carry it once more" in done.stderr
    assert not list((tmp_path / "site").iterdir())


@pytest.mark.slow
@pytest.mark.extended("test_environments_tasks reads problems of that form")
def test_word_problems_are_written_as_the_task_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    path = tmp_path / "gsm_symbolic.jsonl"
    subprocess.run([sys.executable, str(SCRIPTS / "make_gsm_symbolic.py"), str(path), "--count", "40"], check=True)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["question"] for record in records}) == 40
    task = Jsonl(path=path)
    item = next(task.items(0))
    assert task.score(item, f"So the answer is {item.answer}.") == 1
    assert task.score(item, "I do not know.") == 0


@pytest.fixture
def durations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("test_durations")


def test_both_tiers_of_the_tests_stay_within_their_budget(durations: ModuleType) -> None:
    files = durations.load()
    for tier, budget_s in durations.BUDGETS_S.items():
        slowest = sorted(((times[tier], name) for name, times in files.items() if tier in times), reverse=True)[:8]
        assert durations.expected_s(files, tier) <= budget_s, f"make the slowest faster, or extended: {slowest}"


def test_every_test_file_has_a_recorded_duration(durations: ModuleType) -> None:
    root = SCRIPTS.parent
    files = {str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")}
    files = {name for name in files if not name.startswith("tests/gpu/")}
    recorded = durations.load().keys()
    assert not files - recorded, "not recorded: make test-all, then scripts/test_durations.py record"
    assert not recorded - files, "no longer there: make test-all, then scripts/test_durations.py record"


def test_recording_durations_names_the_files_that_grew(
    durations: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = '<testcase classname="tests.test_scripts" name="a" time="{}"/>'
    paths = [tmp_path / "fast.xml", tmp_path / "extended.xml"]
    for path, seconds in zip(paths, (12.0, 7.0), strict=True):
        path.write_text(f"<testsuites><testsuite>{case.format(seconds)}{case.format(0.5)}</testsuite></testsuites>")
    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.json")
    (tmp_path / "durations.json").write_text('{"files": {"tests/test_scripts.py": {"fast": 2.0, "extended": 7.0}}}')

    durations.record(paths)

    assert durations.load() == {"tests/test_scripts.py": {"fast": 12.5, "extended": 7.5}}
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "test_scripts" in line] == ["  tests/test_scripts.py: 12 s, recorded 2 s"]

    durations.report("fast", paths[0], 700.4)
    assert capsys.readouterr().out == "fast tests: 700 s, budget 600 s on two quiet cores\n"


def test_every_extra_installs_something_that_is_used() -> None:
    root = Path(__file__).parent.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_all = set(extras["all"][0].removeprefix("grpo-tui[").removesuffix("]").split(","))
    assert of_all == {"vllm", "data", "trackers"}
    names_of_readers = {"all", "example_trainer", "async_rl"}
    assert all(set(re.findall(r"[a-z]+(?=[],])", extras[name][0])) <= of_all for name in names_of_readers)
    files = [root / "Makefile", root / "README.md", *root.glob("grpo_*/**/*.py"), *root.glob("docs/*.md")]
    named = "\n".join(re.findall(r"\[([a-z,-]+)\]'", "\n".join(file.read_text() for file in files)))
    assert not {name for name in extras.keys() - names_of_readers if name not in re.split(r"[,\n]", named)}


DOCKERFILE = Path(__file__).parents[1] / "docker" / "Dockerfile.grpo"


def copied_by_the_image() -> list[str]:
    lines = [line.split() for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY")]
    return [source for _, *sources, _ in lines for source in sources]


def test_the_image_copies_what_its_installation_needs() -> None:
    root = DOCKERFILE.parents[1]
    text = DOCKERFILE.read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())
    copied = copied_by_the_image()
    assert [name for name in copied if not (root / name).exists()] == []
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["packages"], *wheel["force-include"], project["project"]["readme"]]
    needed += [*project["project"]["license-files"], *re.findall(r"-c (\S+)", text)]
    assert set(needed) <= set(copied)
    [extras] = re.findall(r"\"\.\[(.*?)\]\"", text)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])


@pytest.mark.extended("test_the_image_copies_what_its_installation_needs checks what is copied")
@pytest.mark.slow
def test_what_the_image_copies_installs_and_starts_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Without the requirements, which are those of this environment: they are behind the new one."""
    root, context = DOCKERFILE.parents[1], tmp_path / "context"
    context.mkdir()
    for name in copied_by_the_image():
        (shutil.copytree if (root / name).is_dir() else shutil.copyfile)(root / name, context / name)
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*pip, str(context)], check=True, timeout=200)
    [packages] = environment.glob("lib/python3*/site-packages")
    (packages / "behind.pth").write_text(str(Path(pydantic.__file__).parents[1]))
    app = tmp_path / "app"
    app.mkdir()
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for words in (["grpo-tui", "profiles"], ["grpo-engine", "train", "--help"]):
        ended = subprocess.run(
            [environment / "bin" / words[0], *words[1:]], cwd=app, env=bare, capture_output=True, text=True, check=True
        )
        assert ended.stdout
    where = [python, "-c", "import grpo_engine; print(grpo_engine.__file__)"]
    assert str(environment) in subprocess.run(where, cwd=app, env=bare, capture_output=True, text=True).stdout

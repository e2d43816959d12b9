"""Checkpoints, journals and records from elsewhere: none of their files hangs a trainer or fills its memory."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from training import made_up_groups, settings, trainee

from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.stock_bridge_file import is_stock_file, read_stock_file
from grpo_engine.bridges.transport.checkpoint_folder import newest_checkpoint
from grpo_engine.errors import BridgeError, CheckpointError, ConfigError, ModelError, PeerError
from grpo_engine.models.optimizer_state import fault_of_state
from grpo_engine.models.stored_weights import read_stored
from grpo_engine.rollouts.storage.store import Store
from grpo_engine.server import adapter_files
from grpo_engine.server.adapter_files import check_adapter
from grpo_engine.server.torch.weights import ServedWeights
from grpo_engine.train.batch import trainable_batch
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.journal import Journal, JournalEntry
from grpo_engine.train.checkpointing.resuming import used_versions
from grpo_engine.train.checkpointing.state_files import read_state, write_state
from grpo_engine.train.recording import line_file
from grpo_engine.train.recording.line_file import LineFile
from grpo_engine.train.step import gradient_step
from grpo_engine.wire.checkpoints import CheckpointMarker, JournalHead
from grpo_engine.wire.codec import write_json_atomically
from grpo_engine.wire.handover import HandoverNote
from grpo_engine.wire.run_folder import (
    CHECKPOINT_MARKER,
    HANDOVER_CURRENT,
    HANDOVER_NOTE,
    USED_VERSIONS_FILE,
    journal_file,
)
from grpo_tui.client import lives
from grpo_tui.client.local import StartRefused
from grpo_tui.profile.plan_file import Plan

MARKER = CheckpointMarker(step=6, policy_version=6, model_name="m", bridge="none", lease="", settings={})
HEAD = JournalHead(step=7, policy_version=6, lease="", environments={}, settings={})


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def sparse(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(40 << 30)


def lists(path: Path) -> None:
    path.write_bytes(b"[" + b"[]," * 5_000_000 + b"[]]")


HOSTILE = pytest.mark.parametrize("damage", [pipe, sparse, lists])


@pytest.fixture
def step_6(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / "step_6"
    folder.mkdir(parents=True)
    write_json_atomically(folder / CHECKPOINT_MARKER, MARKER)
    state = {"masters": {"a": torch.zeros(2)}, "optimizer": {}, "random": [], "bad_steps": 0, "loss_scale": {}}
    write_state(folder, "trainer", state)
    checkpoints.load(folder, model_name="m")
    return folder


@HOSTILE
@pytest.mark.parametrize("name", [CHECKPOINT_MARKER, "trainer.json"])
def test_a_file_of_a_checkpoint_neither_hangs_its_reader_nor_fills_the_memory(
    step_6: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(step_6 / name)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"not a regular file|longer than|more than"):
            checkpoints.load(step_6, model_name="m")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300 << 20


def test_a_pipe_in_place_of_tensors_is_not_waited_for(step_6: Path) -> None:
    pipe(step_6 / "trainer-00001.safetensors")
    with pytest.raises(OSError, match="not a regular file"):
        read_state(step_6, "trainer")


def of_other_shape(state: dict[str, Any]) -> None:
    state["exp_avg_sq"] = torch.zeros(3)


def of_no_count(state: dict[str, Any]) -> None:
    state["step"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda state: state.pop("exp_avg"), "exp_avg is missing"),
        (lambda state: state.pop("step"), "step is missing"),
        (of_no_count, "step is no count"),
        (of_other_shape, r"exp_avg_sq is \(3,\) instead of \(32, 32\)"),
        (lambda state: state.update(exp_avg=[1.0]), r"exp_avg is a list instead of \(32, 32\)"),
    ],
)
def test_an_optimizer_state_that_does_not_fit_is_refused_at_the_start_and_names_its_entry(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], words: str
) -> None:
    one = trainee(settings(batch_size=2, gradient_accumulation_steps=4))
    gradient_step(one, trainable_batch(made_up_groups(0), 32, vocab_size=64), step=0, policy_version=0)
    one.save(tmp_path, step=1, policy_version=1, lease="", settings={})
    state = checkpoints.load(tmp_path / "step_1", model_name="test/model")
    damage(state.optimizer["state"][0])
    with pytest.raises(CheckpointError, match=rf"the optimizer's state of model\.embed_tokens\.weight: {words}"):
        trainee(one.config).restore(state)


def test_8_bit_state_has_as_many_scales_as_its_kernel_reads() -> None:
    parameter = torch.zeros(64, 65)
    optimizer = torch.optim.SGD([parameter])  # stands for bitsandbytes', which needs a GPU
    codes = torch.zeros(64, 65, dtype=torch.uint8)
    state = {"step": 1, "state1": codes, "state2": codes}
    state |= {name: torch.zeros(17) for name in ("absmax1", "absmax2")}
    state |= {name: torch.zeros(256) for name in ("qmap1", "qmap2")}
    assert fault_of_state(optimizer, parameter, state) is None
    fault = fault_of_state(optimizer, parameter, {**state, "absmax2": torch.zeros(16)})
    assert fault == "absmax2 is (16,) instead of (17,)"


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_checkpoint_names_no_tensors_outside_its_folder(step_6: Path, is_absolute: bool) -> None:
    other = step_6.parent / "trainer-00001.safetensors"
    (step_6 / other.name).rename(other)
    state = json.loads((step_6 / "trainer.json").read_text())
    state["files"] = [str(other) if is_absolute else f"../{other.name}"]
    (step_6 / "trainer.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"trainer-00001.safetensors' is not a file of this folder"):
        checkpoints.load(step_6, model_name="m")


def test_a_checkpoint_names_nothing_of_torch_but_data_types(step_6: Path) -> None:
    (step_6 / "trainer.json").write_text('{"files": [], "state": {"dtype": "load"}}')
    with pytest.raises(ValueError, match=r"unknown kind of value: 'dtype': 'load'"):
        read_state(step_6, "trainer")


@HOSTILE
def test_notes_beside_checkpoints_and_weights_are_read_only_as_far_as_they_can_be(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(tmp_path / USED_VERSIONS_FILE)
    with pytest.raises(CheckpointError, match=r"not a regular file|longer than|more than"):
        used_versions(tmp_path)
    (tmp_path / HANDOVER_CURRENT).mkdir()
    damage(tmp_path / HANDOVER_CURRENT / HANDOVER_NOTE)
    assert newest_checkpoint(tmp_path, "m") is None


@HOSTILE
def test_a_batch_of_the_journal_is_read_only_as_far_as_one_can_be(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    journal = Journal(tmp_path)
    journal.keep(JournalEntry(head=HEAD, groups=made_up_groups(0)))
    assert journal.read(7) is not None
    damage(journal_file(tmp_path, 7))
    for read in (lambda: journal.read(7), lambda: journal.heads(after=6)):
        with pytest.raises(CheckpointError, match=r"step_7.jsonl: unreadable"):
            read()


def test_a_hand_over_with_a_pipe_in_place_of_tensors_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / HANDOVER_CURRENT
    path.mkdir()
    write_json_atomically(path / HANDOVER_NOTE, HandoverNote(policy_version=1, model="m", num_tensors=1))
    pipe(path / "model.safetensors")
    assert newest_checkpoint(tmp_path, "m") is None


def test_a_pipe_in_place_of_a_bridge_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe(tmp_path / "bridge.json")
    assert not is_stock_file(tmp_path / "bridge.json")
    for read in (read_bridge_file, read_stock_file):
        with pytest.raises(BridgeError, match="cannot be read: not a regular file"):
            read(tmp_path / "bridge.json")


def test_a_bridge_file_that_is_nested_too_deep_is_none_of_a_stock_server(tmp_path: Path) -> None:
    (tmp_path / "bridge.json").write_text('{"param_mappings":' + "[" * 200_000)
    assert not is_stock_file(tmp_path / "bridge.json")


def test_a_batch_of_the_journal_with_a_million_wrong_groups_is_one_error(tmp_path: Path) -> None:
    journal_file(tmp_path, 7).parent.mkdir()
    journal_file(tmp_path, 7).write_bytes(HEAD.model_dump_json().encode() + b"\n[" + b"0," * 100_000 + b"0]\n")
    with pytest.raises(CheckpointError, match=r"step_7.jsonl: unreadable") as refused:
        Journal(tmp_path).read(7)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("wrong", [{"argv": [0] * 100_000}, {"env": dict.fromkeys(map(str, range(100_000)), 0)}])
def test_a_plan_of_wrong_values_is_one_error(wrong: dict[str, object]) -> None:
    plan = json.loads(Plan(profile_name="p", profile_folder=Path(), launches=()).to_json())
    with pytest.raises(PeerError, match=r"damaged, or of another version: launches\.0") as refused:
        Plan.from_json(json.dumps({**plan, "launches": [wrong]}))
    assert len(str(refused.value)) < 1000


def test_a_store_whose_journal_has_sqlite_delete_a_file_of_ours_is_refused(tmp_path: Path) -> None:
    path, precious = tmp_path / "rollouts.sqlite", tmp_path / "precious"
    precious.touch()
    Store(path).close()
    magic, name = bytes.fromhex("d9d505f920a163d7"), bytes(precious)
    num_pages, behind = path.stat().st_size // 16384, 0x40000000 // 16384 + 1
    header = (magic + struct.pack(">5I", 0, 0, num_pages, 512, 16384)).ljust(512, b"\0")
    super_journal = struct.pack(">I", behind) + name + struct.pack(">2I", len(name), sum(name)) + magic
    (tmp_path / "rollouts.sqlite-journal").write_bytes(header + super_journal)
    with pytest.raises(ConfigError, match="its journal names another file, which SQLite would delete: move it away"):
        Store(path)
    assert precious.exists()


def test_a_store_with_sql_of_somebody_else_in_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.sqlite"
    Store(path).close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DROP TABLE run")
        endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) AS record FROM c"
        database.execute(f"CREATE VIEW run AS {endless}")
    with pytest.raises(ConfigError, match=r"has a view 'run' that no rollout API has made: move it away"):
        Store(path)


@pytest.mark.parametrize(
    ("name", "sql"),
    [
        (
            "run",
            "CREATE TABLE run (id INTEGER PRIMARY KEY, record TEXT GENERATED ALWAYS AS (printf('%.*c', 1e9, 'x')))",
        ),
        ("leases", "CREATE TABLE leases (id TEXT PRIMARY KEY, record TEXT CHECK (length(printf('%.*c', 1e9, 'x'))))"),
        ("groups_by_place", "CREATE INDEX groups_by_place ON groups (length(printf('%.*c', 1e9, place)))"),
        ("other", "CREATE VIRTUAL TABLE other USING fts5(a)"),
    ],
)
def test_a_store_whose_columns_are_computed_is_refused(tmp_path: Path, name: str, sql: str) -> None:
    path = tmp_path / "rollouts.sqlite"
    Store(path).close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"DROP {'INDEX' if 'INDEX' in sql else 'TABLE'} IF EXISTS {name}")
        database.execute(sql)
    with pytest.raises(ConfigError, match=rf"has a (table|index) '{name}' that no rollout API has made"):
        Store(path)


@pytest.mark.parametrize(
    "row",
    [
        "groups VALUES (1, 'x', 2, 9, NULL, NULL, 'queue')",
        "groups VALUES (1, NULL, -5, 9, NULL, NULL, 'queue')",
        "groups VALUES (1, NULL, 2, 'many', NULL, NULL, 'queue')",
        "groups VALUES (1, NULL, 2, 9, 1e300, NULL, 'queue')",
        "uses VALUES (1, 'x', 1)",
        "posts VALUES (x'00', 'a')",
    ],
)
def test_a_store_with_values_that_no_column_should_have_is_damaged(tmp_path: Path, row: str) -> None:
    path = tmp_path / "rollouts.sqlite"
    with closing(Store(path)) as store:
        store.load()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"INSERT INTO {row}")
    with closing(Store(path)) as store, pytest.raises(sqlite3.DatabaseError, match="has values that no rollout API"):
        store.load()


@pytest.mark.parametrize("name", ["checkpoints/step_6/trainer.json", "handover/current/note.json", "wandb/run/id"])
def test_a_pipe_at_any_depth_of_a_run_folder_is_refused_before_anything_is_started(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    lives.refuse_no_files(tmp_path)
    pipe(file)
    with pytest.raises(StartRefused, match=rf"{name} is no regular file"):
        lives.refuse_no_files(tmp_path)


def test_folders_nested_deeper_than_any_are_refused_by_resume_and_branch(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.joinpath(*["d"] * 80).mkdir(parents=True)
    with pytest.raises(StartRefused, match="nested deeper than 64"):
        lives.refuse_no_files(folder)
    with pytest.raises(StartRefused, match="nested deeper than 64"):
        lives.copy_checkpoint(folder, tmp_path / "branch")


def test_a_checkpoint_with_a_pipe_in_it_is_not_copied_to_a_branch(step_6: Path, tmp_path: Path) -> None:
    pipe(step_6 / "trainer.json")
    with pytest.raises(CheckpointError, match=r"trainer\.json is no regular file"):
        lives.copy_checkpoint(step_6, tmp_path / "branch")


@pytest.mark.parametrize(
    "line",
    [
        b'{"time":1,"step":' + b"9" * 5000 + b"}\n",
        b'{"step":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n",
        b'{"step":1,"other":' + b"[" + b"[]," * 5_000_000 + b"[]]}\n",
    ],
    ids=["digits", "depth", "lists"],
)
def test_a_line_of_records_that_no_trainer_writes_counts_as_of_no_step(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    first, later = (f"{json.dumps({'time': 1, 'step': step})}\n".encode() for step in (1, 9))
    path.write_bytes(first + line + later)
    records = LineFile(path)
    assert records.keep_through(3) == 1
    records.close()
    assert path.read_bytes() == first + line
    assert (tmp_path / "metrics-set-aside.jsonl").read_bytes() == later


def test_records_that_go_on_for_40_gb_are_cut_after_their_last_line_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_file, "MAX_RECORD_BYTES", 1 << 20)
    path, line = tmp_path / "metrics.jsonl", b'{"time":1,"step":1}\n'
    sparse(path)
    with path.open("r+b") as file:
        file.write(line)
    tracemalloc.start()
    try:
        records = LineFile(path)
        assert records.keep_through(3) == 1
        records.close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (path.read_bytes(), peak < 8 << 20) == (line, True)


def test_a_pipe_in_an_adapter_or_a_checkpoint_that_a_server_loads_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    pipe(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="not a regular file"):
        check_adapter(tmp_path, model_name="m", shapes={}, aliases={}, max_rank=8)
    with pytest.raises(ModelError, match="not a regular file"):
        read_stored(str(tmp_path), ["a"])
    with pytest.raises(ModelError, match="not a regular file"):
        ServedWeights.reload(None, tmp_path, 1)  # type: ignore[arg-type]


def test_an_adapter_whose_settings_are_nested_too_deep_is_none(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type":' + "[" * 200_000)
    with pytest.raises(ModelError, match=r"not an adapter: adapter_config\.json cannot be read"):
        check_adapter(tmp_path, model_name="m", shapes={}, aliases={}, max_rank=8)


def test_a_header_longer_than_factors_of_all_layers_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    names = [f"base_model.model.model.layers.{index}.q_proj.lora_A.weight" for index in range(20_000)]
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setattr(adapter_files, "safe_open", None)  # 80 MB of names took it 13 s and 1 GB
    with pytest.raises(ModelError, match="its header has 2,"):
        check_adapter(tmp_path, model_name="m", shapes={"model.layers.0.q_proj.weight": (8, 8)}, aliases={}, max_rank=8)

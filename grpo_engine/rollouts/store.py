"""What outlives the process: one SQLite file with the run, the environments, every group and who holds it.

Synchronous and single-threaded by design: the exchange calls it from one writer thread, in the order in which things
happened. Each public method is one transaction. A group is one row, its body the very bytes that are handed out.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from grpo_engine.errors import ConfigError
from grpo_engine.rollouts.forming import QueuedGroup
from grpo_engine.rollouts.records import EnvironmentRecord, EvaluationRecord, Lease, RunRecord

_LAYOUT = 1
_APPLICATION = 0x6772706F  # "grpo": tells our files from other people's SQLite files
_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY CHECK (id = 0), record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evaluation (id INTEGER PRIMARY KEY CHECK (id = 0), record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS environments (id INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS leases (id TEXT PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
  id INTEGER PRIMARY KEY, env_id INTEGER, num_sequences INTEGER NOT NULL, place TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS posts (sender TEXT PRIMARY KEY, number TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS groups_by_place ON groups (place);
"""

QUEUE = "queue"
"""Place of a group that waits to be handed out."""
BUFFER = "buffer"
"""Place of a group that waits for others to fill up its environment's group size. Other places are lease ids."""

_RUN: TypeAdapter[RunRecord] = TypeAdapter(RunRecord)
_ENVIRONMENT: TypeAdapter[EnvironmentRecord] = TypeAdapter(EnvironmentRecord)
_LEASE: TypeAdapter[Lease] = TypeAdapter(Lease)
_EVALUATION: TypeAdapter[EvaluationRecord] = TypeAdapter(EvaluationRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """All that a file holds, without the bodies."""

    run: RunRecord | None
    environments: list[EnvironmentRecord]
    leases: list[Lease]
    groups: list[tuple[QueuedGroup, str]]
    """Each group, oldest first, with its place."""
    latest_body: bytes | None
    posts: dict[str, str] = field(default_factory=dict)
    """Number of the last post of each sender."""
    evaluation: EvaluationRecord | None = None


class Store:
    """An open database; refuses to share it with another process."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            ConfigError: it cannot be opened, belongs to something else, or is in use.
        """
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.5)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._check_owner(path)
            # A killed process loses nothing; only a power cut may cost the last transactions, never the file.
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {_LAYOUT}")
        except sqlite3.Error as error:
            hint = "another rollout API uses it" if "locked" in str(error) else "move it away or name another file"
            raise ConfigError(f"--database {path}: {error}: {hint}") from None

    def _check_owner(self, path: Path) -> None:
        owner, layout = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and (owner != _APPLICATION or layout != _LAYOUT):
            raise ConfigError(
                f"--database {path}: not a rollout database of this version (layout {layout}, expected {_LAYOUT}): "
                "move it away or name another file"
            )

    def close(self) -> None:
        """Fold the journal into the file and let go of it."""
        self._db.close()

    def load(self) -> Stored:
        """Read everything but the bodies."""
        run = self._db.execute("SELECT record FROM run").fetchone()
        evaluation = self._db.execute("SELECT record FROM evaluation").fetchone()
        latest = self._db.execute("SELECT body FROM groups ORDER BY id DESC LIMIT 1").fetchone()
        rows = self._db.execute("SELECT id, env_id, num_sequences, length(body), place FROM groups ORDER BY id")
        return Stored(
            run=_RUN.validate_json(run[0]) if run else None,
            environments=[
                _ENVIRONMENT.validate_json(row[0])
                for row in self._db.execute("SELECT record FROM environments ORDER BY id")
            ],
            leases=[
                _LEASE.validate_json(row[0]) for row in self._db.execute("SELECT record FROM leases ORDER BY rowid")
            ],
            groups=[
                (QueuedGroup(id=id_, env_id=env_id, num_sequences=sequences, num_bytes=size), place)
                for id_, env_id, sequences, size, place in rows
            ],
            latest_body=latest[0] if latest else None,
            posts=dict(self._db.execute("SELECT sender, number FROM posts")),
            evaluation=_EVALUATION.validate_json(evaluation[0]) if evaluation else None,
        )

    def save_run(self, run: RunRecord, *, dropped: Sequence[int] = ()) -> None:
        """Replace the run's record, and forget its evaluation and groups of the run before it."""
        with self._transaction():
            self._put_run(run)
            self._db.execute("DELETE FROM evaluation")
            if dropped:
                self._db.executemany("DELETE FROM groups WHERE id = ?", ((id_,) for id_ in dropped))
                self._db.execute("DELETE FROM leases WHERE id NOT IN (SELECT place FROM groups)")

    def save_environment(self, environment: EnvironmentRecord) -> None:
        """Add or replace an environment."""
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO environments VALUES (?, ?)",
                (environment.id, _ENVIRONMENT.dump_json(environment).decode()),
            )

    def save_evaluation(self, evaluation: EvaluationRecord, *, run: RunRecord | None = None) -> None:
        """Replace the evaluation, and with it the run's record where that changed."""
        with self._transaction():
            record = _EVALUATION.dump_json(evaluation).decode()
            self._db.execute("INSERT OR REPLACE INTO evaluation VALUES (0, ?)", (record,))
            if run is not None:
                self._put_run(run)

    def add_groups(
        self,
        groups: Iterable[tuple[QueuedGroup, str, bytes]],
        queued: Sequence[int],
        post: tuple[str, str] | None = None,
    ) -> None:
        """Add groups with their place and body, and move the buffered groups `queued` into the queue.

        Args:
            post: sender and number of the post that they came with, where it said so.
        """
        with self._transaction():
            self._db.executemany(
                "INSERT INTO groups VALUES (?, ?, ?, ?, ?)",
                ((g.id, g.env_id, g.num_sequences, place, body) for g, place, body in groups),
            )
            self._move(queued, QUEUE)
            if post is not None:
                self._db.execute("INSERT OR REPLACE INTO posts VALUES (?, ?)", post)

    def hand_out(
        self, run: RunRecord, *, acknowledged: Sequence[str], returned: Sequence[int], lease: Lease | None
    ) -> list[bytes]:
        """Forget acknowledged batches, put `returned` groups back, lend the lease's groups, and read their bodies."""
        with self._transaction():
            self._put_run(run)
            # Before the leases go: what they return must not be taken for acknowledged.
            self._move(returned, QUEUE)
            for id_ in acknowledged:
                self._db.execute("DELETE FROM groups WHERE place = ?", (id_,))
                self._db.execute("DELETE FROM leases WHERE id = ?", (id_,))
            if lease is None:
                return []
            self._db.execute(
                "INSERT OR REPLACE INTO leases VALUES (?, ?)", (lease.id, _LEASE.dump_json(lease).decode())
            )
            self._move(lease.group_ids, lease.id)
            rows = self._db.execute("SELECT body FROM groups WHERE place = ? ORDER BY id", (lease.id,))
            return [row[0] for row in rows]

    def clear(self) -> None:
        """Forget everything."""
        with self._transaction():
            for table in ("run", "evaluation", "environments", "leases", "groups", "posts"):
                self._db.execute(f"DELETE FROM {table}")

    def _put_run(self, run: RunRecord) -> None:
        self._db.execute("INSERT OR REPLACE INTO run VALUES (0, ?)", (_RUN.dump_json(run).decode(),))

    def _move(self, ids: Sequence[int], place: str) -> None:
        if ids:
            self._db.executemany("UPDATE groups SET place = ? WHERE id = ?", ((place, id_) for id_ in ids))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

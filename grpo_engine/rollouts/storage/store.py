"""The durable store: one SQLite file with the run, the environments, the leases and every group with its place.

Synchronous and single-threaded: the writer calls it from one thread, in the order of the changes, and `commit` makes
one transaction of several method calls. A group is one row and its body another: SQLite rewrites a whole row when any
column changes, and a group changes its place twice.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from grpo_engine.errors import ConfigError
from grpo_engine.own_file import foreign_owner
from grpo_engine.rollouts.state.batch_forming import QueuedGroup
from grpo_engine.rollouts.state.records import QUEUE, EnvironmentRecord, EvaluationRecord, Lease, RunRecord, Stored
from grpo_engine.wire.codec import fail_fast, require_own_journal

_LAYOUT = 2
_SQL = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"
"""What a file defines; views, triggers, and tables with computed columns have expressions that SQLite evaluates."""
_WRONG = """
SELECT 'groups', id FROM groups WHERE NOT (
  typeof(num_sequences) = 'integer' AND num_sequences BETWEEN 1 AND 1048576
  AND typeof(num_bytes) = 'integer' AND num_bytes >= 0 AND id >= 0 AND typeof(place) = 'text'
  AND typeof(env_id) IN ('integer', 'null') AND typeof(policy_version) IN ('integer', 'null')
  AND typeof(step) IN ('integer', 'null'))
UNION ALL
SELECT 'uses', id FROM uses WHERE NOT (typeof(spread) = 'real' AND typeof(number) = 'integer')
UNION ALL
SELECT 'posts', rowid FROM posts WHERE NOT (typeof(sender) = 'text' AND typeof(number) = 'text')
LIMIT 1
"""
"""Rows with values of a type that their columns do not keep out: SQLite takes any."""
_APPLICATION = 0x6772706F  # "grpo": marks our files among other SQLite files
_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY CHECK (id = 0), record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evaluation (id INTEGER PRIMARY KEY CHECK (id = 0), record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS environments (id INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS leases (id TEXT PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
  id INTEGER PRIMARY KEY, env_id INTEGER, num_sequences INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
  policy_version INTEGER, step INTEGER, place TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS bodies (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS uses (id INTEGER PRIMARY KEY, spread REAL NOT NULL, number INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS posts (sender TEXT PRIMARY KEY, number TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS groups_by_place ON groups (place);
"""

IN_MEMORY = ":memory:"
"""Name of a store that is not kept."""
_PAGE_BYTES = 16384
"""A group of some hundred kilobytes is a chain of pages; with SQLite's default of 4096 it is four times as long."""

_RUN = fail_fast(TypeAdapter(RunRecord))
_ENVIRONMENT = fail_fast(TypeAdapter(EnvironmentRecord))
_LEASE = fail_fast(TypeAdapter(Lease))
_EVALUATION = fail_fast(TypeAdapter(EvaluationRecord))


class Store:
    """An open database, locked against other processes."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            ConfigError: it cannot be opened, is not a rollout database, or is in use.
        """
        if (fault := foreign_owner(path)) is not None:
            raise ConfigError(f"--store {path}: {fault}, who may put groups into it: name a file in a folder of yours")
        try:
            require_own_journal(path)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.5)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._check_owner(path)
            self._db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            # Every transaction is synced to disk before its requests are answered: a power cut loses nothing either.
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {_LAYOUT}")
            self._path = None if str(path) == IN_MEMORY else path.resolve()
            self._inode = self._path.stat().st_ino if self._path else None
        except (sqlite3.Error, OSError) as error:
            hint = "another rollout API uses it" if "locked" in str(error) else "move it away, or name another file"
            raise ConfigError(f"--store {path}: {error}: {hint}") from None

    def _check_owner(self, path: Path) -> None:
        owner, layout = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and (owner != _APPLICATION or layout != _LAYOUT):
            raise ConfigError(
                f"--store {path}: not a rollout database of this version (layout {layout}, expected {_LAYOUT}): "
                "move it away or name another file"
            )
        own = _schema()
        for kind, name, sql in self._db.execute(_SQL):  # SQL that somebody else wrote may never end
            if own.get((kind, name)) != sql:
                raise ConfigError(
                    f"--store {path}: has a {kind} {name!r} that no rollout API has made: move it away, or name "
                    "another file"
                )

    @property
    def lost(self) -> str | None:
        """An error message when the file was removed or replaced, else None."""
        if self._path is None or (self._path.exists() and self._path.stat().st_ino == self._inode):
            return None
        return f"{self._path} was removed or replaced: put it back, or restart the service"

    def commit(self, actions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all actions in one transaction and return their results; they are synced to disk then.

        Raises:
            sqlite3.Error, OSError: nothing was written.
        """
        if (lost := self.lost) is not None:  # SQLite would keep writing to the unlinked file
            raise FileNotFoundError(lost)
        self._db.execute("BEGIN IMMEDIATE")
        try:
            results = [action() for action in actions]
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite rolls back after some errors itself
                self._db.execute("ROLLBACK")
            raise
        return results

    def close(self) -> None:
        """Checkpoint the WAL into the file and close it."""
        self._db.close()

    def load(self) -> Stored:
        """Read everything but the bodies.

        Raises:
            sqlite3.Error, ValidationError: it is damaged.
        """
        for table, number in self._db.execute(_WRONG):
            raise sqlite3.DatabaseError(f"row {number} of {table} has values that no rollout API writes")
        run = self._db.execute("SELECT record FROM run").fetchone()
        evaluation = self._db.execute("SELECT record FROM evaluation").fetchone()
        latest = self._db.execute("SELECT body FROM bodies ORDER BY id DESC LIMIT 1").fetchone()
        rows = self._db.execute(
            "SELECT groups.id, env_id, num_sequences, num_bytes, policy_version, step, place, spread, "
            "coalesce(number, 0) FROM groups LEFT JOIN uses ON groups.id = uses.id ORDER BY groups.id"
        )
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
                (
                    QueuedGroup(
                        id=id_,
                        env_id=env_id,
                        num_sequences=sequences,
                        num_bytes=size,
                        policy_version=version,
                        step=step,
                        spread=spread,
                        uses=number,
                    ),
                    place,
                )
                for id_, env_id, sequences, size, version, step, place, spread, number in rows
            ],
            latest_body=latest[0] if latest else None,
            posts=dict(self._db.execute("SELECT sender, number FROM posts ORDER BY rowid")),
            evaluation=_EVALUATION.validate_json(evaluation[0]) if evaluation else None,
        )

    def save_run(self, run: RunRecord, *, dropped: Sequence[int] = (), offered_again: Sequence[Lease] = ()) -> None:
        """Replace the run's record and its leases; delete its evaluation, and `dropped` groups of the earlier run."""
        self._put_run(run)
        self._db.execute("DELETE FROM evaluation")
        for lease in offered_again:
            self.save_lease(lease)
        if dropped:
            self._delete(dropped)
            self._db.execute("DELETE FROM leases WHERE id NOT IN (SELECT place FROM groups)")

    def save_environments(self, *environments: EnvironmentRecord) -> None:
        """Add or replace environments."""
        self._db.executemany(
            "INSERT OR REPLACE INTO environments VALUES (?, ?)",
            [(each.id, _ENVIRONMENT.dump_json(each).decode()) for each in environments],
        )

    def save_evaluation(self, evaluation: EvaluationRecord, *, run: RunRecord | None = None) -> None:
        """Replace the evaluation, and the run's record if it changed."""
        record = _EVALUATION.dump_json(evaluation).decode()
        self._db.execute("INSERT OR REPLACE INTO evaluation VALUES (0, ?)", (record,))
        if run is not None:
            self._put_run(run)

    def add_groups(
        self,
        groups: Iterable[tuple[QueuedGroup, str, bytes]],
        queued: Sequence[int],
        post: tuple[str, str] | None = None,
        forgotten: Sequence[str] = (),
        evicted: Sequence[int] = (),
    ) -> None:
        """Add groups with place and body, move the buffered groups `queued` into the queue, and delete `evicted` ones.

        Args:
            post: sender and number of their post, where it carries them.
            forgotten: senders whose last post is no longer of interest.
        """
        for g, place, body in groups:
            row = (g.id, g.env_id, g.num_sequences, g.num_bytes, g.policy_version, g.step, place)
            self._db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._db.execute("INSERT INTO bodies VALUES (?, ?)", (g.id, body))
            self._put_uses([g])
        self._move(queued, QUEUE)
        self._delete(evicted)
        if post is not None:
            self._db.execute("INSERT OR REPLACE INTO posts VALUES (?, ?)", post)
        self._db.executemany("DELETE FROM posts WHERE sender = ?", [(sender,) for sender in forgotten])

    def hand_out(
        self,
        run: RunRecord,
        *,
        acknowledged: Sequence[str],
        returned: Sequence[int],
        kept: Sequence[QueuedGroup],
        dropped: Sequence[int],
        lease: Lease | None,
    ) -> list[bytes]:
        """Delete acknowledged batches and `dropped` groups, requeue `returned` and `kept` ones, and lease a batch.

        Returns the bodies of the leased groups.
        """
        self._put_run(run)
        # Before leases are deleted: what they return must not be deleted as acknowledged.
        self._move([*returned, *(group.id for group in kept)], QUEUE)
        self._put_uses(kept)
        for id_ in acknowledged:
            for table in ("bodies", "uses"):
                self._db.execute(f"DELETE FROM {table} WHERE id IN (SELECT id FROM groups WHERE place = ?)", (id_,))
            self._db.execute("DELETE FROM groups WHERE place = ?", (id_,))
            self._db.execute("DELETE FROM leases WHERE id = ?", (id_,))
        self._delete(dropped)
        if lease is None:
            return []
        self.save_lease(lease)
        self._move(lease.group_ids, lease.id)
        rows = self._db.execute(
            "SELECT body FROM groups JOIN bodies USING (id) WHERE place = ? ORDER BY groups.id", (lease.id,)
        )
        return [row[0] for row in rows]

    def save_lease(self, lease: Lease) -> None:
        """Add or replace a lease's record."""
        self._db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?)", (lease.id, _LEASE.dump_json(lease).decode()))

    def clear(self) -> None:
        """Delete everything."""
        for table in ("run", "evaluation", "environments", "leases", "groups", "bodies", "uses", "posts"):
            self._db.execute(f"DELETE FROM {table}")

    def _put_run(self, run: RunRecord) -> None:
        self._db.execute("INSERT OR REPLACE INTO run VALUES (0, ?)", (_RUN.dump_json(run).decode(),))

    def _put_uses(self, groups: Iterable[QueuedGroup]) -> None:
        rows = ((group.id, group.spread, group.uses) for group in groups if group.spread is not None)
        self._db.executemany("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", rows)

    def _move(self, ids: Sequence[int], place: str) -> None:
        self._db.executemany("UPDATE groups SET place = ? WHERE id = ?", ((place, id_) for id_ in ids))

    def _delete(self, ids: Sequence[int]) -> None:
        for table in ("groups", "bodies", "uses"):
            self._db.executemany(f"DELETE FROM {table} WHERE id = ?", ((id_,) for id_ in ids))


def _schema() -> dict[tuple[str, str], str]:
    """The SQL of each table and index of a store, as SQLite keeps it."""
    with contextlib.closing(sqlite3.connect(IN_MEMORY)) as database:
        database.executescript(_SCHEMA)
        return {(kind, name): sql for kind, name, sql in database.execute(_SQL)}

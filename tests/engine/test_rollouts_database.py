"""A database that cannot be used, as the API says it at its start."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

from grpo_engine.rollouts.store import Store


def what_an_api_says(database: Path) -> str:
    """Its last words; it is to end at once, as with a wrong setting."""
    argv = [sys.executable, "-m", "grpo_engine", "api", "--port", "0", "--database", str(database)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    return ended.stderr


def test_a_damaged_database_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.sqlite"
    Store(path).close()
    database = sqlite3.connect(path)
    database.execute("INSERT INTO environments VALUES (0, '{}')")
    database.commit()
    database.close()
    said = what_an_api_says(path)
    assert said.startswith(f"grpo-engine api: --store {path}: damaged: ")
    assert "--fresh" in said


def test_a_database_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory: name another file" in what_an_api_says(tmp_path / "file" / "deep" / "rollouts.sqlite")

"""Weights on their way to inference through a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from grpo_engine.bridges.saving import saying_why_unwritten
from grpo_engine.errors import BridgeError


def test_a_full_disk_is_named_with_the_folder_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"No space left on device.*make room"), saying_why_unwritten(tmp_path):
        Path("/dev/full").write_text("weights")


def test_what_safetensors_says_of_a_folder_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"No such file.*make room"), saying_why_unwritten(tmp_path):
        save_file({"weight": torch.zeros(1)}, tmp_path / "missing" / "file")

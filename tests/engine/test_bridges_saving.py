"""Weights on their way to inference through a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from grpo_engine.bridges.saving import saying_why_unwritten
from grpo_engine.errors import BridgeError


def test_a_full_disk_is_named_with_the_folder_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"there: .*No space left on device.*make room, or choose another folder"):
        with saying_why_unwritten(tmp_path):
            Path("/dev/full").write_text("weights")
    with pytest.raises(BridgeError, match="cannot be written there: .*make room"), saying_why_unwritten(tmp_path):
        save_file({"weight": torch.zeros(1)}, tmp_path / "missing" / "file")

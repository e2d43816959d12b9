"""Weights on their way to inference through a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from grpo_engine.bridges.saving import saying_why_unwritten
from grpo_engine.errors import BridgeError


def test_a_full_disk_is_named_with_the_folder_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"No space left on device.*make room"), saying_why_unwritten(tmp_path):
        Path("/dev/full").write_text("weights")


def test_a_disk_that_is_full_for_the_tokenizer_is_named_too() -> None:
    with pytest.raises(BridgeError, match=r"No space left on device.*make room"), saying_why_unwritten(Path("/dev")):
        Tokenizer(BPE()).save("/dev/full")


def test_a_fault_of_the_program_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a fault"), saying_why_unwritten(tmp_path):
        raise ValueError("a fault")


def test_what_safetensors_says_of_a_folder_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"No such file.*make room"), saying_why_unwritten(tmp_path):
        save_file({"weight": torch.zeros(1)}, tmp_path / "missing" / "file")

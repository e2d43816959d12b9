"""What kernels are compiled with."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from grpo_engine import compilers


def test_triton_has_the_assembler_of_torch_from_the_start_and_so_one_name_for_each_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that found its model compiled made all kernels of vLLM again, under other names: 11 s a restart."""
    ptxas = tmp_path / "torch" / "bin" / "ptxas"
    ptxas.parent.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setattr(compilers, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    environment: dict[str, str] = {}
    compilers.settle_assembler(environment)
    assert environment == {}  # as of torch for CPUs, which brings none
    ptxas.touch(mode=0o755)
    compilers.settle_assembler(environment)
    assert environment == {"TRITON_PTXAS_PATH": str(ptxas)}
    environment["TRITON_PTXAS_PATH"] = "/mine"
    compilers.settle_assembler(environment)
    assert environment == {"TRITON_PTXAS_PATH": "/mine"}

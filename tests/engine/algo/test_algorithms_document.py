"""docs/algorithms.md names places in the code and settings: each must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from grpo_engine.train.config import TrainConfig

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "algorithms.md").read_text()
PLACES = sorted(set(re.findall(r"([a-z_]+/[a-z_]+\.py)::([A-Za-z_][\w.]*\w)", DOCUMENT)))

WITHOUT_A_FORMULA = {"check_shapes", "flat_temperature", "product", "add_product", "ks_up_to"}
"""Helpers of the output layer, and the choice of k."""


def settings_named_in(column: int) -> set[str]:
    """Identifiers in that column of the table of names, as `clip_low` of "`clip_low` = 0.2"."""
    table = DOCUMENT.partition("| ours | TRL |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [line.strip("|").split(" | ")[column].strip() for line in table]
    return {name for cell in cells if not cell.startswith("-") for name in re.findall(r"`([a-z_]+)[^`]*`", cell)}


def defined_in(source: Path) -> set[str]:
    """Functions and classes of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_every_place_that_the_document_names_is_there(file: str, name: str) -> None:
    assert name in defined_in(ROOT / "grpo_engine" / file)


def test_every_public_function_of_the_mathematics_is_in_the_document() -> None:
    for source in sorted((ROOT / "grpo_engine" / "algo").glob("*.py")):
        public = {name for name in defined_in(source) if name.islower() and not name.startswith("_")}
        named = {name for file, name in PLACES if file == f"algo/{source.name}"}
        assert public - named - WITHOUT_A_FORMULA == set(), source.name


def test_our_names_in_the_table_are_settings_of_the_trainer() -> None:
    names = settings_named_in(column=0)
    assert len(names) > 20
    assert names <= set(TrainConfig.model_fields)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM versions:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_trls_names_in_the_table_are_settings_of_trl() -> None:
    trl = pytest.importorskip("trl", reason="the peers extra is not installed")
    names = settings_named_in(column=1)
    assert len(names) > 15
    assert names <= set(trl.GRPOConfig.__dataclass_fields__)

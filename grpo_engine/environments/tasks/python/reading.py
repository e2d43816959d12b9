"""Checks a user's module by its source, without importing it: a plan of a profile runs nothing.

Finds a module that is missing or has a syntax error, an import that is not installed, and a name that is not defined.
What only shows when the module runs is found by `load_attribute`, when the environment starts.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from grpo_engine.config import did_you_mean
from grpo_engine.environments.tasks.python.loading import CORRECT_IT, describe_error
from grpo_engine.errors import ConfigError

_MAKE_NAMES = frozenset({"__getattr__", "globals", "setattr", "exec"})
_FIND_MODULES = frozenset({"path", "modules", "meta_path"})
"""Of `sys`. A module that uses one of these may define or find what its source does not show."""


def check_attribute(module: str, name: str, folders: Sequence[Path], *, where: str, remedy: str = CORRECT_IT) -> None:
    """Check that a module defines `name`, as `load_attribute` will find it.

    Args:
        folders: the working directory, and those of PYTHONPATH.

    Raises:
        ConfigError: the module does not exist or cannot be imported, or has no such name.
    """
    if "\0" in module:
        raise ConfigError(f"{where}: {module!r} has a NUL character, which no module can: take it out")
    file = _own_file(module, folders, where)
    if file is None:
        return  # installed: its names may be made by its code
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}: {module} cannot be imported: {describe_error(error)}") from None
    if any(_hides_names(node) for node in ast.walk(tree)):
        return
    for package, line in _imports(tree):
        if _spec(package, [str(file.parent), *map(str, folders)]) is None:
            raise ConfigError(
                f"{where}: {module} cannot be imported: there is no module {package!r}, neither in "
                f"{_listed(folders)} nor installed ({file}:{line})"
            )
    names = set(_names(tree.body))
    if name not in names and "*" not in names:
        raise ConfigError(f"{where}: {_named(module, file)} has no {name!r}{did_you_mean(name, names)}: {remedy}")


def _hides_names(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.FunctionDef(name=name):
            return name in _MAKE_NAMES
        case ast.Attribute(value=ast.Name(id="sys"), attr=name):
            return name in _FIND_MODULES
    return False


def _named(module: str, file: Path) -> str:
    """A module with its file, where its name is not that of the file."""
    return module if module == str(file) else f"{module} ({file})"


def _listed(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders))


def _own_file(module: str, folders: Sequence[Path], where: str) -> Path | None:
    """The file of a module in the user's folders; None for one that is installed.

    Raises:
        ConfigError: there is no such module.
    """
    if module.endswith(".py"):
        file = folders[0] / module
        if not file.is_file():
            raise ConfigError(f"{where}: there is no file {file}")
        return file
    spec, path = None, [*map(str, folders)]
    parts = module.split(".")
    for number in range(len(parts)):
        name = ".".join(parts[: number + 1])
        spec = _spec(name, path, is_top=number == 0)
        if spec is None:
            near = did_you_mean(module, [each.stem for folder in folders for each in folder.glob("*.py")])
            here = Path(os.path.realpath(f"{module}.py"))
            hint = f"write {here} for the file that is here" if here.is_file() else "give the path of a .py file"
            raise ConfigError(
                f"{where}: there is no module {name!r}{near}, neither in {_listed(folders)} nor installed: correct the "
                f"name, or {hint}"
            )
        if spec.submodule_search_locations is None:
            break
        path = list(spec.submodule_search_locations)
    origin = None if spec is None or spec.origin is None else Path(spec.origin)
    is_own = origin is not None and origin.suffix == ".py" and any(map(origin.is_relative_to, folders))
    return origin if is_own else None


def _spec(name: str, path: Sequence[str], *, is_top: bool = True) -> ModuleSpec | None:
    """The spec of a module below `path` or, at the top, of one that is installed; imports no parent package."""
    found = PathFinder.find_spec(name, path)
    if found is not None or not is_top:
        return found
    return next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, None)) is not None), None)


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Packages that the module cannot do without, with their lines: not those in a `try`, an `if` or a function."""
    for node in tree.body:
        match node:
            case ast.Import(names=names):
                yield from ((alias.name.partition(".")[0], node.lineno) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0], node.lineno


def _names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements define; `*` for those of another module."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        for inner in ast.iter_child_nodes(node):
            match inner:
                case ast.stmt():
                    yield from _names([inner])
                case ast.alias(name=name, asname=asname):
                    yield asname or name.partition(".")[0]
                case ast.ExceptHandler(body=handled) | ast.match_case(body=handled):
                    yield from _names(handled)
                case _:
                    stored = (each for each in ast.walk(inner) if isinstance(each, ast.Name))
                    yield from (each.id for each in stored if isinstance(each.ctx, ast.Store))

"""Loads a function or class from a user's module or file; errors name the line in the user's code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_engine.config import did_you_mean
from grpo_engine.errors import ConfigError
from grpo_engine.python_command import others_may_write

CORRECT_IT = "define it, or correct the name after the colon"
"""What to do where a module does not have a name that was given with it, as `module:name`."""


def load_attribute(module: str, name: str, *, where: str, remedy: str = CORRECT_IT) -> Any:
    """Attribute `name` of a module.

    Args:
        module: a module on the path, the current folder first (last where other users may write to it), or a file that
            ends in .py.
        where: the setting that names both, for messages.
        remedy: what to do where it has no such attribute.

    Raises:
        ConfigError: the module does not exist, fails to import, or has no such attribute.
    """
    loaded = import_user_module(module, where=where)
    if not hasattr(loaded, name):
        names = [known for known in vars(loaded) if not known.startswith("_")]
        raise ConfigError(f"{where}: {module} ({loaded.__file__}) has no {name!r}{did_you_mean(name, names)}: {remedy}")
    return getattr(loaded, name)


def import_user_module(module: str, *, where: str) -> ModuleType:
    """Import a module, or run a file as one; the second call returns the same module.

    Raises:
        ConfigError: it does not exist, fails to import (names the file and line), or has the name of a standard
            module.
    """
    is_file = module.endswith(".py")
    if not is_file:
        _refuse_shadowed(module, where)
    _add_to_path(Path(os.path.realpath(module)).parent if is_file else Path.cwd())
    importlib.invalidate_caches()
    try:
        return _run_file(Path(os.path.realpath(module))) if is_file else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if is_file or error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{where}: {module} cannot be imported: {describe_error(error)}") from error
        near = did_you_mean(module, [file.stem for file in Path.cwd().glob("*.py")])
        raise ConfigError(
            f"{where}: there is no module {error.name!r}{near}, neither in {Path.cwd()} nor installed: "
            "start in its folder, or give the path of a .py file"
        ) from None
    except FileNotFoundError as error:
        if is_file and not Path(module).exists():
            raise ConfigError(f"{where}: there is no file {module} in {Path.cwd()}") from None
        raise ConfigError(f"{where}: {module} cannot be imported: {describe_error(error)}") from error
    # User code can raise anything; SystemExit would end this process without a message.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {module} cannot be imported: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """An error of user code in one line: type, message, and the innermost line of the user's code.

    The innermost frames of a traceback are often in libraries; the user can change only their own.
    """
    what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    if isinstance(error, SyntaxError):
        return f"{what} ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_foreign(frame.filename)]
    return f"{what} ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else what


def _is_foreign(filename: str) -> bool:
    ours = str(Path(__file__).parents[3])
    return filename.startswith(("<frozen", ours, sysconfig.get_path("stdlib"))) or "site-packages" in filename


def _refuse_shadowed(module: str, where: str) -> None:
    """Refuse the name of a standard module that shadows a file in the current folder."""
    file = Path(f"{module}.py")
    if module in sys.stdlib_module_names and file.exists():
        raise ConfigError(
            f"{where}: {module!r} is a standard module of Python and hides {file.resolve()}: "
            f"write {file}, or rename the file"
        )


def _add_to_path(folder: Path) -> None:
    """Put a folder first on the path of modules; last where others may write to it and so stand in for any library."""
    if str(folder) not in sys.path:
        sys.path.insert(len(sys.path) if others_may_write(folder) else 0, str(folder))


def _run_file(file: Path) -> ModuleType:
    # Not under its bare name: a rewards file called math.py must not replace the standard module.
    name = f"own_file_{file.stem}_{abs(hash(file))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

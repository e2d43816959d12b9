"""Loading a function or class of the user's own, by module or file, with an error that says where it is wrong."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_engine.config import did_you_mean
from grpo_engine.errors import ConfigError


def load_attribute(module: str, name: str, *, where: str) -> Any:
    """What `name` is in a module.

    Args:
        module: one that Python finds, the current folder first, or a file that ends in .py.
        where: the table of settings that names both.

    Raises:
        ConfigError: there is no such module, it fails, or it holds no such name.
    """
    loaded = load_module(module, where=where)
    if not hasattr(loaded, name):
        names = [known for known in vars(loaded) if not known.startswith("_")]
        raise ConfigError(
            f"{where}: {module} ({loaded.__file__}) has no {name!r}{did_you_mean(name, names)}: "
            f"define it there, or name another after the colon"
        )
    return getattr(loaded, name)


def load_module(module: str, *, where: str) -> ModuleType:
    """Import a module, or run a file as one; the second time it is the same one.

    Raises:
        ConfigError: there is none, it fails while it is imported (names the file and line), or Python has one of that
            name too.
    """
    is_file = module.endswith(".py")
    if not is_file:
        _refuse_hidden(module, where)
    _put_first(Path(module).resolve().parent if is_file else Path.cwd())
    importlib.invalidate_caches()
    try:
        return _run_file(Path(module).resolve()) if is_file else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if is_file or error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{where}: {module} cannot be imported: {told(error)}") from error
        near = did_you_mean(module, [file.stem for file in Path.cwd().glob("*.py")])
        raise ConfigError(
            f"{where}: there is no module {error.name!r}{near}, neither in {Path.cwd()} nor installed: "
            "start where it is, or give the path of a .py file"
        ) from None
    except FileNotFoundError as error:
        if is_file and not Path(module).exists():
            raise ConfigError(f"{where}: there is no file {module} in {Path.cwd()}") from None
        raise ConfigError(f"{where}: {module} cannot be imported: {told(error)}") from error
    # A module of the user's own can fail in any way; one that exits would end this process without a word.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {module} cannot be imported: {told(error)}") from error


def told(error: BaseException) -> str:
    """An error of the user's own code in one line: what it is, and the innermost line of code that it came from.

    Lines of libraries come last in a traceback; the innermost one outside of them is what its author can change.
    """
    what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    if isinstance(error, SyntaxError):
        return f"{what} ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_foreign(frame.filename)]
    return f"{what} ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else what


def _is_foreign(filename: str) -> bool:
    ours = str(Path(__file__).parents[2])
    return filename.startswith(("<frozen", ours, sysconfig.get_path("stdlib"))) or "site-packages" in filename


def _refuse_hidden(module: str, where: str) -> None:
    """Refuse a name by which Python finds a module of its own where a file in the current folder is meant."""
    file = Path(f"{module}.py")
    if module in sys.stdlib_module_names and file.exists():
        raise ConfigError(
            f"{where}: by the name {module!r} Python finds its own module, not {file.resolve()}: "
            f"write {file} for it, or rename the file"
        )


def _put_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _run_file(file: Path) -> ModuleType:
    # Not by its bare name: a rewards file called math.py must not take the place of Python's own.
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

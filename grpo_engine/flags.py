"""Command line flags made from the settings of a `Config`, and a command line made from a `Config` again.

Names follow the field (`batch_size` → `--batch-size`), nested tables are dotted (`--task.difficulty`), and a `Flag`
annotation gives a field the name that its users already know. argparse rather than typer: the stock flags take several
words (`--lora-target-modules q_proj v_proj`), which click's options cannot.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpo_engine.config import (
    MISSING,
    Config,
    ConfigT,
    Fault,
    RawTable,
    apply_overrides,
    did_you_mean_setting,
    keys_of,
    other_keys,
    read_table,
    setting_names,
    union_leaves,
    validated,
    with_absolute_paths,
)
from grpo_engine.errors import ConfigError
from grpo_engine.other_names import BARE_OVERRIDE, FLAGS, bare_overrides, own_override, own_table


@dataclass(frozen=True, slots=True)
class Flag:
    """Annotation of a field whose command line flags do not follow from its name."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WithoutPrefix:
    """Annotation of a table whose settings have flags without its name: `--task` of `environment.task`."""


@dataclass(frozen=True, slots=True)
class OtherFlags:
    """Annotation of a table that takes unknown flags, for another program."""


def add_flags(parser: argparse.ArgumentParser, model: type[Config], *, with_help: bool = True) -> None:
    """Add a flag for every setting of `model`: `--batch-size`, its aliases, and `--table.key` for nested tables.

    Args:
        with_help: whether help texts are needed; reading docstrings doubles the time.
    """
    for setting in _settings(model):
        field = setting.field
        help_text = _help_text(setting) if with_help else None
        names, dest = list(setting.flags), ".".join(setting.path)
        if _plain(field.annotation) is bool:
            parser.add_argument(
                *names, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text
            )
        elif _is_list(field.annotation):
            parser.add_argument(*names, dest=dest, nargs="*", default=argparse.SUPPRESS, metavar="X", help=help_text)
        else:
            metavar = _metavar(*setting.annotations)
            parser.add_argument(*names, dest=dest, default=argparse.SUPPRESS, metavar=metavar, help=help_text)


def nobody(_flag: str) -> str | None:
    """No other command takes a flag."""
    return None


def parse_flags(
    model: type[ConfigT],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    whose: Callable[[str], str | None] = nobody,
    command: str | None = None,
) -> ConfigT:
    """Read settings from a command line: `--config FILE`, flags, and overrides, in rising precedence.

    Overrides are `--set dotted.key=value`, or the same without `--set`; also by the names of other trainers, which are
    then told on stderr with ours.

    Args:
        command: whose settings the names of other trainers stand for; None: of the last word of `prog`.
        whose: the other command that takes a flag which this one does not, for the error.

    Raises:
        ConfigError: what is wrong, by flag name.
    """
    parser = argparse.ArgumentParser(prog=prog, usage="%(prog)s [flags]", description=description, allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="TOML, YAML or JSON file with the same settings")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="dotted override, repeatable")
    add_flags(parser, model, with_help=not {"-h", "--help"}.isdisjoint(argv))
    others = _table_for_others(model)
    words, overrides = bare_overrides(argv)
    namespace, rest = parser.parse_known_args(words)
    foreign, rest = _foreign_tables(model, rest)
    overrides += [word for word in rest if BARE_OVERRIDE.match(word)]
    rest = [word for word in rest if word not in overrides]
    if rest and (others is None or not rest[0].startswith("--")):
        raise ConfigError(f"{prog}: {_unknown(rest, flags_of(model), whose)}")
    command = command or prog.rpartition(" ")[2]
    table, told = own_table(read_table(namespace.config), command) if namespace.config else ({}, [])
    if model.foreign_tables:
        table = model.from_foreign(_with_foreign(table, foreign))
    given = {dest: value for dest, value in vars(namespace).items() if dest not in {"config", "set"}}
    for dest, value in given.items():
        path = dest.split(".")
        inner = table
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        for name in other_keys(model, table, path):  # the file may have it by another of its names
            inner.pop(name, None)
        inner[path[-1]] = value
    if others is not None and rest:
        table[others] = {**table.get(others, {}), **_table_of(rest, prefix=f"{others}.")}
    by_own_names = [own_override(override, command) for override in [*overrides, *namespace.set]]
    for line in [*told, *(text for _, text in by_own_names if text)]:
        sys.stderr.write(f"{prog}: {line}\n")
    own_overrides = [override for override, _ in by_own_names]
    spell_out = partial(with_absolute_paths, model, folder=Path.cwd())
    table = apply_overrides(table, own_overrides, spell_out=spell_out, model=model)
    table = _without_foreign_keys(model, table)
    return validated(model, table, where=prog, named=lambda fault: _with_flag(fault, model))


def to_flags(config: Config, model: type[Config] | None = None) -> list[str]:
    """The command line that gives `config` again: a flag for every setting that differs from its default.

    `model` limits it to the settings of one of its base classes.
    """
    argv: list[str] = []
    for setting in _settings(model or type(config)):
        owner: Any = None
        value: Any = config
        for key in setting.path:
            owner, value = value, getattr(value, key, PydanticUndefined)
            if value is PydanticUndefined:
                break
        if value is PydanticUndefined or value is None:
            continue
        if not setting.is_tag and value == _default(setting.field, vars(owner)):
            continue
        flag = setting.flags[0]
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple | list):
            argv += [flag, *(_flag_text(item) for item in value)]
        else:
            text = _flag_text(value)
            argv += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return argv


def flags_of_table(table: Mapping[str, Any]) -> list[str]:
    """Flags that give the keys of a table: `{"block_size": 32, "eager": True}` → `--block-size 32 --eager`."""
    argv: list[str] = []
    for key, value in table.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        else:
            argv += [f"--{name}", *map(_flag_text, value if isinstance(value, list) else [value])]
    return argv


def flags_of(model: type[BaseModel]) -> list[str]:
    """Every flag that `add_flags` adds, but for the `--no-…` of switches."""
    return [flag for setting in _settings(model) for flag in setting.flags]


def _unknown(words: Sequence[str], flags: Sequence[str], whose: Callable[[str], str | None]) -> str:
    """The message for unknown flags and arguments."""
    first = next((word.partition("=")[0] for word in words if word.startswith("--")), None)
    if first is None:
        return f"unrecognized arguments: {' '.join(words)}: settings are flags, which --help lists"
    if first.startswith(("--env.", "--openai.")):
        return f"{first}: a flag of Atropos environments; see `grpo-engine atropos-env --help`"
    if first in FLAGS:
        return f"{first}: {FLAGS[first]}"
    if (other := whose(first)) is not None:
        return f"{first}: not a flag here, but of {other}: give it to that command"
    return f"{first}: unknown flag{did_you_mean_setting(first, flags)}; --help lists all flags"


def _with_flag(fault: Fault, model: type[BaseModel]) -> str:
    """The key of a fault, and its flag where that is another name or has to be given."""
    flags = {".".join(each.path): each.flags[0] for each in _settings(model)}
    flags |= {".".join(each.path[:-1]): each.flags[0] for each in _settings(model) if each.is_tag}
    flag = flags.get(fault.key)
    is_told = flag is not None and (fault.text == MISSING or flag != f"--{fault.key.replace('_', '-')}")
    return f"{fault.key} ({flag})" if is_told else fault.key


@dataclass(frozen=True, slots=True)
class _Setting:
    path: tuple[str, ...]
    field: FieldInfo
    owner: type[BaseModel]
    flags: tuple[str, ...]
    annotations: tuple[Any, ...]
    is_tag: bool = False
    """Whether it chooses the member of a union, and so is always written."""


def _table_for_others(model: type[BaseModel]) -> str | None:
    """The setting that takes unknown flags."""
    fields = model.model_fields.items()
    return next((name for name, field in fields if any(isinstance(m, OtherFlags) for m in field.metadata)), None)


def _table_of(words: Sequence[str], *, prefix: str) -> RawTable:
    """`--block-size 32 --eager --sizes 1 2` → `{"block_size": "32", "eager": True, "sizes": ["1", "2"]}`."""
    table: RawTable = {}
    for word in words:
        if word.startswith("--"):
            flag, equals, text = word[2:].partition("=")
            key = flag.removeprefix(prefix).replace("-", "_")
            table[key] = text if equals else True
        else:
            before = table[key]
            table[key] = word if before is True else [*(before if isinstance(before, list) else [before]), word]
    return table


def _foreign_tables(model: type[Config], words: Sequence[str]) -> tuple[dict[str, RawTable], list[str]]:
    """Of unknown words, those of the model's foreign tables (`--env.group_size 4`), and the others."""
    found: dict[str, RawTable] = {}
    others: list[str] = []
    of_name: dict[str, list[str]] = {}
    taken = others
    for word in words:
        if word.startswith("--"):
            name = next((name for name in model.foreign_tables if word.startswith(f"--{name}.")), None)
            taken = others if name is None else of_name.setdefault(name, [])
        taken.append(word)
    for name, own in of_name.items():
        found[name] = _table_of(own, prefix=f"{name}.")
    return found, others


def _with_foreign(table: RawTable, foreign: Mapping[str, RawTable]) -> RawTable:
    """The table with more settings in its foreign tables, or in each of a list of them."""
    result = dict(table)
    for name, more in foreign.items():
        before = result.get(name) or {}
        if isinstance(before, dict):
            result[name] = {**before, **more}
        elif isinstance(before, list):
            result[name] = [{**each, **more} for each in before]
    return result


def _settings(
    model: type[BaseModel], prefix: tuple[str, ...] = (), flag_prefix: tuple[str, ...] = ()
) -> Iterator[_Setting]:
    seen: set[tuple[str, ...]] = set()
    for name, field in model.model_fields.items():
        members = _config_members(field)
        if members:
            tag = field.discriminator if isinstance(field.discriminator, str) else None
            own = () if any(isinstance(mark, WithoutPrefix) for mark in field.metadata) else (name,)
            for member in members:
                for inner in _settings(member, (*prefix, name), (*flag_prefix, *own)):
                    if inner.path not in seen:
                        seen.add(inner.path)
                        if tag is not None and inner.path == (*prefix, name, tag):
                            choices = tuple(m.model_fields[inner.path[-1]].annotation for m in members)
                            default = _default(field)
                            chosen = None if default is None else getattr(default, tag, PydanticUndefined)
                            of_all = FieldInfo(annotation=inner.field.annotation, default=chosen)
                            inner = replace(inner, field=of_all, annotations=choices, is_tag=True)
                        yield inner
            continue
        explicit = next((m.names for m in field.metadata if isinstance(m, Flag)), None)
        keys = [".".join((*flag_prefix, key)).replace("_", "-") for key in keys_of(name, field)]
        flags = explicit or tuple(f"--{key}" for key in keys)
        yield _Setting((*prefix, name), field, model, flags, (field.annotation,))


def _help_text(setting: _Setting) -> str:
    field = setting.field
    default = "required" if field.is_required() else f"default: {_default_text(field)}"
    text = " ".join(_docstrings(setting.owner).get(setting.path[-1], "").split())
    return f"{text} ({default})".strip().replace("%", "%%")


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field, by the field's name; a class overrides what its base classes say."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, Config):
            continue
        [body] = (
            node.body for node in ast.parse(dedent(inspect.getsource(base))).body if isinstance(node, ast.ClassDef)
        )
        for statement, below in pairwise(body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = text
    return found


def _without_foreign_keys(model: type[BaseModel], table: RawTable) -> RawTable:
    """Drop, with a warning, the keys of a union's table that belong to another member than the chosen one."""
    result = dict(table)
    flags = {setting.path: setting.flags[0] for setting in _settings(model)}
    for name, field in model.model_fields.items():
        members, inner = _config_members(field), result.get(name)
        if len(members) == 1 and isinstance(inner, dict):
            result[name] = _without_foreign_keys(cast(type[Config], members[0]), inner)
        if len(members) < 2 or not isinstance(inner, dict) or not isinstance(field.discriminator, str):
            continue
        default = _default(field)
        tag = inner.get(field.discriminator, getattr(default, field.discriminator, None))
        chosen = next((m for m in members if tag in get_args(m.model_fields[field.discriminator].annotation)), None)
        if chosen is None:
            continue
        foreign = set(inner) - set(setting_names(chosen))
        known = {key for member in members for key in setting_names(member)}
        for key in sorted(foreign & known):
            flag = flags.get((name, key))
            own = f"{name}.{key}" if flag is None else f"{name}.{key} ({flag})"
            sys.stderr.write(f"warning: {own} has no effect with {name}.{field.discriminator} = {tag!r}\n")
        result[name] = {field.discriminator: tag, **{k: v for k, v in inner.items() if k not in foreign & known}}
    return result


def _config_members(field: FieldInfo) -> list[type[BaseModel]]:
    """The `Config` classes that a field may hold: none for a plain value, several for a union."""
    return [t for t in union_leaves(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)]


def _plain(annotation: Any) -> Any:
    leaves = [leaf for leaf in union_leaves(annotation) if leaf is not type(None)]
    return leaves[0] if len(leaves) == 1 else None


def _is_list(annotation: Any) -> bool:
    return get_origin(_plain(annotation)) in (tuple, list)


def _metavar(*annotations: Any) -> str:
    leaves = [leaf for annotation in annotations for leaf in union_leaves(annotation) if leaf is not type(None)]
    choices = [str(c) for leaf in leaves if get_origin(leaf) is Literal for c in get_args(leaf)]
    choices += [str(m.value) for leaf in leaves if isinstance(leaf, type) and issubclass(leaf, Enum) for m in leaf]
    if choices:
        return "{" + ",".join(choices) + "}"
    return {int: "N", float: "F", Path: "PATH"}.get(leaves[0] if leaves else str, "TEXT")


def _default(field: FieldInfo, settings: Mapping[str, Any] | None = None) -> Any:
    """Its default beside these settings, on which it may depend."""
    if field.is_required():
        return PydanticUndefined
    return field.get_default(call_default_factory=True, validated_data=dict(settings or {}))


def _default_text(field: FieldInfo) -> str:
    value = _default(field)
    return "none" if value is None or value == () else _flag_text(value)


def _flag_text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, BaseModel | Mapping | list | tuple):
        return TypeAdapter(Any).dump_json(value).decode()
    return str(value)

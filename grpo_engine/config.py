"""Settings: one declaration each, from which files, flags, `--help` and error messages are made.

A setting is a field of a `Config` with a type, bounds, a default and a docstring under it. This module reads TOML and
JSON, applies dotted overrides and formats validation errors; `flags.py` makes the command line.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from grpo_engine.errors import ConfigError

RawTable = dict[str, Any]
"""A table as TOML or JSON gave it, before validation; the only untyped mapping that is passed on."""

ConfigT = TypeVar("ConfigT", bound="Config")


class Config(BaseModel):
    """Base of all settings: unknown keys are refused, values never change.

    The docstrings under the fields are the help, which `flags` reads from the source on demand.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_by_name=True,
        validate_by_alias=True,
        defer_build=True,  # most kinds of settings that are loaded are never validated
    )


def read_table(path: Path) -> RawTable:
    """Read a TOML or JSON file.

    Raises:
        ConfigError: the file is missing, unreadable or malformed; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    try:
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: must hold a table, not {type(table).__name__}")
    return table


def apply_overrides(table: RawTable, overrides: Iterable[str]) -> RawTable:
    """Return a copy of `table` with each `a.b.c=value` put in its place.

    The value is read as TOML (`2e-6`, `true`, `[1, 2]`, `{ a = 1 }`), and else as plain text.

    Raises:
        ConfigError: an override without `=`, or a path through a value that is not a table.
    """
    result = _deep_copy(table)
    for override in overrides:
        dotted, separator, text = override.partition("=")
        keys = [key.strip() for key in dotted.split(".")]
        if not separator or not all(keys):
            raise ConfigError(f"--set {override}: expected KEY=VALUE, as in services.trainer.lr=2e-6")
        inner = result
        for depth, key in enumerate(keys[:-1], start=1):
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {override}: {'.'.join(keys[:depth])} is {inner!r}, not a table")
        inner[keys[-1]] = _toml_value(text.strip())
    return result


def validated(model: type[ConfigT], table: RawTable, *, where: str) -> ConfigT:
    """Validate `table`.

    Raises:
        ConfigError: every fault as `where: dotted.key: what (hint)`.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, model, where))) from None


def explain(error: ValidationError, model: type[BaseModel], where: str) -> list[str]:
    """Turn a validation error into lines `where: dotted.key: what is wrong (what was probably meant)`."""
    lines: list[str] = []
    for fault in error.errors():
        written, _ = _follow(model, fault["loc"])
        key = ".".join(part if part.isprintable() else repr(part) for part in written)
        match fault["type"]:
            case "extra_forbidden":
                _, owner = _follow(model, fault["loc"][:-1])
                same = _names_of_the_same(owner, written[-1])
                text = (
                    f"another name of {same[0]!r}, which is also set: set only that"
                    if same
                    else f"unknown setting{did_you_mean(written[-1], setting_names(owner))}"
                )
            case "missing":
                text = "required, but missing"
            case "union_tag_not_found":
                discriminator = fault["ctx"]["discriminator"].strip("'")
                key, text = f"{key}.{discriminator}", "required, but missing"
            case "union_tag_invalid":
                context = fault["ctx"]
                expected = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
                key = f"{key}.{context['discriminator'].strip(chr(39))}"
                text = f"{context['tag']!r} is not one of {', '.join(expected)}{did_you_mean(context['tag'], expected)}"
            case "value_error":
                text = str(fault["ctx"]["error"])
            case _:
                text = f"{fault['msg'][:1].lower()}{fault['msg'][1:]}, but this is {_shown(fault['input'])}"
        line = ": ".join(part for part in (where, key, text) if part)  # no key: it is of several settings together
        if line not in lines:
            lines.append(line)
    return lines


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest of `names`, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def setting_names(model: type[BaseModel] | None) -> list[str]:
    """Every key that a table of `model` may hold, aliases included."""
    if model is None:
        return []
    return [key for name, field in model.model_fields.items() for key in keys_of(name, field)]


def keys_of(name: str, field: FieldInfo) -> list[str]:
    """The keys that a table may use for one field: its name, then its aliases."""
    alias = field.validation_alias
    choices = [c for c in alias.choices if isinstance(c, str)] if isinstance(alias, AliasChoices) else []
    return [name, *(choice for choice in choices if choice != name)]


def _names_of_the_same(model: type[BaseModel] | None, key: str) -> list[str]:
    """The other keys of the field that `key` means, its name first; none where it means no field."""
    fields = () if model is None else model.model_fields.items()
    keys = next((names for name, field in fields if key in (names := keys_of(name, field))), [])
    return [name for name in keys if name != key]


def _follow(model: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], type[BaseModel] | None]:
    """Walk a pydantic location: the keys that the user wrote, and the class that owns the last table.

    Pydantic puts the tag of a union's member between two keys (`services.trainer.⟨trainer⟩.lr`), which
    is not in the file.
    """
    written: list[str] = []
    current: Any = model
    for part in location:
        members = [leaf for leaf in union_leaves(current) if leaf is not type(None)]
        if len(members) > 1:
            current = next((m for m in members if isinstance(m, type) and part in _tags(m)), None)
            if current is not None:
                continue
        current = members[0] if len(members) == 1 else None
        written.append(str(part))
        if isinstance(current, type) and issubclass(current, BaseModel):
            current = next((f.annotation for n, f in current.model_fields.items() if part in keys_of(n, f)), None)
        else:
            arguments = get_args(current)
            current = arguments[-1 if get_origin(current) is dict else 0] if arguments else None
    owners = [leaf for leaf in union_leaves(current) if isinstance(leaf, type) and issubclass(leaf, BaseModel)]
    return written, owners[0] if len(owners) == 1 else None


def union_leaves(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, `Annotated` and nested unions unpacked; itself when it has none."""
    if get_origin(annotation) is Annotated:
        return union_leaves(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for part in get_args(annotation) for leaf in union_leaves(part)]
    return [annotation]


def _tags(member: type) -> set[object]:
    """The words that choose `member` out of a union: the values of its `Literal` fields."""
    fields = member.model_fields.values() if issubclass(member, BaseModel) else ()
    return {
        value for field in fields if get_origin(field.annotation) is Literal for value in get_args(field.annotation)
    }


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _deep_copy(table: RawTable) -> RawTable:
    return {key: _deep_copy(value) if isinstance(value, dict) else value for key, value in table.items()}

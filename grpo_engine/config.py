"""Settings: one declaration each, from which files, flags, `--help` and error messages are made.

A setting is a field of a `Config` with a type, bounds, a default and a docstring under it. This module reads TOML and
JSON, applies dotted overrides and formats validation errors; `flags.py` makes the command line.
"""

from __future__ import annotations

import datetime
import difflib
import errno
import json
import os
import re
import stat
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from grpo_engine.errors import ConfigError
from grpo_engine.python_command import is_of_others

RawTable = dict[str, Any]
"""A table as TOML or JSON gave it, before validation; the only untyped mapping that is passed on."""

ConfigT = TypeVar("ConfigT", bound="Config")

LogLevel = Annotated[
    Literal["critical", "error", "warning", "info", "debug"],
    BeforeValidator(lambda level: level.lower() if isinstance(level, str) else level),
]
"""Least severe level of the lines that a service logs; capitals do not matter."""


_OPEN = re.compile(r"/dev/stdin|(/dev|/proc/self)/fd/\d+")
"""Paths of descriptors that are open already."""
MAX_DEPTH = 64
"""Of tables and lists in each other; settings have six."""
MAX_FILE_BYTES = 4 * 1024 * 1024
"""Of settings, which may be somebody else's work; those of a large run have some kB."""
MAX_INTEGER_BITS = 1024
"""No float holds more; Python refuses to write one of 4300 digits, as `0xfff…` may be."""
MAX_VALUES = 262_144
"""Of a file, with the names: 64 for each of 4096 services. Each is looked at a dozen times; 4 MiB hold a million."""
MAX_YAML_VALUES = 100_000
MAX_YAML_BYTES = 262_144
"""PyYAML takes 8 s for 1 MB of short values, and twelve for half a megabyte of one number of base 60."""
MAX_KEY_WORK = 400_000_000
"""Dots of a line of TOML, squared, over all lines: `tomllib` copies the parts of a key before each of them."""
_KINDS = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
"""Of files, by their suffix; others are TOML."""


class Fault(NamedTuple):
    """What is wrong with a setting."""

    key: str
    """Dotted; empty where it is of several settings at the top together."""
    text: str
    """What is wrong, and what was probably meant."""


MISSING = "required, but missing"
MOST_FAULTS = 100
"""Named of one file: to look for the meant name of each takes time, and settings may be somebody else's work."""


class Config(BaseModel):
    """Base of all settings: unknown keys are refused, values never change.

    The docstrings under the fields are the help, which `flags` reads from the source on demand. A number is taken where
    a text is expected, as in `train_layer_indices = 1`.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        validate_by_name=True,
        validate_by_alias=True,
        defer_build=True,  # most kinds of settings that are loaded are never validated
    )

    foreign_tables: ClassVar[tuple[str, ...]] = ()
    """Tables of another program's layout, which a `--config` file and dotted flags (`--env.group_size 4`) may have."""

    @classmethod
    def from_foreign(cls, table: RawTable) -> RawTable:
        """The table with those of `foreign_tables` replaced by settings of this class.

        Raises:
            ConfigError: one of them cannot be.
        """
        return table


def read_table(path: Path) -> RawTable:
    """Read a TOML, YAML or JSON file. A pipe is read only where it is open already, as in `--config <(command)`.

    Raises:
        ConfigError: the file is missing, unreadable or malformed; the message names the line.
    """
    try:
        content = read_file(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return parsed_table(content, path)


def unreadable(path: Path, error: OSError) -> ConfigError:
    """What `read_table` raises for a file that `read_file` cannot read."""
    return ConfigError(f"{path}: cannot be read: {error.strerror or error}")


def read_file(path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The content of a file of settings. A pipe is read only where it is open already.

    Raises:
        OSError: it is missing or cannot be read, is no regular file, or is longer than `max_bytes`.
    """
    if not stat.S_ISREG(path.stat().st_mode) and not _OPEN.fullmatch(str(path)):
        raise OSError(errno.EINVAL, "not a regular file")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"longer than {max_bytes:,} bytes")
    return content


def parsed_table(content: bytes, path: Path) -> RawTable:
    """The content of a TOML, YAML or JSON file, by the suffix of its path.

    Raises:
        ConfigError: it is malformed; the message names the line.
    """
    kind = _KINDS.get(path.suffix, "TOML")
    try:
        text = content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    if kind == "YAML" and len(content) > MAX_YAML_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_YAML_BYTES:,} bytes: write it as TOML")
    try:
        table = _reader(path)(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {kind}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid {kind}: nested too deep") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: must hold a table, not {type(table).__name__}")
    if is_too_deep(table):
        raise ConfigError(f"{path}: not valid {kind}: nested too deep")
    for number, each in enumerate(_values_in(table)):
        if number == MAX_VALUES:
            raise ConfigError(f"{path}: more than {MAX_VALUES:,} names and values, as no settings have")
        if isinstance(each, int) and each.bit_length() > MAX_INTEGER_BITS:
            raise ConfigError(f"{path}: not valid {kind}: an integer of more than {MAX_INTEGER_BITS} bits")
    return table


def _values_in(value: Any) -> Iterator[Any]:
    """The value, all that is in it at any depth, and the keys of tables; empty tables and lists, too, may be faults."""
    yield value
    if isinstance(value, dict | list):
        yield from value if isinstance(value, dict) else ()
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _values_in(inner)


def is_too_deep(value: Any) -> bool:
    """Whether tables and lists are nested deeper than any settings: what walks through them calls itself at each level.

    `a.a.a.…` in TOML nests without end, and its parser does not mind.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = (
            each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)
        )
        level = [inner for each in containers for inner in each if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _reader(path: Path) -> Callable[[str], Any]:
    """What parses a file of this name; raises `ValueError` on malformed text."""
    readers: dict[str, Callable[[str], Any]] = {"JSON": json.loads, "YAML": _read_yaml}
    return readers.get(_KINDS.get(path.suffix, ""), _toml)


def _read_yaml(text: str) -> Any:
    """YAML without tags; `1e-5`, which YAML reads as text, is a number to every setting that is one."""
    import yaml  # here: TOML is the usual kind

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        if _num_values(node, [], {}) > MAX_YAML_VALUES:
            raise ValueError(f"its aliases stand for more than {MAX_YAML_VALUES} values")
        return loader.construct_document(node) or {}
    except (ValueError, RecursionError):
        raise
    except Exception as error:  # PyYAML: `!!int ''` is an IndexError, `!!bool x` a KeyError, `!!timestamp x` another
        why = str(error) if isinstance(error, yaml.YAMLError) else f"a value does not fit its tag: {error!r}"
        raise ValueError(" ".join(why.split())) from error
    finally:
        loader.dispose()


def _num_values(node: Any, above: list[int], known: dict[int, int]) -> int:
    """How many values a YAML node stands for, an alias for all that it names; `above` are the nodes that it is in.

    Raises:
        ValueError: an alias puts a table or list into itself.
    """
    if not isinstance(node.value, list):
        return 1
    if id(node) in above:
        raise ValueError("an alias names the table or list that it is in")
    if id(node) not in known:
        within = [*above, id(node)]
        parts = (part for each in node.value for part in (each if isinstance(each, tuple) else (each,)))
        known[id(node)] = 1 + sum(_num_values(part, within, known) for part in parts)
    return known[id(node)]


def apply_overrides(
    table: RawTable,
    overrides: Iterable[str],
    *,
    spell_out: Callable[[RawTable], RawTable] | None = None,
    model: type[BaseModel] | None = None,
) -> RawTable:
    """Return a copy of `table` with each `a.b.c=value` put in its place.

    The value is read as TOML (`2e-6`, `true`, `[1, 2]`, `{ a = 1 }`), and else as plain text. A path may go on through
    the short form of a table: `task.path=x` over `task = "jsonl"` makes `{ name, path }`.

    Args:
        spell_out: returns a copy in which short forms are tables, as `with_absolute_paths`; unset: there are none.
        model: whose settings these are: an override takes the place of one by another of its names, as `lr` and
            `learning_rate`; unset: none has another.

    Raises:
        ConfigError: an override without `=`, or a path through a value that is not a table.
    """
    result = _deep_copy(table)
    for override in overrides:
        dotted, separator, text = override.partition("=")
        keys = [key.strip() for key in dotted.split(".")]
        if not separator or not all(keys):
            raise ConfigError(f"--set {override}: expected KEY=VALUE, as in services.trainer.lr=2e-6")
        if spell_out is not None and _leads_through_text(result, keys[:-1]):
            result = spell_out(result)
        inner = result
        for depth, key in enumerate(keys[:-1], start=1):
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {override}: {'.'.join(keys[:depth])} is {inner!r}, not a table")
        for name in () if model is None else other_keys(model, result, keys):
            inner.pop(name, None)
        inner[keys[-1]] = toml_value(text.strip())
    return result


def other_keys(model: type[BaseModel], table: RawTable, keys: Sequence[str]) -> list[str]:
    """The other names of the setting at `keys` of a table of `model`; none where that is no setting."""
    annotation: Any = model
    marks: Sequence[Any] = ()
    value: Any = table
    for key in keys[:-1]:
        leaves, marks = union_leaves(annotation), (*marks, *_marks_of(annotation))
        if mappings := [leaf for leaf in leaves if get_origin(leaf) is dict]:
            annotation = get_args(mappings[0])[1]
        else:
            field = _field_of(_member_of(leaves, marks, value), key)
            annotation, marks = (None, ()) if field is None else (field.annotation, (field, *field.metadata))
        value = value.get(key) if isinstance(value, dict) else None
    owner = _member_of(union_leaves(annotation), (*marks, *_marks_of(annotation)), value)
    return _names_of_the_same(owner, keys[-1])


def _field_of(owner: type[BaseModel] | None, key: str) -> FieldInfo | None:
    """The field of a class that a key of its table means."""
    fields = () if owner is None else owner.model_fields.items()
    return next((field for name, field in fields if key in keys_of(name, field)), None)


def _leads_through_text(table: RawTable, keys: Sequence[str]) -> bool:
    value: Any = table
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else value
    return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class PathText:
    """Marks a setting whose texts are paths where they match the whole pattern; those of type `Path` always are."""

    pattern: str


class ModuleText:
    """Marks a setting whose texts are names of modules; an override may mean one in the folder of the shell."""


class OfWorkingDirectory:
    """Marks a path that is relative to the working directory of its service, and so is not made absolute."""


def with_absolute_paths(
    model: type[BaseModel], table: RawTable, folder: Path, *, before: RawTable | None = None
) -> RawTable:
    """Return a copy of `table` in which paths below `folder` are absolute, and short forms of tables spelled out.

    Names that are no paths, as `:memory:`, and those that begin with a variable are left as they are.

    Args:
        before: the table without overrides: a module that these name is the file of that name in `folder`, if any.
    """
    result, before = dict(table), table if before is None else before
    for name, field in model.model_fields.items():
        for key in keys_of(name, field):
            if key in table:
                result[key] = _with_absolute_paths(
                    field.annotation, (field, *field.metadata), table[key], folder, before.get(key)
                )
    return result


def _with_absolute_paths(annotation: Any, marks: Sequence[Any], value: Any, folder: Path, before: Any) -> Any:
    leaves, marks = union_leaves(annotation), (*marks, *_marks_of(annotation))
    is_overridden = value != before
    members = [leaf for leaf in leaves if isinstance(leaf, type) and issubclass(leaf, BaseModel)]
    if isinstance(value, str | dict) and members:
        for mark in marks:
            value = mark.func(value) if isinstance(mark, BeforeValidator) else value  # type: ignore[call-arg]
    inside = value if not is_overridden else before if isinstance(before, dict) else {}
    match value:
        case str() if is_overridden and any(isinstance(mark, ModuleText) for mark in marks) and value.isidentifier():
            file = folder.absolute() / f"{value}.py"
            return str(file) if os.path.isfile(file) and not is_of_others(file, folder) else value
        case str():
            patterns = [mark.pattern for mark in marks if isinstance(mark, PathText)]
            is_path = Path in leaves or any(re.fullmatch(pattern, value) for pattern in patterns)
            is_fixed = value.startswith((":", "$")) or any(isinstance(mark, OfWorkingDirectory) for mark in marks)
            if is_path and "\0" in value:
                raise ConfigError(f"{_shown(value)} has a NUL character, which no path can: take it out")
            return os.path.abspath(folder / os.path.expanduser(value)) if is_path and not is_fixed else value
        case list():
            inner = [get_args(leaf)[0] for leaf in leaves if get_origin(leaf) in (tuple, list)]
            return [_with_absolute_paths(inner[0], marks, each, folder, each) for each in value] if inner else value
        case dict() if mappings := [leaf for leaf in leaves if get_origin(leaf) is dict]:
            of_values = get_args(mappings[0])[1]
            return {
                key: _with_absolute_paths(of_values, marks, each, folder, inside.get(key))
                for key, each in value.items()
            }
        case dict():
            chosen = _member_of(members, marks, value)
            return value if chosen is None else with_absolute_paths(chosen, value, folder, before=inside)
        case _:
            return value


def _member_of(leaves: Sequence[Any], marks: Sequence[Any], value: Any) -> type[BaseModel] | None:
    """The class among the leaves of an annotation whose table `value` is, by its tag."""
    members = [leaf for leaf in leaves if isinstance(leaf, type) and issubclass(leaf, BaseModel)]
    tags = [mark.discriminator for mark in marks if isinstance(getattr(mark, "discriminator", None), str)]
    table = value if isinstance(value, dict) else {}
    chosen = [each for each in members if any(table.get(tag) in _tags_of(each, tag) for tag in tags)]
    return next(iter(members if len(members) == 1 else chosen), None)


def _marks_of(annotation: Any) -> list[Any]:
    """What `Annotated` adds to an annotation, and to the alternatives of a union."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return [*_marks_of(inner), *marks]
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return [mark for part in get_args(annotation) for mark in _marks_of(part)] if is_union else []


def _tags_of(member: type[BaseModel], discriminator: str) -> tuple[Any, ...]:
    field = member.model_fields.get(discriminator)
    return () if field is None else get_args(field.annotation)


def validated(
    model: type[ConfigT], table: RawTable, *, where: str, named: Callable[[Fault], str] = lambda fault: fault.key
) -> ConfigT:
    """Validate `table`.

    Args:
        named: what a line calls the setting of its fault.

    Raises:
        ConfigError: the first faults, each as `where: dotted.key: what (hint)`.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        faults = faults_of(error, model)
        lines = [": ".join(part for part in (where, named(fault), fault.text) if part) for fault in faults]
        raise ConfigError("\n".join(lines)) from None


def faults_of(
    error: ValidationError, model: type[BaseModel], *, is_secret: Callable[[str], bool] = lambda name: False
) -> list[Fault]:
    """The faults in a validation error, each once; the first `MOST_FAULTS` of them.

    Args:
        is_secret: whether the value of a setting of this name is not shown.
    """
    faults: list[Fault] = []
    for fault in error.errors():
        if fault["type"] == "default_factory_not_called":
            continue  # a default that depends on another setting, which has a fault of its own
        written, _ = _follow(model, fault["loc"])
        key = ".".join(part if part.isprintable() else repr(part) for part in written)
        match fault["type"]:
            case "extra_forbidden":
                _, owner = _follow(model, fault["loc"][:-1])
                same = _names_of_the_same(owner, written[-1])
                text = (
                    f"another name of {same[0]!r}, which is also set: set only that"
                    if same
                    else f"unknown setting{did_you_mean_setting(written[-1], setting_names(owner))}"
                )
            case "missing":
                text = MISSING
            case "union_tag_not_found":
                discriminator = fault["ctx"]["discriminator"].strip("'")
                key, text = f"{key}.{discriminator}", MISSING
            case "union_tag_invalid":
                context = fault["ctx"]
                expected = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
                key = f"{key}.{context['discriminator'].strip(chr(39))}"
                text = f"{context['tag']!r} is not one of {', '.join(expected)}{did_you_mean(context['tag'], expected)}"
            case "value_error":
                text = str(fault["ctx"]["error"])
            case _:
                text = f"{fault['msg'][:1].lower()}{fault['msg'][1:]}, but this is "
                text += f"a {type(fault['input']).__name__}" if any(map(is_secret, written)) else _shown(fault["input"])
        if Fault(key, text) not in faults:
            faults.append(Fault(key, text))
        if len(faults) == MOST_FAULTS:
            break
    return faults


OF_THE_ENVIRONMENT = {
    **dict.fromkeys(("num_generations", "grpo_samples", "grpo_size", "group_size"), "group_size"),
    **dict.fromkeys(("max_completion_length", "max_generated_tokens", "max_tokens"), "max_tokens"),
    **{name: name for name in ("temperature", "top_p")},
}
OF_THE_TRAINER = {
    **dict.fromkeys(
        ("max_iterations", "max_steps", "total_steps", "num_steps", "steps", "num_train_epochs", "epochs"),
        "training_steps",
    ),
    **dict.fromkeys(("per_device_train_batch_size", "batch_size"), "batch_size"),
    **dict.fromkeys(("learning_rate", "lr"), "lr"),
    **dict.fromkeys(("beta", "kl_coeff"), "kl_coef"),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), "num_iterations"),
    "epsilon": "clip_eps",
    "epsilon_high": "clip_high",
    "delta": "dual_clip",
    "loss_type": "loss",
    "scale_rewards": "advantage_scale",
    "mask_truncated_completions": "mask_truncated",
    "clip_grad_norm": "max_grad_norm",
    "enable_activation_checkpointing": "gradient_checkpointing",
    "num_warmup_steps": "warmup_steps",
    "save_steps": "checkpoint_interval",
    "save_total_limit": "keep_checkpoints",
    "eval_steps": "eval_every",
    "output_dir": "save_path",
    "report_to": "use_wandb",
    "lr_scheduler_type": "lr_schedule",
    "optim": "optimizer",
    "bf16": "dtype",
    "vllm_mode": "weight_bridge_mode",
}
_ELSEWHERE = {**OF_THE_TRAINER, **OF_THE_ENVIRONMENT}
"""Names that TRL and torchtune give to a setting, with ours, which no likeness of letters finds; and names of ours that
are looked for among the settings of another service."""


def checked_url(url: str) -> str:
    """A URL of a service, with 127.0.0.1 for `localhost`.

    That name is also ::1, which clients try first. No service of ours listens there, so any user of the machine can, at
    any time, and would be sent the token by clients that do not look who listens; others would wait.

    Raises:
        ValueError: it is none, e.g. since a character of its password is not encoded; the message has no password.
    """
    try:
        parts, _ = urlsplit(url), urlsplit(url).port
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable()
    except ValueError:  # a port that is no number, or half an address
        is_url = False
    if is_url:
        is_plain = parts.scheme == "http" and parts.hostname == "localhost"  # a certificate has the name
        netloc = re.sub("(?i)localhost(?=(:[0-9]*)?$)", "127.0.0.1", parts.netloc) if is_plain else parts.netloc
        return url.replace(parts.netloc, netloc, 1)
    shown = re.sub("^([^/]*//)?.*@", r"\1***@", url, flags=re.DOTALL)
    how = "write / and @ in a password as %2F and %40" if "@" in url else "write it like http://127.0.0.1:9001"
    raise ValueError(f"{shown!r} is not a URL: {how}")


_LONGEST_NAME = 100
"""That is compared with others."""
_MOST_NAMES = 1000
"""With which it is compared: a record of a data set may have a million."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the one of `names` that is meant, or the nearest; nothing when none is near."""
    if len(name) > _LONGEST_NAME:  # to compare takes memory and time in proportion
        return ""
    known = list(islice(names, _MOST_NAMES))
    ours = _ELSEWHERE.get(_as_setting(name))
    meant = [each for each in known if _as_setting(each) == ours]
    near = meant or difflib.get_close_matches(name, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def did_you_mean_setting(name: str, names: Iterable[str]) -> str:
    """As `did_you_mean`, and of another service where it is a setting there, or what other trainers call one.

    >>> did_you_mean_setting("num_generations", ["lr", "num_iterations"])
    " (did you mean 'group_size' of the environment?)"
    """
    known = list(islice(names, _MOST_NAMES))
    plain = _as_setting(name)
    ours = _ELSEWHERE.get(plain)
    if ours is None or ours in map(_as_setting, known):
        return did_you_mean(name, known)
    return f" (did you mean {ours!r} of the {'environment' if plain in OF_THE_ENVIRONMENT else 'trainer'}?)"


def _as_setting(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


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


def toml_value(text: str) -> Any:
    """What the text of an override stands for: a value of TOML, and else plain text, as a date, which no setting is."""
    try:
        value = _toml(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or 4,301 digits, or a thousand brackets
        return text
    return text if isinstance(value, datetime.date | datetime.time) else value


class _Float(float):
    """A number whose text is as it was written, for a setting that is a text: a version 0.10 is not 0.1."""

    def __new__(cls, text: str | float) -> _Float:
        number = super().__new__(cls, text)
        number._text = str(text)
        return number

    def __str__(self) -> str:
        return self._text

    _text: str


def _toml(text: str) -> RawTable:
    if sum(line.count(".") ** 2 for line in text.split("\n")) > MAX_KEY_WORK:
        raise ValueError("its lines have too many dots, each of which may divide a key: break them")
    return tomllib.loads(text, parse_float=_Float)


def _deep_copy(table: RawTable) -> RawTable:
    return {key: _deep_copy(value) if isinstance(value, dict) else value for key, value in table.items()}

"""Settings of runs, from their `resolved.json`: those that differ from the defaults, and those in which runs differ.

Secrets are masked. Keys are dotted, as `--set` takes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from grpo_engine.wire.secrets import masked_settings
from grpo_tui.run_files.resolved import flat
from grpo_tui.services.base import Service
from grpo_tui.services.kinds import KINDS, service_class

SHARED = ("model", "bridge")
"""Tables that a profile states once; services repeat them."""
_ABOUT = ("profile", "file", "description")
"""Keys of `resolved.json` that are no settings."""
_PLACE = re.compile(r"(^|_)(port|host|url|folder|file|path|dir|store|handover|token)s?$")
"""Names of settings that say where something is on the machine of the run."""
_FOLDER = re.compile(r"(~|\.{0,2})/[^\n]+$")
"""What is a path as a whole; folders may have spaces in their names."""
_OF_MODEL = {"model_name": "name", "dtype": "dtype", "device": "device", "max_model_len": "max_model_len"}
"""Settings of services that are the model table's, by their name there."""


def services_of(resolved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables of the services, by name."""
    services = resolved.get("services")
    return {name: one for name, one in services.items() if isinstance(one, dict)} if isinstance(services, dict) else {}


def changed_settings(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """What a run set other than by default and decides what is trained, by dotted key; for people elsewhere.

    Left out are services of kind `command`, what every service has (needs, probes, environment variables), and where
    things are on the machine of the run: ports, URLs, folders.
    """
    shown = masked_settings(resolved)
    changed = {
        key: value
        for key, value in flat({name: shown[name] for name in SHARED if shown.get(name)})
        if value is not None
    }
    model = shown.get("model") or {}
    for name, service in services_of(shown).items():
        kind = service.get("kind")
        if kind not in KINDS or kind == "command":
            continue
        fields = service_class(kind).model_fields
        for key, value in service.items():
            field = fields.get(key)
            if field is None or key in Service.model_fields or key == "kind" or _is_place(key):
                continue
            if key == "bridge" and shown.get("bridge"):
                continue
            if key in _OF_MODEL and value == model.get(_OF_MODEL[key]):
                continue
            default = field.get_default(call_default_factory=True, validated_data=service)  # may depend on others
            if value != to_jsonable_python(default, fallback=str):
                changed |= dict(flat({f"services.{name}.{key}": value}))
    known = {key: value for key, value in changed.items() if not _is_place(key)}
    return {key: _without_folders(value) for key, value in known.items()}


def _without_folders(value: Any) -> Any:
    match value:
        case str():
            return without_folder(value)
        case list():
            return [_without_folders(each) for each in value]
        case dict():
            return {key: _without_folders(each) for key, each in value.items()}
        case _:
            return value


def without_folder(text: str) -> str:
    """A text, or the last part of the path that it is."""
    return f"…/{text.rstrip('/').rpartition('/')[2]}" if _FOLDER.match(text) else text


def differing_settings(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings in which runs differ, by dotted key: a value for each run, None where it has none.

    A setting that a service has from the tables of model and bridge is listed under the table alone.
    """
    flats = [
        {key: value for key, value in flat(masked_settings(document)) if key not in _ABOUT} for document in documents
    ]
    keys = dict.fromkeys(key for one in flats for key in one)
    values = {key: [one.get(key) for one in flats] for key in keys}
    return {key: found for key, found in values.items() if _differ(found) and not _is_repeated(key, found, values)}


def compared_settings(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings in which runs differ, other than seeds and where things are on the machine: ports, URLs, folders."""
    return {
        key: found
        for key, found in differing_settings(documents).items()
        if not is_seed(key) and not any(_is_place(part) for part in key.split("."))
    }


def is_seed(key: str) -> bool:
    """Whether a setting is the seed of a service."""
    return key.rpartition(".")[2] == "seed"


def _differ(found: Sequence[Any]) -> bool:
    return any(value != found[0] for value in found)


def _is_repeated(key: str, found: Sequence[Any], values: Mapping[str, Sequence[Any]]) -> bool:
    if not key.startswith("services."):
        return False
    own = key.split(".", 2)[-1]
    return values.get(f"model.{_OF_MODEL[own]}" if own in _OF_MODEL else own) == found


def _is_place(key: str) -> bool:
    return _PLACE.search(key.rpartition(".")[2]) is not None

"""Ports that a start chooses: other ones for a second run, and free ones where a profile has 0.

A port stands in `port`, `ports` and settings named `*_port`; in text behind an address of this machine
(`localhost:8000`) or behind a flag or variable named port (`--vllm-port 9001`, `PORT=9001`); and as a word of its own
in the command of the service that declares it (`http.server 9000`). Any other number stays as it is. A 0 is replaced in
the same places of the service that has it; `{services.NAME.port}` is the port of a service in any text. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from grpo_engine.config import Fault, RawTable, did_you_mean
from grpo_engine.errors import ConfigError
from grpo_tui.services.kinds import KINDS, service_class

PORT_STEP = 10
"""A second run gets ports that a person finds: 8010 for 8000."""
LAST_PORT = 65535
FIRST_PORT = 1024
"""Those below need privileges."""
_LOOPBACK = r"localhost|127(?:\.\d+){3}|0\.0\.0\.0|\[::1?\]"
_NAMED_PORT = re.compile(r"(?i)(?<![a-z0-9])port$")
_PROBES_AND_PORTS = ("ports", "ready", "live")
FIRST_OPEN_PORT = 8000
"""From which a port is looked for that has no default."""
_PORT_OF = re.compile(r"\{services\.([\w.-]+)\.port\}")


def choose(wanted: Collection[int], used: Collection[int]) -> dict[int, int]:
    """A free port for each of the wanted ones that is used; the others stay.

    Raises:
        ConfigError: every port is used.
    """
    taken = {*wanted, *used}
    moves: dict[int, int] = {}
    for port in sorted(set(wanted) & set(used)):
        moves[port] = _free(port + PORT_STEP, taken, f"to move {port} to")
        taken.add(moves[port])
    return moves


def choose_open(wanted: Mapping[str, int], used: Collection[int]) -> dict[str, int]:
    """A free port for each service that has 0, the wanted one where it is free.

    Raises:
        ConfigError: every port is used.
    """
    taken = set(used)
    ports: dict[str, int] = {}
    for name, port in wanted.items():
        ports[name] = _free(port, taken, f"for services.{name}")
        taken.add(ports[name])
    return ports


def _free(first: int, taken: Collection[int], what: str) -> int:
    """The first port that is not taken, in steps that a person finds."""
    candidates = chain(range(first, LAST_PORT + 1, PORT_STEP), range(FIRST_PORT, LAST_PORT + 1))
    free = next((each for each in candidates if each not in taken), None)
    if free is None:
        raise ConfigError(f"no port is free {what}: end some of the servers of this machine")
    return free


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPorts:
    """A profile without a 0 for a port."""

    table: RawTable
    by_service: Mapping[str, int] = field(default_factory=dict)
    """Of the services that have 0: the port that was given, or the one to try first."""
    faults: tuple[Fault, ...] = ()


def asks_for_ports(table: RawTable) -> bool:
    """Whether a table has a 0 for a port, or the port of a service in a text."""
    return any(map(_num_open, _services(table).values())) or "{services." in str(table)


def with_chosen(table: RawTable, given: Mapping[str, int]) -> ChosenPorts:
    """A profile, whose replicas are services, with a port in place of each 0 and of each `{services.NAME.port}`.

    Args:
        given: the ports of services that have 0; the others get one that is only valid.
    """
    services = _services(table)
    declared = {port for service in services.values() for port in _declared(service)}
    faults = [
        Fault(f"services.{name}.ports", "0 is there twice, and the two could not be told apart: write one of them")
        for name, service in services.items()
        if _num_open(service) > 1
    ]
    wanted = {name: _default_port(each) or FIRST_OPEN_PORT for name, each in services.items() if _num_open(each) == 1}
    ports = {**choose_open(wanted, declared), **{name: port for name, port in given.items() if name in wanted}}
    filled = dict(table["services"])
    for name, port in ports.items():
        mover = _Mover({0: port}, _places(filter(None, [services[name].get("host")]), [0]))
        filled[name] = mover.service(services[name])
        if services[name].get("kind") == "command" and not (
            mover.reaches(services[name], 0) or _names_port_of(name, services[name])
        ):
            text = "0, and the command does not show where the port goes: write `--port 0`, `PORT=0` or"
            faults.append(Fault(f"services.{name}.ports", f"{text} {{services.{name}.port}} there"))
    by_name = {name: _port_of(service) for name, service in _services({"services": filled}).items()}
    known = {name: port for name, port in by_name.items() if port is not None}

    for name, service in filled.items():
        unknown = {each: None for each in _PORT_OF.findall(str(service)) if each not in known}
        faults += [
            Fault(f"services.{name}", f"{{services.{each}.port}}: that service has no port{did_you_mean(each, known)}")
            for each in unknown
        ]
    filled = {name: _with_text(service, partial(_named_ports, known)) for name, service in filled.items()}
    return ChosenPorts(table={**table, "services": filled}, by_service=ports, faults=tuple(dict.fromkeys(faults)))


def _services(table: RawTable) -> dict[str, RawTable]:
    services = table.get("services")
    pairs = services.items() if isinstance(services, dict) else ()
    return {name: service for name, service in pairs if isinstance(service, dict)}


def _declared(service: RawTable) -> list[int]:
    own = service.get("ports")
    ports = [service.get("port"), *(own if isinstance(own, list) else [])]
    return [port for port in ports if isinstance(port, int) and not isinstance(port, bool)]


def _num_open(service: RawTable) -> int:
    return _declared(service).count(0)


def _port_of(service: RawTable) -> int | None:
    return next(iter(_declared(service)), None) or _default_port(service)


def _default_port(service: RawTable) -> int | None:
    kind = service.get("kind")
    default = service_class(kind).model_fields.get("port") if kind in KINDS else None
    return None if default is None else int(default.default)


def _names_port_of(name: str, service: RawTable) -> bool:
    return f"{{services.{name}.port}}" in str(service)


def _named_ports(known: Mapping[str, int], text: str) -> str:
    return _PORT_OF.sub(lambda found: str(known.get(found[1], found[0])), text)


def _with_text(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case dict():
            return {key: _with_text(each, change) for key, each in value.items()}
        case list():
            return [_with_text(each, change) for each in value]
        case _:
            return value


def _places(hosts: Iterable[Any], ports: Iterable[int]) -> re.Pattern[str]:
    """Where a port stands in a text: behind an address of this machine, or a flag or variable named port."""
    addresses = "|".join([_LOOPBACK, *map(re.escape, sorted({str(host) for host in hosts}))])
    numbers = "|".join(map(str, ports))
    return re.compile(rf"(?i)((?:{addresses}):|(?<![a-z0-9])port(?:=|\s+)['\"]?)({numbers})(?!\d)")


def moved(table: RawTable, moves: Mapping[int, int], *, where: str, passed_on: Collection[str] = ()) -> RawTable:
    """A valid profile as written, with other ports in every place where one of them stands, defaults included.

    Args:
        passed_on: dotted keys of the settings that services get from elsewhere in the profile, not their defaults.

    Raises:
        ConfigError: the command of a service would not learn of its port; names both.
    """
    services = table["services"]
    hosts = [service["host"] for service in services.values() if isinstance(service, dict) and "host" in service]
    mover = _Mover(moves, _places(hosts, moves))
    result = {
        name: {**mover.defaults(f"services.{name}", service, passed_on), **mover.service(service)}
        if isinstance(service, dict)
        else service
        for name, service in services.items()
    }
    for name, service in services.items():
        for port in moves.keys() & set(service.get("ports", ())):
            if not mover.reaches(service, port) and not _names_port_of(name, service):
                raise ConfigError(
                    f"{where}: services.{name}.ports: {port} is in use, and the command does not show where the port "
                    f"goes, so that no other can be chosen: write it there as `--port {port}`, or choose one with "
                    f"--set services.{name}.ports=[…]"
                )
    return {**{key: mover.value(key, value) for key, value in table.items()}, "services": result}


class _Mover:
    def __init__(self, moves: Mapping[int, int], text: re.Pattern[str]) -> None:
        self._moves = moves
        self._text = text

    def service(self, service: RawTable) -> RawTable:
        """A `[services.NAME]` table with other ports."""
        own = service.get("ports")
        own = [port for port in own if isinstance(port, int)] if isinstance(own, list) else []
        return {key: self.value(key, value, own) for key, value in service.items()}

    def defaults(self, where: str, service: RawTable, passed_on: Collection[str]) -> RawTable:
        """Settings that a service leaves at a default in which one of the ports stands."""
        kind = service.get("kind")
        fields = service_class(kind).model_fields if kind in KINDS else {}
        unset = {
            key: list(field.default) if isinstance(field.default, tuple) else field.default
            for key, field in fields.items()
            if key not in service and f"{where}.{key}" not in passed_on
        }
        return {key: other for key, value in unset.items() if (other := self.value(key, value)) != value}

    def reaches(self, service: RawTable, port: int) -> bool:
        """Whether this port of a service stands anywhere but where it is declared and probed."""
        alone = _Mover({port: self._moves[port]}, self._text).service(service)
        return any(alone[key] != value for key, value in service.items() if key not in _PROBES_AND_PORTS)

    def value(self, key: str, value: Any, own: Collection[int] = ()) -> Any:
        """A setting with other ports; `own` are those that its service declares."""
        match value:
            case bool():
                return value
            case int() if _NAMED_PORT.search(key):
                return self._moves.get(value, value)
            case str() if _NAMED_PORT.search(key) and value.isdecimal():
                return str(self._moves.get(int(value), value))
            case str():
                return self._text.sub(self._replacement, value)
            case dict():
                return {name: self.value(name, inner, own) for name, inner in value.items()}
            case list() if key == "ports":
                return [self._moves.get(port, port) if isinstance(port, int) else port for port in value]
            case list() if all(isinstance(word, str) for word in value):
                return self._words(value, own)
            case list():
                return [self.value("", inner, own) for inner in value]
            case _:
                return value

    def _replacement(self, found: re.Match[str]) -> str:
        port = int(found[2])
        return f"{found[1]}{self._moves.get(port, port)}"

    def _words(self, words: list[str], own: Collection[int]) -> list[str]:
        """A command line: a word that is a port, behind a flag named port, or where its own service declares it."""
        result = []
        for before, word in zip(["", *words], words, strict=False):
            port = int(word) if word.isdecimal() else -1
            is_flag = before.startswith("-") and before not in ("-p", "-P")
            if port in self._moves and (_NAMED_PORT.search(before) or (port in own and not is_flag)):
                result.append(str(self._moves[port]))
            else:
                result.append(self.value("", word, own))
        return result

"""One attempt of a service, on one machine or in parts on several, followed for the process that stands for it.

The parts are one service: their logs are one log, the first part gets the signals and ends the others, and when one
fails all are ended. Of a service that follows others to their machines (`Launch.beside`) a lost part ends nothing,
parts are added, and all get the signals. Nothing is kept here that is not on both sides: another broker follows the
attempt from there on.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel

from grpo_engine.errors import GrpoError
from grpo_engine.wire.codec import Message, Whole
from grpo_engine.wire.environment_variables import MACHINE_ADDRESS_VARIABLE
from grpo_engine.wire.supervisor import RanksReport, ServiceReport
from grpo_tui.remote_process import EXIT_LOST
from grpo_tui.services.base import DEVICE_ORDER, VISIBLE_DEVICES, Launch
from grpo_tui.supervisor.placement import wire
from grpo_tui.supervisor.placement.cluster import MachineLost, NoAnswer
from grpo_tui.supervisor.placement.machine_report import Held

START_LIMIT_S = 60.0
"""For an agent to start, and to check ports and GPU memory."""
FOLLOW_S = 0.5
MOST_PARTS = 1_000_000
"""Of one attempt, with those that were lost."""
NOT_STARTED = 1
"""Exit code of a part that its machine refuses to start."""
PART_GRACE_S = 5.0
"""For the other parts to exit where one has failed; ranks whose peer has exited fail within a second."""
KILLED_WITHIN_S = 10.0
MAX_LINE_BYTES = 64 * 1024
"""Of a log of parts: a longer line is passed on in pieces."""
LOCAL_VARIABLES = ("TMPDIR", "XDG_RUNTIME_DIR", "TORCHINDUCTOR_CACHE_DIR", VISIBLE_DEVICES)
"""Of the supervisor's machine; on another one they would name what is not there."""
log = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT", bound=BaseModel)
PassOn = Callable[[ServiceReport | RanksReport], Awaitable[None]]


class FollowRequest(Message):
    """The first line of a `remote_process.py`."""

    service: str
    attempt: int
    num_copied: dict[Whole, Whole]
    """Bytes of the log of each part that it has."""
    environment: dict[str, str]


class Agents(Protocol):
    """The machines of a run."""

    async def ask(self, held: Held, request: BaseModel, kind: type[AnswerT], *, timeout_s: float = ...) -> AnswerT:
        """Ask the agent of a machine.

        Raises:
            MachineLost: the cluster has given the machine up.
            NoAnswer: not in time.
        """

    def lose(self, held: Held) -> None:
        """Take note that a machine is lost."""


class Writer(Protocol):
    """As `asyncio.StreamWriter`."""

    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Part:
    """What of a service is on one machine."""

    number: int
    held: Held
    devices: tuple[int, ...]
    num_copied: int = 0
    """Bytes of its log, from where the attempt begins."""


class PlacedAttempt:
    """An attempt, and the process that stands for it."""

    def __init__(
        self,
        agents: Agents,
        launch: Launch,
        request: FollowRequest,
        parts: Sequence[Part],
        writer: Writer,
        *,
        claim: Callable[[int], None],
        pass_on: PassOn,
        ports: Collection[int] = (),
    ) -> None:
        """
        Args:
            parts: one for each machine of the service, the first one first.
            claim: called at each question, with the attempt as its machine numbers it, which keeps it from being ended
                as one that is not followed.
            pass_on: takes what the service reports of itself.
            ports: those of all services of the run.
        """
        self._agents = agents
        self._launch = launch
        self._request = request
        self._parts = list(parts)
        self._writer = writer
        self._claim = claim
        self._pass_on = pass_on
        self._has_moved = asyncio.Event()
        self._ranks: dict[int, RanksReport] = {}
        """What each part says of its ranks."""
        self._ports = ports
        for part in parts:
            part.num_copied = request.num_copied.get(part.number, 0)

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Start or take up the attempt, and serve the process that stands for it until it has ended."""
        try:
            await self._begin()
        except GrpoError as error:
            await self._kill(self._parts)
            return self._send(words=str(error), exit=EXIT_LOST)
        name = self._launch.name
        signals = asyncio.create_task(self._pass_signals(reader), name=f"signals of {name}")
        copying = asyncio.create_task(self._copy_all(), name=f"log of {name}")
        moving = asyncio.create_task(self._has_moved.wait(), name=f"place of {name}")
        try:
            await asyncio.wait({signals, copying, moving}, return_when=asyncio.FIRST_COMPLETED)
            if copying.done():
                return self._send(exit=copying.result())
            await self._kill(self._parts)
            if not signals.done():  # else its process on the supervisor's side is gone
                self._send(words=f"{self._launch.beside[0]} is on another machine now", exit=EXIT_LOST)
        finally:
            for task in (signals, copying, moving):
                task.cancel()
            await asyncio.gather(signals, copying, moving, return_exceptions=True)

    # --- the start -------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Start the parts that do not run: all, or those that an earlier broker had not started yet.

        Raises:
            GrpoError: a part cannot be started, or was lost while it was not followed.
        """
        if self._launch.beside:
            return await self._begin_beside()
        are_known = await asyncio.gather(*(self._is_known(part) for part in self._parts))
        missing = [part for part, is_known in zip(self._parts, are_known, strict=True) if not is_known]
        if not missing:
            return
        if self._request.num_copied:
            where = missing[0].held.node.name
            raise MachineLost(f"{where} does not know attempt {self._request.attempt}: it was lost meanwhile")
        port = await self._free_port() if len(self._parts) > 1 else None
        answers = await asyncio.gather(*(self._start(part, port) for part in missing), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _begin_beside(self) -> None:
        """Start the first part unless it runs; the others begin and end on their own.

        Raises:
            GrpoError: it cannot be started, or was lost while it was not followed.
        """
        first = self._parts[0]
        if not await self._is_known(first):
            if first.num_copied:
                raise MachineLost(f"{first.held.node.name} has lost {self._launch.name}")
            await self._start(first, None)

    async def _is_known(self, part: Part) -> bool:
        """Whether its machine has the attempt; asked until it answers, since an actor may be killed as a broker begins.

        Raises:
            MachineLost: it is lost.
        """
        while True:
            try:
                return (await self._follow(part, 0.0)).is_known
            except MachineLost:
                self._agents.lose(part.held)  # before the service starts again, elsewhere
                raise
            except NoAnswer as error:
                if part.held.state == "lost":
                    raise MachineLost(str(error)) from None
                await asyncio.sleep(FOLLOW_S)

    def add(self, part: Part) -> None:
        """Begin a part where a service was placed that this one follows."""
        part.num_copied = self._request.num_copied.get(part.number, 0)
        self._parts.append(part)

    def move(self) -> None:
        """End all parts, where the first one belongs on another machine by now: the supervisor starts it again."""
        self._has_moved.set()

    async def _free_port(self) -> int:
        """A port of the first machine, where the parts meet."""
        first = self._parts[0].held
        asked = wire.ChoosePort(
            service=self._launch.name,
            attempt=self._request.attempt,
            address=first.node.address,
            but=sorted(self._ports),
        )
        port = (await self._agents.ask(first, asked, wire.Chosen)).port
        if port is None:
            raise GrpoError(f"{first.node.name}: no port is free at {first.node.address}")
        return port

    async def _start(self, part: Part, port: int | None) -> None:
        """Start a part on its machine, with the environment that its keeper gave the process on this side."""
        environment = {name: value for name, value in self._request.environment.items() if name not in LOCAL_VARIABLES}
        environment |= {VISIBLE_DEVICES: ",".join(map(str, part.devices)), DEVICE_ORDER: "PCI_BUS_ID"}
        environment[MACHINE_ADDRESS_VARIABLE] = part.held.node.address
        placed = replace(self._launch, env=environment, gpus=part.devices)
        if placed.machine_folder is not None:
            name = part.held.node.name
            folder = placed.machine_folder / name
            own = (word.format(machine=name, folder=folder) for word in placed.machine_arguments)
            placed = replace(placed, argv=(*placed.argv, *own))
        if placed.beside and part.number:
            placed = replace(placed, argv=(*placed.argv, *placed.later_arguments), ports=())
        if port is not None:
            values = {
                "num_devices": len(part.devices),
                "num_machines": len(self._parts),
                "number": part.number,
                "address": self._parts[0].held.node.address,
                "port": port,
            }
            argv = (*placed.argv, *(word.format_map(values) for word in placed.part_arguments))
            placed = replace(placed, argv=argv, ports=placed.ports if part.number else (*placed.ports, port))
        number = self._number_on_machine(part)
        asked = wire.Start(launch=wire.LAUNCH.dump_json(placed).decode(), attempt=number)
        try:
            answer = await self._agents.ask(part.held, asked, wire.Started, timeout_s=START_LIMIT_S)
        finally:
            part.held.leased_at_s = time.monotonic()  # its agent may have been started for this question
        if answer.refused is not None:
            raise GrpoError(f"{part.held.node.name}: {answer.refused}")

    # --- its log and its end ---------------------------------------------------------------------------------------

    async def _copy_all(self) -> int:
        """Copy the logs of all parts until they have exited; where one has failed, end the others. The exit code."""
        copying: dict[asyncio.Task[int], Part] = {}
        num_begun = 0
        ends: list[int] = []
        until_s, is_killed = math.inf, False
        try:
            while copying or not num_begun:
                for part in self._parts[num_begun:] if until_s == math.inf else ():
                    copying[asyncio.create_task(self._copy_begun(part))] = part
                num_begun = len(self._parts)
                limit_s = None if until_s == math.inf else max(0.0, until_s - time.monotonic())
                if self._launch.beside:  # parts may be added
                    limit_s = FOLLOW_S if limit_s is None else min(FOLLOW_S, limit_s)
                done, _ = await asyncio.wait(copying, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    part, code = copying.pop(task), task.result()
                    if self._launch.beside and part.number and part.held.state == "lost":
                        continue  # the others go on
                    if is_killed and code != EXIT_LOST:
                        continue
                    if code and copying and not any(ends):
                        self._send(words=f"{_exit_words(part, code)}; the others are ended")
                        if self._launch.beside:  # ranks fail with each other
                            await self._stop(copying.values())
                    ends.append(code)
                    until_s = min(until_s, time.monotonic() + self._grace_s(part, code))
                if done or time.monotonic() < until_s:
                    continue
                if is_killed:
                    break  # an agent that does not answer ends what nobody follows
                names = ", ".join(part.held.node.name for part in copying.values())
                self._send(words=f"{self._launch.name} still runs on {names}: it is killed there")
                is_killed, until_s = True, time.monotonic() + KILLED_WITHIN_S
                await self._kill(copying.values())
        finally:
            for task in copying:
                task.cancel()
            await asyncio.gather(*copying, return_exceptions=True)
        return exit_code(ends, self._launch.final_exit_codes)

    async def _copy_begun(self, part: Part) -> int:
        """Copy the log of a part, which is started first where it was added; its exit code."""
        while self._launch.beside and part.number:
            try:
                if not (await self._follow(part, 0.0)).is_known and not part.num_copied:
                    await self._start(part, None)
                break
            except MachineLost as error:
                self._agents.lose(part.held)
                self._send(words=str(error))
                return EXIT_LOST
            except NoAnswer:
                if part.held.state == "lost":
                    return EXIT_LOST
                await asyncio.sleep(FOLLOW_S)
            except GrpoError as error:
                self._send(words=str(error))
                return NOT_STARTED
        return await self._copy(part)

    def _grace_s(self, part: Part, code: int) -> float:
        """How long the others have when a part has exited; the first one ends the others when it has finished."""
        if code:
            return PART_GRACE_S
        if self._launch.beside:
            return self._launch.stop_grace_s
        return math.inf if part.number else self._launch.stop_grace_s

    async def _copy(self, part: Part) -> int:
        """Copy the log of a part until it has exited, or its machine is lost; its exit code."""
        name, service = part.held.node.name, self._launch.name
        has_parts = len(self._parts) > 1 or bool(self._launch.beside)
        lines = LogLines(f"{name}: " if part.number else "") if has_parts else None
        while True:
            try:
                followed = await self._follow(part, FOLLOW_S)
            except MachineLost as error:
                self._agents.lose(part.held)
                self._send(words=f"{error}: {service} ran there")
                return EXIT_LOST
            except GrpoError:
                if part.held.state == "lost":
                    self._send(words=f"{name} is lost")
                    return EXIT_LOST
                await asyncio.sleep(FOLLOW_S)
                continue
            if not followed.is_known:
                self._send(words=f"{name} has lost {service}")
                return EXIT_LOST
            data = base64.b64decode(followed.data)
            part.num_copied += len(data)
            shown = data if lines is None else lines.take(data, is_last=followed.has_exited)
            if shown:
                num_copied = part.num_copied - (0 if lines is None else lines.num_kept)
                self._send(part=part.number, num_copied=num_copied, data=base64.b64encode(shown).decode())
                await self._writer.drain()
            if followed.report is not None:
                await self._pass_on(followed.report)
            if followed.ranks is not None:
                self._ranks[part.number] = followed.ranks
                await self._pass_on(self._all_ranks(followed.ranks))
            if followed.has_exited:
                if followed.error is not None:
                    self._send(words=followed.error)
                return EXIT_LOST if followed.exit_code is None else followed.exit_code

    def _all_ranks(self, newest: RanksReport) -> RanksReport:
        """What all parts say of their ranks."""
        ranks = [
            each.model_copy(update={"machine": part.held.node.name, "gpu": _gpu(part, place)})
            for part in self._parts
            if (said := self._ranks.get(part.number)) is not None
            for place, each in enumerate(said.ranks)
        ]
        stalls = [each.stall for each in self._ranks.values() if each.stall is not None]
        ends = [
            f"{part.held.node.name}: {said.end}" if len(self._parts) > 1 else said.end
            for part in self._parts
            if (said := self._ranks.get(part.number)) is not None and said.end is not None
        ]
        return newest.model_copy(
            update={
                "ranks": ranks,
                "stall": next((each for each in stalls if each.ranks), stalls[0] if stalls else None),
                "end": "; ".join(ends) or None,
            }
        )

    async def _follow(self, part: Part, wait_s: float) -> wire.Followed:
        attempt = self._number_on_machine(part)
        self._claim(attempt)
        asked = wire.Follow(service=self._launch.name, attempt=attempt, num_copied=part.num_copied, wait_s=wait_s)
        followed = await self._agents.ask(part.held, asked, wire.Followed)
        if followed.report is not None:
            report = followed.report.model_copy(update={"attempt": self._request.attempt})
            followed = followed.model_copy(update={"report": report})
        return followed

    def _number_on_machine(self, part: Part) -> int:
        """The attempt as the agent of its machine numbers it: a machine that comes back may know an earlier part."""
        if not self._launch.beside:
            return self._request.attempt
        return self._request.attempt * MOST_PARTS + part.number

    # --- signals ---------------------------------------------------------------------------------------------------

    async def _pass_signals(self, reader: asyncio.StreamReader) -> None:
        """Pass signals on, to the first part or to all, until the process on the supervisor's side is gone."""
        while line := await reader.readline():
            number = int(json.loads(line)["signal"])
            how: Literal["stop", "send"] = "stop" if number == self._launch.stop_signal else "send"
            parts = self._parts if self._launch.beside else self._parts[:1]
            await asyncio.gather(*(self._signal(part, how, number) for part in parts))

    async def _stop(self, parts: Iterable[Part]) -> None:
        await asyncio.gather(*(self._signal(part, "stop") for part in parts))

    async def _kill(self, parts: Iterable[Part]) -> None:
        await asyncio.gather(*(self._signal(part, "kill") for part in parts))

    async def _signal(self, part: Part, how: Literal["stop", "kill", "send"], number: int = 0) -> None:
        attempt = self._number_on_machine(part)
        asked = wire.Signal(service=self._launch.name, attempt=attempt, how=how, number=number)
        with suppress(GrpoError):
            await self._agents.ask(part.held, asked, wire.Done)

    def _send(self, **message: Any) -> None:
        send(self._writer, **message)


def _gpu(part: Part, place: int) -> int | None:
    """The GPU of one of its ranks; None where the machine has none of that number."""
    there = [] if part.held.usage is None else [gpu.index for gpu in part.held.usage.gpus]
    return next((device for device in part.devices[place : place + 1] if device in there), None)


def send(writer: Writer, **message: Any) -> None:
    """Send a line to a `remote_process.py`."""
    writer.write(json.dumps(message).encode() + b"\n")


@dataclass(slots=True)
class LogLines:
    """Whole lines of a part's log, so that those of several parts are not mixed.

    Progress bars end their lines with a CR: of the first part, which has no prefix, they are shown as they grow.
    """

    prefix: str
    _kept: bytes = field(default=b"", init=False)

    @property
    def num_kept(self) -> int:
        """Bytes of a line that is not whole yet."""
        return len(self._kept)

    def take(self, data: bytes, *, is_last: bool) -> bytes:
        """The lines that are whole with this data, each with the prefix."""
        *whole, rest = (self._kept + data).split(b"\n")
        lines = [line + b"\n" for line in whole]
        if not self.prefix:
            shown, end, rest = rest.rpartition(b"\r")
            lines += [shown + end] if end else []
        self._kept = b""
        if rest:
            lines.append(rest)
            if is_last:
                lines[-1] += b"\n"
            elif len(lines[-1]) < MAX_LINE_BYTES:
                self._kept = lines.pop()
        return b"".join(self.prefix.encode() + line for line in lines)


def exit_code(ends: Sequence[int], final: Collection[int]) -> int:
    """The exit code of a service whose parts have ended so, in this order.

    A part fails when another one was killed or lost its machine, so these come first, and before them a wrong setting.
    """
    failures = [code for code in ends if code]
    for is_cause in (lambda code: code in final, lambda code: code == EXIT_LOST, _is_kill):
        if causes := [code for code in failures if is_cause(code)]:
            return causes[0]
    return failures[0] if failures else 0


def _is_kill(code: int) -> bool:
    return code < 0 or code > 128


def _exit_words(part: Part, code: int) -> str:
    how = "is lost" if code == EXIT_LOST else f"its part exited with code {code}"
    return f"{part.held.node.name}: {how}"

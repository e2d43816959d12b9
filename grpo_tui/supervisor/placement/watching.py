"""The machines of a cluster that a run has: which answers, what runs there, and which the cluster has given up.

Each is asked on its own, so that none waits for another one's answer. One that does not answer is named, and only the
cluster decides whether it is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from grpo_engine.errors import GrpoError
from grpo_engine.wire.codec import to_line
from grpo_tui.supervisor.placement import wire
from grpo_tui.supervisor.placement.cluster import Cluster, MachineLost, NoAnswer, Node
from grpo_tui.supervisor.placement.machine_report import Held, Seen

LOOK_S = 1.0
"""Between an answer of a machine and the next question, between two lists of all machines, and between two reports."""
WATCH_S = 0.25
"""Between two looks at which machines have answered."""
SILENT_AFTER_S = 3.5
"""A machine that has not answered for so long is named."""
LOOK_LIMIT_S = 4.0
LIST_LIMIT_S = 30.0
LATE_S = 1.0
"""A round that comes so much too late says that this process stood still, and not the machines."""
ANSWER_LIMIT_S = 20.0
log = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT", bound=BaseModel)


class MachineWatch:
    """Of the broker, which decides what follows."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        lost: Callable[[Held], object],
        answered: Callable[[Held, wire.Usage], Awaitable[object]],
        report: Callable[[], object],
    ) -> None:
        """
        Args:
            lost: called once for each machine that the cluster has given up.
            answered: awaited with what runs on a machine, after each answer.
            report: called every `LOOK_S`, and when one falls silent or answers again.
        """
        self._cluster = cluster
        self._lost = lost
        self._answered = answered
        self._report = report
        self._reported_at_s = -LOOK_S
        self.held: dict[str, Held] = {}
        """By node, those that are lost included."""
        self.joining: dict[str, Seen] = {}
        self.spares: dict[str, Seen] = {}
        """The same, of machines that devices are being reserved on, and of those without anything of the run."""
        self.listed_at: float | None = None
        """When the cluster said last which machines are alive."""

    def has(self, node: str) -> bool:
        """Whether the run has a machine that is not lost."""
        held = self.held.get(node)
        return held is not None and held.state != "lost"

    async def watch(self) -> None:
        """Watch each machine on its own, name those that do not answer, and report; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._list_machines())
            round_at_s = time.monotonic()
            while True:
                for held in list(self.held.values()):
                    if not held.is_watched:
                        held.is_watched = True
                        tasks.create_task(self._watch(held), name=f"watch {held.node.name}")
                self._name_silent()
                if time.monotonic() - self._reported_at_s >= LOOK_S:
                    self.report()
                await asyncio.sleep(WATCH_S)
                late_s, round_at_s = time.monotonic() - round_at_s - WATCH_S, time.monotonic()
                if late_s > LATE_S:
                    for held in self.held.values():
                        held.heard_at_s += late_s

    async def reserve(self, node: Node, num_devices: int) -> tuple[int, ...]:
        """`Cluster.reserve`; meanwhile the machine is shown as one that joins."""
        self.joining[node.id] = Seen(node=node, since=time.time())
        self.report()
        try:
            return await self._cluster.reserve(node, num_devices)
        finally:
            del self.joining[node.id]

    async def ask(
        self, held: Held, request: BaseModel, kind: type[AnswerT], *, timeout_s: float = ANSWER_LIMIT_S
    ) -> AnswerT:
        """Ask the agent of a machine.

        Raises:
            MachineLost: the cluster has given the machine up.
            NoAnswer: not in time.
        """
        line = await self._cluster.ask(held.node.id, to_line(request), timeout_s=timeout_s)
        try:
            return kind.model_validate_json(line)
        except ValidationError:
            raise NoAnswer(f"{held.node.name} answers {line[:80]!r}") from None

    def lose(self, held: Held) -> None:
        """Take note that the cluster has given a machine up."""
        if held.state != "lost":
            held.state, held.since, held.usage = "lost", time.time(), None
            self._lost(held)
            self.report()

    def report(self) -> None:
        """Report now."""
        self._reported_at_s = time.monotonic()
        self._report()

    async def _watch(self, held: Held) -> None:
        while held.state != "lost":
            await self._look(held)
            await asyncio.sleep(LOOK_S)

    async def _list_machines(self) -> None:
        """Ask the cluster which machines it has, again and again: it may know of a loss before a question fails."""
        while True:
            with suppress(GrpoError, TimeoutError):
                async with asyncio.timeout(LIST_LIMIT_S):
                    await self._take_list(await self._cluster.nodes())
            await asyncio.sleep(LOOK_S)

    async def _take_list(self, nodes: list[Node]) -> None:
        now, alive = time.time(), {node.id: node for node in nodes}
        self.listed_at = now
        spares = [node for node in nodes if node.id not in self.held and node.id not in self.joining]
        self.spares = {
            node.id: Seen(node=node, since=known.since if (known := self.spares.get(node.id)) else now)
            for node in spares
        }
        for held in list(self.held.values()):
            if held.node.id in alive:
                held.node = alive[held.node.id]
            elif held.state != "lost":
                self.lose(held)
                await self._cluster.release(held.node.id)

    async def _look(self, held: Held) -> None:
        """Ask a machine what runs there, and keep the answer; without one of the cluster's own process it is silent."""
        try:
            usage, _ = await asyncio.gather(
                self._ask_usage(held),
                self._cluster.check(held.node.id, timeout_s=LOOK_LIMIT_S),
            )
        except MachineLost:
            self.lose(held)
            return
        except GrpoError as error:
            log.debug("%s: %s", held.node.name, error)
            return
        if held.state == "lost":
            return
        held.usage, held.heard_at_s, held.answered_at = usage, time.monotonic(), time.time()
        if held.state == "silent":
            log.info("%s answers", held.node.name)
            held.state, held.since = "ready", time.time()
            self.report()
        await self._answered(held, usage)

    async def _ask_usage(self, held: Held) -> wire.Usage:
        usage = await self.ask(held, wire.Look(heard=held.last_answer), wire.Usage, timeout_s=LOOK_LIMIT_S)
        held.last_answer, held.leased_at_s = usage.number, time.monotonic()
        return usage

    def _name_silent(self) -> None:
        """Machines that have not answered for a while."""
        silent = [
            held
            for held in self.held.values()
            if held.state == "ready" and time.monotonic() - held.heard_at_s > SILENT_AFTER_S
        ]
        for held in silent:
            log.warning("%s has not answered for %g s", held.node.name, SILENT_AFTER_S)
            held.state, held.since = "silent", held.answered_at or held.since
        if silent:
            self.report()

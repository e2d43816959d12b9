"""The inference servers of a trainer: which of them answer, and what each serves.

A server that does not answer is *away*: the others get their updates, and it is looked for again and brought up to date
once it answers. Its restart is its supervisor's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from grpo_engine.bridges.protocol import BridgeContext, BridgeModel, SavedPlacement, send_all
from grpo_engine.bridges.transport.served_file import Repetition, ServedFile
from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.bridges.transport.server_control import is_listening
from grpo_engine.errors import BridgeError, PeerUnavailable
from grpo_engine.wire.inference import BridgeInfo

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_AWAY_AFTER_S = 3.0
"""A server that has not answered for so long is away, where there are others."""
_ANSWER_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.5
_LOOK_WITHIN_S = 1.0

AnswerT = TypeVar("AnswerT")

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Server:
    """One of them."""

    client: ServerClient
    instance: str = ""
    """The start of the server that was updated last."""
    version: int | None = None
    """What it was sent last; None: nothing by this trainer."""
    is_away: bool = False

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.url

    def is_current(self, info: BridgeInfo, version: int) -> bool:
        """Whether it serves a version that this trainer sent to it."""
        return (info.instance, info.policy_version) == (self.instance, version) == (self.instance, self.version)

    def served(self, instance: str, version: int) -> None:
        """Note what it serves from now on."""
        self.instance, self.version = instance, version


class Servers:
    """All of them; at least one."""

    def __init__(self, context: BridgeContext) -> None:
        self._patience_s = context.patience_s
        self.all = [
            Server(ServerClient(url, patience_s=context.patience_s, is_stopping=context.is_stopping))
            for url in context.server_urls
        ]
        self._pool = ThreadPoolExecutor(len(self.all), thread_name_prefix="inference-server")
        self._looked_at = self._compared_at = -_LOOK_EVERY_S
        self._served_file = ServedFile(context.served_file)
        self._repetition = Repetition()

    @property
    def asked(self) -> list[Server]:
        """Those that are not away; where all are, all of them."""
        return [server for server in self.all if not server.is_away] or self.all

    def find(self, advice: Callable[[int], str]) -> list[BridgeInfo]:
        """Wait for every server; returns the state of each.

        Args:
            advice: how to start one on a port, for the log and the error.

        Raises:
            PeerUnavailable: one does not answer.
        """
        infos = []
        for server in self.all:
            port = urlsplit(server.url).port or 0
            if not is_listening(server.url):
                logger.warning("%s: no inference server answers yet: if none is loading, %s", server.url, advice(port))
            try:
                infos.append(server.client.info())
            except PeerUnavailable as error:
                raise PeerUnavailable(f"{error}; {advice(port)}") from None
        return infos

    def ask(self, servers: Iterable[Server], question: Callable[[Server], AnswerT]) -> dict[Server, AnswerT]:
        """Ask several at once; those that do not answer are away afterwards, and not in the result.

        Args:
            question: asks one, with `patience_s`.

        Raises:
            PeerUnavailable: none answers.
            GrpoError: the first other error of a server.
        """
        with self.asking(servers, question) as answers:
            pass
        if not answers:
            urls = ", ".join(server.url for server in self.all)
            raise PeerUnavailable(f"no inference server answers ({urls}); look at their logs")
        return answers

    @contextmanager
    def asking(
        self,
        servers: Iterable[Server],
        question: Callable[[Server], AnswerT],
        when_answered: Callable[[Future[AnswerT]], None] | None = None,
    ) -> Iterator[dict[Server, AnswerT]]:
        """The same, with something else to do within; the result is filled afterwards, and may be empty.

        Args:
            when_answered: called in another thread, for each answer and each failure at once.
        """
        asked = {server: self._pool.submit(question, server) for server in servers}
        for future in asked.values():
            if when_answered is not None:
                future.add_done_callback(when_answered)
        answers: dict[Server, AnswerT] = {}
        yield answers
        for server, future in asked.items():
            try:
                answers[server] = future.result()
                server.is_away = False
            except PeerUnavailable as error:
                self.lose(server, str(error))

    def infos(self) -> dict[Server, BridgeInfo]:
        """The state of those that answer.

        Raises:
            PeerUnavailable: none does.
        """
        return self.ask(
            self.asked, lambda server: server.client.info(patience_s=self.patience_s, within_s=self.within_s)
        )

    @property
    def patience_s(self) -> float:
        """How long to wait for the answer of one: of the only one long, of one among others shortly."""
        return self._patience_s if len(self.all) == 1 else _AWAY_AFTER_S

    @property
    def within_s(self) -> float | None:
        """Longest time for a short answer of one among others, which may have been stopped; None: the client's own."""
        return None if len(self.all) == 1 else _ANSWER_WITHIN_S

    def lose(self, server: Server, why: str) -> None:
        """Note that a server does not answer."""
        if not server.is_away and len(self.all) > 1:
            logger.warning("inference server %s is away (%s); the others go on", server.url, why)
        server.is_away = True

    def look_for_lost(self) -> bool:
        """Look for servers that are away, at most twice a second; returns whether one answers again."""
        now = time.monotonic()
        if not any(server.is_away for server in self.all) or now - self._looked_at < _LOOK_EVERY_S:
            return False
        self._looked_at = now
        found = False
        for server in self.all:
            if server.is_away and _answer_now(server) is not None:
                logger.info("inference server %s answers again", server.url)
                server.is_away = False
                found = True
        return found

    def has_restarted_one(self) -> bool:
        """Whether one that is not away was started again since its last update; looks at most twice a second."""
        now = time.monotonic()
        if now - self._compared_at < _LOOK_EVERY_S:
            return False
        self._compared_at = now
        for server in self.all:
            info = None if server.is_away else _answer_now(server)
            if info is not None and info.instance != server.instance:
                logger.info("inference server %s was started again", server.url)
                return True
        return False

    # --- versions that are computed again ----------------------------------------------------------------------------

    def repeat(self, versions: range) -> None:
        """See `BridgeModel.repeat`."""
        self._repetition.begin(versions)

    def kept_version(self) -> int | None:
        """What all of them serve as an earlier trainer of this run has sent it, if they may stay at that."""
        note = self._served_file.read(self._repetition)
        if note is None:
            return None
        version, infos = note.policy_version, self.infos()
        for info in infos.values():
            if info.policy_version != version or note.updates.get(info.instance) != info.update_count:
                return None
        if len(infos) < len(self.all):
            return None
        for server, info in infos.items():
            server.served(info.instance, version)
        logger.info("inference serves version %d of this run, and stays at it until a later one is due", version)
        return version

    def may_stay(self, served: int | None, version: int) -> bool:
        """Whether servers that have `served` (None: nothing by this trainer) need not be sent `version`."""
        has_it = version == served and version in self._repetition
        return served is not None and (has_it or self._repetition.goes_on_after(version))

    @contextmanager
    def noting(self, version: int) -> Iterator[None]:
        """Within, servers are sent a version; which of them serve it is noted for the next trainer."""
        self._served_file.remove()
        yield
        if self._served_file.is_possible:
            infos = zip(self.all, self._pool.map(_answer_now, self.all), strict=True)
            current = [info for server, info in infos if info is not None and server.is_current(info, version)]
            self._served_file.write(version, {info.instance: info.update_count for info in current})

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for server in self.all:
            server.client.close()


def _answer_now(server: Server) -> BridgeInfo | None:
    """The state of a server that answers at once."""
    if not is_listening(server.url):
        return None
    try:
        return server.client.info(patience_s=0.0, within_s=_LOOK_WITHIN_S)
    except PeerUnavailable:
        return None


def require_same_model(url: str, served: str, trained: str) -> None:
    """Refuse a server that would be sent the weights of another model than it serves.

    Raises:
        BridgeError: the models differ.
    """
    from grpo_engine.models.same_model import is_same_model

    if not is_same_model(trained, served):
        raise BridgeError(f"{url}: serves {served}, but {trained} is trained: give both the same model")


def unshared_model(
    model: PreTrainedModel | PeftModel,
    placement: SavedPlacement,
    infos: Iterable[BridgeInfo],
    repeat: Callable[[range], None] = send_all,
) -> BridgeModel:
    """What a bridge attaches whose servers have weights of their own, in these versions."""
    return BridgeModel(
        model=model,
        is_shared=False,
        policy_version=max(info.policy_version for info in infos),
        save=placement.save,
        tensors=placement.tensors,
        repeat=repeat,
    )

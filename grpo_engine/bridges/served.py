"""What the server was handed last, and whether it still serves it: a server may be restarted at any time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_engine.bridges.server_client import ServerClient

logger = logging.getLogger(__name__)


class Served:
    """The version that was handed over last, and the start of the server that took it."""

    def __init__(self, client: ServerClient) -> None:
        self.version: int | None = None
        """None before the first hand-over."""
        self.instance = ""
        self._client = client

    def note(self, version: int) -> None:
        """The server has taken `version`."""
        self.version, self.instance = version, self._client.info().instance

    def is_lost(self) -> bool:
        """Whether the server has something else by now, and must be handed the weights again; one GET.

        A new start of it that serves the version has read it itself, as one does that is given a hand-over folder;
        version 0 alone may also be the untrained model's.

        Raises:
            PeerUnavailable: it stays away.
        """
        if self.version is None:
            return False
        info = self._client.info()
        if info.policy_version == self.version and (info.instance == self.instance or self.version > 0):
            if info.instance != self.instance:
                logger.info("the inference server was restarted, and serves version %d", self.version)
            self.instance = info.instance
            return False
        logger.warning(
            "the inference server serves version %d instead of %d; handing over again",
            info.policy_version,
            self.version,
        )
        return True

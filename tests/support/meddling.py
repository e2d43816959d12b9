"""A proxy in front of a real inference server that changes requests or answers: a server with one defect."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Body = dict[str, Any]
Ask = Callable[[Body], Body]


class Refusal(Exception):
    """Raised to answer 500 instead of the server."""


def honest(path: str, body: Body, ask: Ask) -> Body:
    """Forward everything unchanged."""
    return ask(body)


@contextmanager
def meddling_server(url: str, meddle: Callable[[str, Body, Ask], Body]) -> Iterator[int]:
    """The port of a server that answers `meddle(path, body, ask)`, where `ask` sends a request to the real one."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                self._answer(json.loads(self.rfile.read(length)) if length else {})

            def _answer(self, body: Body) -> None:
                status = 200

                def ask(asked: Body) -> Body:
                    nonlocal status
                    answer = client.request(self.command, self.path, json=asked or None)
                    status = answer.status_code
                    return dict(answer.json())

                try:
                    content = json.dumps(meddle(self.path, body, ask)).encode()
                except Refusal:
                    status, content = 500, b'{"detail": "meddled with"}'
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
            thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                yield proxy.server_port
            finally:
                proxy.shutdown()
                thread.join()

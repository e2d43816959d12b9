"""A private cluster of Ray talks only to who has the key that is made for it."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from grpo_tui.supervisor.placement.certificate import new_certificate


def context(purpose: ssl.Purpose, folder: Path, own: Path | None) -> ssl.SSLContext:
    made = ssl.create_default_context(purpose, cafile=str(folder / "crt"))
    made.verify_mode = ssl.CERT_REQUIRED
    if own is not None:
        made.load_cert_chain(own / "crt", own / "key")
    return made


@pytest.fixture
def clusters(tmp_path: Path) -> tuple[Path, Path]:
    """The files of two clusters."""
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
        for name, content in zip(("key", "crt"), new_certificate("127.0.0.1"), strict=True):
            (folder / name).write_bytes(content)
    return folders


def hello(server: Path, client: Path | None) -> bytes:
    """What a server gets from a client, which may have a certificate."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = context(ssl.Purpose.SERVER_AUTH, server, client).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    back, forth = ssl.MemoryBIO(), ssl.MemoryBIO()
    answering = context(ssl.Purpose.CLIENT_AUTH, server, server).wrap_bio(back, forth, server_side=True)
    for _ in range(4):
        for side in (asking, answering):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
            back.write(outgoing.read())
            incoming.write(forth.read())
    asking.write(b"hello")
    back.write(outgoing.read())
    return answering.read(5)


def test_who_has_the_key_of_a_cluster_is_let_in(clusters: tuple[Path, Path]) -> None:
    assert hello(clusters[0], clusters[0]) == b"hello"


def test_nobody_without_a_certificate_of_the_cluster_is_let_in(clusters: tuple[Path, Path]) -> None:
    for stranger in (None, clusters[1]):
        with pytest.raises(ssl.SSLError):
            hello(clusters[0], stranger)

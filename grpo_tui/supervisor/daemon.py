"""The supervisor process of one run: `python -m grpo_tui.supervisor.daemon RUN_FOLDER`. Detaches, listens, supervises.

With `- N` it prints that it is loaded and reads the run folder from stdin, so that it can be started before the folder
exists or before its predecessor exits; on an empty line it exits. Descriptor N is the lock of all starts on this host,
which it keeps until it has locked the run.
It reads `plan.json` from the run folder and adopts the services that an earlier supervisor left running. It exits when
the run is over. SIGTERM, SIGINT and a crash leave every service running, so that a log-out script or an upgrade ends no
training; `grpo-tui down` ends a run. A second supervisor on the same run folder exits at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from grpo_engine.errors import GrpoError, PeerError
from grpo_engine.wire.codec import MAX_LINE_BYTES
from grpo_engine.wire.run_folder import ADDRESS_FILE, PLAN_FILE, SUPERVISOR_LOG
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, Bye
from grpo_tui.paths import ALWAYS_SHORT, registration_path, socket_path
from grpo_tui.profile.plan_file import Plan
from grpo_tui.supervisor.core import Supervisor
from grpo_tui.supervisor.handlers import converse
from grpo_tui.supervisor.keeper.orphans import become_reaper
from grpo_tui.supervisor.lock import LOADED, read_address, take_lock, write_address
from grpo_tui.supervisor.registered import register
from grpo_tui.supervisor.run_folder import LOST, LOST_IN_PART, RunFolder, log_to
from grpo_tui.supervisor.state_file import StateDocument, read_state

FILES_CHECK_S = 2.0
"""Between two checks of the socket and the run folder: log-outs, cleaners of /tmp and people remove them."""
SOCKET_ALONE = "s"
"""The name of the socket in a folder that has nothing else."""
BACKLOG = 64
NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""As many as asyncio would start."""
CLOSE_LIMIT_S = 0.2
log = logging.getLogger(__name__)


def main() -> int:
    """Detach from the parent, and supervise; 0 also when another supervisor of the run is running."""
    if len(sys.argv) != (3 if sys.argv[1:2] == ["-"] else 2):
        sys.stderr.write("usage: python -m grpo_tui.supervisor.daemon RUN_FOLDER|- N\n")
        return 2
    folder = sys.argv[1] if sys.argv[1] != "-" else _read_folder()
    if not folder:
        return 0
    run_folder = Path(folder).resolve()
    plan = Plan.of(run_folder)
    _detach(run_folder / SUPERVISOR_LOG)
    become_reaper()
    lock = take_lock(run_folder)
    if sys.argv[2:]:
        os.close(int(sys.argv[2]))
    if lock is None:
        log.info("another supervisor of %s is running: this one exits", run_folder.name)
        return 0
    predecessor = _predecessor(run_folder)
    if predecessor is not None and predecessor.state in ENDED_RUN_STATES:
        log.info("run %s is over: %s", run_folder.name, predecessor.state)
        registration_path(run_folder).unlink(missing_ok=True)  # made anew by the command that started this process
        return 0
    try:
        asyncio.run(_serve(plan, run_folder, predecessor))
    except GrpoError as error:
        log.error("supervisor exits: %s; services keep running, and the next supervisor takes them over", error)
        return 1
    except Exception:
        log.exception("supervisor crashed (bug); services keep running, and the next supervisor takes them over")
        return 1
    return 0


def _read_folder() -> str:
    sys.stdout.write(LOADED)
    sys.stdout.flush()
    return sys.stdin.readline().rstrip("\n")


def _detach(log_file: Path) -> None:
    """Leave the terminal, the session and the parent process; from here on stderr is the supervisor's log."""
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o077)  # for services too: other users may neither read nor replace the files of a run
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    log_to(log_file)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(message)s", force=True
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _predecessor(run_folder: Path) -> StateDocument | None:
    try:
        return read_state(run_folder)
    except PeerError as error:
        log.error("%s; continuing with the files of the keepers", error)
        return None


async def _serve(plan: Plan, run_folder: Path, predecessor: StateDocument | None) -> None:
    """Listen and supervise until the run is over or a signal comes."""
    asyncio.get_running_loop().set_default_executor(started_threads())
    supervisor = Supervisor(plan, run_folder=run_folder, predecessor=predecessor)
    log.info("supervisor %d started for run %s of profile %s", os.getpid(), run_folder.name, plan.profile_name)
    listening = asyncio.create_task(_listen(supervisor, run_folder), name="listening")
    supervising = asyncio.create_task(supervisor.run(), name="supervising")
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _exit_on_signal, number, supervising)
    try:
        await asyncio.wait({listening, supervising}, return_when=asyncio.FIRST_COMPLETED)
        if not supervising.done():
            listening.result()
        with suppress(asyncio.CancelledError):
            await supervising
    finally:
        supervising.cancel()
        listening.cancel()
        await asyncio.gather(listening, supervising, return_exceptions=True)


def started_threads() -> ThreadPoolExecutor:
    """Threads for blocking work, all started: where the user may have no further process later, none is needed.

    Raises:
        GrpoError: the user may have no further process now.
    """
    pool, are_started = ThreadPoolExecutor(NUM_THREADS), threading.Barrier(NUM_THREADS + 1)
    try:
        for _ in range(NUM_THREADS):
            pool.submit(are_started.wait)
    except RuntimeError as error:
        are_started.abort()
        raise GrpoError(f"{error}: the limit of processes is reached (`ulimit -u`, pids.max)") from None
    are_started.wait()
    return pool


def _exit_on_signal(number: int, supervising: asyncio.Task[object]) -> None:
    log.info("%s: supervisor exits, services keep running", signal.Signals(number).name)
    supervising.cancel()


async def _listen(supervisor: Supervisor, run_folder: Path) -> None:
    """Accept clients on the run's socket, and restore files that were removed; cancelled, close all connections."""
    conversations: set[asyncio.Task[None]] = set()
    count = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        task = asyncio.current_task()
        assert task is not None
        conversations.add(task)
        task.add_done_callback(conversations.discard)
        with suppress(asyncio.CancelledError):  # asyncio's streams would log it as an exception of this callback
            await converse(supervisor, reader, writer, f"client {count}")

    files = RunFolder(run_folder)
    path = socket_path(run_folder)
    server: asyncio.Server | None = None
    is_found, fault = False, ""
    try:
        while True:
            try:
                was_lost = files.is_lost and _restore(files, supervisor)
                is_found = is_found and not was_lost and _is_own_socket(path)
                if not is_found:
                    path, before = socket_path(run_folder) if server is None else _next_socket(run_folder), server
                    _clear(path)
                    server = await asyncio.start_unix_server(accept, path, limit=MAX_LINE_BYTES, backlog=BACKLOG)
                    path.chmod(0o600)
                    if before is not None:
                        log.warning("the socket or its address file was removed: listening again on %s", path)
                        before.close()
                    write_address(run_folder, path)
                    is_found, fault = True, ""
            except (OSError, GrpoError) as error:  # a full disk, a runtime folder that went with a log-out
                if server is None:
                    raise
                if str(error) != fault:
                    fault = str(error)
                    log.error("clients cannot connect: %s; services keep running, and it is tried again", fault)
            with suppress(OSError, GrpoError):  # a full disk: it is tried again
                if not registration_path(run_folder).exists():
                    register(run_folder)
            await asyncio.sleep(FILES_CHECK_S)
    finally:
        with suppress(OSError):  # another user's by now
            _clear(path)
            if path.name == SOCKET_ALONE:
                path.parent.rmdir()
        address = read_address(run_folder)
        if address is not None and address.pid == os.getpid():
            (run_folder / ADDRESS_FILE).unlink(missing_ok=True)
        if supervisor.state in ENDED_RUN_STATES:
            with suppress(OSError, GrpoError):  # its folder is another user's by now
                registration_path(run_folder).unlink(missing_ok=True)
            supervisor.broadcast.send_to_all(Bye(state=supervisor.state))
        await _close(conversations)


def _is_own_socket(path: Path) -> bool:
    """Whether our socket is there still: where its folder was removed, another user can make both again."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()


def _next_socket(run_folder: Path) -> Path:
    """Where to listen once the socket is gone: as before, or in a new folder where the one for sockets is not ours."""
    try:
        return socket_path(run_folder)
    except GrpoError as error:
        log.warning("%s; this supervisor listens in a folder of its own, whose name is in %s", error, ADDRESS_FILE)
        return Path(tempfile.mkdtemp(prefix="grpo-socket-", dir=ALWAYS_SHORT)) / SOCKET_ALONE


def _clear(path: Path) -> None:
    """Remove what is in the socket's place; the folder is accessible to our user only."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _restore(files: RunFolder, supervisor: Supervisor) -> bool:
    """Make the deleted run folder or files of it again; returns whether that was possible."""
    has_plan = (files.folder / PLAN_FILE).exists()
    try:
        files.restore(supervisor.keepers())
    except OSError as error:
        log.error("%s was deleted and cannot be made again: %s; services keep running", files.folder, error)
        return False
    supervisor.notice("error", (LOST_IN_PART if has_plan else LOST).format(folder=files.folder), None)
    supervisor.write_state()
    return True


async def _close(conversations: set[asyncio.Task[None]]) -> None:
    """Give pending lines a moment to be sent, then end all connections."""
    if conversations:
        await asyncio.wait(set(conversations), timeout=CLOSE_LIMIT_S)
    for task in set(conversations):
        task.cancel()


if __name__ == "__main__":
    sys.exit(main())

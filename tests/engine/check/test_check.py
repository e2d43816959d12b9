"""`grpo-engine check` against real servers: ok without a fault, and the error with its cause for each fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from functools import cache
from pathlib import Path

import pytest
import torch
from meddling import Ask, Body, Refusal, honest, meddling_server
from serving import RunningServer, free_port, model_logprobs, python_path, running_server, save_tiny_model
from training import ListedSource, made_up_groups, metrics_lines, train_in

from grpo_engine import cli
from grpo_engine.bridges import ON_SHARED_MEMORY, BridgeContext
from grpo_engine.check.config import CheckConfig
from grpo_engine.check.main import check, run
from grpo_engine.check.report import Report
from grpo_engine.config import validated
from grpo_engine.diagnosis.finding import Finding
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.loading import load_model
from grpo_engine.models.lora import add_lora, save_adapter

pytestmark = pytest.mark.slow
FLAGS = {
    "shared_vllm": ["--shared-weights"],
    "lora_merged": ["--shared-weights"],
    "lora_only": ["--enable-lora"],
    "none": [],
}
FURTHER = pytest.mark.extended("the same test with shared_vllm, on processed log-probabilities")
PROMPT, FIXED = [10, 20, 30], [40, 50, 60, 70]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def server_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """Starts one server of `model` for each mode and convention; every check leaves it as it was."""
    with ExitStack() as servers:

        @cache
        def start(mode: str = "none", logprobs_mode: str = "processed") -> RunningServer:
            folder = tmp_path_factory.mktemp(f"{mode}-{logprobs_mode}")
            return servers.enter_context(serving(model, mode, folder, "--logprobs-mode", logprobs_mode))

        yield start


@pytest.fixture
def server(server_of: Callable[..., RunningServer]) -> RunningServer:
    return server_of()


def serving(model: Path, mode: str, folder: Path, *flags: str) -> AbstractContextManager[RunningServer]:
    bridge_file = folder / "bridge.json"
    return running_server(model, "--bridge-file", str(bridge_file), *FLAGS[mode], *flags, folder=folder)


def config_of(model: Path | str, server: RunningServer | None, mode: str = "none", **changes: object) -> CheckConfig:
    bridge: dict[str, object] = {"mode": mode}
    if server is not None:
        changes = {"vllm_port": int(server.url.rsplit(":", 1)[1]), **changes}
        if mode in ON_SHARED_MEMORY:
            bridge["config_path"] = server.log.parent / "bridge.json"
    table: dict[str, object] = {
        **{"model_name": str(model), "bridge": bridge, "optimizer": "adamw", "device": "cpu", "dtype": "float32"},
        **{"seq_len": 200, "check_timeout_s": 20.0, "check_tokens": 24},
        **{"batch_size": 4, "gradient_accumulation_steps": 2, "training_steps": 2},
    }
    return validated(CheckConfig, {**table, **changes}, where="test")


def findings_of(config: CheckConfig) -> dict[str, Finding]:
    report = Report(config)
    check(config, report)
    return {finding.id: finding for finding in report.findings}


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    """Those that are not ok."""
    return {id: finding.severity for id, finding in findings.items() if finding.severity != "ok"}


def version_of(server: RunningServer) -> int:
    with server.client as client:
        return int(client.get("/bridge/info").json()["policy_version"])


def assert_serves_the_start(server: RunningServer, model: Path | str) -> None:
    answer = server.generate(prompt={"prompt_token_ids": PROMPT + FIXED}, prompt_logprobs=0, max_tokens=1)
    values = [next(iter(entry.values())) for entry in answer["prompt_logprobs"][len(PROMPT) :]]  # type: ignore[index]
    expected = model_logprobs(load_model(str(model), dtype="float32", device="cpu"), PROMPT, FIXED)
    torch.testing.assert_close(torch.tensor(values), expected, atol=1e-4, rtol=0)


def trained_versions(config: CheckConfig, server: RunningServer, folder: Path) -> list[int]:
    """The policy version of each step of a training run."""
    context = BridgeContext(
        model_name=config.model_name,
        dtype="float32",
        device="cpu",
        server_urls=(server.url,),
        folder=folder,
        lora=LoraSettings(),
    )
    source = ListedSource([made_up_groups(seed) for seed in range(config.training_steps)])
    with closing(config.bridge.build(context)) as bridge:
        train_in(folder, config, source, bridge)
    return [line.policy_version for line in metrics_lines(folder)]


# --- servers without a fault -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", ["shared_vllm", *(pytest.param(m, marks=FURTHER) for m in ("lora_only", "lora_merged", "none"))]
)
@pytest.mark.parametrize("logprobs_mode", [pytest.param("raw", marks=FURTHER), "processed"])
def test_a_server_without_a_fault_passes_every_check_is_left_unchanged_and_can_be_trained_with(
    tiny_model_dir: Path, tmp_path: Path, mode: str, logprobs_mode: str
) -> None:
    with serving(tiny_model_dir, mode, tmp_path, "--logprobs-mode", logprobs_mode) as server:
        before = set(tmp_path.iterdir())
        config = config_of(tiny_model_dir, server, mode)
        findings = findings_of(config)
        assert levels(findings) == {}
        assert {"server", "vocabulary", "alignment", "group order", "temperature", "canary"} <= set(findings)
        assert findings["canary"].numbers["not_returned"] == 0
        assert findings["canary"].numbers["moved"] > 0.05
        assert_serves_the_start(server, tiny_model_dir)
        with server.client as client:
            assert client.get("/bridge/info").json()["paused"] is False
            assert client.get("/lora/status").json()["active_adapter_path"] is None
        assert set(tmp_path.iterdir()) == before
        checked = version_of(server)
        first, second = trained_versions(config, server, tmp_path / "run")
        assert first > checked + 1
        assert second == first + 1


def test_weights_of_an_earlier_trainer_are_named_and_replaced_by_the_start(
    server: RunningServer, model: Path, tmp_path: Path
) -> None:
    version = version_of(server) + 57
    body = {"path": str(save_tiny_model(tmp_path / "other", seed=2)), "policy_version": version}
    with server.client as client:
        assert client.post("/bridge/reload", json=body).status_code == 200
    findings = findings_of(config_of(model, server))
    assert levels(findings) == {}
    assert f"version {version}" in findings["start"].text
    assert_serves_the_start(server, model)


def test_an_adapter_of_an_earlier_trainer_is_served_again_after_the_check(model: Path, tmp_path: Path) -> None:
    adapted = add_lora(load_model(str(model), dtype="float32", device="cpu"), LoraSettings(rank=4))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.05)
    save_adapter(adapted, tmp_path / "policy@000009")
    with serving(model, "lora_only", tmp_path) as server, server.client as client:
        body = {"adapter_path": str(tmp_path / "policy@000009"), "policy_version": 9}
        assert client.post("/lora/load", json=body).status_code == 200
        assert levels(findings_of(config_of(model, server, "lora_only"))) == {}
        assert client.get("/lora/status").json()["active_adapter_name"] == "policy@000009"
        assert version_of(server) > 9


# --- servers with one fault ------------------------------------------------------------------------------------------

Meddle = Callable[[str, Body, Ask], Body]


def findings_through(meddle: Meddle, server: RunningServer, model: Path, mode: str = "none") -> dict[str, Finding]:
    with meddling_server(server.url, meddle) as port:
        return findings_of(config_of(model, server, mode, vllm_port=port))


def is_sampling(path: str, body: Body) -> bool:
    return path == "/generate" and "logprobs" in body and isinstance(body["prompt"], dict)


def sampling_with(**settings: object) -> Meddle:
    return lambda path, body, ask: ask({**body, **settings} if is_sampling(path, body) else body)


def declaring_raw(path: str, body: Body, ask: Ask) -> Body:
    answer = ask(body)
    return {**answer, "logprobs_mode": "raw"} if "logprobs_mode" in answer else answer


def shifting_logprobs(path: str, body: Body, ask: Ask) -> Body:
    answer = ask(body)
    if "logprobs" in answer:
        answer["logprobs"] = [with_values(row, row[-1:] + row[:-1]) for row in answer["logprobs"]]
    return answer


def swapping_completions(path: str, body: Body, ask: Ask) -> Body:
    answer = sampling_with(ignore_eos=True)(path, body, ask)
    if "logprobs" in answer:
        rows = answer["logprobs"]
        answer["logprobs"] = [with_values(*pair) for pair in zip(rows, rows[1:] + rows[:1], strict=True)]
    return answer


def with_values(row: list[list[Body]], others: list[list[Body]]) -> list[list[Body]]:
    """The tokens of `row` with the values of `others`."""
    return [[{next(iter(own[0])): next(iter(other[0].values()))}] for own, other in zip(row, others, strict=True)]


def leaving_out_end_tokens(path: str, body: Body, ask: Ask) -> Body:
    answer = ask(body)
    if "logprobs" in answer:
        for index, reason in enumerate(answer["finish_reasons"]):
            if reason == "stop" and len(answer["token_ids"][index]) > 1:
                answer["logprobs"][index].pop()
                answer["token_ids"][index].pop()
    return answer


def dropping_weight_updates(path: str, body: Body, ask: Ask) -> Body:
    if path == "/bridge/reload":
        return {"status": "reloaded", "policy_version": body["policy_version"]}
    return ask(body)


def caching_answers() -> Meddle:
    """Answer a repeated request from a cache that outlives the weights."""
    answers: dict[str, Body] = {}

    def meddle(path: str, body: Body, ask: Ask) -> Body:
        answer = ask(body)
        if "logprobs" not in answer or "prompt_logprobs" in answer:
            return answer
        cached = answers.setdefault(json.dumps(body, sort_keys=True), answer)
        return {**cached, "policy_version": answer["policy_version"]}

    return meddle


FURTHER_SAMPLING = pytest.mark.extended("the same test with a temperature; test_check_judges has each")
MISALIGNED = {"alignment": "error", "temperature": "warning", "sampling": "warning"}
SWAPPED = {**MISALIGNED, "group order": "error", "end token": "error"}


@pytest.mark.parametrize(
    ("meddle", "not_ok", "cause"),
    [
        pytest.param(honest, {}, ("", ""), id="none"),
        pytest.param(declaring_raw, {"temperature": "error"}, ("temperature", "processed"), id="other convention"),
        pytest.param(sampling_with(temperature=0.7), MISALIGNED, ("alignment", "temperature:0.7"), id="temperature"),
        pytest.param(
            sampling_with(top_k=20), MISALIGNED, ("alignment", "top_k:20"), id="top_k", marks=FURTHER_SAMPLING
        ),
        pytest.param(
            sampling_with(top_p=0.9), MISALIGNED, ("alignment", "top_p:0.9"), id="top_p", marks=FURTHER_SAMPLING
        ),
        pytest.param(shifting_logprobs, MISALIGNED, ("alignment", "shift:-1"), id="shifted by one"),
        pytest.param(swapping_completions, SWAPPED, ("alignment", "order"), id="swapped", marks=FURTHER_SAMPLING),
        pytest.param(dropping_weight_updates, {"canary": "error"}, ("canary", "did not follow"), id="no weight update"),
        pytest.param(caching_answers(), {"canary": "error"}, ("canary", "prefix cache"), id="stale cache"),
    ],
)
def test_one_fault_of_a_server_is_reported_with_its_cause(
    server: RunningServer, model: Path, meddle: Meddle, not_ok: dict[str, str], cause: tuple[str, str]
) -> None:
    findings = findings_through(meddle, server, model)
    assert levels(findings) == not_ok
    if not_ok:
        place, words = cause
        found = findings[place]
        assert words in str(found.numbers.get("fits") or (found.text, found.cause))


def test_no_server_on_the_port_is_an_error_that_says_how_to_start_one(model: Path) -> None:
    findings = findings_of(config_of(model, None, vllm_port=free_port(), check_timeout_s=0.1))
    assert levels(findings) == {"server": "error"}
    assert "grpo-engine server" in str(findings["server"].hint)


@pytest.mark.extended("the other faults of a server here")
def test_another_checkpoint_is_recognised_by_its_numbers_and_its_name(model: Path, tmp_path: Path) -> None:
    with running_server(save_tiny_model(tmp_path / "other", seed=2), folder=tmp_path) as wrong:
        findings = findings_of(config_of(model, wrong))
    assert levels(findings)["server"] == "warning"
    assert findings["alignment"].severity == "error"
    assert "different weights" in str(findings["alignment"].cause)
    assert findings["canary"].severity == "ok"  # the first weight update of a run would correct it


def test_truncation_that_raw_log_probabilities_do_not_show_is_found_by_token_frequencies(
    server_of: Callable[..., RunningServer], model: Path
) -> None:
    findings = findings_through(sampling_with(top_k=8), server_of("none", "raw"), model)
    assert levels(findings) == {"sampling": "error"}
    assert "narrower" in str(findings["sampling"].cause)


@pytest.mark.extended("the other faults of a server here")
def test_an_end_token_that_is_left_out_is_an_error(tiny_model_dir: Path, tmp_path: Path) -> None:
    with running_server(tiny_model_dir, folder=tmp_path) as running:
        findings = findings_through(leaving_out_end_tokens, running, tiny_model_dir)
    assert findings["end token"].severity == "error"
    assert "leaves the end token out" in str(findings["end token"].cause)


def test_a_server_without_the_flag_of_the_bridge_is_an_error_that_names_it(server: RunningServer, model: Path) -> None:
    findings = findings_of(config_of(model, server, "shared_vllm"))
    assert levels(findings) == {"trainer": "error"}
    assert "--shared-weights" in findings["trainer"].text
    findings = findings_of(config_of(model, server, "lora_only"))
    assert levels(findings) == {"server": "error"}
    assert "--enable-lora" in str(findings["server"].hint)
    assert findings["alignment"].severity == "ok"
    assert "canary" not in findings


def test_a_stock_server_is_checked_as_far_as_it_answers(server_of: Callable[..., RunningServer], model: Path) -> None:
    """It reports neither version nor convention, and has neither a chat route nor prompt_logprobs."""

    def stock(path: str, body: Body, ask: Ask) -> Body:
        ours = ("logprobs_mode", "policy_version", "policy_versions", "instance", "prompt_logprobs", "paused")
        if path.startswith("/v1/"):
            raise Refusal
        return {key: value for key, value in ask(body).items() if key not in ours}

    findings = findings_through(stock, server_of("none", "raw"), model)
    assert levels(findings) == {"bridge": "error"}
    assert "canary is not checked" in findings["bridge"].text
    assert "not declared" in findings["server"].text
    assert {findings[id].severity for id in ("alignment", "temperature")} == {"ok"}


@pytest.mark.extended("the refusal of a second trainer in test_bridges_failures")
def test_a_server_that_another_trainer_writes_into_is_left_alone(
    server_of: Callable[..., RunningServer], model: Path, tmp_path: Path
) -> None:
    server = server_of("shared_vllm")
    config, version = config_of(model, server, "shared_vllm"), version_of(server) + 3
    trainer = (
        "import sys; from pathlib import Path; from grpo_engine.bridges.memory.bridge_files import read_bridge_file\n"
        "from grpo_engine.bridges.memory.weight_lock import WeightLock\n"
        "lock = WeightLock.attach(read_bridge_file(Path(sys.argv[1])).fence_segment)\n"
        "with lock.writing(int(sys.argv[2])): pass\n"
        "print('written', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", trainer, str(server.log.parent / "bridge.json"), str(version)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path()},
        cwd=tmp_path,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"written\n"
        findings = findings_of(config)
    assert levels(findings) == {"trainer": "error"}
    assert f"process {other.pid} is running" in findings["trainer"].text
    assert version_of(server) == version
    assert levels(findings_of(config)) == {}  # once it has exited


# --- a changed weight is always restored -----------------------------------------------------------------------------


def at_the_changed_weight(server: RunningServer, act: Callable[[], None]) -> Meddle:
    """Call `act` once, at the first sample after the second weight update, which is the changed weight's."""
    start = version_of(server)
    has_acted = False

    def meddle(path: str, body: Body, ask: Ask) -> Body:
        nonlocal has_acted
        if is_sampling(path, body) and not has_acted and version_of(server) == start + 2:
            has_acted = True
            act()
        return ask(body)

    return meddle


def refuse() -> None:
    raise Refusal


@pytest.mark.parametrize(
    "mode", ["shared_vllm", *(pytest.param(mode, marks=FURTHER) for mode in FLAGS if mode != "shared_vllm")]
)
def test_a_changed_weight_is_restored_when_the_server_fails(
    server_of: Callable[..., RunningServer], model: Path, mode: str
) -> None:
    server = server_of(mode)
    start = version_of(server)
    findings = findings_through(at_the_changed_weight(server, refuse), server, model, mode)
    assert levels(findings) == {"broke off": "error"}
    assert "canary" not in findings
    assert version_of(server) > start + 2
    assert_serves_the_start(server, model)


@pytest.mark.extended("the same when the server fails")
def test_a_changed_weight_is_restored_when_the_check_is_ended_by_a_signal(
    server_of: Callable[..., RunningServer], model: Path
) -> None:
    server = server_of("shared_vllm")
    start = version_of(server)
    meddle = at_the_changed_weight(server, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with meddling_server(server.url, meddle) as port, pytest.raises(KeyboardInterrupt):
        run(config_of(model, server, "shared_vllm", vllm_port=port))
    assert version_of(server) > start + 2
    assert_serves_the_start(server, model)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_json_for_programs_and_exits_with_0(
    server: RunningServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "sort 3 1 2"}\nplain text\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    flags = ["check", "--model-name", str(model), "--vllm-port", server.url.rsplit(":", 1)[1], "--optimizer", "adamw"]
    flags += ["--device", "cpu", "--dtype", "float32", "--prompts", str(prompts), "--threads", "1"]
    assert cli.main([*flags, "--check-tokens", "24", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["ok"] is True
    assert {finding["level"] for finding in table["findings"]} == {"ok"}


@pytest.mark.parametrize(
    ("prompts", "exit_code", "message"),
    [
        (None, 1, "✗ server"),
        ("", cli.FINAL_ERROR, "prompts.jsonl: cannot be read"),
        ('{"text": "?"}\n', cli.FINAL_ERROR, "line 1: has text, none of messages"),
    ],
    ids=["failed check", "no such file", "no prompt in a line"],
)
def test_the_command_exits_with_1_on_a_failed_check_and_2_on_wrong_usage(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompts: str | None, exit_code: int, message: str
) -> None:
    flags = ["check", "--model-name", str(model), "--vllm-port", str(free_port()), "--check-timeout-s", "0.1"]
    if prompts is not None:
        flags += ["--prompts", str(tmp_path / "prompts.jsonl")]
    if prompts:
        (tmp_path / "prompts.jsonl").write_text(prompts)
    assert cli.main(flags) == exit_code
    printed = capsys.readouterr()
    assert message in (printed.out if exit_code == 1 else printed.err)

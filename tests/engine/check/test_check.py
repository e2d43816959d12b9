"""`grpo-engine check` against real servers: green where all is right, and the right red line where one thing is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from meddling import Ask, Body, Refusal, honest, meddling_server
from serving import RunningServer, free_port, model_logprobs, python_path, running_server, save_tiny_model
from training import ListedSource, made_up_groups

from grpo_engine import cli
from grpo_engine.bridges import ON_SHARED_MEMORY, BridgeContext
from grpo_engine.check.config import CheckConfig
from grpo_engine.check.main import check, run
from grpo_engine.check.report import Report
from grpo_engine.config import validated
from grpo_engine.diagnosis.finding import Finding
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.loading import load_model
from grpo_engine.train.loop import train
from grpo_engine.train.recording.recorder import Recorder

pytestmark = pytest.mark.slow
FLAGS = {
    "shared_vllm": ["--shared-weights"],
    "lora_merged": ["--shared-weights"],
    "lora_only": ["--enable-lora"],
    "none": [],
}
FURTHER = pytest.mark.extended("the same test with shared_vllm and lora_only, on processed log-probabilities")
SHARED_FIRST = ["shared_vllm", *(pytest.param(mode, marks=FURTHER) for mode in FLAGS if mode != "shared_vllm")]
PROMPT, FIXED = [10, 20, 30], [40, 50, 60, 70]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A right one, that takes checkpoints and samples as `processed`; every check leaves it as it was."""
    folder = tmp_path_factory.mktemp("server")
    with running_server(model, "--logprobs-mode", "processed", folder=folder) as running:
        yield running


def config_of(model: Path | str, port: int, mode: str = "none", **changes: object) -> CheckConfig:
    bridge: dict[str, object] = {"mode": mode}
    if "bridge_file" in changes:
        bridge["config_path"] = changes.pop("bridge_file")
    table: dict[str, object] = {
        **{"model_name": str(model), "bridge": bridge, "vllm_port": port, "optimizer": "adamw", "device": "cpu"},
        **{"dtype": "float32", "seq_len": 200, "check_timeout_s": 20.0, "check_tokens": 24},
    }
    return validated(CheckConfig, {**table, **changes}, where="test")


def findings_of(config: CheckConfig) -> dict[str, Finding]:
    report = Report(config)
    check(config, report)
    return {finding.id: finding for finding in report.findings}


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    """Those that are not green."""
    return {id: finding.severity for id, finding in findings.items() if finding.severity != "ok"}


def port_of(server: RunningServer) -> int:
    return int(server.url.rsplit(":", 1)[1])


def assert_serves_the_start(server: RunningServer, model: Path | str) -> None:
    answer = server.generate(prompt={"prompt_token_ids": PROMPT + FIXED}, prompt_logprobs=0, max_tokens=1)
    values = [next(iter(entry.values())) for entry in answer["prompt_logprobs"][len(PROMPT) :]]  # type: ignore[index]
    expected = model_logprobs(load_model(str(model), dtype="float32", device="cpu"), PROMPT, FIXED)
    torch.testing.assert_close(torch.tensor(values), expected, atol=1e-4, rtol=0)


@contextmanager
def a_stack(model: Path, mode: str, folder: Path, *flags: str) -> Iterator[tuple[RunningServer, dict[str, object]]]:
    bridge_file = folder / "bridge.json"
    flags = ("--bridge-file", str(bridge_file), *FLAGS[mode], *flags)
    with running_server(model, *flags, folder=folder) as server:
        yield server, {"bridge_file": bridge_file} if mode in ON_SHARED_MEMORY else {}


# --- all right -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FLAGS)
@pytest.mark.parametrize("logprobs_mode", [pytest.param("raw", marks=FURTHER), "processed"])
def test_a_right_server_is_green_and_is_left_as_it_was(
    tiny_model_dir: Path, tmp_path: Path, mode: str, logprobs_mode: str
) -> None:
    with a_stack(tiny_model_dir, mode, tmp_path, "--logprobs-mode", logprobs_mode) as (server, extra):
        before = set(tmp_path.iterdir())
        config = config_of(tiny_model_dir, port_of(server), mode, **extra)
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
        assert levels(findings_of(config)) == {}  # a second look finds the same


@pytest.mark.parametrize("mode", SHARED_FIRST)
def test_a_training_run_right_after_a_check_goes_on_counting_versions(model: Path, tmp_path: Path, mode: str) -> None:
    with a_stack(model, mode, tmp_path) as (server, extra):
        config = config_of(
            model, port_of(server), mode, **extra, batch_size=4, gradient_accumulation_steps=2, training_steps=2
        )
        assert levels(findings_of(config)) == {}
        with server.client as client:
            checked = client.get("/bridge/info").json()["policy_version"]
        bridge = config.bridge.build(
            BridgeContext(
                model_name=str(model),
                dtype="float32",
                device="cpu",
                server_url=server.url,
                folder=tmp_path / "run",
                lora=LoraSettings(),
            )
        )
        try:
            with Recorder(tmp_path / "run", total_steps=2, show_times=False) as recorder:
                source = ListedSource([made_up_groups(0), made_up_groups(1)])
                steps = train(
                    config,
                    source,  # type: ignore[arg-type]
                    bridge,
                    recorder,
                    decode=str,
                    save_path=tmp_path / "saved",
                )
        finally:
            bridge.close()
        assert steps == 2
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert lines[0]["policy_version"] > checked + 1
        assert lines[1]["policy_version"] == lines[0]["policy_version"] + 1


def test_weights_of_an_earlier_trainer_give_way_to_the_start_and_are_named(model: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=2)
    with a_stack(model, "none", tmp_path) as (server, _):
        with server.client as client:
            body = {"path": str(other), "policy_version": 57}
            assert client.post("/bridge/reload", json=body).status_code == 200
        findings = findings_of(config_of(model, port_of(server)))
        assert levels(findings) == {}
        assert "version 57" in findings["start"].text
        assert_serves_the_start(server, model)


def test_an_adapter_of_an_earlier_trainer_is_served_again_after_the_check(model: Path, tmp_path: Path) -> None:
    from grpo_engine.models.lora import add_lora, save_adapter

    adapted = add_lora(load_model(str(model), dtype="float32", device="cpu"), LoraSettings(rank=4))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.05)
    save_adapter(adapted, tmp_path / "policy@000009")
    with a_stack(model, "lora_only", tmp_path) as (server, _), server.client as client:
        body = {"adapter_path": str(tmp_path / "policy@000009"), "policy_version": 9}
        assert client.post("/lora/load", json=body).status_code == 200
        assert levels(findings_of(config_of(model, port_of(server), "lora_only"))) == {}
        assert client.get("/lora/status").json()["active_adapter_name"] == "policy@000009"
        assert client.get("/bridge/info").json()["policy_version"] > 9


# --- one thing wrong -------------------------------------------------------------------------------------------------


def looked_at_through(meddle: object, server: RunningServer, model: Path, **changes: object) -> dict[str, Finding]:
    with meddling_server(server.url, meddle) as port:  # type: ignore[arg-type]
        return findings_of(config_of(model, port, **changes))


def is_sampling(path: str, body: Body) -> bool:
    return path == "/generate" and "logprobs" in body and isinstance(body["prompt"], dict)


def test_a_proxy_that_changes_nothing_changes_nothing(server: RunningServer, model: Path) -> None:
    assert levels(looked_at_through(honest, server, model)) == {}


def test_nobody_on_the_port_is_a_red_line_that_says_how_to_start_one(model: Path) -> None:
    findings = findings_of(config_of(model, free_port(), check_timeout_s=0.1))
    assert levels(findings) == {"server": "error"}
    assert "grpo-engine server" in str(findings["server"].hint)


def test_another_checkpoint_is_recognised_by_its_numbers_and_its_name(
    server: RunningServer, model: Path, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "other", seed=2)
    with running_server(other, folder=tmp_path) as wrong:
        findings = findings_of(config_of(model, port_of(wrong)))
    assert levels(findings)["server"] == "warning"
    assert findings["alignment"].severity == "error"
    assert "different weights" in str(findings["alignment"].cause)
    assert findings["canary"].severity == "ok"  # the first weight update of a run would correct it


def test_a_server_that_declares_the_other_convention_is_found_out(server: RunningServer, model: Path) -> None:
    def lie(path: str, body: Body, ask: Ask) -> Body:
        answer = ask(body)
        return {**answer, "logprobs_mode": "raw"} if "logprobs_mode" in answer else answer

    findings = looked_at_through(lie, server, model)
    assert levels(findings) == {"temperature": "error"}
    assert findings["temperature"].numbers["fits"] == "processed"


def test_a_server_with_a_temperature_of_its_own_is_found_out(server: RunningServer, model: Path) -> None:
    def cool(path: str, body: Body, ask: Ask) -> Body:
        return ask({**body, "temperature": 0.7} if is_sampling(path, body) else body)

    found = looked_at_through(cool, server, model)["alignment"]
    assert (found.severity, found.numbers["fits"]) == ("error", "temperature:0.7")


@pytest.mark.parametrize(("limit", "key"), [({"top_k": 20}, "top_k:20"), ({"top_p": 0.9}, "top_p:0.9")])
def test_truncation_behind_the_back_shows_in_processed_numbers(
    server: RunningServer, model: Path, limit: Body, key: str
) -> None:
    def truncate(path: str, body: Body, ask: Ask) -> Body:
        return ask({**body, **limit} if is_sampling(path, body) else body)

    findings = looked_at_through(truncate, server, model)
    assert levels(findings) == {"alignment": "error", "temperature": "warning", "sampling": "warning"}
    assert findings["alignment"].numbers["fits"] == key


def test_truncation_that_raw_numbers_do_not_show_is_found_by_the_surprise(model: Path, tmp_path: Path) -> None:
    def truncate(path: str, body: Body, ask: Ask) -> Body:
        return ask({**body, "top_k": 8} if is_sampling(path, body) else body)

    with running_server(model, "--logprobs-mode", "raw", folder=tmp_path) as raw:
        findings = looked_at_through(truncate, raw, model)
    assert levels(findings) == {"sampling": "error"}
    assert "narrower" in str(findings["sampling"].cause)


def test_log_probabilities_one_token_late_are_found_out(server: RunningServer, model: Path) -> None:
    def shift(path: str, body: Body, ask: Ask) -> Body:
        answer = ask(body)
        if "logprobs" in answer:
            answer["logprobs"] = [revalued(row, row[-1:] + row[:-1]) for row in answer["logprobs"]]
        return answer

    found = looked_at_through(shift, server, model)["alignment"]
    assert (found.severity, found.numbers["fits"]) == ("error", "shift:-1")


def test_completions_whose_log_probabilities_are_swapped_are_found_out(server: RunningServer, model: Path) -> None:
    def swap(path: str, body: Body, ask: Ask) -> Body:
        answer = ask({**body, "ignore_eos": True} if is_sampling(path, body) else body)
        if "logprobs" in answer:
            rows = answer["logprobs"]
            answer["logprobs"] = [revalued(*pair) for pair in zip(rows, rows[1:] + rows[:1], strict=True)]
        return answer

    findings = looked_at_through(swap, server, model)
    assert findings["alignment"].numbers["fits"] == "order"
    assert findings["group order"].severity == "error"


def revalued(row: list[list[Body]], others: list[list[Body]]) -> list[list[Body]]:
    """The tokens of `row` with the values of `others`."""
    return [[{next(iter(own[0])): next(iter(other[0].values()))}] for own, other in zip(row, others, strict=True)]


def test_an_end_token_that_is_left_out_is_found_out(
    server: RunningServer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    def cut(path: str, body: Body, ask: Ask) -> Body:
        answer = ask(body)
        if "logprobs" in answer:
            for index, reason in enumerate(answer["finish_reasons"]):
                if reason == "stop" and len(answer["token_ids"][index]) > 1:
                    answer["logprobs"][index].pop()
                    answer["token_ids"][index].pop()
        return answer

    with running_server(tiny_model_dir, folder=tmp_path) as running:
        findings = looked_at_through(cut, running, tiny_model_dir)
    assert findings["end token"].severity == "error"
    assert "leaves the end token out" in str(findings["end token"].cause)


def test_a_hand_over_that_never_arrives_is_noticed_by_the_canary(server: RunningServer, model: Path) -> None:
    def swallow(path: str, body: Body, ask: Ask) -> Body:
        if path == "/bridge/reload":
            return {"status": "reloaded", "policy_version": body["policy_version"]}
        return ask(body)

    findings = looked_at_through(swallow, server, model)
    assert levels(findings) == {"canary": "error"}
    assert "did not follow" in findings["canary"].text


def test_answers_from_a_cache_that_outlives_the_weights_are_noticed_by_the_canary(
    server: RunningServer, model: Path
) -> None:
    kept: dict[str, Body] = {}

    def remember(path: str, body: Body, ask: Ask) -> Body:
        answer = ask(body)
        if "logprobs" not in answer:
            return answer
        known = kept.setdefault(json.dumps(body, sort_keys=True), answer)
        return {**known, "policy_version": answer["policy_version"]}

    findings = looked_at_through(remember, server, model)
    assert levels(findings) == {"canary": "error"}
    assert "prefix cache" in str(findings["canary"].cause)


def test_a_server_that_shares_nothing_is_a_red_line_for_shared_vllm(server: RunningServer, model: Path) -> None:
    findings = findings_of(config_of(model, port_of(server), "shared_vllm"))
    assert levels(findings) == {"trainer": "error"}
    assert "--shared-weights" in findings["trainer"].text


def test_a_server_that_takes_no_adapters_is_a_red_line_for_lora_only(server: RunningServer, model: Path) -> None:
    findings = findings_of(config_of(model, port_of(server), "lora_only"))
    assert levels(findings) == {"server": "error"}
    assert "--enable-lora" in str(findings["server"].hint)
    assert findings["alignment"].severity == "ok"
    assert "canary" not in findings


def test_a_stock_server_is_checked_as_far_as_it_answers(model: Path, tmp_path: Path) -> None:
    """Such a one says neither version nor convention, knows no chat, and has no prompt_logprobs."""

    def stock(path: str, body: Body, ask: Ask) -> Body:
        ours = ("logprobs_mode", "policy_version", "policy_versions", "instance", "prompt_logprobs", "paused")
        if path.startswith("/v1/"):
            raise Refusal
        return {key: value for key, value in ask(body).items() if key not in ours}

    with running_server(model, "--logprobs-mode", "raw", folder=tmp_path) as running:
        findings = looked_at_through(stock, running, model)
    assert levels(findings) == {"bridge": "error"}
    assert "canary is not checked" in findings["bridge"].text
    assert "not declared" in findings["server"].text
    assert findings["alignment"].severity == "ok"
    assert findings["temperature"].severity == "ok"


def test_a_server_that_another_trainer_writes_into_is_left_alone(model: Path, tmp_path: Path) -> None:
    trainer = (
        "import sys; from pathlib import Path; from grpo_engine.bridges.memory.bridge_files import read_bridge_file\n"
        "from grpo_engine.bridges.memory.weight_lock import WeightLock\n"
        "fence = WeightLock.attach(read_bridge_file(Path(sys.argv[1])).fence_segment)\n"
        "with fence.writing(3): pass\n"
        "print('written', flush=True); sys.stdin.read()"
    )
    with a_stack(model, "shared_vllm", tmp_path) as (server, extra):
        config = config_of(model, port_of(server), "shared_vllm", **extra)
        with subprocess.Popen(
            [sys.executable, "-c", trainer, str(tmp_path / "bridge.json")],
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
        assert version_of(server) == 3
        assert levels(findings_of(config)) == {}  # once it has ended


# --- it never leaves a changed weight behind -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SHARED_FIRST)
def test_a_weight_is_put_back_when_the_server_fails_while_it_is_changed(model: Path, tmp_path: Path, mode: str) -> None:
    with a_stack(model, mode, tmp_path) as (server, extra):
        start = version_of(server)
        meddle = at_the_changed_weight(server, refuse)
        findings = looked_at_through(meddle, server, model, mode=mode, **extra)
        assert levels(findings) == {"broke off": "error"}
        assert "canary" not in findings
        assert version_of(server) > start + 2
        assert_serves_the_start(server, model)


def test_a_weight_is_put_back_when_the_check_is_ended_while_it_is_changed(model: Path, tmp_path: Path) -> None:
    with a_stack(model, "shared_vllm", tmp_path) as (server, extra):
        meddle = at_the_changed_weight(server, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with meddling_server(server.url, meddle) as port, pytest.raises(KeyboardInterrupt):
            run(config_of(model, port, "shared_vllm", **extra))
        assert version_of(server) >= 3
        assert_serves_the_start(server, model)


def refuse() -> None:
    raise Refusal


def version_of(server: RunningServer) -> int:
    with server.client as client:
        return int(client.get("/bridge/info").json()["policy_version"])


def at_the_changed_weight(server: RunningServer, happen: object):  # type: ignore[no-untyped-def]
    """Let something happen once, at the first sample after the second hand-over, which is the changed weight's."""
    start = version_of(server)
    has_happened = False

    def meddle(path: str, body: Body, ask: Ask) -> Body:
        nonlocal has_happened
        if is_sampling(path, body) and not has_happened and version_of(server) == start + 2:
            has_happened = True
            happen()  # type: ignore[operator]
        return ask(body)

    return meddle


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_json_for_programs_and_exits_with_0(
    server: RunningServer, model: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "sort 3 1 2"}\nplain text\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    done = subprocess.run(
        [
            *(sys.executable, "-m", "grpo_engine", "check", "--model-name", str(model), "--json"),
            *("--vllm-port", str(port_of(server)), "--optimizer", "adamw", "--device", "cpu", "--dtype", "float32"),
            *("--prompts", str(prompts), "--threads", "1", "--check-tokens", "24"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(done.stdout)
    assert table["ok"] is True
    assert {finding["level"] for finding in table["findings"]} == {"ok"}


def test_the_command_exits_with_1_on_a_red_line_and_2_on_wrong_usage(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["check", "--model-name", str(model), "--vllm-port", str(free_port()), "--check-timeout-s", "0.1"]
    assert cli.main(flags) == 1
    assert "✗ server" in capsys.readouterr().out
    assert cli.main([*flags, "--prompts", str(tmp_path / "nowhere.txt")]) == cli.USAGE_ERROR
    assert "nowhere.txt: cannot be read" in capsys.readouterr().err
    (tmp_path / "odd.jsonl").write_text('{"text": "?"}\n')
    assert cli.main([*flags, "--prompts", str(tmp_path / "odd.jsonl")]) == cli.USAGE_ERROR
    assert "line 1: has text, none of messages" in capsys.readouterr().err

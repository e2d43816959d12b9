"""`grpo-engine check` against a real vLLM, on a GPU where there is one: every check is ok for both kinds of bridge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_serving
from vllm_serving import DEVICE, DTYPE

from grpo_engine.bridges import ON_SHARED_MEMORY
from grpo_engine.check.config import CheckConfig
from grpo_engine.check.main import check
from grpo_engine.check.report import Report
from grpo_engine.config import validated

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def stack(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm_serving.Stack]:
    flags = ("--logprobs-mode", "processed", "--enable-lora", "--max-lora-rank", "16")
    with vllm_serving.serving_vllm(tiny_model_dir, tmp_path_factory.mktemp("vllm"), *flags) as stack:
        yield stack


@pytest.mark.extended("test_check, with the torch engine; test_vllm_engine, with a real vLLM")
@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only"])
def test_a_real_vllm_passes_every_check(
    stack: vllm_serving.Stack, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table: dict[str, object] = {
        **{"model_name": str(stack.model), "vllm_port": int(stack.server.url.rsplit(":", 1)[1])},
        **{"optimizer": "adamw", "device": DEVICE, "dtype": DTYPE, "seq_len": 200, "check_tokens": 24},
        "bridge": {"mode": mode, **({"config_path": stack.bridge_file} if mode in ON_SHARED_MEMORY else {})},
    }
    config = validated(CheckConfig, table, where="test")
    report = Report(config)
    check(config, report)
    findings = {finding.id: finding for finding in report.findings}
    assert {id: finding.text for id, finding in findings.items() if finding.severity != "ok"} == {}
    assert findings["server"].text.startswith("our server, vllm")
    assert findings["canary"].numbers["moved"] > 0.1

"""Adapters swapped under a running vLLM on a GPU, with CUDA graphs: nothing grows, and no request is lost.

Times are in the log (`-o log_cli=true --log-cli-level=INFO`).
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from contextlib import closing
from pathlib import Path

import pynvml
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_engine.bridges import BridgeContext
from grpo_engine.bridges.lora_only import LoraOnly
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import adapter_tensors

serving = pytest.importorskip("serving")
vllm_serving = pytest.importorskip("vllm_serving")
pytest.importorskip("vllm", reason="vLLM is not installed here")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_SWAPS = 200
GROWTH_BYTES = 100 << 20
"""Much less than 200 adapters of 7 MB; the driver's figure for a GPU moves by some MB."""

logger = logging.getLogger(__name__)


def save_wide_model(folder: Path) -> Path:
    """A model as wide as an 8B model, with 8 layers."""
    serving.save_tiny_model(folder, seed=0)  # for its tokenizer
    config = LlamaConfig(
        vocab_size=serving.VOCABULARY,
        hidden_size=4096,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=serving.EOS,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def gpu_bytes_in_use() -> int:
    pynvml.nvmlInit()
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0), version=pynvml.nvmlMemory_v2)
        return int(memory.used)
    finally:
        pynvml.nvmlShutdown()


def test_hundreds_of_adapters_under_running_requests_take_no_more_memory_than_two(tmp_path: Path) -> None:
    model = save_wide_model(tmp_path / "model")
    torch.cuda.empty_cache()
    with vllm_serving.serving_vllm(model, tmp_path, "--enable-lora", "--max-lora-rank", "16") as stack:
        context = BridgeContext(
            model_name=str(model),
            dtype="bfloat16",
            device="cuda",
            server_urls=(stack.server.url,),
            folder=tmp_path / "run",
            lora=LoraSettings(rank=16, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),
            patience_s=60,
        )
        is_over = threading.Event()
        answers: list[dict] = []

        def send_requests() -> None:
            while not is_over.is_set():
                answers.append(stack.server.generate(prompt="hello", n=4, max_tokens=64, logprobs=0, ignore_eos=True))

        with closing(LoraOnly().build(context)) as bridge:
            factors = adapter_tensors(bridge.attach().model).values()

            def write() -> None:
                for factor in factors:
                    factor.data.normal_(std=0.02)
                torch.cuda.synchronize()

            def swap(first: int, count: int) -> list[float]:
                seconds = []
                for version in range(first, first + count):
                    started = time.perf_counter()
                    bridge.publish(version, write)
                    seconds.append(time.perf_counter() - started)
                return seconds

            idle = swap(1, 20)
            requests = threading.Thread(target=send_requests)
            requests.start()
            try:
                swap(21, 20)
                before = gpu_bytes_in_use()
                busy = swap(41, NUM_SWAPS)
                growth = gpu_bytes_in_use() - before
            finally:
                is_over.set()
                requests.join()
        logger.info(
            "a swap of 3.4 M parameters: %.1f ms idle, %.1f ms under 4 requests (medians); %d answers; %.1f MB grown",
            1e3 * statistics.median(idle),
            1e3 * statistics.median(busy),
            len(answers),
            growth / 1e6,
        )
        assert growth < GROWTH_BYTES
        assert len({answer["policy_version"] for answer in answers}) > 5
        with stack.server.client as client:
            assert client.get("/lora/status").json()["load_count"] == 40 + NUM_SWAPS

"""Real inference servers for tests: a random tiny model on disk, and a process on loopback that is stopped cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from forked import Forked
from ports import free_port
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_engine.wire.access_token import authorization, find_token

_SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
VOCABULARY = 128
EOS = 2
_INSTANCES: set[str] = set()
"""Instance ids of all servers started here."""


def save_tiny_model(folder: Path, *, seed: int, dtype: torch.dtype = torch.float32, tied: bool = False) -> Path:
    """Save a random Llama with a character tokenizer: 2 layers, head_dim 64, 128 tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    vocabulary = {token: index for index, token in enumerate(_SPECIAL + _CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    fast.save_pretrained(folder)
    return folder


def end_all(processes: Collection[subprocess.Popen[bytes] | Forked]) -> None:
    """Stop those that still run: SIGTERM, then SIGKILL."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def python_path() -> str:
    """PYTHONPATH of a child: this checkout first, then this process's PYTHONPATH."""
    return os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(slots=True)
class RunningServer:
    process: subprocess.Popen[bytes] | Forked
    url: str
    log: Path

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def generate(self, **body: object) -> dict[str, object]:
        with self.client as client:
            answer = client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def running_server(
    model: Path, *flags: str, folder: Path, environment: dict[str, str] | None = None, port: int | None = None
) -> Iterator[RunningServer]:
    """A healthy server, stopped by SIGTERM at the end."""
    port = port or free_port()
    log = folder / f"server-{port}-{time.monotonic_ns()}.log"
    process = Forked(
        *("server", "--model-name", str(model), "--engine", "torch", "--device", "cpu", "--dtype", "float32"),
        *("--port", str(port), "--threads", "1", "--max-model-len", "256", *flags),
        log=log,
        folder=folder,
        environment={**os.environ, **(environment or {})},
    )
    token = authorization(find_token({**os.environ, **(environment or {})}))
    server = RunningServer(process, f"http://127.0.0.1:{port}", log)
    try:
        wait_healthy(server)
        with server.client as client:
            _INSTANCES.add(client.get("/bridge/info", headers=token).json()["instance"])
        yield server
    finally:
        server.stop()


def wait_healthy(server: RunningServer) -> None:
    with httpx.Client(trust_env=False) as client:
        while True:
            assert server.process.poll() is None, server.log.read_text(errors="replace")
            try:
                if client.get(f"{server.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)  # the interval of a probe, whose limit is the test's own


def model_logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probabilities (T,) fp32 of a completion under a model in this process, without any cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(-1, torch.tensor(completion)[:, None])[:, 0]


def our_segments() -> set[str]:
    """Segments of the servers that this process started; other runs may have segments too."""
    return {path.name for path in Path("/dev/shm").glob("grpo-*") if any(i in path.name for i in _INSTANCES)}


def shift(model: torch.nn.Module, seed: int) -> Callable[[], None]:
    """A function that sets every trainable parameter to new values, far from the old ones."""
    generator = torch.Generator().manual_seed(seed)
    values = {
        name: p.detach() + 0.05 * torch.randn(p.shape, generator=generator).to(p)
        for name, p in model.named_parameters()
        if p.requires_grad
    }

    def write() -> None:
        for name, parameter in model.named_parameters():
            if name in values:
                parameter.data.copy_(values[name])

    return write

"""What several tests of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("vllm_serving")  # most of what the tests with a real vLLM assert is there


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models in tests are so small that a second thread costs more than it brings."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    """The folder of `local/tiny`, in the usual cache: made at most once a machine, which takes 15 s."""
    from grpo_engine.models.loading import resolve_model

    return Path(resolve_model("local/tiny"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a character tokenizer, which no test changes."""
    from serving import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)

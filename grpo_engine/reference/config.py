"""Settings of a reference service. Torch-free: the terminal side builds command lines from them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from grpo_engine.config import Config, LogLevel
from grpo_engine.flags import Flag
from grpo_engine.models.config import DtypeName

USUAL_MICRO_BATCH = 16384


class ReferenceConfig(Config):
    """The reference service: model, address, and limits."""

    model_name: Annotated[str, Flag(("--model-name", "--model"))]
    """Hub id, local folder, or one of the models that are made locally (`local/…`); as the trainer names it."""
    host: str = "127.0.0.1"
    """Address to listen on; on any but loopback other hosts can have sequences scored, so set a token too."""
    port: int = Field(9101, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    dtype: DtypeName = "bfloat16"
    """Type of weights and computation; log-probabilities are fp32."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`cuda`, `cuda:1`, `cpu`; auto: a GPU where there is one."""
    max_model_len: int = Field(4096, ge=2, lt=2**31)
    """Longest sequence that is scored; at least the trainer's seq_len."""
    micro_batch_tokens: int | None = Field(None, ge=2)
    """Tokens that go through the model at a time; unset: 16,384, or the longest sequence where that is longer."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch; unset: torch's own choice."""
    allow_without_token: bool = False
    """Require no token, also under a supervisor."""
    dry_run: bool = False
    """Print how much memory it takes, and exit: with 0 where it fits on the GPU, else 1."""
    card_gb: float | None = Field(None, gt=0)
    """With dry_run: plan for a GPU of so many GB by its name (80, 141, 192), instead of the one that is here."""
    log_level: LogLevel = "info"
    """Least severe level of the lines that are logged."""

    @property
    def tokens_at_once(self) -> int:
        """Tokens that go through the model at a time."""
        return self.micro_batch_tokens or max(USUAL_MICRO_BATCH, self.max_model_len)

    @model_validator(mode="after")
    def _hangs_together(self) -> ReferenceConfig:
        if self.tokens_at_once < self.max_model_len:
            raise ValueError(
                f"micro_batch_tokens {self.micro_batch_tokens} is less than max_model_len {self.max_model_len}: a "
                "sequence of that length would fit in no micro-batch; raise the one or lower the other"
            )
        if self.card_gb is not None and not self.dry_run:
            raise ValueError("card_gb is the size of a GPU to plan for: add dry_run, or leave it out")
        return self

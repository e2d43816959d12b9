"""The torch engine without thread, queue and server: decodes the requests that it is given, in batches that fit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_engine.bridges.engine import Layer
from grpo_engine.models.loading import load_model, load_tokenizer
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Generation
from grpo_engine.server.in_process import prompt_of
from grpo_engine.server.prompts import max_new_tokens
from grpo_engine.server.torch.batching import Job, next_batch
from grpo_engine.server.torch.decoding import Decoder
from grpo_engine.server.torch.engine import eos_ids, generation_of
from grpo_engine.server.torch.weights import resolve_device
from grpo_engine.wire.inference import GenerateRequest


class TorchInProcess:
    """See `grpo_engine.server.in_process.SamplingEngine`. Its cache lives as long as a batch."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._model: Any
        self._tokenizer: Any
        self._decoder: Decoder
        self._shapes: dict[str, torch.Size] = {}

    def start(self) -> None:
        """Load the model."""
        config = self._config
        device = resolve_device(config.device)
        self._model = load_model(config.model_name, dtype=config.dtype, device=str(device)).eval()
        self._model.requires_grad_(False)
        self._shapes = {name: parameter.shape for name, parameter in self._model.named_parameters()}
        self._device = device
        self._tokenizer = load_tokenizer(config.model_name)
        self._decoder = Decoder(
            self._model,
            self._tokenizer,
            eos_ids=eos_ids(self._model, self._tokenizer),
            logprobs_mode=config.logprobs_mode,
            generator=torch.Generator().manual_seed(config.seed or 0),
        )

    def sleep(self, *, keeps_weights: bool) -> None:
        """Move the weights to main memory, or drop them."""
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to("cpu") if keeps_weights else parameter.data.new_empty(0)

    def wake_weights(self) -> None:
        """Move the weights back; those that were dropped are garbage until they are loaded."""
        for name, parameter in self._model.named_parameters():
            is_kept = parameter.shape == self._shapes[name]
            parameter.data = (
                parameter.data.to(self._device)
                if is_kept
                else torch.empty(self._shapes[name], dtype=parameter.dtype, device=self._device)
            )

    def load(self, layer: Layer) -> None:
        """Copy values over the weights."""
        parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        for name, values in layer.items():
            parameters[name].data.copy_(values)

    def wake_cache(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def parameter_names(self) -> Collection[str]:
        """Of all weights."""
        return self._shapes

    def generate(self, requests: Sequence[GenerateRequest], policy_version: int) -> list[Generation]:
        """Complete all prompts."""
        config = self._config
        vocabulary = int(self._model.config.get_text_config().vocab_size)
        jobs = []
        for request in requests:
            prompt = prompt_of(request)
            room = max_new_tokens(prompt, request, max_model_len=config.max_model_len, vocabulary=vocabulary)
            jobs.append(Job(prompt=prompt, params=request, max_new_tokens=room))
        waiting = jobs
        while waiting:
            batch = next_batch(waiting, max_rows=config.max_batch_size, max_tokens=config.max_batch_tokens)
            decoded = self._decoder.decode([job.work(copies) for job, copies in batch])
            for (job, _), rows in zip(batch, decoded, strict=True):
                job.finished += [(row, policy_version) for row in rows]
            waiting = [job for job in waiting if job.num_left]
        return [generation_of(job, self._tokenizer) for job in jobs]

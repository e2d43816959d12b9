"""`grpo-engine check`: before training, whether sampler and trainer agree, and whether new weights arrive.

Uses the settings, the bridge and the scoring that training would use, against a running inference server. One weight is
changed last, and always restored: afterwards the server differs only by some policy versions. The verdicts are in
`server`, `tokens`, `alignment`, `distribution` and `canary`; here are the requests, in their order.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

from grpo_engine.bridges import Bridge, BridgeModel
from grpo_engine.bridges.memory.bridge_files import bridge_file_path, is_server_alive, read_bridge_file
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.bridges.transport.in_place import InPlaceSettings
from grpo_engine.bridges.transport.saving import save_model
from grpo_engine.check.alignment import difference, judge_alignment, judge_order
from grpo_engine.check.changing import check_canary
from grpo_engine.check.config import CheckConfig
from grpo_engine.check.distribution import judge_sampler, judge_temperature
from grpo_engine.check.prompts import QUESTIONS, asked, prompt_tokens, special_tokens
from grpo_engine.check.report import Report, passes
from grpo_engine.check.sampling import CheckedServer, Sample, ServerFacts, ServerKind
from grpo_engine.check.server import (
    adapter_not_restored,
    broken_off,
    can_be_handed_weights,
    judge_server,
    no_bridge,
    no_server,
    no_trainer,
    other_trainer,
    skipped,
    start_published,
)
from grpo_engine.check.tokens import (
    Encoded,
    Ending,
    SpecialTokens,
    VocabularyProbe,
    judge_endings,
    judge_special_tokens,
    judge_vocabulary,
)
from grpo_engine.check.trainer import TrainerSide, reading_of
from grpo_engine.diagnosis.evidence import NoiseBand, noise_band
from grpo_engine.diagnosis.finding import Finding
from grpo_engine.errors import BridgeError, ModelError, PeerError
from grpo_engine.models.devices import trainable_device
from grpo_engine.models.loading import load_config, load_model, load_tokenizer
from grpo_engine.processes import ProcessIdentity
from grpo_engine.train.main import bridge_context
from grpo_engine.train.trainee import Trainee

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPERATURES = (0.7, 1.3)
"""Where raw and processed log-probabilities differ; at 1 they are the same."""
_TEXTS = (
    "Hello, world!",
    "  two  spaces\n\tand a tab ",
    "naïve café: 3½ × 10⁻³ €",
    "12345 67890",
    "def f(x): return x",
)
_SEED = 20177


def run(config: CheckConfig) -> int:
    """Check and print the findings; returns the exit code: 0, or 1 if a check failed."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    report = Report(config)
    with nullcontext() if config.debug_loading else _quiet(), _sigterm_unwinds():
        check(config, report)
    report.end()
    return 0 if passes(report.findings) else 1


def check(config: CheckConfig, report: Report) -> None:
    """Make all checks in order; those that an earlier failure makes meaningless are skipped."""
    tokenizer = load_tokenizer(config.model_name)
    prompts = prompt_tokens(config, tokenizer)
    vocab_size = int(load_config(config.model_name).get_text_config().vocab_size)
    url = f"http://127.0.0.1:{config.vllm_port}"
    server = CheckedServer(url, patience_s=config.check_timeout_s, vocab_size=vocab_size)
    try:
        try:
            facts = server.facts()
        except (PeerError, BridgeError) as error:
            report.add(no_server(config, error))
            return
        report.add(judge_server(facts, config))
        if facts.kind is not ServerKind.OURS:
            report.add(no_bridge(config, facts))
        special = special_tokens(config.model_name, tokenizer)
        report.add(_ask_vocabulary(server, vocab_size, tokenizer))
        report.add(*judge_special_tokens(special, decode=tokenizer.decode))
        with tempfile.TemporaryDirectory(prefix=".grpo-check-", dir=_folder(config)) as folder:
            _check_weights(_Session(config, server, facts, tokenizer, special, prompts), report, Path(folder))
    finally:
        server.close()


@dataclass(frozen=True, slots=True)
class _Session:
    """The inputs of the checks that need the trainer's model."""

    config: CheckConfig
    server: CheckedServer
    facts: ServerFacts
    tokenizer: PreTrainedTokenizerBase
    special: SpecialTokens
    prompts: list[tuple[int, ...]]

    def sample(self, temperature: float) -> list[Sample]:
        """Completions of every prompt."""
        config = self.config
        return [
            sample
            for prompt in self.prompts
            for sample in self.server.sample(
                prompt,
                n=config.check_samples,
                max_tokens=min(config.check_tokens, config.seq_len - len(prompt)),
                temperature=temperature,
            )
        ]


def _check_weights(session: _Session, report: Report, folder: Path) -> None:
    """All checks that need the trainer's model: on the bridge where the server has one, else on a separate copy."""
    config, facts = session.config, session.facts
    bridge: Bridge | None = None
    try:
        try:
            if (other := _other_trainer(config)) is not None:
                report.add(other_trainer(other.pid))
                return
            if can_be_handed_weights(facts, config):
                bridge = _build_bridge(config, folder)
                attached = bridge.attach()
            else:
                attached = _separate_copy(config)
            trainer = TrainerSide(Trainee(attached, config))
        except (BridgeError, ModelError, PeerError) as error:
            report.add(no_trainer(config, error))
            return
        band = noise_band([trainer.dtype, facts.dtype or trainer.dtype])
        try:
            if bridge is not None and not (attached.is_shared or facts.serves_the_start):
                bridge.publish(session.server.policy_version() + 1, trainer.trainee.write_weights)
                report.add(start_published(facts))
            samples = _check_samples(session, trainer, band, report)
            if bridge is not None:
                report.add(check_canary(bridge, session.server, trainer, samples, mode=facts.logprobs_mode, band=band))
        except (BridgeError, PeerError) as error:
            report.add(broken_off(error))
        finally:
            if bridge is not None and config.bridge.server_settings.get("enable_lora"):
                _restore_adapter(session, report)
    finally:
        if bridge is not None:
            bridge.close()


def _ask_vocabulary(server: CheckedServer, size: int, tokenizer: PreTrainedTokenizerBase) -> Finding:
    probe = VocabularyProbe(size=size, takes_last=server.takes_token(size - 1), takes_one_more=server.takes_token(size))
    conversation = asked(QUESTIONS[0])
    texts = list(_TEXTS)
    encoded: list[Encoded] = []
    if tokenizer.chat_template:
        rendered = str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        texts.append(rendered)
        if (chat := server.encode_chat(conversation)) is not None:
            own = tuple(tokenizer.encode(rendered, add_special_tokens=False))
            encoded.append(Encoded(text=f"chat: {QUESTIONS[0]}", trainer=own, server=chat))
    texts.append("".join(str(token) for token in tokenizer.all_special_tokens[:4]) + "after them")
    for text in texts:
        if (theirs := server.encode(text)) is not None:
            encoded.append(Encoded(text=text, trainer=tuple(tokenizer.encode(text)), server=theirs))
    return judge_vocabulary(probe, encoded, decode=tokenizer.decode)


def _build_bridge(config: CheckConfig, folder: Path) -> Bridge:
    undropped = config.model_copy(update={"lora_dropout": 0.0})  # so that only the served weights can differ
    return config.bridge.updating_at_once().build(
        replace(bridge_context(undropped, folder), patience_s=config.check_timeout_s)
    )


def _other_trainer(config: CheckConfig) -> ProcessIdentity | None:
    """A running trainer that writes the memory which this one would write."""
    if not isinstance(config.bridge, InPlaceSettings):
        return None  # servers do not report who sends them checkpoints or adapters
    path = bridge_file_path(config.bridge.config_path, os.environ)
    if not path.exists():
        return None
    file = read_bridge_file(path)
    if not is_server_alive(file):
        return None
    fence = WeightLock.attach(file.fence_segment)
    other = fence.other_trainer(file.pid)
    fence.close()
    return other


def _separate_copy(config: CheckConfig) -> BridgeModel:
    model = load_model(config.model_name, dtype=config.dtype, device=trainable_device(config.device))
    return BridgeModel(
        model=model, is_shared=False, policy_version=0, save=partial(save_model, model, config.model_name)
    )


def _check_samples(session: _Session, trainer: TrainerSide, band: NoiseBand, report: Report) -> list[Sample]:
    """Sample, compare, and judge; returns the completions at temperature 1."""
    config, server, facts, decode = session.config, session.server, session.facts, session.tokenizer.decode

    def in_words(row: int, column: int) -> str:
        token = plain[row].tokens[column]
        return f"{decode([token])!r} ({token}), token {column} of completion {row}"

    plain = session.sample(1.0)
    scored = trainer.score(plain, temperature=1.0)
    reading = reading_of(plain, scored)
    seen = difference(reading.trainer, reading.server)
    alignment = judge_alignment(
        reading,
        band,
        trainer.alternatives(plain, temperature=1.0) if seen.abs_mean > band.normal else [],
        describe=in_words,
        served_model=f"the server says that it serves {facts.model_name!r}",
    )
    first, again = (
        server.sample(plain[0].prompt, n=config.check_samples, max_tokens=16, temperature=1.0, seed=_SEED)
        for _ in range(2)
    )
    repeated = [(left.tokens, right.tokens) for left, right in zip(first, again, strict=True)]
    report.add(alignment, judge_order(reading, repeated=repeated, band=band))
    samples = list(plain)
    if alignment.severity == "error":
        report.add(*skipped("temperature", "sampling"))
    else:
        by_temperature = {temperature: session.sample(temperature) for temperature in TEMPERATURES}
        processed = {t: trainer.score(some, temperature=t) for t, some in by_temperature.items()}
        raw = {t: trainer.score(some, temperature=t, mode="raw") for t, some in by_temperature.items()}
        warmer_and_colder = [sample for some in by_temperature.values() for sample in some]
        samples += warmer_and_colder
        report.add(
            judge_temperature(
                facts.logprobs_mode,
                server=[sample.logprobs for sample in warmer_and_colder],
                processed=[row for each in processed.values() for row in each.logprobs],
                raw=[row for each in raw.values() for row in each.logprobs],
                temperatures=TEMPERATURES,
                band=band,
                is_declared=facts.declares_mode,
            )
        )
        sampler = judge_sampler({1.0: scored, **processed})
        if sampler.severity == "error":
            # By chance, rare tokens may be missing, which makes a correct sampler look narrow: sample again.
            again_at = {t: trainer.score(session.sample(t), temperature=t) for t in (1.0, *TEMPERATURES)}
            sampler = judge_sampler(again_at)
        report.add(sampler)
    endings = [Ending(tokens=sample.tokens, finish_reason=sample.finish_reason) for sample in samples]
    report.add(judge_endings(endings, session.special, max_tokens=config.check_tokens, decode=decode))
    return plain


def _restore_adapter(session: _Session, report: Report) -> None:
    """Restore what was served before the check: an adapter, or the base model."""
    server, adapter = session.server, session.facts.adapter
    try:
        if not server.restore_adapter(adapter):
            server.restore_adapter(None)
            report.add(adapter_not_restored(f"its folder {adapter} no longer exists; the base model is served"))
    except (BridgeError, PeerError) as error:
        report.add(adapter_not_restored(str(error)))


def _folder(config: CheckConfig) -> Path:
    """The folder for files that the server reads; the check removes its own."""
    return next((folder for folder in (config.run_folder, config.log_dir) if folder and folder.is_dir()), Path("."))


@contextmanager
def _quiet() -> Iterator[None]:
    """Print findings only; log lines of loading are shown with --debug-loading."""
    logger = logging.getLogger("grpo_engine")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that a changed weight is restored."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

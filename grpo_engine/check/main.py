"""`grpo-engine check`: before training, whether sampler and trainer agree, and whether new weights arrive.

Uses the settings, the bridge and the scoring that training would use, against a running inference server. Asks first,
changes one weight last, and puts it back whatever happens; a training run started afterwards finds a server like the
one it would have found, some policy versions further on. Judging is in `alignment`, `tokens` and
`canary`; here is what is asked, in its order.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from grpo_engine.bridges import Bridge, BridgeModel, CheckpointReload, SharedVllm
from grpo_engine.bridges.bridge_files import bridge_file_path, is_server_alive, read_bridge_file
from grpo_engine.bridges.fence import Fence
from grpo_engine.bridges.saving import trainable_device
from grpo_engine.check.alignment import (
    NoiseBand,
    Reading,
    Values,
    difference,
    judge_alignment,
    judge_order,
    judge_sampler,
    judge_temperature,
    noise_band,
)
from grpo_engine.check.canary import CanaryReading, judge_canary
from grpo_engine.check.config import CheckConfig
from grpo_engine.check.findings import (
    Finding,
    Level,
    fail,
    is_all_right,
    ok,
    warn,
)
from grpo_engine.check.prompts import QUESTIONS, asked, prompt_tokens, special_tokens
from grpo_engine.check.report import Report
from grpo_engine.check.sampling import CheckedServer, Sample, ServerFacts, ServerKind
from grpo_engine.check.server import (
    can_be_handed_weights,
    judge_server,
    no_bridge,
    no_server,
    no_trainer,
    other_trainer,
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
from grpo_engine.check.trainer import Scored, TrainerSide
from grpo_engine.errors import BridgeError, ModelError, PeerError
from grpo_engine.models.loading import load_config, load_model, load_tokenizer
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
_CANARY_MOVES = 0.1
"""Mean |Δ| in nats that the canary must make; several times what bfloat16 does by itself."""

log = logging.getLogger(__name__)


def run(config: CheckConfig) -> int:
    """Check, and say what was found; returns the exit code: 0, or 1 where there is a red line."""
    if not config.debug_loading:
        _be_quiet()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    report = Report(config)
    with _ended_politely():
        check(config, report)
    report.end()
    return 0 if is_all_right(report.findings) else 1


def check(config: CheckConfig, report: Report) -> None:
    """Ask everything, in order; later questions are left out where an earlier answer makes them senseless."""
    tokenizer = load_tokenizer(config.model_name)
    prompts = prompt_tokens(config, tokenizer)
    server = CheckedServer(f"http://127.0.0.1:{config.vllm_port}", patience_s=config.check_timeout_s)
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
        report.add(_ask_vocabulary(server, config, tokenizer))
        report.add(*judge_special_tokens(special, decode=tokenizer.decode))
        with tempfile.TemporaryDirectory(prefix=".grpo-check-", dir=_folder(config)) as folder:
            _check_weights(_Session(config, server, facts, tokenizer, special, prompts, Path(folder)), report)
    finally:
        server.close()


@dataclass(frozen=True, slots=True)
class _Session:
    """What the checks of weights work with."""

    config: CheckConfig
    server: CheckedServer
    facts: ServerFacts
    tokenizer: PreTrainedTokenizerBase
    special: SpecialTokens
    prompts: list[tuple[int, ...]]
    folder: Path

    def describe(self, samples: Sequence[Sample]) -> Any:
        """(completion, token) → words."""

        def words(row: int, column: int) -> str:
            token = samples[row].tokens[column]
            return f"{self.tokenizer.decode([token])!r} ({token}), token {column} of completion {row}"

        return words


def _check_weights(session: _Session, report: Report) -> None:
    """Everything that needs the trainer's model: by the bridge where the server has one, else by a copy of its own."""
    config, facts = session.config, session.facts
    bridge: Bridge | None = None
    try:
        try:
            if (pid := _other_trainer(config)) is not None:
                report.add(other_trainer(pid))
                return
            if can_be_handed_weights(facts, config):
                bridge = _build_bridge(session)
                attached = bridge.attach()
            else:
                attached = _copy_of_its_own(config)
            trainer = TrainerSide(Trainee(attached, config), seq_len=config.seq_len, batch_size=config.batch_size)
        except (BridgeError, ModelError, PeerError) as error:
            report.add(no_trainer(config, error))
            return
        band = noise_band([trainer.dtype, facts.dtype or trainer.dtype])
        try:
            if bridge is not None and not _starts_alike(session, attached):
                _hand_over_the_start(session, bridge, trainer, attached, report)
            fixed = _check_samples(session, trainer, band, report)
            if bridge is not None:
                report.add(_canary(session, bridge, trainer, fixed, band))
        except (BridgeError, PeerError) as error:
            report.add(
                fail(
                    "broke off",
                    str(error),
                    cause="the server failed or ended in the middle of the check, or answers something else",
                    advice="look at its log, restart it, and check again",
                )
            )
        finally:
            if bridge is not None and config.bridge.mode == "lora_only":
                _give_the_adapter_back(session, report)
    finally:
        if bridge is not None:
            bridge.close()


# --- the server ------------------------------------------------------------------------------------------------------


def _ask_vocabulary(server: CheckedServer, config: CheckConfig, tokenizer: PreTrainedTokenizerBase) -> Finding:
    size = int(load_config(config.model_name).get_text_config().vocab_size)
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


# --- the trainer -----------------------------------------------------------------------------------------------------


def _build_bridge(session: _Session) -> Bridge:
    config = session.config
    settings = config.bridge
    if isinstance(settings, CheckpointReload):  # every hand-over of the check must be one
        settings = settings.model_copy(update={"every_steps": 1})
    context = replace(bridge_context(config, session.folder), patience_s=config.check_timeout_s)
    return settings.build(context)


def _other_trainer(config: CheckConfig) -> int | None:
    """Pid of a living trainer that writes into the memory which this one would write into."""
    if not isinstance(config.bridge, SharedVllm):
        return None  # servers do not say who hands them checkpoints or adapters
    path = bridge_file_path(config.bridge.config_path, os.environ)
    if not path.exists():
        return None
    file = read_bridge_file(path)
    if not is_server_alive(file):
        return None
    fence = Fence.attach(file.fence_segment)
    writer = fence.writer()
    fence.close()
    is_trainer = writer is not None and writer.pid not in (file.pid, os.getpid()) and writer.is_alive()
    return writer.pid if writer is not None and is_trainer else None


def _copy_of_its_own(config: CheckConfig) -> BridgeModel:
    model = load_model(config.model_name, dtype=config.dtype, device=trainable_device(config.device))
    return BridgeModel(model=model, is_shared=False, policy_version=0, save=model.save_pretrained)


def _starts_alike(session: _Session, attached: BridgeModel) -> bool:
    """Whether the server holds what the trainer starts from, as far as can be known before they are compared."""
    return attached.is_shared or (session.facts.policy_version == 0 and session.facts.adapter is None)


def _hand_over_the_start(
    session: _Session, bridge: Bridge, trainer: TrainerSide, attached: BridgeModel, report: Report
) -> None:
    """Have the server serve what training starts from, in place of what an earlier trainer left."""
    bridge.publish(session.server.policy_version() + 1, trainer.trainee.write_weights)
    left = "adapter" if session.facts.adapter is not None else "weights"
    report.add(
        ok(
            "start",
            f"the server held {left} of version {attached.policy_version}, of an earlier trainer; it was handed what "
            "training starts from, as training does first",
        )
    )


# --- samples ---------------------------------------------------------------------------------------------------------


def _check_samples(session: _Session, trainer: TrainerSide, band: NoiseBand, report: Report) -> list[Sample]:
    """Sample, compare, and judge; returns the completions at temperature 1."""
    config, server, facts = session.config, session.server, session.facts
    mode = facts.logprobs_mode
    plain = _sample(session, 1.0)
    scored = trainer.score(plain, temperature=1.0)
    reading = _reading(plain, scored)
    seen = difference(reading.trainer, reading.server)
    alternatives = trainer.alternatives(plain, temperature=1.0) if seen.abs_mean > band.normal else []
    alignment = judge_alignment(
        "alignment",
        reading,
        band,
        alternatives,
        describe=session.describe(plain),
        whose_weights=f"the server says that it serves {facts.model_name!r}",
    )
    report.add(alignment)
    seeded = [server.sample(plain[0].prompt, n=config.check_samples, max_tokens=16, temperature=1.0, seed=_SEED)]
    seeded.append(server.sample(plain[0].prompt, n=config.check_samples, max_tokens=16, temperature=1.0, seed=_SEED))
    repeated = [(left.tokens, right.tokens) for left, right in zip(*seeded, strict=True)]
    report.add(judge_order(reading, repeated=repeated, band=band))
    endings = [Ending(tokens=sample.tokens, finish_reason=sample.finish_reason) for sample in plain]
    if alignment.level is Level.FAIL:
        why = "not checked: it means nothing before alignment is mended"
        report.add(warn("temperature", why), warn("sampling", why))
    else:
        by_temperature = {temperature: _sample(session, temperature) for temperature in TEMPERATURES}
        processed = {t: trainer.score(samples, temperature=t) for t, samples in by_temperature.items()}
        raw = {t: trainer.score(samples, temperature=t, mode="raw") for t, samples in by_temperature.items()}
        report.add(
            judge_temperature(
                mode,
                server=[sample.logprobs for samples in by_temperature.values() for sample in samples],
                processed=[row for each in processed.values() for row in each.logprobs],
                raw=[row for each in raw.values() for row in each.logprobs],
                temperatures=TEMPERATURES,
                band=band,
                is_declared=facts.declares_mode,
            )
        )
        sampler = judge_sampler({1.0: _surprises(scored), **{t: _surprises(each) for t, each in processed.items()}})
        if sampler.level is Level.FAIL:
            # A right sampler looks narrow where chance kept its rare tokens away, and their spread with them: not twice.
            again = {t: trainer.score(_sample(session, t), temperature=t) for t in (1.0, *TEMPERATURES)}
            sampler = judge_sampler({t: _surprises(each) for t, each in again.items()})
        report.add(sampler)
        endings += [
            Ending(tokens=sample.tokens, finish_reason=sample.finish_reason)
            for samples in by_temperature.values()
            for sample in samples
        ]
    report.add(judge_endings(endings, session.special, max_tokens=config.check_tokens, decode=session.tokenizer.decode))
    return plain


def _surprises(scored: Scored) -> tuple[Values, Values]:
    return scored.logprobs, scored.entropies


def _sample(session: _Session, temperature: float) -> list[Sample]:
    config = session.config
    return [
        sample
        for prompt in session.prompts
        for sample in session.server.sample(
            prompt,
            n=config.check_samples,
            max_tokens=min(config.check_tokens, config.seq_len - len(prompt)),
            temperature=temperature,
        )
    ]


def _reading(samples: Sequence[Sample], scored: Scored) -> Reading:
    numbers: dict[tuple[int, ...], int] = {}
    groups = [numbers.setdefault(sample.prompt, len(numbers)) for sample in samples]
    return Reading(server=[sample.logprobs for sample in samples], trainer=scored.logprobs, groups=groups)


# --- the canary ------------------------------------------------------------------------------------------------------


def _canary(
    session: _Session, bridge: Bridge, trainer: TrainerSide, samples: Sequence[Sample], band: NoiseBand
) -> Finding:
    """Change one weight, hand it over, look; put it back, hand over, look again."""
    server = session.server
    fixed = _fixed(samples)
    # All of a completion but its last tokens: long enough for a prefix cache to keep, with room to go on.
    known = (*fixed[0].prompt, *fixed[0].tokens[:-1])[: session.config.seq_len - 8]
    canary = trainer.find_canary(fixed, at_least=max(_CANARY_MOVES, 5 * band.normal))
    version = server.policy_version() + 1
    # First what training starts from: what is compared afterwards is this, whatever the server held before.
    bridge.publish(version, trainer.writer(canary, canary.original))
    before, trainer_before = _ask_fixed(server, fixed), trainer.score(fixed, temperature=1.0).logprobs
    repeated = _ask_fixed(server, fixed)
    asked_before = _ask_known(server, known)
    sampled_before = _reading(asked_before, _as_declared(session, trainer, asked_before))
    try:
        bridge.publish(version + 1, trainer.writer(canary, canary.changed))
        asked_changed = _ask_known(server, known)
        changed, trainer_changed = _ask_fixed(server, fixed), trainer.score(fixed, temperature=1.0).logprobs
        sampled_changed = _reading(asked_changed, _as_declared(session, trainer, asked_changed))
    finally:
        with _undisturbed():
            bridge.publish(version + 2, trainer.writer(canary, canary.original))
    asked_after = _ask_known(server, known)
    reading = CanaryReading(
        parameter=canary.name,
        server_before=before,
        server_repeated=repeated,
        server_changed=changed,
        server_after=_ask_fixed(server, fixed),
        trainer_before=trainer_before,
        trainer_changed=trainer_changed,
        sampled_before=sampled_before,
        sampled_changed=sampled_changed,
        sampled_old=_as_declared(session, trainer, asked_changed).logprobs,
        sampled_after=_reading(asked_after, _as_declared(session, trainer, asked_after)),
        versions=(version + 1, version + 2),
        served=(asked_changed[0].policy_version or 0, asked_after[0].policy_version or 0),
    )
    finding = judge_canary(reading, bridge=session.config.bridge.mode, band=band)
    if not torch.equal(canary.parameter.data, canary.original):
        return replace(finding, level=Level.FAIL, seen=f"{canary.name} was not put back bit for bit; {finding.seen}")
    return finding


def _fixed(samples: Sequence[Sample]) -> list[Sample]:
    """A few completions whose tokens stay the same throughout: the longest of different prompts."""
    longest: dict[tuple[int, ...], Sample] = {}
    for sample in sorted(samples, key=lambda sample: -len(sample.tokens)):
        longest.setdefault(sample.prompt, sample)
    return list(longest.values())[:3]


def _ask_fixed(server: CheckedServer, samples: Sequence[Sample]) -> list[list[float]]:
    return [server.prompt_logprobs((*sample.prompt, *sample.tokens))[len(sample.prompt) - 1 :] for sample in samples]


def _ask_known(server: CheckedServer, prompt: tuple[int, ...]) -> list[Sample]:
    """Go on from the same tokens, twice, so that the second time finds the first one's keys and values."""
    server.sample(prompt, n=1, max_tokens=1, temperature=1.0)
    return server.sample(prompt, n=4, max_tokens=8, temperature=1.0)


def _as_declared(session: _Session, trainer: TrainerSide, samples: Sequence[Sample]) -> Scored:
    return trainer.score(samples, temperature=1.0, mode=session.facts.logprobs_mode)


def _give_the_adapter_back(session: _Session, report: Report) -> None:
    """Serve what was served before the check: an earlier adapter, or the bare model."""
    try:
        is_back = session.server.restore_adapter(session.facts.adapter)
    except (BridgeError, PeerError) as error:
        report.add(
            warn("adapter", f"what was served before could not be put back: {error}", advice="restart the server")
        )
        return
    if not is_back:
        session.server.restore_adapter(None)
        name, path = session.facts.adapter or ("", "")
        report.add(
            warn(
                "adapter",
                f"{name!r}, which was served before, could not be put back: {path} is gone; the bare model is served",
                advice="nothing, for training: it hands over an adapter of its own first",
            )
        )


# --- around it -------------------------------------------------------------------------------------------------------


def _folder(config: CheckConfig) -> Path:
    """Where a run would put what the server is to read; what is put there by the check goes with it."""
    return next((folder for folder in (config.run_folder, config.log_dir) if folder and folder.is_dir()), Path("."))


def _be_quiet() -> None:
    """Findings are the talk here; what loading has to say comes with --debug-loading."""
    from transformers.utils import logging as transformers_logging

    logging.getLogger("grpo_engine").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()


@contextmanager
def _ended_politely() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that a changed weight is put back."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No polite signal cuts the body off; the time limit of the server's answers is its end."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""`grpo-engine check`: before training, whether sampler and trainer agree, and whether new weights arrive.

Uses the settings, the bridge and the scoring that training would use, against a running inference server. Asks first,
changes one weight last, and puts it back whatever happens; a training run started afterwards finds a server like the
one it would have found, some policy versions further on. Judging is in `check_alignment`, `check_tokens` and
`check_canary`; here is what is asked, in its order.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from grpo_engine.bridges import Bridge, BridgeContext, BridgeModel, CheckpointReload
from grpo_engine.bridges.saving import trainable_device
from grpo_engine.errors import BridgeError, ConfigError, GrpoError, ModelError, PeerError
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.loading import load_config, load_model, load_tokenizer, resolve_model
from grpo_engine.train.check_alignment import (
    NoiseBand,
    Reading,
    difference,
    judge_alignment,
    judge_order,
    judge_sampler,
    judge_temperature,
    noise_band,
)
from grpo_engine.train.check_canary import ADVICE, CanaryReading, judge_canary
from grpo_engine.train.check_config import CheckConfig
from grpo_engine.train.check_findings import (
    Finding,
    Level,
    as_table,
    fail,
    finding_lines,
    is_all_right,
    ok,
    summary_line,
    warn,
)
from grpo_engine.train.check_sampling import CheckedServer, Sample, ServerFacts, ServerKind
from grpo_engine.train.check_tokens import (
    Encoded,
    Ending,
    SpecialTokens,
    VocabularyProbe,
    judge_endings,
    judge_special_tokens,
    judge_vocabulary,
    template_end,
)
from grpo_engine.train.check_trainer import Scored, TrainerSide
from grpo_engine.train.trainee import Trainee

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPERATURES = (0.7, 1.3)
"""Where raw and processed log-probabilities differ; at 1 they are the same."""
QUESTIONS = (
    "What is 17 + 25?",
    "Write one sentence about the sea.",
    "Sort these digits: 402915",
    "Name three colours and why you like them.",
    "Why is the sky blue? Answer in one sentence.",
    "Tell me a word that rhymes with light.",
)
_TEXTS = (
    "Hello, world!",
    "  two  spaces\n\tand a tab ",
    "naïve café: 3½ × 10⁻³ €",
    "12345 67890",
    "def f(x): return x",
)
_ANSWER = "Blueberry"
"""Stands in for an answer, to see what a chat template puts behind one."""
_SEED = 20177
_CANARY_MOVES = 0.1
"""Mean |Δ| in nats that the canary must make; several times what bfloat16 does by itself."""
_MOST_COLUMNS = 100

log = logging.getLogger(__name__)

Messages = list[dict[str, str]]


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


class Report:
    """Shows each finding when it is there, or all of them as JSON at the end."""

    def __init__(self, config: CheckConfig) -> None:
        self.findings: list[Finding] = []
        self._as_json = config.as_json
        self._has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        self._say(f"{config.model_name} by {config.bridge.mode}, server on port {config.vllm_port}\n")

    def add(self, *findings: Finding) -> None:
        """Take findings."""
        for finding in findings:
            self.findings.append(finding)
            self._say("\n".join(finding_lines(finding, width=self._width, has_colour=self._has_colour)))

    def end(self) -> None:
        """Say how it stands."""
        if self._as_json:
            sys.stdout.write(json.dumps(as_table(self.findings), ensure_ascii=False) + "\n")
        self._say(f"\n{summary_line(self.findings, has_colour=self._has_colour)}")

    def _say(self, text: str) -> None:
        if not self._as_json:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


def check(config: CheckConfig, report: Report) -> None:
    """Ask everything, in order; later questions are left out where an earlier answer makes them senseless."""
    tokenizer = load_tokenizer(config.model_name)
    prompts = _prompts(config, tokenizer)
    server = CheckedServer(f"http://127.0.0.1:{config.vllm_port}", patience_s=config.check_timeout_s)
    try:
        try:
            facts = server.facts()
        except (PeerError, BridgeError) as error:
            report.add(_no_server(config, error))
            return
        report.add(judge_server(facts, config))
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
            if facts.kind is ServerKind.OURS:
                bridge = _build_bridge(session)
                attached = bridge.attach()
            else:
                report.add(_no_bridge(config, facts))
                attached = _copy_of_its_own(config)
            trainer = TrainerSide(Trainee(attached, config), seq_len=config.seq_len, batch_size=config.batch_size)
        except (BridgeError, ModelError, PeerError) as error:
            report.add(_no_trainer(config, error))
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
                    "server",
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


def judge_server(facts: ServerFacts, config: CheckConfig) -> Finding:
    """What answers, and whether it says that it is what the trainer needs. Pure."""
    version = "" if facts.policy_version is None else f", policy version {facts.policy_version}"
    place = "" if facts.device is None else f" on {facts.device} in {facts.dtype}"
    whose = "our server" if facts.kind is ServerKind.OURS else facts.kind.value
    seen = f"{whose}, {facts.engine}{place}{version}; log-probs {facts.logprobs_mode}" + (
        "" if facts.declares_mode else " (it does not say; that is its default)"
    )
    if not _is_same_model(facts.model_name, config.model_name):
        return warn(
            "server",
            f"{seen}; serves {facts.model_name!r}",
            cause=f"another name than the trainer's {config.model_name!r}; alignment will tell whether it is the same",
            advice="start the server with the trainer's --model-name",
        )
    if config.bridge.mode == "lora_only" and facts.kind is ServerKind.OURS and not facts.takes_adapters:
        return fail(
            "server",
            seen,
            cause="it takes no adapters, which lora_only hands over",
            advice="start it with --enable-lora",
        )
    if config.bridge.mode == "lora_only" and config.lora_dropout > 0:
        return warn(
            "server",
            seen,
            cause=f"--lora-dropout {config.lora_dropout:g} makes the trainer disagree with the sampler on every token",
            advice="train with --lora-dropout 0",
        )
    return ok("server", seen)


def _is_same_model(left: str, right: str) -> bool:
    try:
        return left == right or resolve_model(left) == resolve_model(right)
    except ModelError:
        return False


def _no_server(config: CheckConfig, error: GrpoError) -> Finding:
    return fail(
        "server",
        str(error),
        cause="no inference server is up on this port, its model is still loading, or it is of a kind unknown here",
        advice=f"start it (grpo-engine server --model-name {config.model_name} --port {config.vllm_port}), wait until "
        "/health says 200, or name its port by --vllm-port",
    )


def _ask_vocabulary(server: CheckedServer, config: CheckConfig, tokenizer: PreTrainedTokenizerBase) -> Finding:
    size = int(load_config(config.model_name).get_text_config().vocab_size)
    probe = VocabularyProbe(size=size, takes_last=server.takes_token(size - 1), takes_one_more=server.takes_token(size))
    conversation: Messages = [{"role": "user", "content": QUESTIONS[0]}]
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


def special_tokens(model_name: str, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """What the files of a model say about tokens that are no text."""
    configured = [load_config(model_name).get_text_config().eos_token_id]
    try:
        configured.append(GenerationConfig.from_pretrained(resolve_model(model_name)).eos_token_id)
    except OSError:
        log.info("%s has no generation_config.json", model_name)
    eos = {int(i) for each in configured for i in (each if isinstance(each, list | tuple) else [each]) if i is not None}
    question: Messages = [{"role": "user", "content": QUESTIONS[0]}]
    chat: tuple[int, ...] = ()
    text: tuple[int, ...] = ()
    end = None
    if tokenizer.chat_template:
        chat = _chat_tokens(tokenizer, question)
        rendered = str(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True))
        text = tuple(tokenizer.encode(rendered))
        answered = [*question, {"role": "assistant", "content": _ANSWER}]
        tail = str(tokenizer.apply_chat_template(answered, tokenize=False)).rpartition(_ANSWER)[2]
        special = frozenset(int(i) for i in (*tokenizer.all_special_ids, *_added_special(tokenizer)))
        end = template_end(tokenizer.encode(tail, add_special_tokens=False), special)
    return SpecialTokens(
        tokenizer_eos=tokenizer.eos_token_id,
        generation_eos=tuple(sorted(eos)),
        template_end=end,
        pad=tokenizer.pad_token_id,
        bos=tokenizer.bos_token_id,
        has_template=bool(tokenizer.chat_template),
        chat_prompt=chat,
        text_prompt=text,
    )


def _added_special(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special]


def _chat_tokens(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[int, ...]:
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    tokens = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    return tuple(int(token) for token in tokens)


# --- the trainer -----------------------------------------------------------------------------------------------------


def _build_bridge(session: _Session) -> Bridge:
    config = session.config
    settings = config.bridge
    if isinstance(settings, CheckpointReload):  # every hand-over of the check must be one
        settings = settings.model_copy(update={"every_steps": 1})
    return settings.build(
        BridgeContext(
            model_name=config.model_name,
            dtype=config.dtype,
            device=config.device,
            server_url=session.server.url,
            folder=session.folder.absolute(),
            lora=LoraSettings(
                rank=config.lora_r,
                alpha=config.lora_alpha,
                dropout=config.lora_dropout,
                target_modules=config.lora_target_modules,
                layer_indices=config.lora_layer_indices,
            ),
            patience_s=config.check_timeout_s,
        )
    )


def _copy_of_its_own(config: CheckConfig) -> BridgeModel:
    model = load_model(config.model_name, dtype=config.dtype, device=trainable_device(config.device))
    return BridgeModel(model=model, is_shared=False, policy_version=0, save=model.save_pretrained)


def _no_bridge(config: CheckConfig, facts: ServerFacts) -> Finding:
    return fail(
        "bridge",
        f"a {facts.kind.value} server cannot be handed new weights, so the canary is not checked",
        cause=f"it has no /bridge/pause and /bridge/reload with versions, which bridge {config.bridge.mode} asks for",
        advice=f"serve with grpo-engine server --model-name {config.model_name}; the other checks below still hold",
    )


def _no_trainer(config: CheckConfig, error: GrpoError) -> Finding:
    return fail(
        "trainer",
        str(error),
        cause="the trainer cannot be set up, and training with these flags would end in the same way",
        advice=ADVICE[config.bridge.mode] if isinstance(error, BridgeError) else "change the flag that it names",
    )


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
        why = "not checked: they mean nothing before alignment is mended"
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
        report.add(_worst_sampling({1.0: scored, **processed}))
        endings += [
            Ending(tokens=sample.tokens, finish_reason=sample.finish_reason)
            for samples in by_temperature.values()
            for sample in samples
        ]
    report.add(judge_endings(endings, session.special, max_tokens=config.check_tokens, decode=session.tokenizer.decode))
    return plain


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


def _worst_sampling(scored: Mapping[float, Scored]) -> Finding:
    """Of all temperatures, the one that is furthest from what it should be."""
    findings = [
        judge_sampler(logprobs=each.logprobs, entropies=each.entropies, temperature=temperature)
        for temperature, each in scored.items()
    ]
    return max(findings, key=lambda finding: abs(float(finding.numbers["standard_errors"] or 0)))


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
    _ask_known(server, known)
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


def _prompts(config: CheckConfig, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Tokens of the questions, as environments would send them, without those that leave no room for an answer.

    Raises:
        ConfigError: the file cannot be read, or none of its questions fits.
    """
    conversations = _conversations(config.prompts_file) if config.prompts_file else [_asked(q) for q in QUESTIONS]
    prompts = [
        _chat_tokens(tokenizer, messages)
        if tokenizer.chat_template
        else tuple(int(token) for token in tokenizer.encode("\n".join(message["content"] for message in messages)))
        for messages in conversations
    ]
    fitting = [prompt for prompt in dict.fromkeys(prompts) if prompt and len(prompt) + 8 <= config.seq_len]
    if not fitting:
        shortest = min(map(len, prompts), default=0)
        raise ConfigError(
            f"seq_len: none of {len(prompts)} prompts (the shortest has {shortest} tokens) leaves room for 8 more "
            f"within {config.seq_len}: raise --seq-len, or give shorter --prompts"
        )
    return fitting


def _conversations(path: Path) -> list[Messages]:
    """One a line: plain text, or JSON with `messages`, `prompt`, `question` or `problem`."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error}") from None
    conversations: list[Messages] = []
    for number, line in enumerate(lines, start=1):
        if not line.startswith("{"):
            conversations.append(_asked(line))
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--prompts {path}: line {number}: not valid JSON: {error}") from None
        text = next((row[key] for key in ("prompt", "question", "problem") if isinstance(row.get(key), str)), None)
        if isinstance(row.get("messages"), list):
            conversations.append([{"role": str(m["role"]), "content": str(m["content"])} for m in row["messages"]])
        elif text is not None:
            conversations.append(_asked(text))
        else:
            raise ConfigError(
                f"--prompts {path}: line {number}: has {', '.join(row)}, none of messages, prompt, question, problem"
            )
    if not conversations:
        raise ConfigError(f"--prompts {path}: has no line: write one question a line")
    return conversations


def _asked(question: str) -> Messages:
    return [{"role": "user", "content": question}]


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

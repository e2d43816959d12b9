"""Whether trainer and server agree on tokens: vocabulary, tokenizer, end, padding and opening tokens.

Pure and torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_engine.diagnosis.finding import Check, Finding

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One text, as tokenized by both sides."""

    text: str
    trainer: tuple[int, ...]
    server: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyProbe:
    """Whether the server takes the trainer's last token id, and the one after it."""

    size: int
    """Rows of the trainer's embedding."""
    takes_last: bool
    takes_one_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Special tokens, as configured in the model and the tokenizer."""

    tokenizer_eos: int | None
    generation_eos: tuple[int, ...]
    """Of generation_config.json, and of the model's configuration."""
    template_end: int | None
    """The special token that the chat template appends to an answer; None without one."""
    pad: int | None
    bos: int | None
    has_template: bool
    chat_prompt: tuple[int, ...]
    """A question in the template, as environments send it; empty without a template."""
    text_prompt: tuple[int, ...]
    """The same, rendered to text and tokenized as any text is."""

    @property
    def stops(self) -> frozenset[int]:
        """Tokens at which generation stops by the model's files."""
        return frozenset(token for token in (self.tokenizer_eos, *self.generation_eos) if token is not None)

    @property
    def ends(self) -> frozenset[int]:
        """Every token that may end a completion."""
        return self.stops if self.template_end is None else self.stops | {self.template_end}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a completion ended."""

    tokens: tuple[int, ...]
    finish_reason: str


def judge_vocabulary(probe: VocabularyProbe, encoded: Sequence[Encoded], *, decode: Decode) -> Finding:
    """Whether both sides have the same vocabulary and tokenize texts alike."""
    line = Check("vocabulary")
    if not probe.takes_last or probe.takes_one_more:
        smaller = not probe.takes_last
        return line.fail(
            f"the trainer's model has {probe.size:,} tokens, the server's {'fewer' if smaller else 'more'}",
            cause="the server has another model, or one whose embedding was resized",
            hint="start the server and the trainer with the same --model-name",
        )
    different = next((each for each in encoded if each.trainer != each.server), None)
    if different is not None:
        where = next(
            (i for i, (a, b) in enumerate(zip(different.trainer, different.server, strict=False)) if a != b),
            min(len(different.trainer), len(different.server)),
        )
        return line.fail(
            f"{different.text!r} is {len(different.trainer)} tokens here and {len(different.server)} at the server; "
            f"from token {where} on here {_shown(different.trainer[where : where + 3], decode)}, "
            f"there {_shown(different.server[where : where + 3], decode)}",
            cause="another tokenizer, another version of it, or another opening token",
            hint="start the server with the trainer's --model-name, and the same versions of transformers",
        )
    if not encoded:
        return line.warn(
            f"{probe.size:,} tokens on both sides; the server has no tokenize route, so texts were not compared"
        )
    return line.ok(f"{probe.size:,} tokens on both sides; {len(encoded)} texts are tokenized alike, special tokens too")


def judge_special_tokens(tokens: SpecialTokens, *, decode: Decode) -> list[Finding]:
    """Verdicts on end, padding and opening tokens and the chat template, from the model's files."""
    return [_template(tokens, decode), _padding(tokens, decode)]


def judge_endings(endings: Sequence[Ending], tokens: SpecialTokens, *, max_tokens: int, decode: Decode) -> Finding:
    """Whether completions end with exactly one end token, which is trained."""
    line = Check("end token")
    stopped = [ending for ending in endings if ending.finish_reason == "stop"]
    known = ", ".join(_shown([token], decode) for token in sorted(tokens.ends)) or "none"
    without = next((ending for ending in stopped if ending.tokens[-1] not in tokens.ends), None)
    if without is not None:
        return line.fail(
            f"a completion with finish_reason stop ends with {_shown(without.tokens[-1:], decode)}; known end "
            f"tokens are {known}",
            cause="the server leaves the end token out of its answer, or stops at another token than the model's files "
            "say, so the end is never trained",
            hint="have the server report the end token with its log-prob; name others in generation_config.json",
        )
    doubled = next((e for e in stopped if len(e.tokens) > 1 and e.tokens[-2] in tokens.ends), None)
    if doubled is not None:
        return line.fail(
            f"a completion ends twice, with {_shown(doubled.tokens[-2:], decode)}",
            cause="the end token is added to an answer that has it already",
            hint="take the server's token_ids as they are, and append nothing",
        )
    through = next((e for e in endings if not tokens.stops.isdisjoint(e.tokens[:-1])), None)
    if through is not None:
        token = next(token for token in through.tokens[:-1] if token in tokens.stops)
        return line.fail(
            f"a completion goes on after {_shown([token], decode)}",
            cause="the server does not stop at it: its generation settings have other end tokens",
            hint=f"add {token} to eos_token_id in the model's generation_config.json, and leave ignore_eos out",
        )
    if not stopped:
        return line.warn(
            f"none of {len(endings)} completions stopped within {max_tokens} tokens, so no end token was seen",
            hint="raise --check-tokens, or give --prompts with short answers",
        )
    seen = sorted({ending.tokens[-1] for ending in stopped})
    return line.ok(
        f"{len(stopped)} of {len(endings)} completions stopped, each with its end token and that token's log-prob: "
        + ", ".join(_shown([token], decode) for token in seen),
    )


def _template(tokens: SpecialTokens, decode: Decode) -> Finding:
    line = Check("chat template")
    if not tokens.has_template:
        return line.warn(
            "the tokenizer has none; questions were sent as plain text",
            hint="train with chat_template = false (--no-chat-template) in the environment",
        )
    bos = tokens.bos
    if bos is not None and tokens.chat_prompt[:2] == (bos, bos):
        return line.fail(
            f"prompts begin with {_shown(tokens.chat_prompt[:2], decode)}",
            cause="the template writes the opening token, and the tokenizer adds another",
            hint="set add_bos_token to false in tokenizer_config.json, or take it out of the template",
        )
    if tokens.template_end is not None and tokens.template_end not in tokens.stops:
        others = ", ".join(_shown([token], decode) for token in sorted(tokens.stops)) or "nothing"
        return line.warn(
            f"it ends an answer with {_shown([tokens.template_end], decode)}, but generation ends at {others}",
            cause="a base model with a chat template: its answers run on to max_tokens",
            hint=f"add {tokens.template_end} to eos_token_id in generation_config.json, or give environments a stop",
        )
    if bos is not None and tokens.text_prompt[:2] == (bos, bos):
        return line.warn(
            f"rendered to text and tokenized again, prompts begin with {_shown(tokens.text_prompt[:2], decode)}",
            cause="the template writes the opening token, and the tokenizer adds another to any text",
            hint="send prompts as tokens, as our environments do",
        )
    end = "" if tokens.template_end is None else f"; an answer ends with {_shown([tokens.template_end], decode)}"
    return line.ok(f"found, and no opening token is doubled{end}")


def _padding(tokens: SpecialTokens, decode: Decode) -> Finding:
    if tokens.pad is None:
        seen = "no padding token; none is needed, since padding is masked"
    elif tokens.pad in tokens.ends:
        seen = f"{_shown([tokens.pad], decode)} is also an end token; harmless, since padding is masked"
    else:
        seen = f"{_shown([tokens.pad], decode)}, none of the end tokens"
    return Check("padding").ok(seen)


def template_end(tail: Sequence[int], special: frozenset[int]) -> int | None:
    """The first special token that a template appends to an answer."""
    return next((token for token in tail if token in special), None)


def _shown(tokens: Sequence[int], decode: Decode) -> str:
    return " ".join(f"{decode([token])!r} ({token})" for token in tokens) or "nothing"

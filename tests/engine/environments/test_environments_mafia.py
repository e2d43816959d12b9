"""The game of mafia: its grammar, its rules, what each player is shown, scripted players, rewards."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_engine.config import validated
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.items.source import held_out_items
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.tasks.mafia.grammar import PASS, Action, Verb, parse
from grpo_engine.environments.tasks.mafia.knowledge import knowledge, prompt_text
from grpo_engine.environments.tasks.mafia.rules import (
    NIGHT_VERBS,
    Dawned,
    Deal,
    Investigated,
    Phase,
    Role,
    Rules,
    Side,
    State,
    Voted,
    acting,
    advance,
    begin,
    is_legal,
    targets,
    verb,
    winner,
)
from grpo_engine.environments.tasks.mafia.scripted import scripted
from grpo_engine.environments.tasks.mafia.task import Mafia
from grpo_engine.errors import ConfigError

RULES = Rules(max_days=3, num_talks=1, max_statement=20)
ANN, BOB, CAT, DAN, EVE = range(5)
DEAL = Deal(
    names=("Ann", "Bob", "Cat", "Dan", "Eve"),
    roles=(Role.MAFIA, Role.SHERIFF, Role.DOCTOR, Role.CITIZEN, Role.CITIZEN),
)
GAMES = st.builds(
    lambda players, mafia, days, talks, seed: (
        Mafia(num_players=players, num_mafia=mafia, max_days=days, num_talks=talks, max_statement=20),
        seed,
    ),
    st.integers(5, 7),
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(0, 2**32),
)


def first_morning(task: Mafia, seed: int) -> State:
    deal = task.deal(Item(question=f"game {seed}", answer=""))
    return begin(deal, Rules(max_days=task.max_days, num_talks=task.num_talks, max_statement=task.max_statement))


def legal_actions(state: State, place: int) -> list[Action]:
    said = [Action(Verb.SAY, text) for text in ("hm", "I am Ann")] if state.phase is Phase.TALK else []
    named = [Action(verb(state, place), state.deal.names[target]) for target in targets(state, place)]
    return [PASS, *said, *named]


def played(state: State, seed: int) -> list[State]:
    """Every state of a game of random legal actions."""
    rng = random.Random(seed)
    states = [state]
    while places := acting(states[-1]):
        now = states[-1]
        states.append(advance(now, {place: rng.choice(legal_actions(now, place)) for place in places}))
    return states


# --- grammar -------------------------------------------------------------------------------------------------------

NAME = st.text("ABCxyz", min_size=1, max_size=5)
TEXT = st.text("ab ?!'é", min_size=1, max_size=8).filter(str.strip)
ACTIONS = st.one_of(
    st.just(PASS),
    st.builds(Action, st.sampled_from([Verb.VOTE, Verb.KILL, Verb.PROTECT, Verb.INVESTIGATE]), NAME),
    st.builds(Action, st.just(Verb.SAY), TEXT),
)
BLANKS = st.text(" \n\t", max_size=3)


@given(ACTIONS, BLANKS, BLANKS, st.one_of(st.none(), st.text("ab<>/\n", max_size=10)))
def test_every_answer_of_the_grammar_is_parsed(action: Action, before: str, after: str, thought: str | None) -> None:
    thinking = "" if thought is None else f"<think>{thought}</think>{after}"
    assert parse(f"{before}{thinking}{action}{after}") == action


PIECES = ["<say>", "</say>", "<vote>", "</vote>", "<pass/>", "<think>", "</think>", "Bob", " ", "\n", "x1", "<"]


@given(st.lists(st.sampled_from(PIECES) | ACTIONS.map(str), max_size=7).map("".join))
def test_an_answer_is_an_action_only_if_nothing_but_a_thought_stands_beside_it(answer: str) -> None:
    action = parse(answer)
    if action is None:
        return
    text = answer.strip()
    assert str(action) == (text.partition("</think>")[2].strip() if text.startswith("<think>") else text)
    if action.verb is Verb.SAY:
        assert action.object.strip()
        assert action.object.isprintable()
        assert not set("<>") & set(action.object)
    elif action.verb is not Verb.PASS:
        assert action.object.isalpha()


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "<vote>Bob",
        "<vote>Bob</kill>",
        "<vote> Bob</vote>",
        "<vote>Bob</vote><pass/>",
        "I vote <vote>Bob</vote>",
        "<VOTE>Bob</VOTE>",
        "<pass></pass>",
        "<say></say>",
        "<say>  </say>",
        "<say>hello\nBob: I am mafia</say>",
        "<say>hello\u2028Bob: I am mafia</say>",
        "<say><kill>Bob</kill></say>",
        "<think>never closed <pass/>",
    ],
)
def test_what_is_malformed_is_no_action(answer: str) -> None:
    assert parse(answer) is None


# --- rules ---------------------------------------------------------------------------------------------------------


@given(GAMES)
def test_a_game_ends_within_its_days_and_only_living_players_have_turns(game: tuple[Mafia, int]) -> None:
    task, seed = game
    states = played(first_morning(task, seed), seed)
    assert len(states) - 1 <= task.max_days * (task.num_talks + 2)
    assert states[-1].phase is Phase.OVER
    for state, after in itertools.pairwise(states):
        assert after.alive <= state.alive
        assert set(acting(state)) <= state.alive
        for place in range(task.num_players):
            if place not in state.alive:
                assert not any(is_legal(state, place, Action(each, "Ann")) for each in Verb)
        assert winner(state) is None
    assert winner(states[-1]) is not None or states[-1].day == task.max_days + 1


@given(GAMES, st.data())
def test_nothing_but_legal_actions_is_taken(game: tuple[Mafia, int], data: st.DataObject) -> None:
    task, seed = game
    state = data.draw(st.sampled_from(played(first_morning(task, seed), seed)))
    place = data.draw(st.integers(0, task.num_players - 1))
    action = Action(
        data.draw(st.sampled_from(Verb)), data.draw(st.sampled_from([*state.deal.names, "Nobody", "x" * 21]))
    )
    allowed = {(each.verb, each.object) for each in legal_actions(state, place)} if place in acting(state) else set()
    if action.verb in (Verb.PASS, Verb.SAY):
        expected = place in acting(state) and (
            action.verb is Verb.PASS or (state.phase is Phase.TALK and len(action.object) <= 20)
        )
    else:
        expected = (action.verb, action.object) in allowed
    assert is_legal(state, place, action) is expected
    if not expected:
        with pytest.raises(ValueError, match="is not legal"):
            advance(state, {place: action})


@given(GAMES)
def test_the_player_with_most_votes_is_out_and_none_at_a_tie(game: tuple[Mafia, int]) -> None:
    task, seed = game
    for state, after in itertools.pairwise(played(first_morning(task, seed), seed)):
        if state.phase is not Phase.VOTE:
            continue
        voted = after.events[-1]
        assert isinstance(voted, Voted)
        counts = Counter(target for _, target in voted.votes)
        best = [place for place, count in counts.items() if count == max(counts.values())]
        assert voted.out == (best[0] if len(best) == 1 else None)
        assert after.alive == state.alive - {voted.out}


def vote(name: str) -> Action:
    return Action(Verb.VOTE, name)


def at_night() -> State:
    return advance(advance(begin(DEAL, RULES), {}), {})


def test_a_night_kills_investigates_and_protects_at_the_same_time() -> None:
    kill, look = Action(Verb.KILL, "Dan"), Action(Verb.INVESTIGATE, "Ann")
    dawn = advance(at_night(), {ANN: kill, BOB: look, CAT: Action(Verb.PROTECT, "Eve")})
    assert dawn.alive == {ANN, BOB, CAT, EVE}
    assert dawn.events[-2:] == (Dawned(DAN), Investigated(BOB, ANN, True))
    saved = advance(at_night(), {ANN: kill, CAT: Action(Verb.PROTECT, "Dan")})
    assert saved.alive == {ANN, BOB, CAT, DAN, EVE}
    assert saved.events[-1] == Dawned(None)
    too_late = advance(at_night(), {ANN: Action(Verb.KILL, "Bob"), BOB: look})
    assert too_late.events[-1] == Dawned(BOB)


def test_of_two_mafiosi_who_disagree_the_first_decides() -> None:
    deal = replace(DEAL, roles=(Role.CITIZEN, Role.MAFIA, Role.DOCTOR, Role.MAFIA, Role.SHERIFF))
    night = advance(advance(begin(deal, RULES), {}), {})
    dawn = advance(night, {BOB: Action(Verb.KILL, "Eve"), DAN: Action(Verb.KILL, "Ann")})
    assert dawn.events[-1] == Dawned(EVE)


def test_the_town_wins_without_mafia_and_the_mafia_when_it_is_half() -> None:
    voting = advance(begin(DEAL, RULES), {})
    caught = advance(voting, {BOB: vote("Ann"), CAT: vote("Ann"), ANN: vote("Bob")})
    assert (caught.phase, winner(caught)) == (Phase.OVER, Side.TOWN)
    state = advance(voting, {CAT: vote("Dan")})
    state = advance(state, {ANN: Action(Verb.KILL, "Eve")})
    assert winner(state) is None
    state = advance(advance(state, {}), {ANN: vote("Bob")})
    assert (state.phase, winner(state)) == (Phase.OVER, Side.MAFIA)


def test_a_game_of_passes_ends_without_a_winner() -> None:
    state = begin(DEAL, RULES)
    for _ in range(3 * 3):
        state = advance(state, {})
    assert (state.phase, winner(state), len(state.alive)) == (Phase.OVER, None, 5)


# --- what players know ---------------------------------------------------------------------------------------------


def by_role(state: State, me: int, quiet: frozenset[int], seed: int) -> Mapping[int, Action]:
    """Actions of all: by day by their place, at night by their role; none that is visible has a target in `quiet`."""
    actions = {}
    for place in acting(state):
        role = state.deal.roles[place]
        key = role if state.phase is Phase.NIGHT else place
        rng = random.Random(f"{seed}/{key}/{state.day}/{state.phase}/{state.num_talks}")
        spared = frozenset[int]() if state.phase is Phase.NIGHT and role is Role.SHERIFF and place != me else quiet
        open_targets = [target for target in targets(state, place) if target not in spared]
        if state.phase is Phase.TALK:
            actions[place] = Action(Verb.SAY, f"{rng.randrange(100)}")
        elif open_targets:
            actions[place] = Action(verb(state, place), state.deal.names[rng.choice(open_targets)])
    return actions


def observations(state: State, me: int, quiet: frozenset[int], seed: int) -> list[str]:
    """All prompts of one player in a game."""
    texts: list[str] = []
    num_shown = 0
    while places := acting(state):
        if me in places:
            texts.append(prompt_text(knowledge(state, me, since=num_shown), is_first=not texts, explains=True))
            num_shown = len(state.events)
        state = advance(state, by_role(state, me, quiet, seed))
    return texts


@given(GAMES, st.data())
def test_the_prompt_of_a_player_does_not_depend_on_hidden_roles(game: tuple[Mafia, int], data: st.DataObject) -> None:
    """Two other players swap their roles, and no event reveals them: the prompts stay the same."""
    task, seed = game
    start = first_morning(task, seed)
    roles = list(start.deal.roles)
    me, one, other = data.draw(st.permutations(range(task.num_players)))[:3]
    assume(roles[one] != roles[other])
    if roles[me] is Role.MAFIA:
        assume(Role.MAFIA not in (roles[one], roles[other]))
    roles[one], roles[other] = roles[other], roles[one]
    swapped = begin(replace(start.deal, roles=tuple(roles)), start.rules)
    quiet = frozenset({me, one, other})
    mine = observations(start, me, quiet, seed)
    assert mine
    assert mine == observations(swapped, me, quiet, seed)


def test_a_player_is_shown_public_events_and_his_own_findings() -> None:
    state = begin(DEAL, RULES)
    first = prompt_text(knowledge(state, BOB), is_first=True, explains=True)
    assert "You are Bob, sheriff." in first
    assert first.endswith("Day 1, talk: <say>text</say> of 20 letters at most, or <pass/>")
    state = advance(state, {place: Action(Verb.SAY, f"word of {name}") for place, name in enumerate(DEAL.names)})
    second = prompt_text(knowledge(state, BOB), is_first=False, explains=True)
    assert second.splitlines()[:-1] == ["Ann: word of Ann", "Cat: word of Cat", "Dan: word of Dan", "Eve: word of Eve"]
    since = len(state.events)
    state = advance(state, {ANN: vote("Bob"), CAT: vote("Eve"), DAN: vote("Eve")})
    state = advance(state, {ANN: Action(Verb.KILL, "Dan"), BOB: Action(Verb.INVESTIGATE, "Ann")})
    public = ["Votes: Ann-Bob, Cat-Eve, Dan-Eve. Eve is out: citizen.", "Dan was killed: citizen."]
    assert list(knowledge(state, BOB, since=since).news) == [*public, "Ann is mafia."]
    assert list(knowledge(state, CAT, since=since).news) == public
    assert knowledge(state, CAT).known_mafia == ()


def test_only_mafia_players_know_each_other() -> None:
    deal = Mafia(num_mafia=2).deal(Item(question="game 1", answer=""))
    state = begin(deal, RULES)
    mafia = [name for name, role in zip(deal.names, deal.roles, strict=True) if role is Role.MAFIA]
    for place in range(5):
        known = knowledge(state, place)
        expected = tuple(name for name in mafia if name != known.name) if known.role is Role.MAFIA else ()
        assert known.mates == expected


# --- scripted players ----------------------------------------------------------------------------------------------


@given(GAMES)
def test_scripted_players_act_legally_and_a_mafioso_accuses_no_mate(game: tuple[Mafia, int]) -> None:
    task, seed = game
    state = first_morning(task, seed)
    while places := acting(state):
        actions = {place: scripted(knowledge(state, place), random.Random(seed + place)) for place in places}
        for place, action in actions.items():
            mates = knowledge(state, place).mates
            assert action.object not in mates or len(state.alive) == len(mates) + 1
            assert not any(f"suspect {mate}" in action.object for mate in mates)
        state = advance(state, actions)


def test_scripted_players_vote_for_the_accused_and_a_sheriff_for_the_mafioso_he_found() -> None:
    state = advance(at_night(), {BOB: Action(Verb.INVESTIGATE, "Ann")})
    state = advance(state, {CAT: Action(Verb.SAY, "Dan it is"), EVE: Action(Verb.SAY, "Dan")})
    votes = {place: scripted(knowledge(state, place), random.Random(0)).object for place in (ANN, BOB, CAT, EVE)}
    assert votes == {ANN: "Dan", BOB: "Ann", CAT: "Dan", EVE: "Dan"}


# --- the task ------------------------------------------------------------------------------------------------------


class Saying:
    """A seat that always gives the same answer."""

    def __init__(self, answer: str, *, num_turns: int = 10**6) -> None:
        self._answer, self._num_left = answer, num_turns
        self.prompts: list[str] = []

    @property
    def has_room(self) -> bool:
        return self._num_left >= 0

    async def ask(self, text: str) -> str:
        self._num_left -= 1
        self.prompts.append(text)
        return self._answer if self.has_room else ""


def game_of(task: Mafia, seats: Sequence[Saying], seed: int = 0) -> list[float]:
    return asyncio.run(task.play(Item(question=f"game {seed}", answer=""), seats))


@pytest.mark.parametrize(
    ("task", "answer", "reward"),
    [
        (Mafia(), "<pass/>", 1.0),
        (Mafia(max_days=1, pass_counts=0.25), "<pass/>", 0.25),
        (Mafia(), "<vote>Nobody</vote>", 0.0),
        (Mafia(), "no tag", -1.0),
        (Mafia(), "<kill>Ann", -1.0),
    ],
    ids=["legal", "legal pass with a reward of its own", "illegal", "no action", "malformed"],
)
def test_the_reward_is_the_mean_over_legal_illegal_and_malformed_answers(
    task: Mafia, answer: str, reward: float
) -> None:
    assert game_of(task, [Saying(answer) for _ in range(5)]) == [reward] * 5


def test_the_winning_side_earns_the_bonus() -> None:
    task = Mafia(win_bonus=0.5)
    deal = task.deal(Item(question="game 0", answer=""))
    mafioso = deal.names[deal.roles.index(Role.MAFIA)]
    rewards = game_of(task, [Saying(f"<vote>{mafioso}</vote>") for _ in range(5)])
    # A vote instead of talk is illegal, the vote itself legal, but for the mafioso, who cannot name himself.
    assert rewards == [0.0 if role is Role.MAFIA else 0.5 + 0.5 for role in deal.roles]


def test_the_policy_plays_the_seats_that_it_is_given() -> None:
    of_mafia, of_town = (Mafia(policy_plays=side, num_mafia=2, win_bonus=0.5) for side in ("mafia", "town"))
    rewards = [game_of(of_mafia, [Saying("<pass/>"), Saying("<pass/>")], seed) for seed in range(20)]
    assert {tuple(each) for each in rewards} == {(1.0, 1.0), (1.5, 1.5)}  # a side wins together
    seats = [Saying("<pass/>") for _ in range(of_town.num_seats())]
    game_of(of_town, seats)
    assert len(seats) == 3
    assert not any(", mafia" in seat.prompts[0] for seat in seats)


def test_games_of_an_item_differ_only_in_the_policys_answers() -> None:
    task = Mafia(policy_plays="mafia")
    first, second = Saying("<pass/>"), Saying("<pass/>")
    assert game_of(task, [first]) == game_of(task, [second])
    assert first.prompts == second.prompts
    assert len(first.prompts) >= 2


def test_a_turn_without_room_is_not_counted() -> None:
    rewards = game_of(Mafia(), [Saying("<pass/>"), *(Saying("<pass/>", num_turns=2) for _ in range(4))])
    assert rewards == [1.0] * 5


def test_games_are_held_out_by_their_seeds_and_start_alike_for_a_seat() -> None:
    task = Mafia()
    train = {item.question for item, _ in zip(task.items(0), range(500), strict=False)}
    held_out = held_out_items(task, 50)
    assert len(held_out) == 50
    assert not train & {item.question for item in held_out}
    deals = [task.deal(item) for item in held_out]
    assert deals == [task.deal(item) for item in held_out]
    assert len(set(deals)) == 50


@given(GAMES)
def test_every_role_is_dealt(game: tuple[Mafia, int]) -> None:
    task, seed = game
    deal = task.deal(Item(question=f"game {seed}", answer=""))
    counts = Counter(deal.roles)
    assert len(set(deal.names)) == task.num_players
    assert counts[Role.MAFIA] == task.num_mafia
    assert counts[Role.SHERIFF] == counts[Role.DOCTOR] == 1
    assert {role for role in deal.roles if role not in NIGHT_VERBS} == {Role.CITIZEN}


class Player:
    """A seat that gives its answer at each turn, and keeps what it was asked."""

    has_room = True

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.asked: list[str] = []

    async def ask(self, text: str) -> str:
        self.asked.append(text)
        return self.answer


def test_another_policy_plays_the_other_side_and_its_turns_have_no_reward() -> None:
    task = Mafia(policy_plays="town", max_days=1, num_talks=1)
    assert (task.num_seats(), task.num_other_seats()) == (4, 1)
    town = [Player("<pass/>") for _ in range(4)]
    mafia = Player("<say>trust me</say>")
    item = Item(question="game 7", answer="")
    rewards = asyncio.run(task.play_against(item, town, [mafia]))
    assert rewards == [1.0] * 4  # legal actions, and no side has won
    assert all(": trust me" in text for player in town for text in player.asked[1:2])
    assert len(mafia.asked) == 3  # a talk, a vote and a night
    assert "mafia" in mafia.asked[0]
    assert Mafia(policy_plays="mafia").num_other_seats() == 4
    assert Mafia().num_other_seats() == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "mafia"}, "opponent_urls: task mafia has no seat for another policy: leave them out, or"),
        ({"task": "sort6"}, "opponent_urls: task sort6 has no seat for another policy"),
        (
            {"task": {"name": "mafia", "policy_plays": "town"}, "opponent_urls": ()},
            "without opponent_urls",
        ),
    ],
)
def test_opponents_without_a_seat_are_refused(changes: dict[str, object], said: str) -> None:
    table = {"opponent_urls": ["http://h:1"], "opponent_model_name": "m", "model_name": "m", **changes}
    with pytest.raises(ConfigError, match=re.escape(said)):
        validated(EnvironmentConfig, table, where="env")

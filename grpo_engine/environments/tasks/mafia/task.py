"""The task: a game of Mafia in which the policy plays several or all seats."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from grpo_engine.environments.tasks.base import Item, Split, belongs_to, generator
from grpo_engine.environments.tasks.mafia.grammar import PASS, Action, parse
from grpo_engine.environments.tasks.mafia.knowledge import knowledge, prompt_text
from grpo_engine.environments.tasks.mafia.rules import (
    Deal,
    Role,
    Rules,
    State,
    acting,
    advance,
    begin,
    is_legal,
    winner,
)
from grpo_engine.environments.tasks.mafia.scripted import scripted
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask, Seat, ask_seats
from grpo_engine.flags import Flag

NAMES = ("Ann", "Bob", "Cat", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jim", "Kit", "Leo", "Meg", "Ned", "Pam", "Ray")
"""Short names, drawn per game, so that games with the same roles differ."""

MALFORMED, ILLEGAL, LEGAL = -1.0, 0.0, 1.0
"""Value of an action: malformed, illegal for this player at this time, legal."""


class Mafia(MultiTurnTask):
    """A game of Mafia: talk, vote, kill, protect, investigate.

    A seat's reward is the mean value of its actions (-1 malformed, 0 illegal, 1 legal), plus `win_bonus` if its side
    wins.
    """

    name: Annotated[Literal["mafia"], Flag(("--task", "--task.name"))] = "mafia"
    num_players: int = Field(5, ge=5, le=7)
    """Number of seats: mafia, one sheriff, one doctor, citizens."""
    num_mafia: int = Field(1, ge=1, le=2)
    """Number of mafia seats."""
    policy_plays: Literal["all", "town", "mafia"] = "all"
    """Seats of the policy, each of which gives one group per item; scripted players have the others, or another policy
    (`opponent_urls`)."""
    max_days: int = Field(3, ge=1, le=10)
    """Days after which the game ends without a winner."""
    num_talks: int = Field(1, ge=0, le=3)
    """Rounds of talk per day, before the vote."""
    max_statement: int = Field(60, ge=5, le=1000)
    """Longest statement in characters; a longer one is illegal and dropped."""
    explain: bool = True
    """Begin every seat's first prompt with the rules; off: for models with short contexts."""
    pass_counts: float = Field(1.0, ge=-1, le=1)
    """Value of a `<pass/>`, which is always legal. At 1 a weak model learns to always pass, and no side wins; below 1
    other legal actions are worth more."""
    win_bonus: float = Field(1.0, ge=0, le=100)
    """Bonus for seats of the winning side; rewards lie between -1 and 1 + win_bonus."""

    def num_seats(self) -> int:
        """Number of seats of the policy."""
        return {"all": self.num_players, "town": self.num_players - self.num_mafia, "mafia": self.num_mafia}[
            self.policy_plays
        ]

    def num_other_seats(self) -> int:
        """Number of seats of the other side."""
        return self.num_players - self.num_seats()

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """Endless games, identified by seed; one seed in sixteen is held out."""
        rng = generator(self.label(), seed, split)
        while True:
            question = f"game {rng.randrange(2**32)}"
            if belongs_to(split, question):
                yield Item(question=question, answer="")

    def deal(self, item: Item) -> Deal:
        """Names and roles of a game."""
        rng = random.Random(item.question)
        roles = [Role.MAFIA] * self.num_mafia + [Role.SHERIFF, Role.DOCTOR]
        roles += [Role.CITIZEN] * (self.num_players - len(roles))
        rng.shuffle(roles)
        return Deal(names=tuple(rng.sample(NAMES, self.num_players)), roles=tuple(roles))

    async def play(self, item: Item, seats: Sequence[Seat]) -> list[float]:
        """Play one game with scripted players on the other seats."""
        return await self.play_against(item, seats, ())

    async def play_against(self, item: Item, seats: Sequence[Seat], others: Sequence[Seat]) -> list[float]:
        """Play one game: in each phase all acting players answer, then the state advances."""
        deal = self.deal(item)
        of_policy = dict(zip(self._places_of_policy(deal), seats, strict=True))
        left = [place for place in range(self.num_players) if place not in of_policy]
        asked = {**of_policy, **(dict(zip(left, others, strict=True)) if others else {})}
        counts: dict[int, list[float]] = {place: [] for place in of_policy}
        num_shown: dict[int, int] = {}
        state = begin(deal, Rules(max_days=self.max_days, num_talks=self.num_talks, max_statement=self.max_statement))
        while places := acting(state):
            questions = {place: self._question(state, place, num_shown) for place in places if place in asked}
            answers = await ask_seats({asked[place]: text for place, text in questions.items()})
            actions: dict[int, Action] = {}
            for place in places:
                if place not in asked:
                    actions[place] = scripted(knowledge(state, place), self._randomness(item, state, place))
                    continue
                seat = asked[place]
                if not seat.has_room:
                    continue  # passes from now on; its turns have no value
                action = parse(answers[seat])
                is_allowed = action is not None and is_legal(state, place, action)
                if place in of_policy:
                    counts[place].append(self._count(action, is_allowed=is_allowed))
                if action is not None and is_allowed:
                    actions[place] = action
            state = advance(state, actions)
        return [self._reward(counts[place], won=winner(state) is deal.side(place)) for place in of_policy]

    def _places_of_policy(self, deal: Deal) -> list[int]:
        places = range(self.num_players)
        return [place for place in places if self.policy_plays in ("all", deal.side(place))]

    def _question(self, state: State, place: int, num_shown: dict[int, int]) -> str:
        """The prompt of a seat at its turn; records the events shown."""
        known = knowledge(state, place, since=num_shown.get(place, 0))
        text = prompt_text(known, is_first=place not in num_shown, explains=self.explain)
        num_shown[place] = len(state.events)
        return text

    def _randomness(self, item: Item, state: State, place: int) -> random.Random:
        """Random generator of a scripted player at its turn; equal in all games of an item."""
        return random.Random(f"{item.question}/{place}/{state.day}/{state.phase}/{state.num_talks}")

    def _count(self, action: Action | None, *, is_allowed: bool) -> float:
        if action is None:
            return MALFORMED
        return ILLEGAL if not is_allowed else self.pass_counts if action == PASS else LEGAL

    def _reward(self, counts: Sequence[float], *, won: bool) -> float:
        return (fmean(counts) if counts else 0.0) + (self.win_bonus if won else 0.0)

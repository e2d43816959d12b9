"""The task: a game of Mafia in which the policy plays several or all seats."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_engine.config import did_you_mean
from grpo_engine.environments.tasks.base import Item, Split, belongs_to, generator
from grpo_engine.environments.tasks.mafia.grammar import PASS, Action, parse
from grpo_engine.environments.tasks.mafia.knowledge import knowledge, prompt_text
from grpo_engine.environments.tasks.mafia.objective import OBJECTIVES, PlayedSeat, Turn, load_objective, values_of
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
from grpo_engine.environments.tasks.python.reading import check_attribute
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
    objective: str | None = None
    """Added to the reward of a seat at the end of a game: survive, talk_much, talk_little, or a function of yours,
    `module:function`, of a `PlayedSeat`; unset: none."""
    other_pass_counts: float | None = Field(None, ge=-1, le=1)
    """`pass_counts` of the other policy, where it is trained too (`opponent_rollout_server_url`); unset: the same."""
    other_win_bonus: float | None = Field(None, ge=0, le=100)
    """Likewise its `win_bonus`."""
    other_objective: str | None = None
    """Likewise its `objective`; unset: none."""

    @model_validator(mode="after")
    def _objectives_name_functions(self) -> Mafia:
        for key in ("objective", "other_objective"):
            name = getattr(self, key)
            if name is not None and name not in OBJECTIVES and not all(name.rpartition(":")[::2]):
                raise ValueError(
                    f"{key}: {name!r} is none of {', '.join(OBJECTIVES)}{did_you_mean(name, OBJECTIVES)}: a function "
                    "of your own is written module:function, or file.py:function"
                )
        if self.policy_plays == "all":
            for key in ("other_pass_counts", "other_win_bonus", "other_objective"):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"{key} has no effect with policy_plays all, which leaves no seat to another policy: set "
                        "policy_plays to town or mafia"
                    )
        return self

    def check(self) -> None:
        """Load the functions of both objectives."""
        for key in ("objective", "other_objective"):
            if (name := getattr(self, key)) is not None:
                load_objective(name, where=f"task.{key}")

    def check_files(self, folder: Path, search_path: Sequence[Path] = ()) -> None:
        """Read the sources of their modules."""
        for key in ("objective", "other_objective"):
            if (name := getattr(self, key)) is not None and name not in OBJECTIVES:
                module, _, function = name.rpartition(":")
                check_attribute(module, function, (folder, *search_path), where=f"task.{key}")

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

    def as_others_play(self) -> Mafia:
        """The game from the other side, with `other_pass_counts`, `other_win_bonus` and `other_objective`."""
        side = {"town": "mafia", "mafia": "town"}[self.policy_plays]
        return self.model_copy(
            update={
                "policy_plays": side,
                "pass_counts": self.pass_counts if self.other_pass_counts is None else self.other_pass_counts,
                "win_bonus": self.win_bonus if self.other_win_bonus is None else self.other_win_bonus,
                "objective": self.other_objective,
            }
        )

    async def play(self, item: Item, seats: Sequence[Seat]) -> list[float]:
        """Play one game with scripted players on the other seats."""
        return await self.play_against(item, seats, ())

    async def play_against(self, item: Item, seats: Sequence[Seat], others: Sequence[Seat]) -> list[float]:
        """Play one game, and reward the seats of the policy."""
        deal, turns, state = await self._play(item, seats, others)
        return await self._rewards(deal, turns, state)

    async def play_both(
        self, item: Item, seats: Sequence[Seat], others: Sequence[Seat]
    ) -> tuple[list[float], list[float]]:
        """Play one game, and reward the seats of both policies, each by its own objective."""
        deal, turns, state = await self._play(item, seats, others)
        return await self._rewards(deal, turns, state), await self.as_others_play()._rewards(deal, turns, state)

    async def _play(
        self, item: Item, seats: Sequence[Seat], others: Sequence[Seat]
    ) -> tuple[Deal, Mapping[int, Sequence[Turn]], State]:
        """In each phase all acting players answer, then the state advances; returns the turns of each asked place."""
        deal = self.deal(item)
        of_policy = dict(zip(self._places_of_policy(deal), seats, strict=True))
        left = [place for place in range(self.num_players) if place not in of_policy]
        asked = {**of_policy, **(dict(zip(left, others, strict=True)) if others else {})}
        turns: dict[int, list[Turn]] = {place: [] for place in asked}
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
                turns[place].append(Turn(answer=answers[seat], action=action, is_allowed=is_allowed))
                if action is not None and is_allowed:
                    actions[place] = action
            state = advance(state, actions)
        return deal, turns, state

    async def _rewards(self, deal: Deal, turns: Mapping[int, Sequence[Turn]], state: State) -> list[float]:
        """Rewards of the seats that the policy plays."""
        played = [self._played(deal, place, turns[place], state) for place in self._places_of_policy(deal)]
        own = [0.0] * len(played)
        if self.objective is not None:
            own = await values_of(self.objective, played)
        return [
            (fmean(map(self._count, turns[seat.place])) if turns[seat.place] else 0.0)
            + (self.win_bonus if seat.has_won else 0.0)
            + value
            for seat, value in zip(played, own, strict=True)
        ]

    def _played(self, deal: Deal, place: int, turns: Sequence[Turn], state: State) -> PlayedSeat:
        return PlayedSeat(
            place=place,
            name=deal.names[place],
            role=str(deal.roles[place]),
            side=deal.side(place),
            has_won=winner(state) is deal.side(place),
            is_alive=place in state.alive,
            turns=tuple(turns),
        )

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

    def _count(self, turn: Turn) -> float:
        if turn.action is None:
            return MALFORMED
        return ILLEGAL if not turn.is_allowed else self.pass_counts if turn.action == PASS else LEGAL

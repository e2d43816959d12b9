"""Instruction following with verifiable instructions: generated prompts, or records in the format of IFEval."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_engine.environments.tasks.base import Item, Split, Task, belongs_to, generator
from grpo_engine.environments.tasks.ifeval.instructions import UnknownInstruction, checked_arguments, follows
from grpo_engine.environments.tasks.ifeval.prompts import draw_prompt
from grpo_engine.environments.tasks.records import FIRST_LINES, endless, fields_instead, of_files, read_records
from grpo_engine.errors import ConfigError
from grpo_engine.flags import Flag

log = logging.getLogger(__name__)

_MAX_INSTRUCTIONS = 100
"""Of a record: each is verified in every completion."""
_MAX_TEXTS, _MAX_CHARS = 1000, 1 << 16
"""Of a record, in the arguments of all its instructions: each text is looked for in every completion, some as a regular
expression."""


class IFEval(Task):
    """Write texts under instructions (number of words, no commas, …); the reward is the share that is followed."""

    name: Annotated[Literal["ifeval"], Flag(("--task", "--task.name"))] = "ifeval"
    path: Path | None = None
    """JSON Lines file with `prompt`, `instruction_id_list` and `kwargs`, as the benchmark publishes its records; unset:
    prompts are generated at random."""
    held_out_path: Path | None = None
    """File with the held-out records; unset: one in sixteen of the others."""
    num_instructions: int = Field(2, ge=1, le=5)
    """Most instructions in a generated prompt; with the curriculum rising, those of its last level."""
    all_or_nothing: bool = False
    """Reward 1 for a completion that follows every instruction and 0 for all others."""
    skip_unknown: bool = False
    """Skip records with an instruction that cannot be verified, instead of refusing the file."""

    def check(self) -> None:
        """Read the file once."""
        next(self.items(0))

    def check_files(self, folder: Path, search_path: Sequence[Path] = ()) -> None:
        """Read the first lines of both files."""
        for key, path in {"path": self.path, "held_out_path": self.held_out_path}.items():
            if path is not None:
                self._read(folder / path, f"task.{key}", FIRST_LINES)

    def levels(self) -> Sequence[IFEval]:
        """One per number of instructions, for generated prompts."""
        if self.path is not None:
            return [self]
        return [self.model_copy(update={"num_instructions": number}) for number in range(1, self.num_instructions + 1)]

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """Endless generated prompts, or the file's records, reshuffled at every pass."""
        if self.path is None:
            return self._drawn(seed, split)
        records = of_files(split, self.path, self.held_out_path, self._read)
        return endless(records, task=self.label(), seed=seed, split=split)

    def score(self, item: Item, completion: str) -> float:
        """The share of the item's instructions that the completion follows."""
        entry = item.entry or {}
        pairs = list(zip(entry["instruction_id_list"], entry["kwargs"], strict=True))
        followed = sum(follows(instruction, arguments, completion) for instruction, arguments in pairs)
        return float(followed == len(pairs)) if self.all_or_nothing else followed / len(pairs)

    def _drawn(self, seed: int, split: Split) -> Iterator[Item]:
        rng = generator(self.label(), seed, split)
        while True:
            prompt = draw_prompt(rng, rng.randint(1, self.num_instructions))
            entry = {"instruction_id_list": prompt.instructions, "kwargs": prompt.arguments}
            if belongs_to(split, prompt.text):
                yield Item(question=prompt.text, answer="", entry=entry)

    def _read(self, path: Path, where: str, most_lines: int | None = None) -> list[Item]:
        items: list[Item] = []
        skipped: list[UnknownInstruction] = []
        for line, record in read_records(path, where=where, most_lines=most_lines):
            try:
                items.append(_item(record, f"{where}: {path}:{line}"))
            except UnknownInstruction as error:
                if not self.skip_unknown:
                    raise
                skipped.append(error)
        if skipped:
            total = len(skipped) + len(items)
            log.warning("%d of %d records skipped; the first: %s", len(skipped), total, skipped[0])
        if not items:
            raise ConfigError(f"{where}: {path} has no record whose instructions can be verified")
        return items


def _item(record: Mapping[str, Any], where: str) -> Item:
    for field in ("prompt", "instruction_id_list", "kwargs"):
        if field not in record:
            raise ConfigError(f"{where}: no field {field!r}{fields_instead(field, record)}")
    instructions, arguments = record["instruction_id_list"], record["kwargs"]
    if not isinstance(instructions, list) or not isinstance(arguments, list) or len(instructions) != len(arguments):
        raise ConfigError(f"{where}: instruction_id_list and kwargs must be lists of the same length")
    if not instructions:
        raise ConfigError(f"{where}: instruction_id_list is empty")
    if len(instructions) > _MAX_INSTRUCTIONS:
        raise ConfigError(f"{where}: instruction_id_list has more than {_MAX_INSTRUCTIONS} entries")
    if not all(given is None or isinstance(given, Mapping) for given in arguments):
        raise ConfigError(f"{where}: kwargs must be objects")
    checked = [
        checked_arguments(str(instruction), given or {}, where=where)
        for instruction, given in zip(instructions, arguments, strict=True)
    ]
    texts = [text for given in checked for value in given.values() for text in _texts(value)]
    if len(texts) > _MAX_TEXTS or sum(map(len, texts)) > _MAX_CHARS:
        raise ConfigError(f"{where}: kwargs may have at most {_MAX_TEXTS:,} texts, of {_MAX_CHARS:,} characters in all")
    return Item(
        question=str(record["prompt"]), answer="", entry={"instruction_id_list": instructions, "kwargs": checked}
    )


def _texts(value: Any) -> list[str]:
    """The texts of an argument, which is a number, a text or a list of texts."""
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, str) else []

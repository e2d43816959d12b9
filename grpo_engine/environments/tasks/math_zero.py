r"""Mathematics for a base model, as `math_server_zero.py` of Atropos: reason, then `<answer> \boxed{…} </answer>`.

Prompt and form of the answer are those of Open-Reasoner-Zero. Meant for plain text (`chat_template = false`) and the
stop strings of configs/math_zero_shared.yaml: a completion that stopped at `</answer>` lacks that text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_engine.environments.tasks.answers import final_answer, is_same_answer, last_boxed
from grpo_engine.environments.tasks.base import DATA_EXTRA, Item, Split, Task
from grpo_engine.environments.tasks.hub import hub_rows
from grpo_engine.environments.tasks.reasoning_gym import ReasoningGym
from grpo_engine.environments.tasks.records import (
    FIRST_LINES,
    answer_of,
    endless,
    fields_instead,
    of_split,
    read_records,
)
from grpo_engine.errors import ConfigError
from grpo_engine.flags import Flag
from grpo_engine.installed import is_installed

_HUB: dict[Split, tuple[str, str]] = {
    "train": ("zwhe99/DeepMath-103K", "train"),
    "held_out": ("HuggingFaceH4/math-500", "test"),
}
"""Data set and its split."""
_FILES: dict[Split, str] = {"train": "train.jsonl", "held_out": "test.jsonl"}
_GENERATED = ("gsm_symbolic", "chain_sum", "simple_equations", "products", "gcd", "lcm")
"""Data sets of reasoning-gym whose answers are numbers."""
_QUESTIONS, _ANSWERS = ("question", "problem"), ("final_answer", "answer")
"""Fields of a record: the first one that it has."""
_INSTEAD = "give task.path = a folder with train.jsonl, or set task.source = generated"

_PROMPT = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: You must put your answer "
    "inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final answer will be extracted "
    "automatically by the \\boxed{{}} tag.\nThis is the problem:\n{problem}\n\nAssistant: <think>"
)
_OPENS, _CLOSES = "<answer>", "</answer>"


class MathZero(Task):
    r"""Mathematical problems for a base model. The reward is 1 when the boxed answer in `<answer>` tags is equal."""

    name: Annotated[Literal["math_zero"], Flag(("--task", "--task.name"))] = "math_zero"
    path: Path | None = None
    """JSON Lines file with `question` or `problem` and `final_answer` or `answer`, or a folder with train.jsonl and
    test.jsonl; unset: `source`. Without test.jsonl one question in sixteen is held out."""
    source: Literal["hub", "generated"] = "hub"
    """Without `path`: hub: DeepMath-103K, and MATH-500 held out; generated: number problems of reasoning-gym, which
    need no hub."""
    prompt: Literal["zero", "plain"] = "zero"
    """zero: the problem in the prompt of Open-Reasoner-Zero; plain: the problem alone, e.g. for a chat template."""

    def check(self) -> None:
        """Find the training records, and math-verify: without it equal answers of another form would get 0.

        Raises:
            ConfigError: either is missing.
        """
        if not is_installed("math_verify"):
            raise ConfigError(
                f"task math_zero compares answers by math-verify, which is not installed: {DATA_EXTRA}; the task gsm8k "
                "compares plain numbers without it"
            )
        next(self.items(0))

    def packages(self) -> Mapping[str, str]:
        """math-verify, and what the source of the problems needs."""
        needed = {"math_verify": DATA_EXTRA}
        if self.path is None:
            of_hub = self.source == "hub"
            needed |= {"datasets": f"{DATA_EXTRA}, or {_INSTEAD}"} if of_hub else {"reasoning_gym": DATA_EXTRA}
        return needed

    def hub_datasets(self) -> Sequence[str]:
        """Both data sets, where they are the source."""
        return [name for name, _ in _HUB.values()] if self.path is None and self.source == "hub" else ()

    def check_files(self, folder: Path, search_path: Sequence[Path] = ()) -> None:
        """Read the first lines of both files."""
        if self.path is not None:
            for split in _FILES:
                _from_file(folder / self.path, split, FIRST_LINES)

    def items(self, seed: int, split: Split = "train") -> Iterator[Item]:
        """The split's problems, reshuffled at every pass; generated ones from each data set in turn."""
        if self.path is None and self.source == "generated":
            streams = [ReasoningGym(dataset=dataset).items(seed, split) for dataset in _GENERATED]
            items: Iterator[Item] = (next(stream) for stream in cycle(streams))
        else:
            items = endless(self._records(split), task=self.label(), seed=seed, split=split)
        return (self._asked(item) for item in items)

    def score(self, item: Item, completion: str) -> float:
        r"""1 when the last `\boxed{…}` of the last `<answer>` is equal to the answer, else 0."""
        _, opens, rest = completion.rpartition(_OPENS)
        given = last_boxed(rest.partition(_CLOSES)[0]) if opens else None
        return float(given is not None and is_same_answer(item.answer, given))

    def _asked(self, item: Item) -> Item:
        question = _PROMPT.format(problem=item.question) if self.prompt == "zero" else item.question
        return Item(question=question, answer=item.answer)

    def _records(self, split: Split) -> list[Item]:
        train = self._read("train")
        held_out = self._read("held_out")
        return of_split(
            split,
            train or [],
            held_out,
            where=f"task.path: {self.path}",
            instead="give a folder with train.jsonl and test.jsonl, or add records",
        )

    def _read(self, split: Split) -> list[Item] | None:
        if self.path is not None:
            return _from_file(self.path, split)
        name, of_hub = _HUB[split]
        rows = hub_rows(name, split=of_hub, task=self.name, instead=_INSTEAD)
        return [_item(row, f"{name}, row {number}") for number, row in enumerate(rows)]


def _from_file(path: Path, split: Split, most_lines: int | None = None) -> list[Item] | None:
    """The records of a split's file, or of its first lines; None if held-out records have no file."""
    file = path / _FILES[split] if path.is_dir() else path
    if split == "held_out" and (file == path or not file.exists()):
        return None
    records = read_records(file, where="task.path", most_lines=most_lines)
    return [_item(record, f"task.path: {file}:{number}") for number, record in records]


def _item(record: Mapping[str, Any], where: str) -> Item:
    """
    Raises:
        ConfigError: a field is missing.
    """
    found = []
    for names in (_QUESTIONS, _ANSWERS):
        value = next((record[name] for name in names if record.get(name) is not None), None)
        if value is None:
            wanted = " or ".join(map(repr, names))
            raise ConfigError(f"{where}: no field {wanted}{fields_instead(names[0], record)}")
        found.append(str(value))
    question, answer = found[0], answer_of(found[1], where)
    return Item(question=question, answer=last_boxed(answer) or _without_solution(answer))


def _without_solution(answer: str) -> str:
    """The number after `####`, where the answer is a whole solution as in GSM8K; else the answer itself."""
    return (final_answer(answer) or answer) if "####" in answer else answer.strip().strip("$")

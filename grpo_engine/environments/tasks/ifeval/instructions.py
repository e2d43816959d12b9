"""Verifiable instructions, by the ids and arguments of the published IFEval records. Pure.

The rules are the published ones, quirks included (a keyword counts inside a longer word), so that training optimizes
what the benchmark measures. Three differ, which need language models or data there: sentences are counted by
punctuation, capital words are split at white space, and texts in one case may be of any language.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_engine.config import did_you_mean
from grpo_engine.errors import ConfigError, first_of
from grpo_engine.wire.codec import shortened

RELATIONS = ("at least", "less than")
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""Answers that `constrained_response` accepts."""

# A completion may be one character, thousands of times: no rule may look at the rest of the text from each of them.
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’)\]*]*\s+")
_NO_SENTENCE_END = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|cf|e\.g|i\.e|[A-HJ-Z])\.(?=\s)|^[^\S\n]*\d+\.(?=\s)", re.M
)
"""Abbreviations, initials, and the numbers of a list."""
_STARS = re.compile(r"^[^\S\n]*\*[^\*].*$", re.M)
_DASHES = re.compile(r"^[^\S\n]*-.*$", re.M)
_FENCE = re.compile(r"^```(?:json|Json|JSON)?|```$")


class UnknownInstruction(ConfigError):
    """An instruction that cannot be verified."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """The check of one kind of instruction, and its arguments."""

    is_followed: Callable[..., bool]
    """Called with the completion and the arguments by name."""
    arguments: Mapping[str, type]


def follows(instruction: str, arguments: Mapping[str, Any], completion: str) -> bool:
    """Whether a completion follows an instruction; an empty one follows none."""
    return bool(completion.strip()) and INSTRUCTIONS[instruction].is_followed(completion, **arguments)


def checked_arguments(instruction: str, given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The arguments of an instruction in their types; those that are None are dropped, as in the hub's records.

    Raises:
        UnknownInstruction: it is unknown, or needs a package that is not installed.
        ConfigError: an argument is missing or wrong.
    """
    if instruction not in INSTRUCTIONS:
        raise UnknownInstruction(
            f"{where}: {shortened(repr(instruction))} is not a known instruction"
            f"{did_you_mean(instruction, INSTRUCTIONS)}: correct it, or skip such records with task.skip_unknown"
        )
    if instruction == _LANGUAGE and importlib.util.find_spec("langdetect") is None:
        raise UnknownInstruction(
            f"{where}: {instruction!r} needs the package langdetect: install it, or skip such records with "
            "task.skip_unknown"
        )
    wanted = INSTRUCTIONS[instruction].arguments
    present = {name: value for name, value in given.items() if value is not None}
    if set(present) != set(wanted):
        takes = ", ".join(wanted) or "no arguments"
        raise ConfigError(f"{where}: {instruction} takes {takes}, but has {shortened(first_of(present)) or 'none'}")
    return {name: _read(value, wanted[name], f"{where}: {instruction}: {name}") for name, value in present.items()}


def _read(value: Any, kind: type, where: str) -> Any:
    match value:
        case bool():
            pass
        case int() | float() if (
            kind is int and math.isfinite(value) and value == int(value)
        ):  # data sets on the hub may store 3 as 3.0
            return int(value)
        case str() if kind is str and value.strip():
            if where.endswith("relation") and value not in RELATIONS:
                raise ConfigError(f"{where}: {value!r} is neither {' nor '.join(map(repr, RELATIONS))}")
            return value.strip()
        case list() if kind is list and value and all(isinstance(word, str) and word for word in value):
            return value
    raise ConfigError(f"{where}: {shortened(repr(value))} is not {_SAID[kind]}")


_SAID = {int: "a whole number", str: "a text", list: "a list of texts"}


# --- counting --------------------------------------------------------------------------------------------------------


def _compared(count: int, relation: str, limit: int) -> bool:
    return count < limit if relation == "less than" else count >= limit


def num_sentences_of(text: str) -> int:
    """Number of sentences by punctuation; text after the last mark counts as one."""
    parts = _SENTENCE_END.split(_NO_SENTENCE_END.sub("", text))
    return sum(re.search(r"\w", part) is not None for part in parts)


def _sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compared(num_sentences_of(text), relation, num_sentences)


def _words(text: str, num_words: int, relation: str) -> bool:
    return _compared(len(re.findall(r"\w+", text)), relation, num_words)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in text.split("\n\n")]
    if sum(map(bool, parts)) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    words = parts[nth_paragraph - 1].split()
    return bool(words) and re.split("[.,?!'\"]", words[0].lstrip("'").lstrip('"').lower())[0] == first_word.lower()


def _letters(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compared(text.lower().count(letter.lower()), let_relation, let_frequency)


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compared(sum(word.isupper() for word in text.split()), capital_relation, capital_frequency)


# --- words -----------------------------------------------------------------------------------------------------------


def _keywords(text: str, keywords: list[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compared(text.lower().count(keyword.lower()), relation, frequency)


def _forbidden(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _language(text: str, language: str) -> bool:
    langdetect: Any = importlib.import_module("langdetect")
    langdetect.DetectorFactory.seed = 0  # it is random otherwise
    try:
        return bool(langdetect.detect(text) == language)
    except langdetect.LangDetectException:  # no detectable language counts as followed, as in IFEval
        return True


# --- form ------------------------------------------------------------------------------------------------------------


def _placeholders(text: str, num_placeholders: int) -> bool:
    # As many as `\[.*?\]` finds.
    ended = (part for line in text.split("\n") for part in line.split("]")[:-1])
    return sum("[" in part for part in ended) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower()) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(_STARS.findall(text)) + len(_DASHES.findall(text)) == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
    single, double = re.findall(r"\*[^\n\*]*\*", text), re.findall(r"\*\*[^\n\*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in (*single, *double)) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def _json(text: str) -> bool:
    try:
        json.loads(_FENCE.sub("", text.strip()).strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in map(_titled, text.split("\n")))


def _titled(line: str) -> str:
    """What `<<.+>>` finds in a line; "" if nothing."""
    begin, end = line.find("<<"), line.rfind(">>")
    return line[begin : end + 2] if 0 <= begin < end - 2 else ""


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    given = [part for part in parts if part]
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


def _end(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


_LANGUAGE = "language:response_language"

INSTRUCTIONS: dict[str, Instruction] = {
    "keywords:existence": Instruction(_keywords, {"keywords": list}),
    "keywords:frequency": Instruction(_keyword_frequency, {"keyword": str, "frequency": int, "relation": str}),
    "keywords:forbidden_words": Instruction(_forbidden, {"forbidden_words": list}),
    "keywords:letter_frequency": Instruction(_letters, {"letter": str, "let_frequency": int, "let_relation": str}),
    _LANGUAGE: Instruction(_language, {"language": str}),
    "length_constraints:number_sentences": Instruction(_sentences, {"num_sentences": int, "relation": str}),
    "length_constraints:number_paragraphs": Instruction(_paragraphs, {"num_paragraphs": int}),
    "length_constraints:number_words": Instruction(_words, {"num_words": int, "relation": str}),
    "length_constraints:nth_paragraph_first_word": Instruction(
        _first_word, {"num_paragraphs": int, "nth_paragraph": int, "first_word": str}
    ),
    "detectable_content:number_placeholders": Instruction(_placeholders, {"num_placeholders": int}),
    "detectable_content:postscript": Instruction(_postscript, {"postscript_marker": str}),
    "detectable_format:number_bullet_lists": Instruction(_bullets, {"num_bullets": int}),
    "detectable_format:constrained_response": Instruction(lambda text: any(answer in text for answer in ANSWERS), {}),
    "detectable_format:number_highlighted_sections": Instruction(_highlights, {"num_highlights": int}),
    "detectable_format:multiple_sections": Instruction(_sections, {"section_spliter": str, "num_sections": int}),
    "detectable_format:json_format": Instruction(_json, {}),
    "detectable_format:title": Instruction(_title, {}),
    "combination:two_responses": Instruction(_two_responses, {}),
    "combination:repeat_prompt": Instruction(
        lambda text, prompt_to_repeat: text.strip().lower().startswith(prompt_to_repeat.strip().lower()),
        {"prompt_to_repeat": str},
    ),
    "startend:end_checker": Instruction(_end, {"end_phrase": str}),
    "startend:quotation": Instruction(_quoted, {}),
    "change_case:capital_word_frequency": Instruction(
        _capital_words, {"capital_frequency": int, "capital_relation": str}
    ),
    "change_case:english_capital": Instruction(str.isupper, {}),
    "change_case:english_lowercase": Instruction(str.islower, {}),
    "punctuation:no_comma": Instruction(lambda text: "," not in text, {}),
}
"""Every instruction, by its id in records."""

"""Generates prompts with verifiable instructions at random: a text to write, and constraints on it. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_engine.environments.tasks.ifeval.instructions import ANSWERS, RELATIONS

Arguments = dict[str, Any]

_REQUESTS = (
    "Write a short note about {}.",
    "Explain {} to a child.",
    "Write a letter to a friend about {}.",
    "Describe {} to somebody who has never heard of it.",
    "Give advice on {}.",
    "Say what speaks for and against {}.",
    "Tell a story in which {} matters.",
    "Write the beginning of a speech on {}.",
    "Write a notice for the board in a hallway about {}.",
    "Invent a legend about the origin of {}.",
    "Write a review of a book on {}.",
    "Write a dialogue of two neighbours about {}.",
)
_TOPICS = (
    "keeping bees", "night trains", "growing tomatoes", "a lost umbrella", "sourdough bread", "moving house",
    "learning the violin", "an old lighthouse", "repairing bicycles", "a chess club", "the first snow", "tide pools",
    "waking up early", "a noisy kitchen", "mending clothes", "public libraries", "walking to work", "a village fair",
    "solar eclipses", "making cheese", "rain on a tin roof", "a school orchestra", "stray cats", "collecting stamps",
    "winter swimming", "a broken clock", "map reading", "the smell of coffee", "planting trees", "long queues",
    "paper boats", "sleeping in a tent", "a shared garden", "writing by hand", "second-hand furniture", "kite flying",
    "a town without cars", "fermenting cabbage", "the night sky", "a rowing race",
)  # fmt: skip
_WORDS = (
    "river", "window", "patient", "copper", "laugh", "morning", "careful", "bridge", "orange", "whisper", "travel",
    "garden", "silver", "honest", "puzzle", "thunder", "basket", "quiet", "market", "shadow", "lantern", "gentle",
    "winter", "promise", "kitchen", "narrow", "harvest", "mirror", "station", "feather", "bright", "journey",
)  # fmt: skip
_ENDINGS = ("That is all for today.", "What do you think?", "I hope this helps.", "The rest is up to you.")
_EVERYTHING = frozenset(
    {"words", "letters", "length", "blocks", "brackets", "stars", "title", "start", "end", "case", "commas"}
)
"""Properties of a text that instructions constrain."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to answer, with the instructions in it and the arguments of each."""

    text: str
    instructions: tuple[str, ...]
    arguments: tuple[Arguments, ...]


@dataclass(frozen=True, slots=True)
class _Template:
    """One kind of instruction: its text, and how its arguments are drawn."""

    instruction: str
    about: frozenset[str]
    """Instructions about the same property are not combined, because they could contradict each other."""
    words: str
    """Text with the arguments by name."""
    draw: Callable[[random.Random, str], Arguments]
    """Called with the request that the instruction is added to."""


def _template(instruction: str, about: str, words: str, draw: Callable[[random.Random, str], Arguments]) -> _Template:
    return _Template(instruction, frozenset(about.split()) or _EVERYTHING, words, draw)


def draw_prompt(rng: random.Random, num_instructions: int) -> Prompt:
    """A prompt with this many compatible instructions, or fewer if the first ones exclude all others."""
    request = rng.choice(_REQUESTS).format(rng.choice(_TOPICS))
    chosen: list[_Template] = []
    for template in rng.sample(_TEMPLATES, len(_TEMPLATES)):
        if len(chosen) < num_instructions and not any(template.about & other.about for other in chosen):
            chosen.append(template)
    arguments = [template.draw(rng, request) for template in chosen]
    texts = [template.words.format(**_shown(given)) for template, given in zip(chosen, arguments, strict=True)]
    return Prompt(" ".join((request, *texts)), tuple(template.instruction for template in chosen), tuple(arguments))


def _shown(arguments: Arguments) -> Arguments:
    return {k: ", ".join(f'"{word}"' for word in v) if isinstance(v, list) else v for k, v in arguments.items()}


def _limit(name: str, low: int, high: int, relation: str = "relation") -> Callable[[random.Random, str], Arguments]:
    """A limit and its relation."""
    return lambda rng, _: {name: rng.randint(low, high), relation: rng.choice(RELATIONS)}


def _number(name: str, low: int, high: int) -> Callable[[random.Random, str], Arguments]:
    return lambda rng, _: {name: rng.randint(low, high)}


def _nothing(rng: random.Random, request: str) -> Arguments:
    return {}


def _words(name: str) -> Callable[[random.Random, str], Arguments]:
    return lambda rng, _: {name: sorted(rng.sample(_WORDS, rng.randint(1, 3)))}


def _paragraph(rng: random.Random, request: str) -> Arguments:
    count = rng.randint(2, 4)
    return {"num_paragraphs": count, "nth_paragraph": rng.randint(1, count), "first_word": rng.choice(_WORDS)}


_TEMPLATES = (
    _template("keywords:existence", "words", "Use these words: {keywords}.", _words("keywords")),
    _template(
        "keywords:forbidden_words", "words", "Do not use these words: {forbidden_words}.", _words("forbidden_words")
    ),
    _template(
        "keywords:frequency",
        "words",
        'The word "{keyword}" should appear {relation} {frequency} times.',
        lambda rng, _: {"keyword": rng.choice(_WORDS), **_limit("frequency", 2, 4)(rng, _)},
    ),
    _template(
        "keywords:letter_frequency",
        "letters",
        'The letter "{letter}" should appear {let_relation} {let_frequency} times.',
        lambda rng, _: {
            "letter": rng.choice("abcdeiklmnoprstuvw"),
            **_limit("let_frequency", 3, 12, "let_relation")(rng, _),
        },
    ),
    _template(
        "length_constraints:number_sentences",
        "length",
        "Write {relation} {num_sentences} sentences.",
        _limit("num_sentences", 2, 8),
    ),
    _template(
        "length_constraints:number_words", "length", "Use {relation} {num_words} words.", _limit("num_words", 20, 100)
    ),
    _template(
        "length_constraints:number_paragraphs",
        "blocks stars",
        "Write {num_paragraphs} paragraphs, separated by lines of three asterisks: ***",
        _number("num_paragraphs", 2, 4),
    ),
    _template(
        "length_constraints:nth_paragraph_first_word",
        "blocks start",
        "Write {num_paragraphs} paragraphs, separated by empty lines. "
        'Paragraph {nth_paragraph} must begin with the word "{first_word}".',
        _paragraph,
    ),
    _template(
        "detectable_content:number_placeholders",
        "brackets",
        "Leave at least {num_placeholders} places to be filled in, in square brackets, such as [address].",
        _number("num_placeholders", 1, 4),
    ),
    _template(
        "detectable_content:postscript",
        "end",
        "At the end add a postscript that begins with {postscript_marker}",
        lambda rng, _: {"postscript_marker": rng.choice(("P.S.", "P.P.S"))},
    ),
    _template(
        "detectable_format:number_bullet_lists",
        "stars",
        "Write exactly {num_bullets} bullet points, as Markdown has them: * A point.",
        _number("num_bullets", 2, 6),
    ),
    _template(
        "detectable_format:number_highlighted_sections",
        "stars",
        "Highlight at least {num_highlights} parts in Markdown, as in *this part*.",
        _number("num_highlights", 1, 4),
    ),
    _template(
        "detectable_format:multiple_sections",
        "blocks case",
        "Write {num_sections} sections. Begin each with the line {section_spliter} X, where X is its number.",
        lambda rng, _: {
            "section_spliter": rng.choice(("Section", "SECTION", "Part")),
            "num_sections": rng.randint(2, 4),
        },
    ),
    _template(
        "detectable_format:title", "title", "Give it a title in double angular brackets, as in <<a title>>.", _nothing
    ),
    _template("combination:two_responses", "blocks stars", "Write two different versions, parted by ******", _nothing),
    _template(
        "combination:repeat_prompt",
        "start length case letters words",
        'Before you do so, repeat this word for word: "{prompt_to_repeat}"',
        lambda rng, request: {"prompt_to_repeat": request},
    ),
    _template(
        "startend:end_checker",
        "end",
        'End with exactly these words and nothing after them: "{end_phrase}"',
        lambda rng, _: {"end_phrase": rng.choice(_ENDINGS)},
    ),
    _template("startend:quotation", "start end", "Put all of it between double quotation marks.", _nothing),
    _template(
        "change_case:capital_word_frequency",
        "case",
        "Words in capital letters should appear {capital_relation} {capital_frequency} times.",
        _limit("capital_frequency", 2, 6, "capital_relation"),
    ),
    _template("change_case:english_capital", "case", "Use capital letters only.", _nothing),
    _template("change_case:english_lowercase", "case", "Use lowercase letters only.", _nothing),
    _template("punctuation:no_comma", "commas", "Use no commas.", _nothing),
    _template("detectable_format:json_format", "", "Answer with JSON and nothing else.", _nothing),
    _template(
        "detectable_format:constrained_response",
        "",
        f"Then say whether you like it, with one of these sentences alone: {' '.join(ANSWERS)}",
        _nothing,
    ),
)
"""Every instruction except the language of the answer, which needs a library."""

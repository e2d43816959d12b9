"""Reads what torch pickles in a checkpoint as data that may be somebody else's work.

Python's and torch's own readers run code, or, with `weights_only`, can be held for ever: a dictionary of which a key is
a tuple of tuples, some hundred bytes, takes 2^60 hashes. Here only the operations that torch writes are carried out.
"""

from __future__ import annotations

import pickletools
from enum import Enum
from pickle import UnpicklingError
from typing import Any

import torch

MAX_OBJECTS = 4 * 1024 * 1024
"""Lists, tuples, dictionaries and objects of a pickle: the part of a tensor in the metadata takes 25 of them."""
_NUM_IN_TUPLE = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MAKES = frozenset({"EMPTY_LIST", "EMPTY_DICT", "NEWOBJ", "REDUCE", "TUPLE", *_NUM_IN_TUPLE})


class Opaque:
    """A value of the caller's that a tuple may hold: it is compared and hashed by identity."""


_IN_TUPLES = (int, str, type(None), torch.dtype, torch.layout, Enum, Opaque)
"""What a tuple may hold, besides tuples of these alone: others could be nested, and take for ever to hash or show."""


class PlainUnpickler:
    """A reader of one kind of pickles."""

    def find(self, module: str, name: str) -> Any:
        """The class or function that a pickle names.

        Raises:
            UnpicklingError: no pickle of this kind names it.
        """
        raise UnpicklingError(f"it names {module}.{name}, which no checkpoint has")

    def is_key(self, value: object) -> bool:
        """Whether a dictionary may have this key: to hash it must take a moment only."""
        return isinstance(value, str)

    def persistent(self, reference: Any) -> Opaque:
        """What a reference to something beside the pickle stands for."""
        raise UnpicklingError("it refers to something beside it")

    def load(self, content: bytes) -> Any:
        """The value that is pickled.

        Raises:
            UnpicklingError: it does what torch's do not. Damaged ones raise any class.
        """
        stack: list[Any] = []
        outer: list[list[Any]] = []
        """Stacks below the marks."""
        memo: dict[int, Any] = {}
        num_made = 0
        argument: Any
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            num_made += name in _MAKES
            if num_made > MAX_OBJECTS:
                raise UnpicklingError(f"it has more than {MAX_OBJECTS:,} objects")
            match name:
                case "PROTO" | "FRAME":
                    pass
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BININT1" | "BININT2" | "BININT" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE":
                    stack.append(argument)
                case "NONE" | "NEWTRUE" | "NEWFALSE":
                    stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
                case "MARK":
                    outer.append(stack)
                    stack = []
                case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                    below = len(stack) - _NUM_IN_TUPLE[name]
                    stack[below:] = [_checked_tuple(stack[below:])]
                case "TUPLE":
                    items, stack = stack, outer.pop()
                    stack.append(_checked_tuple(items))
                case "EMPTY_LIST" | "EMPTY_DICT":
                    stack.append([] if name == "EMPTY_LIST" else {})
                case "APPEND" | "SETITEM":
                    below = len(stack) - (1 if name == "APPEND" else 2)
                    self._fill(stack[below - 1], stack[below:])
                    del stack[below:]
                case "APPENDS" | "SETITEMS":
                    items, stack = stack, outer.pop()
                    self._fill(stack[-1], items)
                case "GLOBAL":
                    stack.append(self.find(*argument.split(" ", 1)))
                case "STACK_GLOBAL":
                    stack[-2:] = [self.find(*map(_text, stack[-2:]))]
                case "BINPERSID":
                    stack[-1] = self.persistent(stack[-1])
                case "REDUCE" | "NEWOBJ":
                    made, arguments = stack[-2:]
                    stack[-2:] = [made.__new__(made, *arguments) if name == "NEWOBJ" else made(*arguments)]
                case "BUILD":
                    _set_state(stack[-2], stack.pop())
                case "STOP":
                    [value] = stack
                    return value
                case _:
                    raise UnpicklingError(f"it has {name}, which no checkpoint has")
        raise UnpicklingError("it has no end")

    def _fill(self, collection: Any, items: list[Any]) -> None:
        if isinstance(collection, list):
            collection += items
        elif isinstance(collection, dict):
            if unknown := [key for key in items[::2] if not self.is_key(key)]:
                raise UnpicklingError(f"a key is a {type(unknown[0]).__name__}, which no checkpoint has")
            collection.update(zip(items[::2], items[1::2], strict=True))
        else:
            raise UnpicklingError(f"it fills a {type(collection).__name__}")


def _checked_tuple(items: list[Any]) -> tuple[Any, ...]:
    for item in items:
        if not all(isinstance(each, _IN_TUPLES) for each in (item if isinstance(item, tuple) else (item,))):
            raise UnpicklingError(f"a tuple has a {type(item).__name__} in it, which no checkpoint has")
    return tuple(items)


def _set_state(made: Any, state: Any) -> None:
    if isinstance(state, dict) and not isinstance(made, type):
        vars(made).update(state)
    else:
        made.__setstate__(state)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UnpicklingError(f"it names a {type(value).__name__}")
    return value

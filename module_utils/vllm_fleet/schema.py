"""A small validator for plain data whose messages say where, what was found and what is allowed.

A shape is one of the classes below; ``check(value)`` returns the value (numbers normalised) or raises
:class:`~.errors.UsageError` with reason ``bad_schema`` or ``unknown_key``.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from .errors import UsageError

#: decimal, no sign, no leading zero: "08" and "010" mean different numbers to a shell, to YAML 1.1 and to a person
_DECIMAL = re.compile(r"0|[1-9][0-9]*", re.ASCII)


class Where:
    """A place in a file, for messages: ``profiles/x.yml: knobs.max_seqs``."""

    def __init__(self, source: str, path: str = "") -> None:
        self.source = source
        self.path = path

    def at(self, key: Any) -> Where:
        """Return the place one key or list index deeper."""
        step = f"[{key}]" if isinstance(key, int) else str(key)
        glue = "" if not self.path or step.startswith("[") else "."
        return Where(self.source, f"{self.path}{glue}{step}")

    def __str__(self) -> str:
        return f"{self.source}: {self.path}" if self.path else self.source

    def error(self, found: Any, allowed: str) -> UsageError:
        """Return the error for a value that may not be here."""
        return UsageError("bad_schema", f"{self}: found {describe(found)}, allowed: {allowed}.")


def describe(value: Any) -> str:
    """Name a value for a message, with its type where the text alone could mislead."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    text = repr(value)
    if len(text) > 80:
        text = text[:77] + "..."
    kinds = {str: "the text ", int: "the number ", float: "the number ", list: "the list ", dict: "the mapping "}
    return kinds.get(type(value), "") + text


def suggestion(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `` Did you mean X?`` for the closest known name, or an empty string."""
    names = [str(item) for item in known]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=cutoff)
    close = close or [item for item in names if len(str(name)) > 4 and item.startswith(str(name))]
    return f"Did you mean {close[0]}?" if close else ""


def unknown(where: Where, name: Any, known: Iterable[str]) -> UsageError:
    """Return the error for a name that nothing here reads."""
    names = sorted(known)
    return UsageError(
        "unknown_key",
        f"{where}: unknown name {name!r}; known here: {', '.join(names) or 'none'}.",
        suggestion(str(name), names),
    )


class Shape:
    """Base of all shapes: accepts anything."""

    def check(self, value: Any, where: Where) -> Any:
        """Return the accepted value.

        :raises UsageError: when it has another shape.
        """
        return value


class Text(Shape):
    """A string, optionally of a pattern (whole match)."""

    def __init__(self, pattern: Optional[str] = None, allowed: str = "a text", empty: bool = False) -> None:
        self.pattern = re.compile(pattern, re.ASCII) if pattern else None
        self.allowed = allowed
        self.empty = empty

    def check(self, value: Any, where: Where) -> str:
        """Return the text; numbers are refused, so that a version such as 3.10 is never read as 3.1."""
        if not isinstance(value, str) or (not value and not self.empty):
            raise where.error(value, self.allowed)
        if self.pattern and not self.pattern.fullmatch(value):
            raise where.error(value, self.allowed)
        if "\0" in value:
            raise where.error(value, "a text without NUL")
        return value


class Integer(Shape):
    """A whole number, as a number or as decimal text, between two bounds."""

    def __init__(self, minimum: int = 0, maximum: Optional[int] = None) -> None:
        self.minimum = minimum
        self.maximum = maximum

    def check(self, value: Any, where: Where) -> int:
        """Return the number."""
        upper = f" to {self.maximum}" if self.maximum is not None else " or more"
        allowed = f"a decimal whole number without leading zeros, {self.minimum}{upper}"
        if isinstance(value, str) and _DECIMAL.fullmatch(value) and len(value) < 19:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise where.error(value, allowed)
        if value < self.minimum or (self.maximum is not None and value > self.maximum):
            raise where.error(value, allowed)
        return value


class Boolean(Shape):
    """``true`` or ``false``."""

    def check(self, value: Any, where: Where) -> bool:
        """Return the truth value."""
        if not isinstance(value, bool):
            raise where.error(value, "true or false")
        return value


class Choice(Shape):
    """One of some texts."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def check(self, value: Any, where: Where) -> str:
        """Return the text; a bare ``off`` or ``on``, a truth value to YAML 1.1, is the word where that is a choice."""
        if isinstance(value, bool):
            word = {False: "off", True: "on"}[value]
            value = word if word in self.choices else value
        if not isinstance(value, str) or value not in self.choices:
            raise where.error(value, "one of " + ", ".join(self.choices))
        return value


class Nullable(Shape):
    """A shape, or null."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def check(self, value: Any, where: Where) -> Any:
        """Return null or the shape's value."""
        return None if value is None else self.shape.check(value, where)


class ListOf(Shape):
    """A list whose items have one shape."""

    def __init__(self, shape: Shape, minimum: int = 0, maximum: Optional[int] = None) -> None:
        self.shape = shape
        self.minimum = minimum
        self.maximum = maximum

    def check(self, value: Any, where: Where) -> List[Any]:
        """Return the list."""
        if not isinstance(value, (list, tuple)):
            raise where.error(value, "a list")
        if len(value) < self.minimum or (self.maximum is not None and len(value) > self.maximum):
            upper = "or more" if self.maximum is None else f"to {self.maximum}"
            raise where.error(list(value), f"a list of {self.minimum} {upper} items")
        return [self.shape.check(item, where.at(index)) for index, item in enumerate(value)]


class MapOf(Shape):
    """A mapping from names of one pattern to values of one shape; the order is kept."""

    def __init__(self, shape: Shape, pattern: str, allowed: str) -> None:
        self.shape = shape
        self.pattern = re.compile(pattern, re.ASCII)
        self.allowed = allowed

    def check(self, value: Any, where: Where) -> Dict[str, Any]:
        """Return the mapping."""
        if not isinstance(value, Mapping):
            raise where.error(value, "a mapping")
        for key in value:
            if not isinstance(key, str) or not self.pattern.fullmatch(key):
                raise where.error(key, f"as a name, {self.allowed}")
        return {str(key): self.shape.check(item, where.at(key)) for key, item in value.items()}


class Record(Shape):
    """A mapping with known keys, some of them required; others take the default that is given here."""

    def __init__(
        self, keys: Mapping[str, Shape], required: Sequence[str] = (), defaults: Optional[Mapping[str, Any]] = None
    ) -> None:
        self.keys = dict(keys)
        self.required = tuple(required)
        self.defaults = dict(defaults or {})

    def check(self, value: Any, where: Where) -> Dict[str, Any]:
        """Return the mapping with its defaults."""
        if not isinstance(value, Mapping):
            raise where.error(value, "a mapping with " + ", ".join(sorted(self.keys)))
        for key in value:
            if key not in self.keys:
                raise unknown(where, key, self.keys)
        for key in self.required:
            if key not in value:
                raise UsageError("bad_schema", f"{where}: found no key {key!r}, which is required.")
        checked = {str(key): self.keys[key].check(item, where.at(key)) for key, item in value.items()}
        for key, default in self.defaults.items():
            checked.setdefault(key, default)
        return checked

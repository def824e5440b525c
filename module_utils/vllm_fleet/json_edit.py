"""Setting one nested key in JSON text and changing nothing else.

The text is validated by the standard parser, then cut at exact places: layout, key order, number spelling, newline
style, byte order mark and the end of the file stay as they are. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import json
import re
from typing import Any, List, NamedTuple, Optional, Tuple

from .errors import RefusedError, UsageError

_BOM = b"\xef\xbb\xbf"
_SPACE = " \t\r\n"
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],]', re.DOTALL)
_LAST_LINE = re.compile(r"(?:\r\n|\n|\r)[ \t]*\Z")


class Splice(NamedTuple):
    """Replace ``old`` at character ``start`` of the original text (without byte order mark) by ``new``."""

    start: int
    old: str
    new: str


class Edit(NamedTuple):
    """The outcome of :func:`set_key`.

    ``reason`` is ``already_set``, ``added``, ``replaced``, ``moved`` (a stale top-level copy became the nested key) or
    ``stale_copy_removed`` (the nested key was right). ``before`` is the JSON text of the nested value, ``None`` if it
    was not there, ``after`` that of the wanted one. ``splices`` are what was done, in order of position.
    """

    raw: bytes
    reason: str
    before: Optional[str]
    after: str
    splices: Tuple[Splice, ...]

    @property
    def changed(self) -> bool:
        return bool(self.splices)


class _Member(NamedTuple):
    key: str
    start: int  # of the key's opening quote
    key_end: int
    value: int  # first character of the value
    end: int  # one past the value


class _Object(NamedTuple):
    start: int  # of the brace
    end: int  # of the closing brace
    members: List[_Member]

    def named(self, key: str) -> List[_Member]:
        return [member for member in self.members if member.key == key]


class _Pairs(List[Tuple[str, Any]]):
    """A parsed object with order and duplicates kept; a type of its own, so that it never equals an array."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pairs) and list.__eq__(self, other)

    __hash__ = None


class _Token(str):
    """A number or constant as it was spelt; a type of its own, so that it never equals a string."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Token) and str.__eq__(self, other)

    __hash__ = str.__hash__


def set_key(raw: bytes, key: str, value: Any, force: bool = False) -> Edit:
    """Set ``key`` (a dotted path such as ``text_config.dtype``) to ``value`` in the JSON document ``raw``.

    A new key becomes the first of its object and takes over the layout of its neighbours. A key of the same name at the
    top of the document is a stale copy (readers of the nested object never see it): it is removed when its value is the
    wanted one.

    :param value: anything that JSON can hold.
    :param force: overwrite a different value, and drop a stale copy whose value differs.
    :raises UsageError: ``bad_key`` or ``bad_value``; ``internal_error`` when the result is not the intended document.
    :raises RefusedError: ``bad_json``, ``not_an_object``, ``parent_missing``, ``parent_not_an_object``,
        ``duplicate_key``, ``value_differs`` or ``stale_copy_differs``.
    """
    parts = key.split(".")
    if not all(parts):
        raise UsageError("bad_key", f"{key!r} is not a dotted path of key names")
    try:
        value_text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError("bad_value", f"the value for {key} is not JSON: {error}") from None
    bom = _BOM if raw.startswith(_BOM) else b""
    text, document = _parse(raw[len(bom) :])

    chain = _descend(text, parts)
    target = chain[-1]
    present = _only(target, parts[-1], ".".join(parts[:-1]))
    stale = None
    if len(parts) > 1 and parts[0] != parts[-1]:
        stale = _only(chain[0], parts[-1], "")
    if present is not None and not _same(text[present.value : present.end], value) and not force:
        found = text[present.value : present.end]
        raise RefusedError(
            "value_differs", f"{key} is {_short(found)}, wanted {value_text}", "use --force to overwrite it"
        )
    if stale is not None and not _same(text[stale.value : stale.end], value) and not force:
        found = text[stale.value : stale.end]
        message = f"a top-level {parts[-1]} is {_short(found)}, while {key} is wanted to be {value_text}"
        raise RefusedError("stale_copy_differs", message, "remove the top-level key, or use --force to drop it")

    splices = []
    reason = "already_set"
    before = None
    if present is None:
        splices.append(_insertion(text, chain, parts, value_text))
        reason = "added" if stale is None else "moved"
    else:
        before = text[present.value : present.end]
        if not _same(before, value):
            splices.append(Splice(present.value, before, value_text))
            reason = "replaced"
    if stale is not None:
        splices.append(_removal(text, chain[0], stale))
        if reason == "already_set":
            reason = "stale_copy_removed"
    splices.sort()
    edited = bom + apply(text, splices).encode("utf-8")
    wanted = _intended(document, parts, json.loads(value_text, **_HOOKS), stale is not None)
    if not _parse(edited[len(bom) :])[1] == wanted:
        raise UsageError("internal_error", f"editing {key} would have changed something else; nothing was written")
    return Edit(edited, reason, before, value_text, tuple(splices))


def apply(text: str, splices: List[Splice]) -> str:
    """Return ``text`` with the splices done; they are sorted and do not overlap."""
    pieces = []
    at = 0
    for splice in splices:
        pieces += [text[at : splice.start], splice.new]
        at = splice.start + len(splice.old)
    return "".join([*pieces, text[at:]])


_HOOKS: Any = {"object_pairs_hook": _Pairs, "parse_int": _Token, "parse_float": _Token, "parse_constant": _Token}


def _parse(raw: bytes) -> Tuple[str, Any]:
    """Return the text and the document with every spelling kept. NaN and Infinity pass, as engines read them."""
    try:
        text = raw.decode("utf-8")
        return text, json.loads(text, **_HOOKS)
    except (ValueError, RecursionError) as error:
        raise RefusedError("bad_json", f"it is not JSON in UTF-8: {error}") from None


def _scan(text: str, start: int) -> _Object:
    """Find the members of the object whose brace is at ``start``; the text is known to be valid JSON."""
    members: List[_Member] = []
    depth = 0
    key: Optional[Tuple[int, int]] = None
    for token in _STRUCTURE.finditer(text, start):
        char = token.group()[0]
        if char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        if depth == 1 and char == '"' and key is None:
            key = token.span()
        elif key is not None and ((depth == 1 and char == ",") or depth == 0):
            value = _skip(text, _skip(text, key[1]) + 1)
            end = token.start()
            while text[end - 1] in _SPACE:
                end -= 1
            members.append(_Member(json.loads(text[key[0] : key[1]]), key[0], key[1], value, end))
            key = None
        if depth == 0:
            return _Object(start, token.start(), members)
    raise UsageError("internal_error", "unbalanced JSON passed the parser")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _descend(text: str, parts: List[str]) -> List[_Object]:
    """Return the objects on the way: the top one, then one for each part but the last."""
    start = _skip(text, 0)
    if text[start] != "{":
        raise RefusedError("not_an_object", "the document is not a JSON object")
    chain = [_scan(text, start)]
    for depth, part in enumerate(parts[:-1]):
        member = _only(chain[-1], part, ".".join(parts[:depth]))
        where = ".".join(parts[: depth + 1])
        if member is None:
            raise RefusedError("parent_missing", f"it has no object {where} to set {parts[-1]} in")
        if text[member.value] != "{":
            raise RefusedError(
                "parent_not_an_object", f"{where} is {_short(text[member.value : member.end])}, not an object"
            )
        chain.append(_scan(text, member.value))
    return chain


def _only(parent: _Object, key: str, where: str) -> Optional[_Member]:
    found = parent.named(key)
    if len(found) > 1:
        place = where or "the top level"
        message = f"{key} stands {len(found)} times in {place}, and readers disagree on which one counts"
        raise RefusedError("duplicate_key", message, "remove all but one of them by hand")
    return found[0] if found else None


def _same(value_text: str, value: Any) -> bool:
    """Compare by JSON value and type: 1, 1.0 and true differ, 1.0 and 1e0 do not."""
    try:
        return json.dumps(json.loads(value_text), sort_keys=True) == json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return False


def _short(value_text: str) -> str:
    return value_text if len(value_text) <= 80 else value_text[:77] + "..."


def _insertion(text: str, chain: List[_Object], parts: List[str], value_text: str) -> Splice:
    """Put the new member first, spelt and spaced like its neighbours, or like its parent's in an empty object."""
    target = chain[-1]
    key_text = json.dumps(parts[-1])
    if target.members:
        first = target.members[0]
        member = key_text + text[first.key_end : first.value] + value_text
        if len(target.members) > 1:
            separator = text[first.end : target.members[1].start]
        else:
            space = text[target.start + 1 : first.start]
            if not space and text[first.value - 1] in _SPACE:
                space = " "
            separator = "," + space
        return Splice(first.start, "", member + separator)
    inside = text[target.start + 1 : target.end]
    if len(chain) == 1:
        if "\n" in inside:
            return Splice(target.start + 1, "", _line_of(inside) + "  " + key_text + ": " + value_text)
        return Splice(target.start + 1, "", inside + key_text + ": " + value_text)
    owner = chain[-2].named(parts[-2])[0]
    member = key_text + text[owner.key_end : owner.value] + value_text
    line = _line_of(text[: owner.start])
    if not line:
        return Splice(target.start + 1, "", inside + member)
    unit = "  "
    above = _line_of(text[: chain[-3].named(parts[-3])[0].start]) if len(chain) > 2 else ""
    indent, outer = line.lstrip("\r\n"), above.lstrip("\r\n")
    if indent.startswith(outer) and indent != outer:
        unit = indent[len(outer) :]
    closing = "" if _line_of(inside) else line
    return Splice(target.start + 1, "", line + unit + member + closing)


def _line_of(text: str) -> str:
    """Return the line break and indentation that ``text`` ends with, empty when it ends with something else."""
    found = _LAST_LINE.search(text)
    return found.group() if found else ""


def _removal(text: str, parent: _Object, member: _Member) -> Splice:
    """Take a member out with its comma; the document always holds another one."""
    at = parent.members.index(member)
    if at + 1 < len(parent.members):
        start, end = member.start, parent.members[at + 1].start
    else:
        start, end = parent.members[at - 1].end, member.end
    return Splice(start, text[start:end], "")


def _intended(document: Any, parts: List[str], value: Any, drop_top: bool) -> Any:
    """Return the document that the edit must give, made from the parsed one without looking at the text."""
    result = _Pairs(pair for pair in document if not (drop_top and pair[0] == parts[-1]))
    parent = result
    for part in parts[:-1]:
        at = next(at for at, pair in enumerate(parent) if pair[0] == part)
        child = _Pairs(parent[at][1])
        parent[at] = (part, child)
        parent = child
    for at, pair in enumerate(parent):
        if pair[0] == parts[-1]:
            if not _spelt_same(pair[1], value):
                parent[at] = (parts[-1], value)
            return result
    parent.insert(0, (parts[-1], value))
    return result


def _spelt_same(found: Any, value: Any) -> bool:
    return bool(_plain(found) == _plain(value))


def _plain(parsed: Any) -> str:
    def undo(item: Any) -> Any:
        if isinstance(item, _Pairs):
            return {key: undo(entry) for key, entry in item}
        if isinstance(item, _Token):
            return json.loads(item)
        return [undo(entry) for entry in item] if isinstance(item, list) else item

    return json.dumps(undo(parsed), sort_keys=True)

"""The line format of coreutils' ``sha256sum``: read and written so that ``sha256sum -c --strict`` agrees.

A line is ``<64 hex digits>  <name>``; a name that holds a backslash, a newline or a carriage return is escaped and its
line starts with a backslash (coreutils manual, "cksum output modes"). Names are ``str`` as :func:`os.fsdecode` gives
them, so any bytes that the file system allows survive.
"""

from __future__ import annotations

import os
import re
from typing import Dict, List, NamedTuple

_LINE = re.compile(rb"(\\?)([0-9a-fA-F]{64}) [ *](.+)\Z", re.DOTALL)
_UNESCAPE = {b"\\\\": b"\\", b"\\n": b"\n", b"\\r": b"\r"}


class Sums(NamedTuple):
    """What a sums file says.

    ``entries``: name -> lower-case SHA-256. ``malformed``: one sentence per line that is no such line.
    """

    entries: Dict[str, str]
    malformed: List[str]


def parse(raw: bytes) -> Sums:
    """Parse the bytes of a sums file; a bad line is reported with its number and never stops the rest."""
    entries: Dict[str, str] = {}
    malformed: List[str] = []
    lines = raw.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        match = _LINE.match(line)
        if match is None:
            malformed.append(f"line {number} is not '<64 hex digits>  <name>': {printable(os.fsdecode(line[:100]))!r}")
            continue
        escaped, digest, raw_name = match.groups()
        if escaped:
            if re.sub(rb"\\[\\nr]", b"", raw_name).count(b"\\"):
                malformed.append(f"line {number} has an unknown escape: {printable(os.fsdecode(raw_name))!r}")
                continue
            raw_name = re.sub(rb"\\[\\nr]", lambda found: _UNESCAPE[found.group()], raw_name)
        name = os.fsdecode(raw_name)
        if "\0" in name:
            malformed.append(f"line {number} holds a NUL byte")
        elif name in entries:
            malformed.append(f"line {number} lists {printable(name)} a second time")
        else:
            entries[name] = digest.decode("ascii").lower()
    return Sums(entries, malformed)


def render(entries: Dict[str, str]) -> bytes:
    """Return the sums file for ``entries``, sorted by the bytes of the name (the order of ``LC_ALL=C sort``)."""
    lines = []
    for name in sorted(entries, key=os.fsencode):
        raw_name = os.fsencode(name)
        escaped = raw_name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
        prefix = b"\\" if escaped != raw_name else b""
        lines.append(prefix + entries[name].encode("ascii") + b"  " + escaped + b"\n")
    return b"".join(lines)


def printable(name: str) -> str:
    """Return ``name`` on one line and encodable in UTF-8, for messages and JSON."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)

"""Quoting for systemd units, so that a process receives exactly the words and values that were meant.

The rules are those of systemd.syntax(7) (quoting, C-style escapes), systemd.service(5) (command lines: ``$`` and a
lone ``;``), systemd.exec(5) (``EnvironmentFile=``) and systemd.unit(5) (``%`` specifiers).
"""

from __future__ import annotations

import re
from typing import Iterable, List, Mapping, Sequence

from .errors import UsageError

#: what systemd accepts as the name of a variable
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

#: systemd splits a command line before it unquotes it, and searches a program only in its own fixed path
_PROGRAM = re.compile(r"/[A-Za-z0-9._+/@-]*", re.ASCII)

#: between the words of a command line that people read: a continued line for each
CONTINUED = " \\\n    "

_NAMED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _check_text(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("bad_character", f"{what} is not valid UTF-8 text, which systemd refuses.") from None


def _quoted(text: str, what: str) -> str:
    """Return ``text`` in double quotes, escapes and specifiers neutralised."""
    if "\0" in text:
        raise UsageError("bad_character", f"{what} holds a NUL, which no process can receive.")
    _check_text(text, what)
    pieces = []
    for character in text:
        if character in _NAMED:
            pieces.append(_NAMED[character])
        elif character < " " or character == "\x7f":
            pieces.append(f"\\x{ord(character):02x}")
        else:
            pieces.append(character)
    return '"' + "".join(pieces).replace("%", "%%") + '"'


def exec_word(word: str) -> str:
    """Return one argument of ``ExecStart=``: quoted, with ``$`` doubled against variable expansion.

    :raises UsageError: ``bad_character`` for NUL or text that is not UTF-8.
    """
    return _quoted(word, "the argument").replace("$", "$$")


def exec_line(argv: Sequence[str], executable: str = "") -> str:
    """Return the value of ``ExecStart=`` that runs ``argv``, one argument a line.

    :param executable: absolute path of the program when ``argv[0]`` is not one; the process still sees ``argv[0]``.
    :raises UsageError: ``bad_program`` when there is no absolute path in a plain grammar (systemd expands neither
        variables nor escapes reliably there), ``bad_character`` for an argument that cannot be passed.
    """
    if not argv:
        raise UsageError("bad_program", "the command line is empty.")
    program = executable or argv[0]
    if not _PROGRAM.fullmatch(program):
        raise UsageError(
            "bad_program",
            f"the program {program!r} is not an absolute path of letters, digits and ._+/@-.",
            "Install the engine below a path with such a name.",
        )
    words = [exec_word(word) for word in argv[1:]]
    head = [program] if program == argv[0] else ["@" + program, exec_word(argv[0])]
    return CONTINUED.join(head + words)


def environment_file(env: Mapping[str, str]) -> str:
    """Return the text of an ``EnvironmentFile=``: one quoted assignment a line, sorted by name.

    :raises UsageError: ``bad_variable_name``; ``bad_character`` for line breaks and other control characters but tab
        (systemd drops such an assignment with no more than a warning), and for text that is not UTF-8.
    """
    lines = []
    for name in sorted(env):
        value = env[name]
        if not ENV_NAME.fullmatch(name):
            raise UsageError(
                "bad_variable_name", f"{name!r} is no name of a variable: letters, digits and _ are allowed."
            )
        bad = [character for character in value if (character < " " and character != "\t") or character == "\x7f"]
        if bad:
            raise UsageError("bad_character", f"the value of {name} holds the control character {bad[0]!r}.")
        _check_text(value, f"the value of {name}")
        # Inside double quotes a backslash makes these four plain; nothing is expanded there (systemd.exec(5)).
        for special in ("\\", '"', "`", "$"):
            value = value.replace(special, "\\" + special)
        lines.append(f'{name}="{value}"')
    return "".join(line + "\n" for line in lines)


def unset_names(names: Iterable[str], env: Mapping[str, str]) -> List[str]:
    """Return what ``UnsetEnvironment=`` should list.

    systemd knows no patterns there and applies it last, so names that the lane sets are left out, and patterns
    too: a system unit inherits nothing but the manager's own environment.
    """
    return [name for name in names if ENV_NAME.fullmatch(name) and name not in env]

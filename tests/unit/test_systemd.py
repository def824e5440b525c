"""Quoting for units, quickly and without systemd; the proof by systemd itself is tests/lab/test_systemd_quoting.py."""

from __future__ import annotations

import re
from typing import Dict, List, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet import systemd
from vllm_fleet.errors import UsageError

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30)
NAMED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "s": " ", "a": "\a", "b": "\b", "f": "\f"}


def words_of(line: str) -> List[Tuple[str, bool]]:
    """Split and unquote as systemd.syntax(7) says; return (text, was quoted)."""
    words: List[Tuple[str, bool]] = []
    word, quote, started, quoted, index = "", "", False, False, 0
    while index < len(line):
        character = line[index]
        if character == "\\":
            code = line[index + 1]
            if code == "x":
                word += chr(int(line[index + 2 : index + 4], 16))
                index += 2
            else:
                word += NAMED[code]
            index += 1
            started = True
        elif quote:
            if character == quote:
                quote = ""
            else:
                word += character
        elif character in "'\"":
            quote, started, quoted = character, True, True
        elif character in " \t\n\r":
            if started:
                words.append((word, quoted))
            word, started, quoted = "", False, False
        else:
            word, started = word + character, True
        index += 1
    assert not quote
    return [*words, (word, quoted)] if started else words


def specifiers(text: str) -> str:
    assert "%" not in text.replace("%%", "")
    return text.replace("%%", "%")


def variables(text: str) -> str:
    assert "$" not in text.replace("$$", "")
    return text.replace("$$", "$")


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXT, max_size=6))
def test_words_come_through(words: List[str]) -> None:
    line = systemd.exec_line(["/bin/x", *words])
    # a line that ends in a backslash goes on in the next one, with a blank between
    assert line.replace("\\\n", "").count("\n") == 0
    parsed = words_of(line.replace("\\\n", " "))
    assert [variables(specifiers(word)) for word, _ in parsed] == ["/bin/x", *words]
    # a lone ; outside quotes would begin another command
    assert all(quoted for _, quoted in parsed[1:])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.from_regex(systemd.ENV_NAME, fullmatch=True), TEXT, max_size=4))
def test_values_come_through_or_are_refused(env: Dict[str, str]) -> None:
    control = any((c < " " and c != "\t") or c == "\x7f" for value in env.values() for c in value)
    try:
        text = systemd.environment_file(env)
    except UsageError as error:
        assert control and error.reason == "bad_character"
        return
    assert not control
    lines = [re.fullmatch(r'(\w+)="((?:[^"\\$`]|\\["\\$`])*)"', line) for line in text.split("\n")[:-1]]
    # inside double quotes a backslash makes one of these four plain, and keeps its meaning before all others
    assert {line[1]: re.sub(r'\\(["\\$`])', r"\1", line[2]) for line in lines} == env


def test_a_bare_program_keeps_its_name() -> None:
    line = systemd.exec_line(["python3", "-m", "x"], "/usr/bin/python3")
    assert line.replace("\\\n", " ").split() == ["@/usr/bin/python3", '"python3"', '"-m"', '"x"']


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: systemd.exec_line([]), "bad_program"),
        (lambda: systemd.exec_line(["vllm", "serve"]), "bad_program"),
        (lambda: systemd.exec_line(["/opt/a b/vllm"]), "bad_program"),
        (lambda: systemd.exec_line(["/opt/$x/vllm"]), "bad_program"),
        (lambda: systemd.exec_line(["/bin/x", "a\0b"]), "bad_character"),
        (lambda: systemd.exec_line(["/bin/x", "\udc80"]), "bad_character"),
        (lambda: systemd.environment_file({"A B": "x"}), "bad_variable_name"),
        (lambda: systemd.environment_file({"A": "\x1b[0m"}), "bad_character"),
        (lambda: systemd.environment_file({"A": "line\nbreak"}), "bad_character"),
        (lambda: systemd.environment_file({"A": "a\0"}), "bad_character"),
        (lambda: systemd.environment_file({"A": "\udc80"}), "bad_character"),
    ],
)
def test_what_no_unit_can_carry_is_refused(call, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        call()
    assert refused.value.reason == reason


def test_names_to_unset_are_plain_and_not_set() -> None:
    assert systemd.unset_names(["A", "B", "C_*"], {"B": "1"}) == ["A"]

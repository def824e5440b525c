"""Proof by the real thing that any text survives a unit: its program writes down what the kernel gave it."""

from __future__ import annotations

import base64
import io
import json
import random
import tarfile
from typing import NamedTuple

from conftest import Box
from vllm_fleet import systemd

DIRECTORY = "/run/vllm-fleet-quoting"

#: reads the blocks that the kernel got, before Python decodes or adds anything
STUB = """#!/usr/bin/python3
import json
argv = open("/proc/self/cmdline", "rb").read().split(b"\\0")[:-1]
env = open("/proc/self/environ", "rb").read().split(b"\\0")[:-1]
name = dict(item.split(b"=", 1) for item in env)[b"CASE"].decode()
blocks = {"argv": [item.decode("latin-1") for item in argv], "env": [item.decode("latin-1") for item in env]}
with open("DIRECTORY/out-" + name + ".json", "w") as handle:
    json.dump(blocks, handle)
""".replace("DIRECTORY", DIRECTORY)


class Case(NamedTuple):
    """Words and values that a process should receive exactly."""

    words: list[str]
    env: dict[str, str]


#: what goes wrong by hand, one each
CORNERS = [
    "",
    " ",
    "  two  blanks ",
    "plain",
    "it's",
    'say "yes"',
    "%h %% %n 100%",
    "$HOME ${HOME} $$ $",
    "$HOME",
    "back\\slash \\n \\\\ \\",
    '{"a": {"b": [1, "two", null]}, "c": "$x %i"}',
    "é ü 漢字 🚀 \u2028 \u0085",
    "tab\there",
    ";",
    "a;b",
    "#no comment",
    "=",
    "-x",
    "--flag=$(id)",
    "`id`",
    "*?[a]",
    "|&<>()",
    "@:+!",
    "\\x41",
    "'",
    '"',
    "''",
    '""',
]
#: systemd drops assignments with these, and ours refuses them, so only arguments may have them
ARGUMENT_ONLY = ["line\nbreak", "\x01\x1b\x7f", "carriage\rreturn"]

ALPHABET = "aZ0 \t\n'\"\\%$;#{}[]()=:,./-+*?!~^&|<>`@éß漢🚀"


def cases(count: int = 40, seed: int = 1) -> list[Case]:
    """Return the corners, and ``count`` cases of random words out of the awkward characters."""
    words = CORNERS + ARGUMENT_ONLY
    made = [Case(words, {f"VALUE_{number}": text for number, text in enumerate(CORNERS)})]
    source = random.Random(seed)
    for _ in range(count):
        texts = ["".join(source.choices(ALPHABET, k=source.randrange(0, 24))) for _ in range(12)]
        values = {f"VALUE_{number}": text.replace("\n", "") for number, text in enumerate(texts[8:])}
        made.append(Case(texts[:8], values))
    return made


def archive(wanted: list[Case]) -> str:
    """Return the units, their environment files and the program that they run, as a tar in base64."""
    files = {f"{DIRECTORY}/dump": STUB}
    for number, case in enumerate(wanted):
        files[f"{DIRECTORY}/env-{number}"] = systemd.environment_file({"CASE": str(number), **case.env})
        files[f"/run/systemd/system/quoting-{number}.service"] = (
            f"[Service]\nType=oneshot\nEnvironmentFile={DIRECTORY}/env-{number}\n"
            f"ExecStart={systemd.exec_line([f'{DIRECTORY}/dump', *case.words])}\n"
        )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    return base64.b64encode(packed.getvalue()).decode()


def compare(case: Case, seen: dict[str, list[str]]) -> list[str]:
    """Return one line for each word or value that arrived changed."""
    argv = [word.encode("latin-1").decode("utf-8") for word in seen["argv"]]
    words = argv[argv.index(f"{DIRECTORY}/dump") + 1 :]
    wrong = [f"{a!r} came as {b!r}" for a, b in zip(case.words, words, strict=False) if a != b]
    wrong += [f"{len(case.words)} words came as {len(words)}"] * (len(case.words) != len(words))
    env = dict(item.encode("latin-1").decode("utf-8").split("=", 1) for item in seen["env"])
    return wrong + [f"{name}={v!r} came as {env.get(name)!r}" for name, v in case.env.items() if env.get(name) != v]


def test_any_text_survives_the_way_through_systemd(box1: Box) -> None:
    wanted = cases()
    box1.run(f"base64 -d <<'EOF' | tar -xzC /\n{archive(wanted)}\nEOF")
    names = " ".join(f"quoting-{number}.service" for number in range(len(wanted)))
    try:
        box1.run(f"systemctl daemon-reload && systemctl start {names}")
        seen = box1.run(f'cd {DIRECTORY} && for n in $(seq 0 {len(wanted) - 1}); do cat "out-$n.json"; echo; done')
    finally:
        box1.run(f"rm -rf {DIRECTORY} /run/systemd/system/quoting-*.service; systemctl daemon-reload")
    arrived = [json.loads(line) for line in seen.splitlines()]
    assert len(arrived) == len(wanted)
    assert [line for case, blocks in zip(wanted, arrived, strict=True) for line in compare(case, blocks)] == []

"""Proof by the real thing: units whose program writes down what it received, for a machine that runs systemd.

``units(cases)`` makes the files, ``compare(cases, read)`` says which case came through changed. How the files get there
and who starts the units is the caller's business: ``python3 tests/systemd_quoting.py CONTAINER`` does it with podman.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "module_utils"))

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

    words: List[str]
    env: Dict[str, str]


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
    "line\nbreak",
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
#: systemd.exec(5) drops assignments with these, so only arguments may have them
ARGUMENT_ONLY = ["\x01\x1b\x7f", "carriage\rreturn"]

ALPHABET = "aZ0 \t\n'\"\\%$;#{}[]()=:,./-+*?!~^&|<>`@éß漢🚀"


def cases(count: int = 20, seed: int = 1) -> List[Case]:
    """Return the corners, and ``count`` cases of random words out of the awkward characters."""
    words = CORNERS + ARGUMENT_ONLY
    made = [Case(words, {f"VALUE_{number}": text for number, text in enumerate(CORNERS)})]
    source = random.Random(seed)
    for _ in range(count):
        texts = ["".join(source.choices(ALPHABET, k=source.randrange(0, 24))) for _ in range(12)]
        made.append(Case(texts[:8], {f"VALUE_{number}": text for number, text in enumerate(texts[8:])}))
    return made


def units(wanted: List[Case], directory: str = DIRECTORY) -> Dict[str, str]:
    """Return file name → text: one unit a case, and the program that they run."""
    files = {"dump": STUB}
    for number, case in enumerate(wanted):
        lines = systemd.environment_lines({"CASE": str(number), **case.env})
        files[f"quoting-{number}.service"] = "\n".join(
            [
                "[Service]",
                "Type=oneshot",
                *lines,
                f"ExecStart={systemd.exec_line([directory + '/dump', *case.words])}",
                "",
            ]
        )
    return files


def compare(wanted: List[Case], read: Callable[[int], str]) -> List[str]:
    """Return one line for each word or value that arrived changed.

    :param read: gives the JSON text that the program of case ``number`` wrote.
    """
    wrong = []
    for number, case in enumerate(wanted):
        seen = json.loads(read(number))
        argv = [word.encode("latin-1").decode("utf-8") for word in seen["argv"]]
        words = argv[argv.index(DIRECTORY + "/dump") + 1 :]
        if words != case.words:
            wrong += [f"case {number}: {a!r} came as {b!r}" for a, b in zip(case.words, words) if a != b]
            wrong += [f"case {number}: {len(case.words)} words came as {len(words)}"] * (len(case.words) != len(words))
        env = dict(item.encode("latin-1").decode("utf-8").split("=", 1) for item in seen["env"])
        for name, value in case.env.items():
            if env.get(name) != value:
                wrong.append(f"case {number}: {name}={value!r} came as {env.get(name)!r}")
    return wrong


def in_container(container: str, wanted: List[Case]) -> List[str]:
    """Run the cases in a running podman container whose first process is systemd."""

    def podman(*words: str, data: str = "") -> str:
        command = ["podman", "exec", "-i", container, *words]
        return subprocess.run(command, input=data, capture_output=True, text=True, check=True).stdout

    podman("mkdir", "-p", DIRECTORY)
    for name, text in units(wanted).items():
        place = f"{DIRECTORY}/{name}" if name == "dump" else f"/run/systemd/system/{name}"
        podman("sh", "-c", f"cat > {place} && chmod 755 {place}", data=text)
    podman("systemctl", "daemon-reload")
    podman("systemctl", "start", *[f"quoting-{number}.service" for number in range(len(wanted))])
    files = [f"{DIRECTORY}/out-{number}.json" for number in range(len(wanted))]
    written = podman("sh", "-c", 'for file; do cat "$file"; echo; done', "sh", *files).splitlines()
    wrong = compare(wanted, written.__getitem__)
    podman("sh", "-c", f"rm -rf {DIRECTORY} /run/systemd/system/quoting-*.service && systemctl daemon-reload")
    return wrong


if __name__ == "__main__":
    every = cases(40)
    problems = in_container(sys.argv[1], every)
    print("\n".join(problems))
    print(
        f"{len(every)} units, {sum(len(case.words) + len(case.env) for case in every)} texts, {len(problems)} changed"
    )
    sys.exit(1 if problems else 0)

"""Wheels for other machines than this one: pip downloads them by their hashes, for the boxes' Python and glibc."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import List, Sequence

from .errors import RefusedError

#: what pip says of an index that nobody answers for
_NO_ANSWER = re.compile(
    r"connection error: |after connection broken by|Temporary failure in name resolution|Name or service not known"
    r"|Network is unreachable|timed out"
)


def platforms(glibc: int) -> List[str]:
    """Return the platform tags of wheels that run on a glibc 2.``glibc`` and later, newest first."""
    return [f"manylinux_2_{minor}_x86_64" for minor in range(glibc, 4, -1)] + [
        "manylinux2014_x86_64",
        "manylinux2010_x86_64",
        "manylinux1_x86_64",
    ]


def command(lock: str, dest: str, python: str, glibc: int, find_links: Sequence[str]) -> List[str]:
    """Return the command that fetches every wheel of a lock into ``dest``."""
    argv = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    argv += ["--progress-bar", "off", "--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    for abi in ("cp" + python.replace(".", ""), "abi3", "none"):
        argv += ["--abi", abi]
    for platform in platforms(glibc):
        argv += ["--platform", platform]
    for link in (dest, *find_links):
        argv += ["--find-links", link]
    return [*argv, "--dest", dest, "--requirement", lock]


def nobody_answers(text: str) -> bool:
    """Whether a failed download met no index at all, as opposed to one that has not what is asked for.

    Without retries pip tells a refused connection in its debug output alone, and its error says only that it found no
    version, as for an index that answers and has none.

    :param text: pip's output at its second level of detail.
    """
    return bool(_NO_ANSWER.search(text))


def download(lock: str, dest: str, python: str, glibc: int, find_links: Sequence[str]) -> None:
    """Fetch every wheel of a lock; those that are there with the right hash are taken as they are.

    :raises RefusedError: ``no_index``, ``hash_differs`` or ``download_failed``, with pip's own last lines.
    """
    os.makedirs(dest, exist_ok=True)
    # -vv, because only so pip says why an index gave it nothing
    argv = [*command(lock, dest, python, glibc, find_links), "-vv"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if not done.returncode:
        return
    said = done.stdout + done.stderr
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    name = os.path.basename(lock)
    if "DO NOT MATCH THE HASHES" in said:
        at = next((index for index, line in enumerate(lines) if "DO NOT MATCH THE HASHES" in line), 0)
        reason, what, shown = "hash_differs", "a wheel is not the one that the lock names", lines[at : at + 6]
    elif nobody_answers(said):
        reason, what, shown = "no_index", "no package index answers", errors
    else:
        reason, what, shown = "download_failed", "pip says", errors
    raise RefusedError(
        reason, f"the wheels of {name} could not be collected: {what}: " + " / ".join(shown[-8:]),
        "run again, the wheels that are there are kept" if reason != "hash_differs" else
        "delete the wheel that is named, or make the lock again",
    )  # fmt: skip

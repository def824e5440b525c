"""Rules over an engine tree's build products: what is recorded, and what a verification found.

Three files stand at the top of a tree. ``.build-products.sha256`` is read by ``sha256sum -c --strict`` as well,
``.build-products.json`` holds the paths and exclusions that it was made from, and the marker ``.build-products`` is one
line, ``route engine-id``, written last. Pure functions; :mod:`.facts.product_tree` does the reading and writing.
"""

from __future__ import annotations

import fnmatch
import json
import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import checks, sums
from .errors import RefusedError, UsageError

MARKER = ".build-products"
SUMS = ".build-products.sha256"
LIST = ".build-products.json"

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\Z")

#: reason -> (status, what the message says of the files, fix), in the order of the report
PROBLEMS: Dict[str, Tuple[str, str, str]] = {
    "malformed_line": (checks.FAIL, "lines of the sums file are malformed", "record the products again"),
    "escapes_tree": (checks.FAIL, "products lead out of the tree", "replace the link by the file, then record again"),
    "missing": (checks.FAIL, "products are missing", "install the engine again"),
    "unreadable": (checks.FAIL, "products cannot be read", "correct the permissions or the disk"),
    "changed": (checks.FAIL, "products differ from what was recorded", "install the engine again"),
    "extra": (
        checks.WARN,
        "files in product directories are not recorded",
        "remove them, or record the products again",
    ),
}


class Problem(NamedTuple):
    """One finding: a key of :data:`PROBLEMS`, the file (or line), and more about it when there is more."""

    reason: str
    file: str
    detail: str = ""


def check_words(route: str, engine: str) -> None:
    """Refuse a route or engine id that would not read back from the marker.

    :raises UsageError: ``bad_route`` or ``bad_engine``.
    """
    for what, word in (("route", route), ("engine", engine)):
        if not _WORD.match(word):
            raise UsageError(f"bad_{what}", f"the {what} {word!r} must be one word of letters, digits and ._+-")


def check_paths(paths: Sequence[str]) -> List[str]:
    """Return the product paths in their plain form, relative to the tree.

    :raises UsageError: ``bad_path``.
    """
    plain = []
    for path in paths:
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if path.startswith("/") or ".." in parts or "\0" in path:
            raise UsageError("bad_path", f"the product path {path!r} must be relative and stay inside the tree")
        plain.append("/".join(parts) or ".")
    if not plain:
        raise UsageError("bad_path", "at least one product path is needed")
    return sorted(set(plain))


def excluded(name: str, patterns: Sequence[str]) -> bool:
    """Say whether a file is no product: bytecode, the record itself, or matched by a shell pattern or directory."""
    if "__pycache__" in name.split("/") or name in (MARKER, SUMS, LIST):
        return True
    return any(fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern.rstrip("/") + "/") for pattern in patterns)


def leads_out(name: str) -> bool:
    """Say whether a recorded name is absolute, has a ``..`` or is empty."""
    return not name or name.startswith("/") or ".." in name.split("/")


def render_marker(route: str, engine: str) -> bytes:
    return f"{route} {engine}\n".encode("ascii")


def parse_marker(raw: bytes) -> Optional[Tuple[str, str]]:
    """Return ``(route, engine)``, or ``None`` when the marker is not that one line."""
    words = raw.decode("ascii", "replace").split()
    if len(words) == 2 and all(map(_WORD.match, words)):
        return words[0], words[1]
    return None


def render_list(paths: Sequence[str], exclude: Sequence[str]) -> bytes:
    document = {"schema": 1, "paths": list(paths), "exclude": sorted(set(exclude))}
    return (json.dumps(document, indent=1) + "\n").encode("ascii")


def parse_list(raw: Optional[bytes]) -> Optional[Tuple[List[str], List[str]]]:
    """Return ``(paths, exclude)``, or ``None`` when the list is absent or unusable."""
    try:
        document = json.loads((raw or b"").decode("utf-8"))
        paths, exclude = document["paths"], document["exclude"]
        if document["schema"] == 1 and all(isinstance(entry, str) for entry in [*paths, *exclude]):
            return check_paths(paths), list(exclude)
    except (ValueError, KeyError, TypeError, UsageError):
        pass
    return None


def to_record(digests: Dict[str, Any], problems: Sequence[Problem]) -> bytes:
    """Return the sums file for freshly hashed products.

    :raises RefusedError: with the reason of the first problem, or ``nothing_to_record``; a tree that cannot be verified
        later is not recorded.
    """
    found = list(problems)
    found += [Problem("unreadable", name, digest.error) for name, digest in digests.items() if digest.error]
    if found:
        reason = found[0].reason
        names = _names([problem for problem in found if problem.reason == reason])
        raise RefusedError(reason, f"{PROBLEMS[reason][1]}: {names}", "correct the tree and record it again")
    if not digests:
        raise RefusedError("nothing_to_record", "the product paths hold no file", "name the paths that the build makes")
    return sums.render({name: digest.sha256 for name, digest in digests.items()})


def compare(
    recorded: Dict[str, str], digests: Dict[str, Any], present: Optional[Sequence[str]], exclude: Sequence[str]
) -> List[Problem]:
    """Compare what was recorded with what was read.

    :param present: files that are in the product paths now; ``None`` when the paths are unknown.
    """
    problems = []
    for name, expected in recorded.items():
        digest = digests.get(name)
        if digest is None:
            continue  # reported by the adapter: it leads out of the tree
        if digest.error == "No such file or directory":
            problems.append(Problem("missing", name))
        elif digest.error:
            problems.append(Problem("unreadable", name, digest.error))
        elif digest.sha256 != expected:
            problems.append(Problem("changed", name))
    for name in present or ():
        if name not in recorded and not excluded(name, exclude):
            problems.append(Problem("extra", name))
    return problems


def results(tree: str, problems: Sequence[Problem], count: int, paths_known: bool) -> List[checks.Result]:
    """Turn the findings into check results, one for each reason, every one with the names of files."""
    found = []
    for reason, (status, what, fix) in PROBLEMS.items():
        same = [problem for problem in problems if problem.reason == reason]
        if same:
            message = f"{tree}: {len(same)} {what}: {_names(same)}"
            found.append(checks.result("products", status, reason, message, fix))
    if not count:
        message = f"{tree}/{SUMS} lists no file"
        found.append(checks.result("products", checks.FAIL, "unrecorded", message, "record the products again"))
    if not paths_known:
        message = f"{tree} has no usable {LIST}, so files that were added are not noticed"
        found.append(checks.result("products", checks.UNKNOWN, "paths_unknown", message, "record the products again"))
    if not checks.failed(found):
        found.insert(0, checks.result("products", checks.PASS, "products_ok", f"{tree}: {count} products as recorded"))
    return found


def _names(problems: Sequence[Problem], most: int = 10) -> str:
    shown = [sums.printable(item.file) + (f" ({item.detail})" if item.detail else "") for item in problems[:most]]
    return ", ".join(shown) + (f" and {len(problems) - most} more" if len(problems) > most else "")

"""Reading an engine tree: its record, its product files and their hashes. And writing the record, marker last."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import Any, Dict, Iterable, List, Optional, Tuple

from ..files import fsync_directory, write_atomic
from ..products import LIST, MARKER, SUMS, Problem, excluded, leads_out
from .hashing import Digest, hash_files, stamp_of


def read_record(tree: str) -> Dict[str, Any]:
    """Return ``{"directory": bool, "read_only": bool, "marker", "sums", "list": bytes | None}`` of a tree."""
    record: Dict[str, Any] = {"directory": os.path.isdir(tree), "read_only": False}
    for key, name in (("marker", MARKER), ("sums", SUMS), ("list", LIST)):
        record[key] = None
        with contextlib.suppress(OSError), open(os.path.join(tree, name), "rb") as handle:
            record[key] = handle.read()
    with contextlib.suppress(OSError):
        # a verity-protected image is always mounted read-only
        record["read_only"] = bool(os.statvfs(tree).f_flag & os.ST_RDONLY)
    return record


def find_files(tree: str, paths: Iterable[str], exclude: Iterable[str]) -> Tuple[List[str], List[Problem]]:
    """List the files below the product paths, without what is excluded.

    Links to directories are not entered. A link that leads out of the tree, a path that is not there, and what is
    neither file nor directory are problems.
    """
    patterns = list(exclude)
    top = os.path.realpath(tree)
    names: List[str] = []
    problems: List[Problem] = []

    def visit(name: str) -> None:
        path = os.path.join(tree, name)
        if os.path.islink(path) and not _inside(top, os.path.realpath(path)):
            problems.append(Problem("escapes_tree", name, f"links to {os.readlink(path)}"))
        elif os.path.isfile(path):
            names.append(name)
        elif not os.path.isdir(path):
            problems.append(Problem("unreadable" if os.path.exists(path) else "missing", name))
        elif not os.path.islink(path):
            descend(name, path)

    def descend(name: str, path: str) -> None:
        try:
            with os.scandir(path) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            problems.append(Problem("unreadable", name, error.strerror or ""))
            return
        for entry in entries:
            child = entry.name if name == "." else f"{name}/{entry.name}"
            if excluded(child, patterns):
                continue
            if entry.is_file(follow_symlinks=False):
                names.append(child)  # the common case, and the directory has told already
            else:
                visit(child)

    for path in paths:
        visit(path)
    return sorted(set(names), key=os.fsencode), problems


def hash_products(
    tree: str, names: Iterable[str], workers: Optional[int] = None
) -> Tuple[Dict[str, Digest], List[Problem]]:
    """Hash the named files in parallel; names that lead out of the tree, by text or by link, are problems instead."""
    top = os.path.realpath(tree)
    inside: Dict[str, str] = {}  # directory -> its real path, empty outside
    wanted: List[Tuple[str, str]] = []
    problems: List[Problem] = []
    for name in names:
        if leads_out(name):
            problems.append(Problem("escapes_tree", name))
            continue
        directory, _, base = name.rpartition("/")
        if directory not in inside:
            real = os.path.realpath(os.path.join(top, directory))
            inside[directory] = real if _inside(top, real) else ""
        path = f"{inside[directory]}/{base}"
        if not inside[directory] or (os.path.islink(path) and not _inside(top, os.path.realpath(path))):
            problems.append(Problem("escapes_tree", name, "through a link"))
            continue
        wanted.append((name, path))
    return hash_files(wanted, workers), problems


def _inside(top: str, path: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def remembered(memory: str, tree: str, sums: bytes) -> Dict[str, Digest]:
    """Return the products that were as recorded and have not changed since, by size, time of change and inode.

    :param memory: file of :func:`write_memory`; nothing is known without it, or when it is of other sums.
    """
    known: Dict[str, Digest] = {}
    try:
        with open(memory, encoding="utf-8") as handle:
            noted = json.load(handle)
        if noted["sums"] != hashlib.sha256(sums).hexdigest():
            return {}
        for name, (digest, *stamp) in noted["files"].items():
            with contextlib.suppress(OSError):
                now = stamp_of(os.stat(os.path.join(tree, name)))
                if not leads_out(name) and now == tuple(stamp):
                    known[name] = Digest(digest, now)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return known


def write_memory(memory: str, sums: bytes, digests: Dict[str, Digest]) -> None:
    """Note for products that are as recorded what they look like; not being able to costs only the next reading."""
    noted = {name: [digest.sha256, *digest.stamp] for name, digest in digests.items() if digest.stamp}
    text = json.dumps({"sums": hashlib.sha256(sums).hexdigest(), "files": noted}, ensure_ascii=True)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(memory), mode=0o755, exist_ok=True)
        write_atomic(memory, text.encode(), mode=0o644)


def write_record(tree: str, listing: bytes, sums: bytes, marker: bytes) -> None:
    """Write the record so that the marker only ever stands beside complete sums."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(tree, MARKER))
        fsync_directory(tree)
    write_atomic(os.path.join(tree, LIST), listing, mode=0o644)
    write_atomic(os.path.join(tree, SUMS), sums, mode=0o644)
    write_atomic(os.path.join(tree, MARKER), marker, mode=0o644)

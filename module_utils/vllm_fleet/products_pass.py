"""Recording and verifying the build products of one engine tree. Shared by the module, the program and the start."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Sequence

from . import checks, products, sums
from .errors import RefusedError
from .facts import product_tree


def record(
    tree: str, *, route: str, engine: str, paths: Sequence[str], exclude: Sequence[str] = (), check: bool = False
) -> Dict[str, Any]:
    """Hash the products and write the record when it differs.

    :param route: how the engine came here, one word such as ``tarball``, ``own`` or ``wheel``.
    :param paths: files and directories inside the tree; ``exclude``: shell patterns or directories.
    :param check: write nothing.
    :returns: ``{"changed", "reason": "recorded" | "already_recorded", "files": n, "before", "after": sums as text}``.
    :raises RefusedError: ``not_a_tree``, ``nothing_to_record``, ``write_failed`` or one of :data:`.products.PROBLEMS`.
    :raises UsageError: ``bad_route``, ``bad_engine``, ``bad_path``.
    """
    products.check_words(route, engine)
    paths = products.check_paths(paths)
    tree = os.path.abspath(tree)
    old = product_tree.read_record(tree)
    if not old["directory"]:
        raise RefusedError("not_a_tree", f"{tree} is not a directory", "install the engine first")
    names, problems = product_tree.find_files(tree, paths, exclude)
    digests, more = product_tree.hash_products(tree, names)
    text = products.to_record(digests, [*problems, *more])
    listing, marker = products.render_list(paths, exclude), products.render_marker(route, engine)
    changed = (old["list"], old["sums"], old["marker"]) != (listing, text, marker)
    if changed and not check:
        try:
            product_tree.write_record(tree, listing, text, marker)
        except OSError as error:
            raise RefusedError("write_failed", f"cannot write the record of {tree}: {error.strerror}") from None
    return {
        "changed": changed,
        "reason": "recorded" if changed else "already_recorded",
        "files": len(digests),
        "before": (old["sums"] or b"").decode("utf-8", "backslashreplace"),
        "after": text.decode("utf-8", "backslashreplace"),
    }


def verify(
    tree: str,
    *,
    engine: Optional[str] = None,
    trust_read_only: bool = False,
    workers: Optional[int] = None,
    memory: Optional[str] = None,
    remember: bool = True,
) -> Dict[str, Any]:
    """Compare the products with their record.

    :param engine: the engine id that the marker must name; ``None`` takes any.
    :param trust_read_only: do not read the files of a tree on a read-only mount (a verity-protected one is).
    :param workers: threads; one for each CPU by default.
    :param memory: file that says which products were as recorded, by size, time of change and inode; those are not read
        again. ``None`` reads every file, as a start does.
    :param remember: write what was found to ``memory``; ``False`` is a dry run.
    :returns: ``{"results", "problems": [{"reason", "file", "detail"}], "files": n hashed, "route", "engine"}``.
    """
    tree = os.path.abspath(tree)
    record = product_tree.read_record(tree)
    report: Dict[str, Any] = {"results": [], "problems": [], "files": 0, "route": None, "engine": None}
    marker = products.parse_marker(record["marker"]) if record["marker"] is not None else None
    if marker is None or not record["sums"]:
        what = "is not a directory" if not record["directory"] else _what_is_missing(record)
        message = f"{tree} {what}, so its build products are not verified"
        fix = "install the engine again, or record a tree that you trust: vllm-fleet products record"
        report["results"] = [checks.result("products", checks.FAIL, "unrecorded", message, fix)]
        return report
    report["route"], report["engine"] = marker
    if engine is not None and marker[1] != engine:
        message = f"{tree} holds the products of {marker[1]}, expected {engine}"
        fix = "install the engine that the lane names"
        report["results"].append(checks.result("products", checks.FAIL, "engine_differs", message, fix))
    if trust_read_only and record["read_only"]:
        message = f"{tree} is on a read-only mount; its products were not read again"
        report["results"].append(checks.result("products", checks.PASS, "read_only_mount", message))
        return report
    parsed = sums.parse(record["sums"])
    problems: List[products.Problem] = [products.Problem("malformed_line", line) for line in parsed.malformed]
    known = product_tree.remembered(memory, tree, record["sums"]) if memory else {}
    digests, outside = product_tree.hash_products(tree, [name for name in parsed.entries if name not in known], workers)
    report["files"] = len(digests)
    digests.update({name: digest for name, digest in known.items() if name in parsed.entries})
    listed = products.parse_list(record["list"])
    present, exclude = None, []  # type: Optional[List[str]], List[str]
    if listed is not None:
        paths, exclude = listed
        present, odd = product_tree.find_files(tree, paths, exclude)
        # a recorded file that is gone or unreadable is found by its hash; here only what was added counts
        problems += [
            problem for problem in odd if problem.reason == "escapes_tree" and problem.file not in parsed.entries
        ]
    problems += outside + products.compare(parsed.entries, digests, present, exclude)
    report["results"] += products.results(tree, problems, len(parsed.entries), listed is not None)
    report["problems"] = [dict(item._asdict(), file=sums.printable(item.file)) for item in problems]
    if memory and remember and not checks.failed(report["results"]) and report["files"]:
        product_tree.write_memory(memory, record["sums"], digests)
    return report


def _what_is_missing(record: Dict[str, Any]) -> str:
    if record["marker"] is None:
        return f"has no {products.MARKER}"
    if not record["sums"]:
        return f"has no {products.SUMS}"
    return f"has a {products.MARKER} that is not 'route engine-id'"

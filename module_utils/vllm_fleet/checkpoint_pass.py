"""One pass over a checkpoint: read the directory, hash what is due, judge it. Shared by the module and the program."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Dict, List, Optional, Tuple

from . import checkpoint, checks
from .errors import UsageError
from .facts import checkpoint_dir, hashing

#: How a manifest is verified; see :func:`.checkpoint.due_for_hashing`.
HASHING = ("due", "again", "remembered")


def inspect(
    path: str,
    *,
    user: Optional[str] = None,
    sidecars: Optional[List[Dict[str, Any]]] = None,
    settings: Optional[List[Dict[str, Any]]] = None,
    manifest: Optional[str] = None,
    hash_policy: str = "due",
    state_directory: str = checkpoint_dir.STATE_DIRECTORY,
    remember: bool = True,
    min_free_bytes: Optional[int] = None,
    free_space_path: Optional[str] = None,
    tensor_parallel: Optional[int] = None,
    absent_is_unknown: bool = False,
) -> Dict[str, Any]:
    """Check one checkpoint.

    :param path: the checkpoint directory.
    :param user: who must be able to read it; ``None`` skips the test.
    :param sidecars: required files, ``{"path", "sha256": null | hex}``; relative paths are inside the checkpoint.
    :param settings: required values, ``{"file", "key": dotted path, "value"}``.
    :param manifest: a manifest file, relative to the checkpoint or absolute; ``None`` for none.
    :param hash_policy: one of :data:`HASHING`. ``remembered`` is for a start: it never reads weights.
    :param state_directory: where digests are remembered.
    :param remember: write new digests there; ``False`` is a dry run.
    :returns: what :func:`.checkpoint.evaluate` returns, with ``checkpoint`` (absolute path) and ``hashed`` (how many
        files were read).
    :raises UsageError: for arguments that make no sense.
    """
    if hash_policy not in HASHING:
        raise UsageError("bad_hash_policy", f"hashing must be one of {', '.join(HASHING)}, not {hash_policy!r}")
    path = os.path.abspath(path)
    sidecars, settings = sidecars or [], settings or []
    documents = {checkpoint.CONFIG, checkpoint.INDEX} | {str(item["file"]) for item in settings}
    facts = checkpoint_dir.read_directory(path, sorted(documents))
    extra: List[checks.Result] = []
    hashed = 0
    if facts["state"] == "directory":
        if manifest:
            facts["manifest"], extra = _manifest(path, manifest)
        for name in sorted(checkpoint.named_files(facts, sidecars) - set(facts["files"])):
            facts["files"][name] = checkpoint_dir.look_at(os.path.join(path, name))
        if facts["manifest"]:
            facts["originals"] = _originals(facts, settings)
        state = checkpoint_dir.state_file(path, state_directory)
        hashed, not_remembered = _hash(facts, sidecars, hash_policy, state, remember)
        if not_remembered:
            message = f"the digests could not be kept in {state} ({not_remembered}); the next run reads the files again"
            fix = "run this as root or name another state directory"
            extra.append(checks.result("checkpoint_manifest", checks.WARN, "digests_not_remembered", message, fix))
        if user:
            facts["access"] = checkpoint_dir.access_of(user, path, checkpoint.read_by_engine(facts, sidecars))
    if min_free_bytes is not None:
        facts["free"] = checkpoint_dir.free_space(free_space_path or path)
    report = checkpoint.evaluate(
        facts,
        sidecars,
        settings,
        min_free_bytes=min_free_bytes,
        tensor_parallel=tensor_parallel,
        absent_is_unknown=absent_is_unknown,
    )
    report["results"].extend(extra)
    report.update(checkpoint=path, hashed=hashed)
    return report


def _manifest(path: str, manifest: str) -> Tuple[Optional[Dict[str, Any]], List[checks.Result]]:
    where = os.path.join(path, manifest)
    raw, problem = checkpoint_dir.read_bytes(where)
    if raw is None:
        reason, message = "manifest_missing", f"cannot read the manifest {where}: {problem}"
    else:
        try:
            return checkpoint.parse_manifest(raw, where), []
        except UsageError as error:
            reason, message = error.reason, error.message
    fix = "correct the manifest's path or write it again"
    return None, [checks.result("checkpoint_manifest", checks.FAIL, reason, message, fix)]


def _originals(facts: Dict[str, Any], settings: List[Dict[str, Any]]) -> Dict[str, Dict[str, Any]]:
    originals = {}
    for name in checkpoint.edited_files(facts):
        original, _ = checkpoint_dir.read_bytes(os.path.join(facts["path"], name + checkpoint.BACKUP_SUFFIX))
        current, _ = checkpoint_dir.read_bytes(os.path.join(facts["path"], name))
        if original is not None and current is not None:
            wanted = [item for item in settings if item["file"] == name]
            originals[name] = {
                "sha256": hashlib.sha256(original).hexdigest(),
                "as_edited": checkpoint.as_edited(original, current, wanted),
            }
    return originals


def _hash(
    facts: Dict[str, Any], sidecars: List[Dict[str, Any]], hash_policy: str, state: str, remember: bool
) -> Tuple[int, str]:
    """Fill ``facts["digests"]`` and remember each digest as soon as it is known.

    :returns: how many files were read, and why the digests could not be remembered (empty: they were).
    """
    path = facts["path"]
    remembered = checkpoint_dir.load_remembered(state)
    due, facts["digests"] = checkpoint.due_for_hashing(facts, remembered, sidecars, hash_policy)
    listed = facts["manifest"]["files"] if facts["manifest"] else {}
    problems: List[str] = []

    def done(name: str, digest: hashing.Digest) -> None:
        facts["digests"][name] = {"sha256": digest.sha256, "error": digest.error, "remembered": False}
        if not remember or problems or name not in listed or digest.stamp is None:
            return
        size, mtime_ns, inode = digest.stamp
        remembered[name] = {"sha256": digest.sha256, "size": size, "mtime_ns": mtime_ns, "inode": inode}
        try:
            checkpoint_dir.save_remembered(state, path, remembered)
        except OSError as error:
            problems.append(error.strerror or str(error))

    hashing.hash_files([(name, os.path.join(path, name)) for name in due], done=done)
    return len(due), "".join(problems)

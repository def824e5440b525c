"""Rules over a checkpoint directory: which files it must have, how large they must be, what a manifest says of them.

Pure functions over the facts that :mod:`.facts.checkpoint_dir` reads. Nothing here opens a file.

The shape of the facts::

    {"path": "/models/x", "state": "directory|absent|not_a_directory|unreadable", "problem": "",
     "files": {name: {"state": "file|absent|dangling|other|unreadable", "size": bytes, "mtime_ns": n, "inode": n}},
     "documents": {name: {"value": parsed, "bom": bool} | {"problem": "…"}},
     "manifest": null | {"revision": null | str, "files": {name: {"sha256": str, "size": null | int}}, "malformed": []},
     "digests": {name: {"sha256": "…", "error": "", "remembered": bool}},
     "originals": {name: {"sha256": str, "as_edited": null | bool}},
     "access": null | {"user": "vllm", "problem": "", "unreadable": [names]},
     "free": null | {"path": "/models", "bytes": null | n}}

A name is relative to the checkpoint, or absolute for a sidecar that lives elsewhere. ``originals`` are those
of edited files; ``as_edited`` says whether the file is its original plus the profile's settings, null without settings.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from . import checks, json_edit, sums
from .errors import FleetError, UsageError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
#: What the first original of an edited file is called.
BACKUP_SUFFIX = ".vllm-fleet-orig"

_SHARD = re.compile(r".*-(\d{5,})-of-(\d{5,})\.safetensors\Z")
#: What an engine opens in a checkpoint directory, besides what the index names.
_LOADED = (".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken", ".py")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")

#: The shortest header entry of a tensor, besides its name: ``"":{"dtype":"F8","shape":[],"data_offsets":[0,0]},``
_MIN_TENSOR_HEADER = 44
#: A generous header entry besides the name: eight dimensions and two 15-digit offsets.
_MAX_TENSOR_HEADER = 256
#: What free text a shard's ``__metadata__`` may hold before the size is called odd (bytes).
_MAX_METADATA = 1024 * 1024

DOWNLOAD_AGAIN = "download the checkpoint again; the hub's client keeps the files that are whole"


class Weights(NamedTuple):
    """The weight files that a checkpoint names.

    ``tensors``: shard -> count of its tensors and bytes of their names, empty without an index. ``total_size``: the
    bytes of all tensors as the index states them, or ``None``.
    """

    shards: List[str]
    tensors: Dict[str, Tuple[int, int]]
    total_size: Optional[int]


def lookup(config: Any, name: str) -> Any:
    """Return a model setting from ``text_config`` when it is there, else from the top level, else ``None``.

    Multimodal checkpoints nest the language model's settings, text-only ones do not; both are valid.
    """
    if not isinstance(config, dict):
        return None
    nested = config.get("text_config")
    if isinstance(nested, dict) and name in nested:
        return nested[name]
    return config.get(name)


def parse_manifest(raw: bytes, source: str) -> Dict[str, Any]:
    """Read a manifest: JSON ``{"revision": "…", "files": {name: {"sha256": "…", "size": n}}}`` or sha256sum lines.

    ``revision`` and ``size`` (bytes) may be left out. A file whose text starts with ``{`` is taken as JSON.

    :raises UsageError: ``bad_manifest`` when it has neither form.
    """
    entries: Dict[str, Dict[str, Any]] = {}
    malformed: List[str] = []
    revision = None
    if raw.lstrip()[:1] == b"{":
        try:
            document = json.loads(raw.decode("utf-8"))
            revision = document.get("revision")
            listed = document["files"]
            for name, entry in listed.items():
                digest, size = str(entry["sha256"]).lower(), entry.get("size")
                if _SHA256.match(digest) and (size is None or (isinstance(size, int) and size >= 0)):
                    entries[name] = {"sha256": digest, "size": size}
                else:
                    malformed.append(f"the entry of {sums.printable(name)} has no valid sha256 or size")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError("bad_manifest", f"the manifest {source} is not {{'files': {{…}}}}: {error!r}") from None
    else:
        parsed = sums.parse(raw)
        malformed = list(parsed.malformed)
        entries = {_plain(name): {"sha256": digest, "size": None} for name, digest in parsed.entries.items()}
    for name in list(entries):
        if _leaves_directory(name):
            malformed.append(f"{sums.printable(name)} leads out of the checkpoint")
            del entries[name]
    return {"revision": revision, "files": entries, "malformed": malformed}


def _plain(name: str) -> str:
    return name[2:] if name.startswith("./") else name


def _leaves_directory(name: str) -> bool:
    return not name or name.startswith("/") or "\0" in name or ".." in name.split("/")


def named_files(facts: Dict[str, Any], sidecars: List[Dict[str, Any]]) -> Set[str]:
    """Return every file that the index, the manifest or the sidecars name: what the adapter must look at."""
    names = {str(item["path"]) for item in sidecars}
    names.update(weights(facts)[0].shards)
    if facts.get("manifest"):
        names.update(facts["manifest"]["files"])
    return names


def read_by_engine(facts: Dict[str, Any], sidecars: List[Dict[str, Any]]) -> List[str]:
    """Return the files that the service user must be able to read: named ones, and what engines load by suffix."""
    names = named_files(facts, sidecars)
    names.update(name for name in facts["files"] if name.endswith(_LOADED) and not name.startswith("."))
    return sorted(name for name in names if facts["files"].get(name, {}).get("state") in ("file", "unreadable"))


def due_for_hashing(
    facts: Dict[str, Any], remembered: Dict[str, Dict[str, Any]], sidecars: List[Dict[str, Any]], hashing: str
) -> Tuple[List[str], Dict[str, Dict[str, Any]]]:
    """Say which files must be read, and give the digests that are still good.

    A digest is good while size, mtime and inode are those of the file that was hashed. Sidecars with a pinned hash are
    small and are always read.

    :param hashing: ``due`` reads what is not remembered, ``again`` reads everything, ``remembered`` reads
        no file of the manifest.
    """
    listed = facts["manifest"]["files"] if facts.get("manifest") else {}
    known: Dict[str, Dict[str, Any]] = {}
    due = [str(item["path"]) for item in sidecars if item.get("sha256")]
    for name, expected in listed.items():
        found = facts["files"].get(name, {})
        if found.get("state") != "file" or name in due or name in facts["originals"]:
            continue
        if expected["size"] is not None and expected["size"] != found["size"]:
            continue  # already wrong; reading gigabytes would not change that
        memory = remembered.get(name, {})
        same = all(memory.get(key) == found.get(key) for key in ("size", "mtime_ns", "inode"))
        if hashing != "again" and same and memory.get("sha256"):
            known[name] = {"sha256": memory["sha256"], "error": "", "remembered": True}
        elif hashing != "remembered":
            due.append(name)
    # the large files first: the last thread then never works alone for long
    return sorted(due, key=lambda name: -int(facts["files"].get(name, {}).get("size") or 0)), known


def edited_files(facts: Dict[str, Any]) -> List[str]:
    """Return the files of the manifest that have a kept original beside them."""
    files = facts["files"]
    return [name for name in facts["manifest"]["files"] if files.get(name + BACKUP_SUFFIX, {}).get("state") == "file"]


def as_edited(original: bytes, current: bytes, settings: List[Dict[str, Any]]) -> Optional[bool]:
    """Say whether ``current`` is ``original`` with exactly the settings made in it; ``None`` when there are none."""
    if not settings:
        return None
    try:
        for item in settings:
            original = json_edit.set_key(original, str(item["key"]), item["value"], force=True).raw
    except FleetError:
        return False
    return original == current


def weights(facts: Dict[str, Any]) -> Tuple[Weights, Optional[checks.Result]]:
    """Find the weight files by the index or, without one, the single file; the result is set when that failed."""
    files, path = facts["files"], facts["path"]
    none = Weights([], {}, None)
    present = sorted(name for name in files if name.endswith(".safetensors") and "/" not in name)
    if INDEX not in files:
        if SINGLE in present:
            return Weights([SINGLE], {}, None), None
        numbered = [match for match in map(_SHARD.match, present) if match]
        if len(present) == 1 and (not numbered or int(numbered[0].group(2)) == 1):
            return Weights(present, {}, None), None
        what = f"{len(present)} safetensors files" if present else "no safetensors file"
        reason = "index_missing" if present else "weights_missing"
        return none, checks.result(
            "checkpoint_index", checks.FAIL, reason, f"{path} has {what} and no {INDEX}", DOWNLOAD_AGAIN
        )
    document = facts["documents"].get(INDEX, {"problem": "it was not read"})

    def invalid(why: str) -> Tuple[Weights, checks.Result]:
        message = f"{path}/{INDEX} is unusable: {why}"
        return none, checks.result("checkpoint_index", checks.FAIL, "index_invalid", message, DOWNLOAD_AGAIN)

    if "problem" in document:
        return invalid(document["problem"])
    index = document["value"]
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return invalid("it has no weight_map")
    tensors: Dict[str, Tuple[int, int]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or _leaves_directory(shard):
            return invalid(f"{sums.printable(tensor)} is in {shard!r}, which is no file of the checkpoint")
        count, length = tensors.get(shard, (0, 0))
        tensors[shard] = (count + 1, length + len(tensor.encode("utf-8", "surrogatepass")))
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():
        total = int(total)  # some writers put 1.2e10 here
    if not isinstance(total, int) or isinstance(total, bool) or total < 0:
        total = None
    return Weights(sorted(tensors), tensors, total), None


def check_weights(facts: Dict[str, Any]) -> List[checks.Result]:
    """Index or single file, then every shard: present, a regular file, and of a size that can be right.

    Sizes are judged without opening a shard. The exact size comes from the manifest (:func:`check_manifest`). Otherwise
    a shard must hold at least the header that its tensors in the index need (a Git LFS pointer or an empty file does
    not), and all shards together at least the index's ``total_size``; clearly more than that is a warning.
    """
    found, problem = weights(facts)
    if problem is not None:
        return [problem]
    path, files = facts["path"], facts["files"]
    results = [
        checks.result("checkpoint_index", checks.PASS, "index_ok", f"{path} names {len(found.shards)} weight files")
    ]
    bad = [name for name in found.shards if files.get(name, {}).get("state") != "file"]
    absent = [name for name in bad if files.get(name, {}).get("state", "absent") in ("absent", "dangling")]
    if absent:
        detail = f"{len(absent)} of {len(found.shards)} weight files are missing in {path}: {_names(absent)}"
        dangling = [name for name in absent if files.get(name, {}).get("state") == "dangling"]
        if dangling:
            detail += f" ({len(dangling)} of them are links whose target is gone)"
        results.append(checks.result("checkpoint_shards", checks.FAIL, "shards_missing", detail, DOWNLOAD_AGAIN))
    odd = [name for name in bad if name not in absent]
    if odd:
        detail = f"these weight files of {path} are no readable regular files: {_names(odd)}"
        results.append(checks.result("checkpoint_shards", checks.FAIL, "shards_unusable", detail, DOWNLOAD_AGAIN))
    whole = [name for name in found.shards if name not in bad]
    small = []
    for name in whole:
        count, length = found.tensors.get(name, (1, 1))
        least = 8 + 2 + length + count * _MIN_TENSOR_HEADER
        if files[name]["size"] < least:
            small.append(f"{sums.printable(name)} ({files[name]['size']} bytes, at least {least} expected)")
    if small:
        detail = f"{len(small)} weight files of {path} are too small to be whole: {_names(small)}"
        fix = f"{DOWNLOAD_AGAIN} (a file of some 130 bytes is a Git LFS pointer)"
        results.append(checks.result("checkpoint_shards", checks.FAIL, "shards_too_small", detail, fix))
    if not bad and not small:
        results.append(_check_total(path, found, sum(files[name]["size"] for name in whole)))
    return results


def _check_total(path: str, found: Weights, size: int) -> checks.Result:
    count = len(found.shards)
    if found.total_size is None:
        message = f"{count} weight files, {size} bytes; no index states a total to compare with"
        return checks.result("checkpoint_shards", checks.PASS, "shards_present", message)
    if size < found.total_size:
        message = (
            f"the {count} weight files of {path} hold {size} bytes; {INDEX} states {found.total_size} bytes of tensors,"
            f" {found.total_size - size} more"
        )
        fix = f"{DOWNLOAD_AGAIN}; a manifest with sizes tells which file is short"
        return checks.result("checkpoint_shards", checks.FAIL, "shards_too_small", message, fix)
    most = found.total_size + sum(
        8 + _MAX_METADATA + length + tensors * _MAX_TENSOR_HEADER for tensors, length in found.tensors.values()
    )
    if size > most:
        message = (
            f"the {count} weight files of {path} hold {size} bytes; {INDEX} states {found.total_size} bytes of tensors,"
            f" which with headers gives at most {most}"
        )
        fix = "compare the revision of the index with that of the weight files"
        return checks.result("checkpoint_shards", checks.WARN, "shards_larger_than_index", message, fix)
    message = f"{count} weight files, {size} bytes, in line with the index"
    return checks.result("checkpoint_shards", checks.PASS, "shards_present", message)


def check_settings(facts: Dict[str, Any], settings: List[Dict[str, Any]]) -> List[checks.Result]:
    """``config.json`` exists and parses, and each ``{file, key, value}`` that the profile needs is set.

    ``key`` is a dotted path from the top of the file; a copy of it elsewhere does not count.
    """
    results = []
    path = facts["path"]
    for name in sorted({CONFIG} | {str(item["file"]) for item in settings}):
        document = facts["documents"].get(name)
        if document is None:
            message = f"{path} has no {name}"
            results.append(checks.result("checkpoint_config", checks.FAIL, "config_missing", message, DOWNLOAD_AGAIN))
        elif "problem" in document or not isinstance(document["value"], dict):
            why = document.get("problem", "it holds no JSON object")
            message = f"{path}/{name} is unusable: {why}"
            results.append(checks.result("checkpoint_config", checks.FAIL, "config_invalid", message, DOWNLOAD_AGAIN))
        else:
            if document.get("bom"):
                message = f"{path}/{name} starts with a byte order mark, which Python's JSON reader refuses"
                fix = f"sed -i '1s/^\\xef\\xbb\\xbf//' {path}/{name}"
                results.append(checks.result("checkpoint_config", checks.WARN, "config_has_bom", message, fix))
            wanted = [item for item in settings if item["file"] == name]
            results.extend(_check_setting(path, name, document["value"], item) for item in wanted)
    if not results:
        message = f"{path}/{CONFIG} is a JSON object"
        results.append(checks.result("checkpoint_config", checks.PASS, "config_ok", message))
    return results


def _check_setting(path: str, name: str, config: Any, item: Dict[str, Any]) -> checks.Result:
    key, value = str(item["key"]), item["value"]
    at = config
    for part in key.split("."):
        if not isinstance(at, dict) or part not in at:
            at = None
            reason, found = "setting_missing", "is not set"
            break
        at = at[part]
    else:
        if type(at) is type(value) and at == value:
            message = f"{name}: {key} is {json.dumps(value)}"
            return checks.result("checkpoint_config", checks.PASS, "setting_ok", message)
        reason, found = "setting_differs", f"is {json.dumps(at)[:80]}"
    message = f"{path}/{name}: {key} {found}, expected {json.dumps(value)}"
    fix = edit_command(path, name, key, value)
    return checks.result("checkpoint_config", checks.FAIL, reason, message, fix)


def edit_command(path: str, name: str, key: str, value: Any) -> str:
    """Return the shell command that sets ``key`` in ``path/name``."""
    words = ["vllm-fleet", "checkpoint-config", path]
    words += ["--set", f"{key}={value}"] if isinstance(value, str) else ["--set-json", f"{key}={json.dumps(value)}"]
    if name != CONFIG:
        words += ["--file", name]
    return " ".join(shlex.quote(word) for word in words)


def check_tensor_parallel(facts: Dict[str, Any], tensor_parallel: int) -> checks.Result:
    """The attention heads can be split evenly over ``tensor_parallel`` GPUs (read with :func:`lookup`)."""
    heads = lookup(facts["documents"].get(CONFIG, {}).get("value"), "num_attention_heads")
    if not isinstance(heads, int) or isinstance(heads, bool):
        message = f"{facts['path']}/{CONFIG} states no num_attention_heads, neither in text_config nor at the top"
        return checks.result("checkpoint_heads", checks.UNKNOWN, "heads_unknown", message)
    if heads % tensor_parallel:
        message = f"{heads} attention heads of {facts['path']} cannot be split over {tensor_parallel} GPUs"
        fix = "choose a tensor-parallel size that divides the number of heads"
        return checks.result("checkpoint_heads", checks.FAIL, "heads_not_divisible", message, fix)
    message = f"{heads} attention heads over {tensor_parallel} GPUs"
    return checks.result("checkpoint_heads", checks.PASS, "heads_divisible", message)


def check_sidecars(facts: Dict[str, Any], sidecars: List[Dict[str, Any]]) -> List[checks.Result]:
    """Each required ``{path, sha256}`` is a regular file, with that hash when one is pinned."""
    results = []
    for item in sidecars:
        name, pinned = str(item["path"]), item.get("sha256")
        where = sums.printable(name if name.startswith("/") else f"{facts['path']}/{name}")
        state = facts["files"].get(name, {}).get("state", "absent")
        digest = facts["digests"].get(name, {})
        fix = "put the file that belongs to this checkpoint there; one of another checkpoint gives wrong answers"
        if state in ("absent", "dangling"):
            entry = (checks.FAIL, "sidecar_missing", f"the required file {where} is missing")
        elif state != "file" or digest.get("error"):
            why = digest.get("error") or "not a readable regular file"
            entry = (checks.FAIL, "sidecar_unreadable", f"the required file {where} is unusable: {why}")
        elif pinned and digest.get("sha256") != str(pinned).lower():
            found = digest.get("sha256", "unknown")
            entry = (checks.FAIL, "sidecar_changed", f"{where} has sha256 {found}, expected {pinned}")
        else:
            entry = (checks.PASS, "sidecar_ok", f"{where} is there" + (" with the pinned sha256" if pinned else ""))
        results.append(checks.result("checkpoint_sidecars", *entry, fix="" if entry[0] == checks.PASS else fix))
    return results


def check_manifest(facts: Dict[str, Any]) -> List[checks.Result]:
    """Every file of the manifest is there with its size and SHA-256; one result per kind of problem, by name.

    For a file that was edited, the kept original must be the manifest's, and the file that original plus the settings.
    """
    manifest = facts["manifest"]
    path = facts["path"]
    missing, sizes, changed, unreadable, unverified, edited = [], [], [], [], [], []
    for name in sorted(manifest["files"]):
        expected = manifest["files"][name]
        found = facts["files"].get(name, {"state": "absent"})
        digest = facts["digests"].get(name)
        shown = sums.printable(name)
        if found["state"] in ("absent", "dangling"):
            missing.append(shown)
        elif found["state"] != "file":
            unreadable.append(shown)
        elif name in facts["originals"]:
            original = facts["originals"][name]
            if original["sha256"] != expected["sha256"]:
                changed.append(f"{shown} (by its kept original)")
            elif original["as_edited"] is False:
                changed.append(f"{shown} (not the original plus the profile's settings)")
            elif original["as_edited"] is None:
                edited.append(shown)
        elif expected["size"] is not None and found["size"] != expected["size"]:
            sizes.append(f"{shown} ({found['size']} bytes, expected {expected['size']})")
        elif digest is None:
            unverified.append(shown)
        elif digest["error"]:
            unreadable.append(f"{shown} ({digest['error']})")
        elif digest["sha256"] != expected["sha256"]:
            changed.append(f"{shown} ({digest['sha256'][:12]}…, expected {expected['sha256'][:12]}…)")
    revision = f" (revision {manifest['revision']})" if manifest["revision"] else ""
    again = f"vllm-fleet checkpoint {path} --manifest FILE"
    kinds = [
        (checks.FAIL, "manifest_missing_files", "are missing", missing, DOWNLOAD_AGAIN),
        (checks.FAIL, "manifest_wrong_size", "have the wrong size", sizes, DOWNLOAD_AGAIN),
        (checks.FAIL, "manifest_changed", "differ from the manifest", changed, DOWNLOAD_AGAIN),
        (checks.FAIL, "manifest_unreadable", "cannot be read", unreadable, "correct the permissions or the disk"),
        (checks.FAIL, "manifest_malformed", "lines are malformed", manifest["malformed"], "write the manifest again"),
        (
            checks.WARN,
            "manifest_edited",
            "were edited, with an original as in the manifest",
            edited,
            "name the settings",
        ),
        (checks.UNKNOWN, "manifest_not_verified", "were not hashed since they changed", unverified, again),
    ]
    results = []
    for status, reason, verb, names, fix in kinds:
        if names:
            message = f"{path}{revision}: {len(names)} {verb}: {_names(names)}"
            results.append(checks.result("checkpoint_manifest", status, reason, message, fix))
    if not manifest["files"]:
        message = f"the manifest of {path} lists no file"
        results.append(checks.result("checkpoint_manifest", checks.FAIL, "manifest_empty", message, "write it again"))
    if not results:
        remembered = sum(1 for digest in facts["digests"].values() if digest["remembered"])
        message = f"{len(manifest['files'])} files as in the manifest{revision}, {remembered} of them remembered"
        results.append(checks.result("checkpoint_manifest", checks.PASS, "manifest_ok", message))
    return results


def check_access(facts: Dict[str, Any]) -> checks.Result:
    """The service user can read the checkpoint."""
    access, path = facts["access"], facts["path"]
    user = access["user"]
    if access["problem"] == "unknown_user":
        message = f"the user {user} does not exist, so it cannot read {path}"
        return checks.result("checkpoint_readable", checks.FAIL, "user_unknown", message, f"create the user {user}")
    if access["problem"]:
        message = f"whether {user} can read {path} was not tested: {access['problem']}"
        return checks.result("checkpoint_readable", checks.UNKNOWN, "readability_unknown", message, "run this as root")
    if access["unreadable"]:
        message = f"the user {user} cannot read everything in {path}: {_names(sorted(access['unreadable']))}"
        fix = f"chmod -R a+rX {path}, and a+x on the directories above it and on those that its links lead to"
        return checks.result("checkpoint_readable", checks.FAIL, "not_readable_by_user", message, fix)
    return checks.result("checkpoint_readable", checks.PASS, "readable_by_user", f"{user} can read {path}")


def check_free_space(facts: Dict[str, Any], min_free_bytes: int) -> checks.Result:
    """The file system of the given path has ``min_free_bytes`` left for an ordinary user."""
    free = facts["free"]
    if free["bytes"] is None:
        message = f"the free space of {free['path']} could not be read"
        return checks.result("checkpoint_free_space", checks.UNKNOWN, "free_space_unknown", message)
    message = f"{free['path']} has {free['bytes']} bytes free, {min_free_bytes} expected"
    if free["bytes"] < min_free_bytes:
        fix = "free some space or use a larger disk"
        return checks.result("checkpoint_free_space", checks.FAIL, "free_space_low", message, fix)
    return checks.result("checkpoint_free_space", checks.PASS, "free_space_ok", message)


def evaluate(
    facts: Dict[str, Any],
    sidecars: List[Dict[str, Any]],
    settings: List[Dict[str, Any]],
    *,
    min_free_bytes: Optional[int] = None,
    tensor_parallel: Optional[int] = None,
    absent_is_unknown: bool = False,
) -> Dict[str, Any]:
    """Run every check that the facts allow.

    :param absent_is_unknown: a missing directory or user is ``unknown`` instead of a fail: a dry run on a fresh box,
        where an earlier step would have made it.
    :returns: ``{"results": […], "shards": [{"name", "size"}], "size": bytes of the shards that are there}``; a shard
        that is missing has ``"size": null``.
    """
    results: List[checks.Result] = []
    shards: List[Dict[str, Any]] = []
    path = facts["path"]
    if facts["state"] == "directory":
        results.extend(check_weights(facts))
        results.extend(check_settings(facts, settings))
        if tensor_parallel is not None:
            results.append(check_tensor_parallel(facts, tensor_parallel))
        results.extend(check_sidecars(facts, sidecars))
        if facts["manifest"] is not None:
            results.extend(check_manifest(facts))
        for name in weights(facts)[0].shards:
            entry = facts["files"].get(name, {})
            shards.append({"name": name, "size": entry["size"] if entry.get("state") == "file" else None})
        if facts["access"] is not None:
            access = check_access(facts)
            if absent_is_unknown and access["reason"] == "user_unknown":
                access = dict(access, status=checks.UNKNOWN)
            results.append(access)
    elif facts["state"] == "absent":
        status = checks.UNKNOWN if absent_is_unknown else checks.FAIL
        message = f"no checkpoint directory at {path}"
        fix = "correct the path, mount the disk, or download the checkpoint"
        results.append(checks.result("checkpoint_path", status, "checkpoint_absent", message, fix))
    else:
        reason = "checkpoint_" + facts["state"]
        message = f"{path} is no readable directory: {facts['problem']}"
        fix = "correct the path or its permissions"
        results.append(checks.result("checkpoint_path", checks.FAIL, reason, message, fix))
    if min_free_bytes is not None and facts["free"] is not None:
        results.append(check_free_space(facts, min_free_bytes))
    return {"results": results, "shards": shards, "size": sum(shard["size"] or 0 for shard in shards)}


def _names(names: List[str], most: int = 10) -> str:
    text = ", ".join(sums.printable(name) for name in names[:most])
    return text + (f" and {len(names) - most} more" if len(names) > most else "")

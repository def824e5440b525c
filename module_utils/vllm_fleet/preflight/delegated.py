"""Checks that other parts of the package make, listed so that a lane can name them and the documentation shows them."""

from __future__ import annotations

from typing import Dict, NamedTuple

from .registry import Code, fail, ok, unknown, warn


class Delegated(NamedTuple):
    """A check whose results come from another module of the package, ready-made."""

    about: str
    module: str
    codes: Dict[str, Code]


DELEGATED: Dict[str, Delegated] = {
    "products": Delegated(
        "The build products of the engine's tree are the recorded ones, file by file. They are read at each start,"
        " unless the tree is on a read-only mount and the engine says ``trust_read_only``.",
        "products",
        {
            "products_ok": ok("every recorded file has its recorded hash"),
            "read_only_mount": ok("the tree is on a read-only mount, which the engine trusts"),
            "unrecorded": fail("there is no complete record: both the marker and the sums are needed", absent=True),
            "engine_differs": fail("the tree holds the products of another engine"),
            "malformed_line": fail("lines of the record are malformed"),
            "escapes_tree": fail("a product is a link that leads out of the tree"),
            "missing": fail("recorded files are missing"),
            "unreadable": fail("recorded files can't be read"),
            "changed": fail("recorded files have another hash"),
            "extra": warn("files in product directories that the record does not know"),
            "paths_unknown": unknown("the record does not say where products lie, so added files are not noticed"),
        },
    ),
    "checkpoint_path": Delegated(
        "The checkpoint directory is there. The other checks of it run only then.",
        "checkpoint",
        {
            "checkpoint_absent": fail("there is no such directory", absent=True),
            "checkpoint_not_a_directory": fail("the path is something else than a directory"),
            "checkpoint_unreadable": fail("the directory can't be read"),
        },
    ),
    "checkpoint_index": Delegated(
        "The index, or the single weight file, is there and names every shard.",
        "checkpoint",
        {
            "index_ok": ok("the weight files are known"),
            "index_missing": fail("several weight files and no index", absent=True),
            "weights_missing": fail("no weight file and no index", absent=True),
            "index_invalid": fail("the index is no JSON object with a weight map"),
        },
    ),
    "checkpoint_shards": Delegated(
        "Every shard is there, a regular file, and of a size that can be right. No weight is opened.",
        "checkpoint",
        {
            "shards_present": ok("all there, in line with the index"),
            "shards_missing": fail("shards that the index names are missing", absent=True),
            "shards_unusable": fail("shards that are no readable regular files"),
            "shards_too_small": fail("shards too small to be whole, such as an unfinished download"),
            "shards_larger_than_index": warn("more bytes than the index accounts for"),
        },
    ),
    "checkpoint_config": Delegated(
        "``config.json`` parses and holds the values that the profile needs, each at its own place, ``text_config``"
        " included.",
        "checkpoint",
        {
            "config_ok": ok("the file is a JSON object and nothing more was asked"),
            "setting_ok": ok("the value is the wanted one"),
            "config_missing": fail("the file is missing", absent=True),
            "config_invalid": fail("the file is no JSON object"),
            "config_has_bom": warn("the file starts with a byte order mark, which some readers refuse"),
            "setting_missing": fail("the key is not set", absent=True),
            "setting_differs": fail("the key has another value"),
        },
    ),
    "checkpoint_heads": Delegated(
        "The attention heads, read from ``text_config`` or the top level, divide by the tensor-parallel size.",
        "checkpoint",
        {
            "heads_divisible": ok("they divide"),
            "heads_not_divisible": fail("they do not: the engine would refuse"),
            "heads_unknown": unknown("the configuration states no number of heads"),
        },
    ),
    "checkpoint_sidecars": Delegated(
        "Required files beside the weights, such as KV scales, are there, with the pinned hash if there is one.",
        "checkpoint",
        {
            "sidecar_ok": ok("there, and as pinned"),
            "sidecar_missing": fail("missing: the engine would run with scales of 1.0", absent=True),
            "sidecar_unreadable": fail("no readable regular file"),
            "sidecar_changed": fail("another hash than the pinned one: the file belongs to another checkpoint"),
        },
    ),
    "checkpoint_manifest": Delegated(
        "The files of the manifest have their hashes, remembered by size, time and inode. Nothing is hashed here: a"
        " start never reads the weights again.",
        "checkpoint",
        {
            "manifest_ok": ok("every file as listed"),
            "digests_not_remembered": warn("the state file could not be written; the next run reads the files again"),
            "manifest_missing": fail("the manifest can't be read", absent=True),
            "bad_manifest": fail("the manifest has no known form"),
            "manifest_empty": fail("the manifest lists nothing"),
            "manifest_missing_files": fail("listed files are missing"),
            "manifest_wrong_size": fail("listed files have another size"),
            "manifest_changed": fail("listed files have another hash"),
            "manifest_unreadable": fail("listed files can't be read"),
            "manifest_malformed": fail("lines that are no entries"),
            "manifest_not_verified": unknown("files changed since they were hashed, or never were", absent=True),
        },
    ),
    "checkpoint_readable": Delegated(
        "The service user can read the checkpoint.",
        "checkpoint",
        {
            "readable_by_user": ok("every file"),
            "not_readable_by_user": fail("some file, or a directory on the way"),
            "user_unknown": fail("the user does not exist", absent=True),
            "readability_unknown": unknown("only root can ask for another user"),
        },
    ),
}

"""Checks that other parts of the package make, listed so that a lane can name them and the documentation shows them."""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple


class Delegated(NamedTuple):
    """A check of another module: what it is about, and the reason codes that a dry run on a fresh box excuses."""

    about: str
    module: str
    absent: Tuple[str, ...] = ()


DELEGATED: Dict[str, Delegated] = {
    "checkpoint_path": Delegated("The checkpoint directory is there.", "checkpoint", ("checkpoint_absent",)),
    "checkpoint_index": Delegated(
        "The index, or the single weight file, is there and names every shard.",
        "checkpoint",
        ("index_missing", "weights_missing"),
    ),
    "checkpoint_shards": Delegated(
        "Every shard is there, a regular file, and of a size that can be right; no weight is opened.",
        "checkpoint",
        ("shards_missing",),
    ),
    "checkpoint_config": Delegated(
        "config.json parses and holds the values that the profile needs, each at its own place (text_config included).",
        "checkpoint",
        ("config_missing", "setting_missing", "setting_differs"),
    ),
    "checkpoint_heads": Delegated(
        "The attention heads, read from text_config or the top level, divide by the tensor-parallel size.", "checkpoint"
    ),
    "checkpoint_sidecars": Delegated(
        "Required files beside the weights are there, with the pinned hash.", "checkpoint", ("sidecar_missing",)
    ),
    "checkpoint_manifest": Delegated(
        "The files of the manifest have their hashes, remembered by size, time and inode; nothing is read again here.",
        "checkpoint",
        ("manifest_missing",),
    ),
    "checkpoint_readable": Delegated("The service user can read the checkpoint.", "checkpoint", ("user_unknown",)),
    "products": Delegated(
        "The build products of the engine's tree are the recorded ones, file by file.",
        "products",
        ("tree_missing", "products_unrecorded"),
    ),
}

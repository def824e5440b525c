"""What an engine is built from, as one digest: equal inputs give the same archive, other inputs need another id."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, Mapping

#: Counts up when the way of building changes so that an old archive would be wrong.
RECIPE = 2


def wheel_inputs(engine: Mapping[str, Any], lock_path: str, lock_text: str) -> Dict[str, Any]:
    """Return what the role needs to build or install a wheel-route engine.

    :param engine: the catalog entry.
    :returns: ``{id, version, python_version, interpreter, lock, digest}``.
    """
    recipe = {"recipe": RECIPE, "id": engine["id"], "version": engine["version"], "python": engine["python_version"]}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode() + b"\n" + lock_text.encode())
    return {
        "id": engine["id"],
        "version": engine["version"],
        "python_version": engine["python_version"],
        "interpreter": f"/usr/bin/python{engine['python_version']}",
        "lock": lock_path,
        "digest": digest.hexdigest()[:16],
    }

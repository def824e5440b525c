"""Run an Ansible module in this process, where a test can put its state below a temporary root."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import ansible.module_utils
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


class Exit(Exception):
    """What ends a module."""


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of that name from ``library/``."""
    monkeypatch.setattr(
        ansible.module_utils, "__path__", [*ansible.module_utils.__path__, str(REPOSITORY / "module_utils")]
    )
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f"library/{name}.py")
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def run(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch, check: bool = False, **params: Any) -> dict[str, Any]:
    """Run it and return its result, with ``failed`` when it failed and ``warned`` when it warned."""
    outcome: dict[str, Any] = {}

    class Module:
        def __init__(self, argument_spec: dict[str, Any], supports_check_mode: bool) -> None:
            assert supports_check_mode
            self.check_mode = check
            self.params = {name: entry.get("default") for name, entry in argument_spec.items()}
            self.params.update(params)

        def warn(self, text: str) -> None:
            outcome.setdefault("warned", []).append(text)

        def exit_json(self, **answer: Any) -> None:
            outcome.update(answer)
            raise Exit

        def fail_json(self, **answer: Any) -> None:
            outcome.update(answer, failed=True)
            raise Exit

    monkeypatch.setattr(loaded, "AnsibleModule", Module)
    with pytest.raises(Exit):
        loaded.main()
    return outcome

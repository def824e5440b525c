"""Rules that every role keeps: documented defaults, variables that carry the role's name, pinned collections."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if (path / "tasks").is_dir())
MODULES = {path.stem for path in (ROOT / "library").glob("*.py")}


def load(path: Path) -> Any:
    """Parse a YAML file; a missing one is None."""
    return yaml.safe_load(path.read_text()) if path.exists() else None


def defaults_of(role: str) -> dict[str, Any]:
    return load(ROOT / "roles" / role / "defaults" / "main.yml") or {}


def options_of(role: str) -> dict[str, Any]:
    specs = load(ROOT / "roles" / role / "meta" / "argument_specs.yml")
    return specs["argument_specs"]["main"].get("options", {})


def yaml_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.yml"))]


def walk(node: Any) -> Any:
    """Yield every mapping below a YAML node."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)


def test_the_roles_of_the_design_are_there():
    assert {"lane_plan", "toolchain", "common", "engine", "checkpoint", "serve"} <= set(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_defaults_and_argument_specs_agree(role):
    defaults, options = defaults_of(role), options_of(role)
    optional = {name: option for name, option in options.items() if "default" in option}
    assert {name: option["default"] for name, option in optional.items()} == defaults
    for name, option in options.items():
        assert option.get("description"), f"{name} has no description"
        assert option.get("type"), f"{name} has no type"
        assert "default" in option or option.get("required"), f"{name} has no default and is not required"


@pytest.mark.parametrize("role", ROLES)
def test_every_default_has_a_comment(role):
    path = ROOT / "roles" / role / "defaults" / "main.yml"
    lines = path.read_text().splitlines() if path.exists() else []
    for name in defaults_of(role):
        index = next(number for number, line in enumerate(lines) if line.startswith(f"{name}:"))
        assert lines[index - 1].startswith("# "), f"{name} has no comment above it"


@pytest.mark.parametrize("role", ROLES)
def test_variables_carry_the_role(role):
    names = set(defaults_of(role)) | set(options_of(role))
    assert [name for name in names if not name.startswith(f"{role}_")] == []
    internal = set(load(ROOT / "roles" / role / "vars" / "main.yml") or {})
    for path in sorted((ROOT / "roles" / role).rglob("*.yml")):
        for node in walk(load(path)):
            internal |= {node[key] for key in ("register", "loop_var") if isinstance(node.get(key), str)}
            # "vars" of a task may also set Ansible's own variables, such as the interpreter of a delegated task.
            own = node.get("vars") if isinstance(node.get("vars"), dict) else {}
            # One that runs another role gives that role its variables.
            other = (node.get("ansible.builtin.include_role") or {"name": "-"})["name"] + "_"
            internal |= {name for name in own if not name.startswith(("ansible_", other))}
            for module in ("set_fact", "ansible.builtin.set_fact"):
                facts = set(node.get(module) or {}) - {"cacheable"}
                assert [name for name in facts if not name.startswith((f"{role}_", f"__{role}_"))] == []
    assert [name for name in internal if not name.startswith(f"__{role}_")] == []


@pytest.mark.parametrize("role", ROLES)
def test_every_variable_of_a_role_is_used_by_it(role):
    text = "".join(
        path.read_text(errors="replace")
        for folder in ("tasks", "vars", "templates", "files", "defaults", "handlers")
        for path in (ROOT / "roles" / role / folder).rglob("*")
        if path.is_file()
    )
    for name in [*defaults_of(role), *options_of(role)]:
        assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} is declared and never used"


# --- collections ----------------------------------------------------------------------------------------------------


#: a mapping with one of these runs no module: it holds tasks, or says which tasks of a role to run
NO_TASK = {"block", "rescue", "always", "tasks_from"}
FQCN = re.compile(r"\b((?:ansible|community|[a-z][a-z0-9_]*)\.[a-z][a-z0-9_]*)\.[a-z][a-z0-9_]*\b")


def used_collections() -> set[str]:
    """Return every collection that a task, lookup, filter or test of the project names, ``ansible.builtin`` too."""
    found = set()
    for path in [*yaml_files("roles", "playbooks", "molecule", "inventories"), ROOT / "site.yml"]:
        text = path.read_text()
        for node in walk(load(path)):
            found |= {key.rsplit(".", 1)[0] for key in node if isinstance(key, str) and re.fullmatch(FQCN, key)}
        found |= {
            name.rsplit(".", 1)[0] for name in re.findall(r"(?:lookup|query|q)\(\s*'([^']+)'", text) if "." in name
        }
        found |= set(re.findall(r"\|\s*((?:ansible|community)\.[a-z_]+)\.[a-z_]+", text))
    return found


def pinned_collections() -> dict[str, str]:
    wanted = load(ROOT / "requirements.yml")
    return {entry["name"]: entry["version"] for entry in wanted["collections"] or []}


@lru_cache(maxsize=1)
def carried_collections() -> dict[str, str]:
    """Return the versions that the PyPI package ``ansible`` of the environment carries."""
    import ansible_collections

    found = {}
    for folder in ansible_collections.__path__:
        for manifest in Path(folder).glob("*/*/MANIFEST.json"):
            info = json.loads(manifest.read_text())["collection_info"]
            found[f"{info['namespace']}.{info['name']}"] = info["version"]
    return found


def test_the_environment_carries_collections():
    """Otherwise the comparison below compares nothing."""
    assert len(carried_collections()) > 50


def test_the_collections_that_are_used_are_the_ones_that_are_pinned():
    assert used_collections() - {"ansible.builtin"} == set(pinned_collections())


def test_the_pins_are_what_the_environment_carries():
    for name, version in pinned_collections().items():
        assert version == carried_collections()[name]


def test_short_names_are_the_projects_own_modules():
    """A task names a builtin in full; a short name is a file in library/."""
    from ansible.playbook.task import Task

    known = set(Task.fattributes) | {"action", "local_action"}
    for path in yaml_files("roles"):
        if path.parent.name not in ("tasks", "handlers"):
            continue
        for task in (node for node in walk(load(path)) if "name" in node and not NO_TASK & set(node)):
            modules = [key for key in task if key not in known and not key.startswith("with_")]
            if "." not in "".join(modules) and len(modules) == 1:
                assert modules[0] in MODULES, f"{path.relative_to(ROOT)}: {task['name']}"

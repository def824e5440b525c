"""Every module is documented, and its documentation says what its code takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "library").glob("*.py"))
#: modules without code of their own: an action plugin on the controller does the work
ACTIONS = {path.stem for path in (ROOT / "action_plugins").glob("*.py")}

# Runs one module file up to the construction of its AnsibleModule and prints the arguments of that.
SPY = """
import json, sys
import ansible.module_utils.basic as basic

class Seen(Exception):
    pass

def spy(*args, **kwargs):
    raise Seen(json.dumps({"spec": kwargs.get("argument_spec", args[0] if args else None),
                           "check": kwargs.get("supports_check_mode", False)}))

basic.AnsibleModule = spy
for path in sys.argv[1:]:
    scope = {"__name__": "module", "__file__": path}
    exec(compile(open(path).read(), path, "exec"), scope)
    try:
        scope["main"]()
    except Seen as seen:
        print(seen)
"""


@pytest.fixture(scope="module")
def documented() -> dict[str, Any]:
    """Return what ansible-doc reads out of all modules."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-doc")), "--type", "module", "--json", *MODULES],
        capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def taken() -> dict[str, Any]:
    """Return the arguments that each module declares in code."""
    names = [name for name in MODULES if name not in ACTIONS]
    paths = [str(ROOT / "library" / f"{name}.py") for name in names]
    link = "import ansible.module_utils as m; m.__path__.append('module_utils')\n"
    done = subprocess.run(
        [sys.executable, "-c", link + SPY, *paths], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


def differences(options: dict[str, Any], spec: dict[str, Any], where: str) -> list[str]:
    """Return what the documentation and the code say differently, in words."""
    found = [f"{where}{name}: documented, not taken" for name in options if name not in spec]
    found += [f"{where}{name}: taken, not documented" for name in spec if name not in options]
    for name in sorted(set(options) & set(spec)):
        for key, absent in (
            ("type", "str"),
            ("required", False),
            ("default", None),
            ("choices", None),
            ("elements", None),
        ):
            said, done = options[name].get(key, absent), spec[name].get(key, absent)
            if said != done:
                found.append(f"{where}{name}.{key}: documented {said!r}, taken {done!r}")
        if "suboptions" in options[name] or "options" in spec[name]:
            found += differences(options[name].get("suboptions", {}), spec[name].get("options", {}), f"{where}{name}.")
    return found


def test_there_are_modules():
    assert len(MODULES) > 10


@pytest.mark.parametrize("name", MODULES)
def test_the_parts_are_there(documented, name):
    page = documented[name]
    doc = page["doc"]
    for key in ("short_description", "description", "author", "attributes"):
        assert doc.get(key), f"{key} is missing"
    assert doc["attributes"]["check_mode"]["support"] in ("full", "partial", "none")
    examples = yaml.safe_load(page["examples"])
    assert any(name in task for task in examples), "no example uses the module"
    assert page["return"], "RETURN is empty"
    for key, value in page["return"].items():
        assert value.get("description"), key
        assert value.get("type"), key
        assert value.get("returned"), key


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ACTIONS])
def test_documented_options_are_the_ones_that_the_code_takes(documented, taken, name):
    assert differences(documented[name]["doc"].get("options") or {}, taken[name]["spec"], "") == []


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ACTIONS])
def test_every_module_runs_in_check_mode(taken, name):
    assert taken[name]["check"] is True


@pytest.mark.parametrize("name", MODULES)
def test_examples_use_documented_options_only(documented, name):
    options = documented[name]["doc"].get("options") or {}
    for task in yaml.safe_load(documented[name]["examples"]):
        assert set(task.get(name) or {}) <= set(options)

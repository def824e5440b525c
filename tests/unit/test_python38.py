"""What runs on a box runs on Python 3.8 (Ubuntu 20.04, CoreX boxes): all of it is imported or compiled with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import python38

ROOT = Path(__file__).resolve().parents[2]

# Imports every module of the package, then compiles every Ansible module (those import Ansible, which a box gets with
# the module itself). Prints how many there were, so that an empty run can't pass.
PROGRAM = """
import importlib, pathlib, pkgutil, sys
assert sys.version_info[:2] == (3, 8), sys.version
sys.path.insert(0, "module_utils")
import vllm_fleet
names = [item.name for item in pkgutil.walk_packages(vllm_fleet.__path__, "vllm_fleet.")]
names.remove("vllm_fleet.__main__")
for name in names:
    importlib.import_module(name)
paths = sorted(pathlib.Path("library").glob("*.py"))
for path in paths:
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
print(len(names), len(paths))
"""


def test_everything_that_runs_on_a_box_runs_on_python_3_8():
    python = python38.find()
    assert python, python38.MISSING
    done = subprocess.run([python, "-I", "-B", "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    modules, files = map(int, done.stdout.split())
    assert modules == len(list((ROOT / "module_utils" / "vllm_fleet").rglob("*.py"))) - 2
    assert files == len(list((ROOT / "library").glob("*.py")))

"""The start script of the 4x RTX 3090 setup and our rendering hand the same process to the engine.

The script itself runs here, in a sandbox whose tree, venv and toolchain are stubs; the stub engine records its
arguments and environment. What differs on purpose is listed in docs/seed-rtx3090.md and below.
"""

from __future__ import annotations

import hashlib
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_fleet import catalog, import_env, profile, render
from vllm_fleet.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
SEED = ROOT.parent / "shared" / "seeds" / "004_dc0d0194c7a8e830.txt"
PROFILE = "qwen38-flash-next-w4a16-4x3090"

pytestmark = pytest.mark.skipif(not SEED.parent.is_dir(), reason="the seed systems are not beside this checkout")

#: what a shell leaves behind in the environment of what it starts
SHELL = {"PWD", "OLDPWD", "SHLVL", "_"}
#: the script's own knobs stay in its environment; ours become the lane's keys and go no further
KNOBS = set(
    "CKPT MODEL_MOUNT_PATH PORT HOST MODEL_NAME SCALES CACHE_ROOT PLE_HOME GUARD COUNTERS MAX_SEQS MAX_BATCHED_TOKENS "
    "AUTO_TOPO AUTO_TOPO_NCCL AUTO_TOPO_BIND LANE_GPUS LANE_CPUS TOPO_TIMEOUT LOG TREE VENV".split()
)

STUB_ENGINE = """#!{python} -I
import json, sys
block = open("/proc/self/environ").read()  # as it was handed over, before Python adds its own
env = dict(item.split("=", 1) for item in block.split("\\0") if item)
with open({record!r}, "w") as handle:
    json.dump({{"argv": sys.argv, "env": env}}, handle)
"""

STUB_PYTHON = """#!/bin/sh
case "$2" in
  *purelib*) echo {purelib} ;;
  *Python.h*) exit 0 ;;
  *) exec {python} "$@" ;;
esac
"""

#: stands for the selector: hands back the given decision in the script's own grammar
STUB_SELECTOR = """import sys
path = sys.argv[sys.argv.index("--env-out") + 1]
open(path, "w").write({text!r})
"""

DECISION = {
    "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a,GPU-d,GPU-c",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "VLLM_SKIP_P2P_CHECK": "0",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_PROTO": "LL",
}


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class Sandbox:
    """A box on which the script finds everything it asks for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalog = catalog.load(str(ROOT / "catalog"))
        self.paths = profile.engine_paths(
            self.catalog.engine(self.catalog.profile(PROFILE)["engine"]), str(root / "engines")
        )
        self.checkpoint = root / "model"
        self.record = root / "record.json"
        self.tools = root / "tools"
        lines = SEED.read_text(encoding="utf-8").splitlines(keepends=True)
        start = next(number for number, line in enumerate(lines) if line.startswith("#!"))
        self.script = root / "script" / "start.sh"
        executable(self.script, "".join(lines[start:]) + "\n")
        tree, venv, cuda = (Path(self.paths[key]) for key in ("tree", "venv", "cuda_home"))
        (tree / "vllm").mkdir(parents=True)
        (tree / "vllm" / "__init__.py").write_text("")
        digest = hashlib.sha256(b"").hexdigest()
        (tree / ".build-products.sha256").write_text(f"{digest}  vllm/__init__.py\n")
        (tree / ".build-products").write_text("own stub\n")
        executable(venv / "bin" / "vllm", STUB_ENGINE.format(python=sys.executable, record=str(self.record)))
        executable(
            venv / "bin" / "python", STUB_PYTHON.format(purelib=self.paths["site_packages"], python=sys.executable)
        )
        self.toolkit(cuda)
        for tool in ("cc", "c++", "ninja"):
            executable(self.tools / tool, "#!/bin/sh\n")
        executable(self.tools / "nvidia-smi", "#!/bin/sh\necho '| CUDA Version: 13.3 |'\n")
        self.checkpoint.mkdir()
        (self.checkpoint / "config.json").write_text('{"text_config": {"ple_embedding_dtype": "float8_e4m3fn"}}')
        (self.checkpoint / "qsa_kv_scales.json").write_text("{}")
        (root / "other scales.json").write_text("{}")

    def toolkit(self, cuda: Path) -> None:
        executable(cuda / "bin" / "nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
        (cuda / "lib64").mkdir(parents=True)
        (cuda / "lib64" / "libcudart.so").write_text("")

    def selector(self, decision: dict) -> None:
        lines = ["# topo_select v1 status=ok reason=reordered"]
        lines += [f"export {name}={value}" for name, value in decision.items()]
        lines += ["export TOPO_LAUNCH_PREFIX=''", "export TOPO_DECISION_JSON=/x.json"]
        scripts = self.script.parent / "scripts"
        scripts.mkdir(exist_ok=True)
        (scripts / "topo_select.py").write_text(STUB_SELECTOR.format(text="\n".join(lines) + "\n"))

    def seed(self, env: dict, extra: list) -> tuple:
        """Run the script; return (what the engine got or None, what the script said)."""
        self.record.unlink(missing_ok=True)
        base = {
            "PATH": f"{self.tools}:{profile.BASE_PATH}",
            "TREE": self.paths["tree"],
            "VENV": self.paths["venv"],
            "CKPT": str(self.checkpoint),
            "CACHE_ROOT": str(self.root / "cache"),
            "LOG": "",
        }
        done = subprocess.run(
            ["bash", str(self.script), *extra],
            env={**base, **env},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = done.stdout + done.stderr
        return (json.loads(self.record.read_text()) if self.record.exists() else None), said

    def ours(self, lane: dict) -> tuple:
        """Resolve and render the lane; return (rendering, lane)."""
        defaults = {"engines_root": str(self.root / "engines")}
        base = {"name": "main", "profile": PROFILE, "checkpoint": str(self.checkpoint)}
        base["cache_root"] = str(self.root / "cache")
        resolved = profile.resolve({**base, **lane}, self.catalog, defaults)
        return render.render(resolved), resolved

    def expected_env(self, seen: dict) -> dict:
        env = {name: value for name, value in seen.items() if name not in SHELL | KNOBS}
        env["PATH"] = env["PATH"].replace(f"{self.tools}:", "")
        return {name: value for name, value in env.items() if not name.startswith("TOPO_")}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    return Sandbox(tmp_path_factory.mktemp("seed box"))


#: name -> (environment of the script, our lane, extra arguments for both)
CASES = {
    "defaults": ({}, {}, []),
    "one sequence": ({"MAX_SEQS": "1"}, {"max_seqs": 1}, []),
    "two sequences": ({"MAX_SEQS": "2"}, {"max_seqs": "2"}, []),
    "eight sequences": ({"MAX_SEQS": "8"}, {"max_seqs": 8}, []),
    "large chunk": ({"MAX_BATCHED_TOKENS": "4096", "MAX_SEQS": "3"}, {"max_batched_tokens": 4096, "max_seqs": 3}, []),
    "chunk equals sequences": (
        {"MAX_BATCHED_TOKENS": "5", "MAX_SEQS": "5"},
        {"max_batched_tokens": 5, "max_seqs": 5},
        [],
    ),
    "address": (
        {"PORT": "9001", "HOST": "0.0.0.0"},
        {"port": 9001, "host": "0.0.0.0", "allow_open_bind": True},
        [],
    ),
    "names": ({"MODEL_NAME": "one two  three"}, {"served_names": ["one", "two", "three"]}, []),
    "guard and counters": ({"GUARD": "off", "COUNTERS": "1"}, {"guard": False, "counters": 1}, []),
    "guard raises": ({"GUARD": "raise", "COUNTERS": "0"}, {"guard": "raise", "counters": "0"}, []),
    "offload home": ({"PLE_HOME": "2"}, {"ple_home": 2}, []),
    "statistics": ({"VLLM_LOG_STATS_INTERVAL": "0.5"}, {"log_stats_interval": 0.5}, []),
    "served names only": ({"VLLM_SKIP_MODEL_NAME_VALIDATION": "0"}, {"any_model_name": 0}, []),
    "scales": ({"SCALES": "{root}/other scales.json"}, {"scales": "{root}/other scales.json"}, []),
    "cache": ({"CACHE_ROOT": "{root}/ram"}, {"cache_root": "{root}/ram"}, []),
    "toolkit": ({"CUDA_HOME": "{root}/cuda"}, {"cuda_home": "{root}/cuda"}, []),
    "gpus": ({"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, {"gpus": [3, 2, 1, 0]}, []),
    "blank gpus": ({"CUDA_VISIBLE_DEVICES": ""}, {"gpus": None}, []),
    "constants win": ({"NCCL_PROTO": "Simple", "NCCL_P2P_LEVEL": "PHB"}, {"env": {"NCCL_PROTO": "Simple"}}, []),
    "inherited tree knobs": (
        {"MERLIN_OTHER": "1", "VLLM_E2_SCHED_LOG": "1", "VLLM_QSA_KV_CLIP_COUNT": "1", "PYTORCH_CUDA_ALLOC_CONF": "x"},
        {},
        [],
    ),
    "foreign variables": ({"FOO": 'a "b" $c\\'}, {"env": {"FOO": 'a "b" $c\\'}}, []),
    "extra arguments": ({}, {}, ["--max-model-len", "1000", "--x", '{"a": "b c"}', "--flag"]),
    "empty variables": ({"MAX_SEQS": "", "PORT": "", "GUARD": "", "HOST": "", "MODEL_NAME": ""}, {}, []),
}


def fill(value: object, root: Path) -> object:
    if isinstance(value, dict):
        return {key: fill(item, root) for key, item in value.items()}
    return value.replace("{root}", str(root)) if isinstance(value, str) else value


@pytest.mark.parametrize("name", CASES)
def test_the_engine_gets_the_same_process(sandbox: Sandbox, name: str) -> None:
    env, lane, extra = CASES[name]
    env, lane = fill(env, sandbox.root), fill(lane, sandbox.root)
    if "CUDA_HOME" in env and not Path(env["CUDA_HOME"]).exists():
        sandbox.toolkit(Path(env["CUDA_HOME"]))
    seen, said = sandbox.seed(env, extra)
    assert seen is not None, said
    rendered, resolved = sandbox.ours({**lane, "extra_args": extra})
    assert rendered["argv"] == seen["argv"]
    assert rendered["env"] == sandbox.expected_env(seen["env"])
    assert rendered["runtime_env"] == []
    # what the script notes about the shape is noted here too
    assert ("preempt" in said) == any("preempt" in note for note in resolved["notes"])
    assert ("CUDA graphs for" in said) == any("CUDA graphs" in note for note in resolved["notes"])
    # nothing that must not be inherited reaches either
    for pattern in rendered["unset"]:
        found = [key for key in seen["env"] if key == pattern or (pattern[-1] == "*" and key.startswith(pattern[:-1]))]
        assert not set(found) - set(rendered["env"])


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("extra arguments", "inherited tree knobs")])
def test_an_imported_environment_file_renders_alike(sandbox: Sandbox, name: str) -> None:
    env, lane, _ = CASES[name]
    env, lane = fill(env, sandbox.root), fill(lane, sandbox.root)
    text = "\n".join(f"export {key}='{value}'" for key, value in env.items())
    imported, _ = import_env.to_lane(import_env.parse(text, "x.env"), sandbox.catalog.profile(PROFILE), "main")
    assert sandbox.ours(imported)[0] == sandbox.ours(lane)[0]


@pytest.mark.parametrize("mode", ["1", "strict"])
def test_the_selectors_variables_come_at_run_time(sandbox: Sandbox, mode: str) -> None:
    sandbox.selector(DECISION)
    seen, said = sandbox.seed({"AUTO_TOPO": mode, "NCCL_PROTO": "Simple", "MAX_SEQS": "2"}, [])
    assert seen is not None, said
    rendered, resolved = sandbox.ours(
        {"topology": {"mode": {"1": "auto"}.get(mode, mode)}, "env": {"NCCL_PROTO": "Simple"}, "max_seqs": 2}
    )
    assert rendered["argv"] == seen["argv"]
    env = sandbox.expected_env(seen["env"])
    assert {name: env.pop(name) for name in DECISION} == DECISION
    assert rendered["env"] == env
    assert set(rendered["runtime_env"]) >= set(DECISION)
    assert resolved["policy"]["caller_env"] == {"NCCL_PROTO": "Simple"}


@pytest.mark.parametrize(
    ("env", "lane"),
    [
        ({"MAX_SEQS": "0"}, {"max_seqs": "0"}),
        ({"MAX_SEQS": "four"}, {"max_seqs": "four"}),
        ({"MAX_SEQS": "08"}, {"max_seqs": "08"}),
        ({"MAX_BATCHED_TOKENS": "-1"}, {"max_batched_tokens": -1}),
        ({"MAX_SEQS": "9", "MAX_BATCHED_TOKENS": "8"}, {"max_seqs": 9, "max_batched_tokens": 8}),
    ],
)
def test_both_refuse(sandbox: Sandbox, env: dict, lane: dict) -> None:
    seen, _ = sandbox.seed(env, [])
    assert seen is None
    with pytest.raises(UsageError):
        sandbox.ours(lane)


def test_a_leading_zero_is_octal_to_the_script_and_refused_here(sandbox: Sandbox) -> None:
    seen, _ = sandbox.seed({"MAX_SEQS": "010"}, [])
    assert seen is not None
    assert "1,2,4,8,12,16,20,24,28,32]" in " ".join(seen["argv"])  # eight sequences, from a text that says ten
    with pytest.raises(UsageError) as refused:
        sandbox.ours({"max_seqs": "010"})
    assert "leading zeros" in refused.value.message


def test_every_knob_of_the_script_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "seed-rtx3090.md").read_text(encoding="utf-8")
    for name in sorted(KNOBS | {"CUDA_HOME", "VLLM_LOG_STATS_INTERVAL", "VLLM_SKIP_MODEL_NAME_VALIDATION"}):
        assert f"`{name}`" in text, name

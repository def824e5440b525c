"""The adapters, over directories made for the test and over this machine itself."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator

import pytest
from vllm_fleet.facts import engine_dir, host, ports, toolchain

from tests.unit import preflight_fixtures as given

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another identity")
NOBODY = {"name": "nobody", "uid": 65534, "gid": 65534, "home": "/nonexistent", "groups": [65534]}


def write(root: Path, path: str, text: str = "", mode: int = 0o644) -> Path:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    target.chmod(mode)
    return target


# ---- memory ----------------------------------------------------------------------------------------------------------


def box_memory(root: Path, **files: str) -> Dict[str, Any]:
    write(root, "/proc/meminfo", "MemTotal:       197000000 kB\nMemFree:  1 kB\n")
    for path, text in files.items():
        write(root, path, text)
    return host.memory(str(root), "vllm@main.service")


def test_memory_without_a_limit(tmp_path: Path) -> None:
    assert box_memory(tmp_path) == {"total_kib": 197000000, "limit_kib": None, "limit_source": ""}


def test_the_tightest_limit_of_the_ancestors_counts(tmp_path: Path) -> None:
    found = box_memory(
        tmp_path,
        **{
            "/proc/self/cgroup": "0::/system.slice/a.service\n",
            "/sys/fs/cgroup/system.slice/memory.max": "1048576\n",
            "/sys/fs/cgroup/system.slice/a.service/memory.max": "max\n",
            "/sys/fs/cgroup/memory.max": "2097152\n",
        },
    )
    assert found["limit_kib"] == 1024
    assert found["limit_source"] == "/sys/fs/cgroup/system.slice/memory.max"


def test_the_unit_s_own_limit_counts_before_it_runs(tmp_path: Path) -> None:
    path = "/sys/fs/cgroup/system.slice/system-vllm.slice/vllm@main.service/memory.max"
    assert box_memory(tmp_path, **{path: "4096"})["limit_source"] == path


@pytest.mark.parametrize(("text", "limit"), [("8192", 8), ("9223372036854771712", None), ("max", None), ("", None)])
def test_cgroup_v1_limit(tmp_path: Path, text: str, limit: Any) -> None:
    found = box_memory(
        tmp_path,
        **{
            "/proc/self/cgroup": "9:name=systemd:/x\n4:memory:/docker/abc\n0::/\n",
            "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": text,
        },
    )
    assert found["limit_kib"] == limit


def test_a_container_sees_its_v1_limit_at_the_top(tmp_path: Path) -> None:
    """Inside a container /proc/self/cgroup may name the host's path, which is not mounted there."""
    found = box_memory(
        tmp_path,
        **{"/proc/self/cgroup": "4:memory:/docker/abc\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "8192"},
    )
    assert found["limit_kib"] == 8


def test_memory_of_this_machine() -> None:
    assert host.memory()["total_kib"] > 100000
    shm = host.shared_memory()
    assert shm is not None and 0 <= shm["available_kib"] <= shm["total_kib"]


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert host.shared_memory(str(tmp_path)) is None


# ---- file systems, users, access -------------------------------------------------------------------------------------


def test_filesystem_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    found = host.filesystem(str(tmp_path / "a/b"))
    assert (found["exists"], found["kind"], found["nearest"]) == (False, "missing", str(tmp_path))
    assert found["available_kib"] > 0 and found["type"]


def test_filesystem_kinds(tmp_path: Path) -> None:
    write(tmp_path, "/f")
    os.mkfifo(tmp_path / "p")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    kinds = {name: host.filesystem(str(tmp_path / name))["kind"] for name in (".", "f", "p", "gone")}
    assert kinds == {".": "directory", "f": "file", "p": "other", "gone": "missing"}


def test_shared_memory_is_seen_as_tmpfs() -> None:
    assert host.filesystem("/dev/shm")["type"] == "tmpfs"
    assert host.filesystem("/proc/self")["type"] == "proc"


def test_users(tmp_path: Path) -> None:
    write(
        tmp_path, "/etc/passwd", "root:x:0:0:r:/root:/bin/sh\nvllm:x:990:991::/var/lib/v:/bin/false\nbad:x:a:b:c:d:e\n"
    )
    assert host.user("vllm", str(tmp_path)) == {
        "name": "vllm",
        "uid": 990,
        "gid": 991,
        "home": "/var/lib/v",
        "groups": [991],
    }
    assert host.user("bad", str(tmp_path)) is None
    assert host.user("no-such-user-here") is None
    root = host.user("root")
    assert root is not None and root["uid"] == 0


@ROOT_ONLY
def test_access_is_asked_as_the_user() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "closed").mkdir(mode=0o700)
        (directory / "open").mkdir()
        (directory / "open").chmod(0o777)
        found = host.access_as(NOBODY, [f"{name}/closed", f"{name}/open", f"{name}/gone"])
    assert found == {f"{name}/closed": "", f"{name}/open": "rwx", f"{name}/gone": ""}


def test_access_without_the_right_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert host.access_as(NOBODY, ["/"]) is None
    assert host.access_as(None, ["/"]) is None


@ROOT_ONLY
def test_a_command_runs_as_the_user() -> None:
    assert host.run(["/usr/bin/id", "-u"], NOBODY, {"PATH": "/usr/bin:/bin"}) == (0, "65534\n")


def test_a_command_that_hangs_or_is_not_there() -> None:
    status, text = host.run(["/bin/sleep", "20"], timeout=0.2)
    assert status is None and "0.2 s" in text
    status, text = host.run(["/no/such/program"])
    assert status is None and "/no/such/program" in text


# ---- ports -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_listener_is_found_with_its_process(listening: int) -> None:
    found = ports.listeners(listening)
    assert found is not None and len(found) == 1
    assert found[0]["address"] == "127.0.0.1"
    assert found[0]["pid"] == os.getpid()
    assert "pytest" in found[0]["command"] or "python" in found[0]["command"]


def test_a_connection_is_no_listener(listening: int) -> None:
    with socket.create_connection(("127.0.0.1", listening)) as client:
        assert ports.listeners(client.getsockname()[1]) == []


def test_ipv6_listener() -> None:
    with socket.socket(socket.AF_INET6) as server:
        server.bind(("::1", 0))
        server.listen()
        found = ports.listeners(server.getsockname()[1])
    assert found is not None and [entry["address"] for entry in found] == ["::1"]


def test_listener_of_a_unit(tmp_path: Path) -> None:
    line = "   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 777 1 x 100\n"
    write(tmp_path, "/proc/net/tcp", "  sl  local_address ...\n" + line)
    write(tmp_path, "/proc/55/cmdline", "vllm\0serve\0/models/m\0")
    write(tmp_path, "/proc/55/cgroup", f"9:name=systemd:/x\n0::{given.UNIT_CGROUP}\n")
    (tmp_path / "proc/55/fd").mkdir()
    (tmp_path / "proc/55/fd/3").symlink_to("socket:[777]")
    assert ports.listeners(8000, str(tmp_path)) == [
        {"address": "0.0.0.0", "pid": 55, "command": "vllm serve /models/m", "cgroup": given.UNIT_CGROUP}
    ]
    assert ports.listeners(8001, str(tmp_path)) == []
    shutil.rmtree(tmp_path / "proc/55")
    found = ports.listeners(8000, str(tmp_path))
    assert found is not None and found[0]["pid"] is None


def test_no_socket_table(tmp_path: Path) -> None:
    assert ports.listeners(8000, str(tmp_path)) is None


# ---- the engine's directory ------------------------------------------------------------------------------------------


def engine() -> Dict[str, Any]:
    data: Dict[str, Any] = given.lane()["engine"]
    return data


def make_engine(root: Path) -> None:
    data = engine()
    write(root, data["python"], "", 0o755)
    write(root, data["venv"] + "/bin/vllm", f"#!{data['python']}\nimport sys\n", 0o755)
    write(
        root, data["venv"] + "/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.13.1\n"
    )
    write(root, data["tree"] + "/vllm/__init__.py")
    write(root, data["site_packages"] + "/torch/__init__.py")
    (root / data["site_packages"].lstrip("/") / "nvidia_ml_py-13.610.43.dist-info").mkdir()
    (root / data["site_packages"].lstrip("/") / "pynvml-11.5.3.dist-info").mkdir()


def test_an_installed_engine(tmp_path: Path) -> None:
    make_engine(tmp_path)
    found = engine_dir.read(engine(), str(tmp_path))
    assert found["root"] and found["python"] and found["tree_package"] and not found["package"]
    assert found["console_script"]["executable"] and found["console_script"]["interpreter"] == engine()["python"]
    assert found["venv_version"] == "3.13"
    assert found["distributions"] == {"nvidia-ml-py": "13.610.43", "pynvml": "11.5.3"}


@pytest.mark.parametrize(
    ("text", "interpreter"),
    [
        ("#!/opt/e/venv/bin/python3 -I\nimport x\n", "/opt/e/venv/bin/python3"),
        ("#!/bin/sh\n'''exec' \"/opt/a b/python3\" \"$0\" \"$@\"\n' '''\n", "/opt/a b/python3"),
        ("#!/bin/sh\n'''exec' \"/opt/long/venv/bin/python3\" \"$0\" \"$@\"\n' '''\n", "/opt/long/venv/bin/python3"),
        ("#!/bin/sh\n'''exec' /opt/long/venv/bin/python3 \"$0\" \"$@\"\n' '''\n", "/opt/long/venv/bin/python3"),
        ("#!/bin/sh\n", "/bin/sh"),
        ("\x7fELF", None),
        ("#!\n", None),
        ("", None),
    ],
)
def test_script_interpreter(tmp_path: Path, text: str, interpreter: Any) -> None:
    write(tmp_path, "/script", text)
    assert engine_dir.script_interpreter("/script", str(tmp_path)) == interpreter
    assert engine_dir.script_interpreter("/absent", str(tmp_path)) is None


def test_a_vendor_s_engine_has_no_venv(tmp_path: Path) -> None:
    """CoreX: the packages come by PYTHONPATH, the system's Python also looks into the user's and its own."""
    data: Dict[str, Any] = {"root": "/usr/local/corex", "venv": None, "python": "/usr/bin/python3", "tree": None}
    data["site_packages"] = "/usr/local/corex/lib64/python3/dist-packages"
    write(tmp_path, data["site_packages"] + "/vllm/__init__.py")
    found = engine_dir.read(data, str(tmp_path))
    assert found["package"] and found["console_script"]["path"] is None and found["venv_version"] is None

    def place(**env: str) -> Any:
        options: Dict[str, Any] = {"workdir": "/w", "env": env, "home": "/home/v", "root": str(tmp_path)}
        return engine_dir.import_origin("vllm", data, **options)["source"]

    assert place() is None
    assert place(PYTHONPATH=data["site_packages"]) == "pythonpath"
    write(tmp_path, "/usr/local/lib/python3.10/dist-packages/vllm/__init__.py")
    assert place() == "system"
    write(tmp_path, "/home/v/.local/lib/python3.10/site-packages/vllm/__init__.py")
    assert place() == "user_site"
    assert place(PYTHONPATH=data["site_packages"]) == "pythonpath"


def test_an_absent_engine(tmp_path: Path) -> None:
    found = engine_dir.read(engine(), str(tmp_path))
    assert not found["root"] and not found["python"] and not found["console_script"]["exists"]
    assert found["distributions"] == {}


def origin(root: Path, **env: str) -> Dict[str, Any]:
    return engine_dir.import_origin("vllm", engine(), workdir="/var/lib/w", env=env, home="/home/vllm", root=str(root))


def test_origin_by_editable_path_file(tmp_path: Path) -> None:
    make_engine(tmp_path)
    assert origin(tmp_path)["origin"] is None
    write(tmp_path, engine()["site_packages"] + "/__editable__.vllm-0.30.0.pth", f"# x\nimport y\n{engine()['tree']}\n")
    assert origin(tmp_path) == {"origin": engine()["tree"] + "/vllm", "source": "editable", "shadowing": []}


def test_origin_by_editable_finder(tmp_path: Path) -> None:
    make_engine(tmp_path)
    text = f"MAPPING: dict[str, str] = {{'vllm': '{engine()['tree']}/vllm'}}\n"
    write(tmp_path, engine()["site_packages"] + "/__editable___vllm_0_30_0_finder.py", text)
    assert origin(tmp_path)["origin"] == engine()["tree"] + "/vllm"


def test_the_working_directory_comes_first(tmp_path: Path) -> None:
    make_engine(tmp_path)
    write(tmp_path, "/var/lib/w/vllm/__init__.py")
    write(tmp_path, "/elsewhere/vllm/__init__.py")
    found = origin(tmp_path, PYTHONPATH=engine()["tree"])
    assert (found["origin"], found["source"]) == ("/var/lib/w/vllm", "workdir")
    found = origin(tmp_path, PYTHONPATH=engine()["tree"], PYTHONSAFEPATH="1")
    assert (found["origin"], found["source"]) == (engine()["tree"] + "/vllm", "pythonpath")
    found = origin(tmp_path, PYTHONPATH=f"/elsewhere:{engine()['tree']}", PYTHONSAFEPATH="1")
    assert found["origin"] == "/elsewhere/vllm"


def test_a_single_file_shadows_too(tmp_path: Path) -> None:
    make_engine(tmp_path)
    write(tmp_path, "/var/lib/w/vllm.py")
    assert origin(tmp_path)["origin"] == "/var/lib/w/vllm.py"


def test_a_directory_without_init_hides_nothing(tmp_path: Path) -> None:
    make_engine(tmp_path)
    write(tmp_path, "/var/lib/w/vllm/notes.txt")
    assert origin(tmp_path, PYTHONPATH=engine()["tree"])["source"] == "pythonpath"


def test_an_empty_element_of_pythonpath_is_the_working_directory(tmp_path: Path) -> None:
    make_engine(tmp_path)
    write(tmp_path, "/var/lib/w/vllm/__init__.py")
    assert origin(tmp_path, PYTHONPATH=":/x", PYTHONSAFEPATH="1")["origin"] == "/var/lib/w/vllm"


def test_user_site_counts_only_in_an_open_venv(tmp_path: Path) -> None:
    make_engine(tmp_path)
    write(tmp_path, "/home/vllm/.local/lib/python3.13/site-packages/vllm/__init__.py")
    assert origin(tmp_path)["origin"] is None
    write(tmp_path, engine()["venv"] + "/pyvenv.cfg", "include-system-site-packages = true\nversion = 3.13.1\n")
    assert origin(tmp_path)["source"] == "user_site"
    assert origin(tmp_path, PYTHONNOUSERSITE="1")["origin"] is None


def test_other_packages_that_the_working_directory_hides(tmp_path: Path) -> None:
    make_engine(tmp_path)
    write(tmp_path, "/var/lib/w/torch.py")
    write(tmp_path, "/var/lib/w/notes.py")
    assert origin(tmp_path)["shadowing"] == ["torch"]


def test_the_resolution_is_python_s_own(tmp_path: Path) -> None:
    """Against a real interpreter and a real venv: the same place, for each of the ways in."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python3*/site-packages"))
    data = {"venv": str(venv), "site_packages": str(site)}
    for place in ("tree", "work", "extra"):
        (tmp_path / place / "vllm").mkdir(parents=True)
    work = tmp_path / "work"
    code = "import importlib.util, os; s = importlib.util.find_spec('vllm')\n"
    code += "print(os.path.dirname(s.origin) if s and s.origin else None)"

    def compare(**env: str) -> None:
        done = subprocess.run(
            [str(venv / "bin/python"), "-c", code],
            cwd=str(work),
            env=dict(env, PATH="/usr/bin:/bin"),
            capture_output=True,
            text=True,
            check=True,
        )
        found = engine_dir.import_origin("vllm", data, workdir=str(work), env=env, home=None)
        assert str(found["origin"]) == done.stdout.strip()

    compare()
    (tmp_path / "tree/vllm/__init__.py").touch()
    (site / "x.pth").write_text(str(tmp_path / "tree") + "\n")
    compare()
    (tmp_path / "extra/vllm/__init__.py").touch()
    compare(PYTHONPATH=str(tmp_path / "extra"))
    (work / "vllm/__init__.py").touch()
    compare()
    compare(PYTHONSAFEPATH="1")
    (work / "vllm/__init__.py").unlink()
    (site / "vllm").mkdir()
    (site / "vllm/__init__.py").touch()
    compare()


# ---- the toolchain ---------------------------------------------------------------------------------------------------


def test_cuda_home_is_the_unit_s_then_the_venv_s_then_the_system_s(tmp_path: Path) -> None:
    lane = given.lane()
    assert toolchain.cuda_home(lane, str(tmp_path)) == (given.CUDA, "environment")
    del lane["env"]["CUDA_HOME"]
    assert toolchain.cuda_home(lane, str(tmp_path)) == (None, "none")
    (tmp_path / "usr/local/cuda").mkdir(parents=True)
    assert toolchain.cuda_home(lane, str(tmp_path)) == ("/usr/local/cuda", "system")
    (tmp_path / given.CUDA.lstrip("/")).mkdir(parents=True)
    assert toolchain.cuda_home(lane, str(tmp_path)) == (given.CUDA, "venv")


def test_cudart_states(tmp_path: Path) -> None:
    def state() -> str:
        found = toolchain.read(given.lane(), None, str(tmp_path), execute=False)
        return str(found["cudart"]["state"])

    assert state() == "missing"
    library = tmp_path / given.CUDA.lstrip("/") / "lib"
    library.mkdir(parents=True)
    (library.parent / "lib64").symlink_to("lib")
    (library / "libcudart.so").symlink_to("libcudart.so.13")
    assert state() == "dangling"
    (library / "libcudart.so.13").touch()
    assert state() == "ok"


def test_nothing_of_the_caller_s_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/from/the/shell")
    monkeypatch.setenv("PATH", "/from/the/shell")
    lane = given.lane()
    lane["env"] = {}
    assert toolchain.environment(lane)["PATH"] == toolchain.SYSTEMD_PATH
    assert toolchain.cuda_home(lane, "/nonexistent")[1] == "none"


def test_gcc_limit_is_read_from_the_toolkit(tmp_path: Path) -> None:
    write(tmp_path, given.CUDA + "/include/crt/host_config.h", "#if __GNUC__ > 13\n#error\n")
    assert toolchain.read(given.lane(), None, str(tmp_path), execute=False)["gcc_limit"] == 13


def test_ninja_is_looked_for_as_the_started_processes_do(tmp_path: Path) -> None:
    lane = given.lane()
    lane["engine"]["venv"], lane["env"] = "/engine/venv", {"PATH": "/usr/bin"}
    write(tmp_path, "/engine/venv/bin/ninja", "", 0o755)
    assert toolchain.read(lane, None, str(tmp_path), execute=False)["ninja"] == "/engine/venv/bin/ninja"
    write(tmp_path, "/usr/bin/ninja", "", 0o755)
    assert toolchain.read(lane, None, str(tmp_path), execute=False)["ninja"] == "/usr/bin/ninja"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may enter (pytest's own are private)."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def small_toolkit(place: Path) -> Dict[str, Any]:
    """A lane whose toolkit is a stub: a header, a script for nvcc, a runtime library made by this machine's cc."""
    home = place / "cuda"
    write(home, "/bin/nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n", 0o755)
    write(home, "/include/cuda_runtime_api.h", 'extern "C" int cudaRuntimeGetVersion(int *version);\n')
    write(home, "/source.c", "int cudaRuntimeGetVersion(int *version) { return *version = 13000; }\n")
    (home / "lib64").mkdir()
    library = str(home / "lib64/libcudart.so")
    subprocess.run(["cc", "-shared", "-fPIC", str(home / "source.c"), "-o", library], check=True)
    lane = given.lane()
    lane["engine"].update(python=sys.executable, venv=str(place / "venv"))
    lane["env"] = {"CUDA_HOME": str(home)}
    return lane


def test_a_working_toolchain(small_toolkit: Dict[str, Any]) -> None:
    found = toolchain.read(small_toolkit, None)
    assert found["nvcc"]["release"] == (13, 0)
    assert found["compile"] == {"state": "ok", "output": "", "user": None}
    assert found["host_compiler"]["family"] == "gcc" and found["host_compiler"]["major"] >= 8
    assert found["python_header"].endswith("/Python.h")


@ROOT_ONLY
def test_the_compile_runs_as_the_service_user(small_toolkit: Dict[str, Any], place: Path) -> None:
    """The compiler and the interpreter are replaced by scripts that everyone may run; one says who it is."""
    include = write(place, "/include/Python.h").parent
    write(place, "/bin/c++", '#!/bin/sh\necho "error: I am $(id -u)"\nexit 1\n', 0o755)
    write(place, "/bin/python", f"#!/bin/sh\necho '\"{include}\"'\n", 0o755)
    small_toolkit["env"]["CXX"] = str(place / "bin/c++")
    small_toolkit["engine"]["python"] = str(place / "bin/python")
    found = toolchain.read(small_toolkit, NOBODY)
    assert found["compile"] == {"state": "failed", "output": "error: I am 65534", "user": "nobody"}


def test_a_missing_runtime_library_fails_at_the_link(small_toolkit: Dict[str, Any]) -> None:
    home = Path(small_toolkit["env"]["CUDA_HOME"])
    (home / "lib64/libcudart.so").write_text("not a library")
    found = toolchain.read(small_toolkit, None)
    assert found["compile"]["state"] == "failed"
    assert "libcudart" in found["compile"]["output"]


def test_nothing_is_left_behind(small_toolkit: Dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    toolchain.read(small_toolkit, None)
    assert list(tmp_path.iterdir()) == []

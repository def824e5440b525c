"""The toolchain does what engines ask of it, and waits for another package manager run."""

from __future__ import annotations

import time

import pytest

from tests.testinfra_helpers import start_converge


@pytest.mark.parametrize("program", ["gcc", "g++", "ninja", "python3.11", "numactl", "zstd", "logrotate"])
def test_program_is_there(host, program):
    assert host.run(f"{program} --version || {program} --show").rc == 0


def test_compiles_and_links_an_extension_with_the_headers_of_its_python(host):
    """What Triton does at first use: C against Python.h into a shared object that this Python loads."""
    host.check_output("rm -rf /tmp/ext && mkdir /tmp/ext")
    source = (
        "#include <Python.h>\\n"
        'static struct PyModuleDef m = {PyModuleDef_HEAD_INIT, "tiny", 0, -1, 0};\\n'
        "PyMODINIT_FUNC PyInit_tiny(void) { return PyModule_Create(&m); }\\n"
    )
    host.check_output(f"printf '{source}' > /tmp/ext/tiny.c")
    include = host.check_output("python3.11 -c 'import sysconfig; print(sysconfig.get_path(\"include\"))'")
    host.check_output(f"gcc -shared -fPIC -I{include} -o /tmp/ext/tiny.so /tmp/ext/tiny.c")
    assert host.check_output("cd /tmp/ext && python3.11 -c 'import tiny; print(tiny.__name__)'") == "tiny"


def test_compiles_cxx(host):
    host.check_output(
        "printf '#include <vector>\\nint main() { return std::vector<int>(3).size() - 3; }\\n' > /tmp/a.cc"
    )
    assert host.run("g++ -std=c++17 -fopenmp -o /tmp/a /tmp/a.cc && /tmp/a").rc == 0


def test_makes_a_venv(host):
    host.check_output("rm -rf /tmp/venv && python3.11 -m venv /tmp/venv")
    assert host.run("/tmp/venv/bin/pip --version").rc == 0


def test_no_recommended_packages_came_along(host):
    """``install_recommends: false``: gcc alone would bring manual pages and a debugging allocator."""
    assert not host.package("manpages-dev").is_installed


def test_waits_for_another_package_manager_run(host):
    """Unattended upgrades hold dpkg's lock after a boot; the role waits for it instead of failing."""
    host.check_output("DEBIAN_FRONTEND=noninteractive apt-get -q -y remove ninja-build; rm -f /run/holding")
    hold = (
        "import fcntl, time; f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "open('/run/holding', 'w').close(); time.sleep(600)"
    )
    host.check_output(f'systemd-run --quiet --collect --unit=hold-dpkg /usr/bin/python3 -c "{hold}"')
    try:
        while not host.file("/run/holding").exists:
            time.sleep(0.1)
        busy = host.run("apt-get -q -y install ninja-build")
        assert busy.rc != 0, "this is what happens without the wait"
        assert "lock-frontend" in busy.stderr
        process = start_converge()
        # Released once the same apt-get has been seen waiting for ten seconds; one that gives up ends the play first.
        since: dict[str, float] = {}
        while not any(time.monotonic() - began > 10 for began in since.values()):
            assert process.poll() is None, process.communicate()[0]
            pids = host.run("pgrep -f 'apt-get .*install'").stdout.split()
            since = {pid: since.get(pid, time.monotonic()) for pid in pids}
            time.sleep(1)
    finally:
        host.check_output("systemctl stop hold-dpkg")
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert "rescued=0" in output
    assert host.run("ninja --version").rc == 0

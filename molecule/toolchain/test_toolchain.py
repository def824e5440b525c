"""The toolchain does what engines ask of it, and waits for another package manager run."""

from __future__ import annotations

import time

import pytest

from tests.testinfra_helpers import converge


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
    host.check_output("DEBIAN_FRONTEND=noninteractive apt-get -q -y remove ninja-build")
    hold = (
        "import fcntl, time; f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "open('/run/holding', 'w').close(); time.sleep(20)"
    )
    host.check_output("rm -f /run/holding")
    host.check_output(f'systemd-run --quiet --collect --unit=hold-dpkg /usr/bin/python3 -c "{hold}"')
    while not host.file("/run/holding").exists:
        time.sleep(0.1)
    # Without the wait this is what happens at once:
    busy = host.run("apt-get -q -y install ninja-build")
    assert busy.rc != 0
    assert "lock-frontend" in busy.stderr
    began = time.monotonic()
    played = converge()
    assert played.returncode == 0, played.stdout
    assert time.monotonic() - began > 10, "the lock was held for 20 s"
    assert host.run("ninja --version").rc == 0

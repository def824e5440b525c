"""The CoreX driver's installation from the outside: proven, kept, and refused where it could not end well."""

from __future__ import annotations

import pytest

from tests.testinfra_helpers import as_vllm, converge


def flat(played):
    """Return a play's output on one line, as messages are wrapped."""
    return " ".join(played.stdout.split())


def test_the_module_is_there_for_this_kernel_and_loaded(host):
    kernel = host.check_output("uname -r")
    assert host.check_output("modinfo -F version iluvatar") == "4.3.8"
    assert host.check_output("modinfo -F filename iluvatar") == f"/lib/modules/{kernel}/extra/iluvatar.ko"
    assert host.file("/sys/module/iluvatar/version").content_string.strip() == "4.3.8"


def test_the_tool_runs_without_a_login_shell_and_as_the_service_user(host):
    """No profile, no LD_LIBRARY_PATH: what a unit or an SSH command has."""
    bare = host.run("env -i /usr/local/bin/ixsmi")
    assert (bare.rc, "Driver Version: 4.3.8" in bare.stdout) == (0, True), bare.stderr
    assert as_vllm(host, "/usr/local/bin/ixsmi").rc == 0
    assert "libixml.so" in host.check_output("/sbin/ldconfig -p")


def test_the_kernel_is_kept(host):
    assert "linux-image" in host.file("/etc/apt/apt.conf.d/52vllm-fleet-corex").content_string


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"corex_driver_gcc": [9], "corex_driver_sha256": "0" * 64}, "compiler_unsuitable"),
        ({"corex_driver_sha256": "0" * 64}, "checksum_differs"),
        ({"corex_driver_sha256": ""}, "pin_missing"),
        ({"corex_driver_run": "", "corex_driver_cards": 8}, "card_count_differs"),
        ({"corex_driver_run": "", "corex_driver_sdk": "5.0.0"}, "driver_older_than_sdk"),
        ({"corex_driver_run": "", "corex_driver_compatible": {"4.3.0": ["4.3.1"]}}, "driver_not_listed"),
    ],
)
def test_what_can_not_end_well_is_refused(host, variables, reason):
    before = host.check_output("stat -c %Y /usr/local/corex/release-corex.txt")
    played = converge(**variables)
    assert played.returncode != 0
    assert reason in flat(played), played.stdout
    assert host.check_output("stat -c %Y /usr/local/corex/release-corex.txt") == before, "no installer ran"


def test_a_question_that_nobody_answers_ends_the_run(host):
    """The installer is asked for again, as for a new kernel; it ends, and says why."""
    host.check_output("rm /var/lib/vllm-fleet/corex-driver.json")
    played = converge(corex_driver_answers="")
    assert played.returncode != 0
    assert "the licence was not accepted" in flat(played)
    assert converge().returncode == 0


def test_a_missing_node_is_named(host):
    host.check_output("rm /dev/iluvatar2")
    played = converge(corex_driver_run="")
    host.check_output("ln -s null /dev/iluvatar2")
    assert played.returncode != 0
    assert "device_nodes_missing: 3 device nodes /dev/iluvatarN, 4 expected" in flat(played)


def test_an_older_module_that_is_still_loaded_is_reported_as_a_reboot(host):
    """Not failed: the reboot has a proof of its own."""
    host.check_output("echo 4.3.0 > /sys/module/iluvatar/version")
    played = converge("-v", corex_driver_run="")
    host.check_output("echo 4.3.8 > /sys/module/iluvatar/version")
    assert played.returncode == 0, played.stdout
    assert "loaded_differs" in flat(played)

"""The base of a box: user, directories, program."""

from __future__ import annotations

from tests.testinfra_helpers import as_vllm, owned


def test_the_service_user_cannot_log_in(host):
    fields = host.check_output("getent passwd vllm").split(":")
    assert int(fields[2]) < 1000, "a system user"
    assert fields[5:] == ["/var/lib/vllm-fleet", "/usr/sbin/nologin"]
    assert host.check_output("id -Gn vllm; passwd --status vllm | cut -d ' ' -f 2").split() == ["vllm", "L"]


EXPECTED = {
    "/opt/vllm-fleet": "0755 root:root",
    "/opt/vllm-fleet/bin": "0755 root:root",
    "/opt/vllm-fleet/bin/vllm-fleet": "0755 root:root",
    "/opt/vllm-fleet/engines": "0755 root:root",
    "/opt/vllm-fleet/build": "0755 root:root",
    "/etc/vllm-fleet": "0755 root:root",
    "/etc/vllm-fleet/lanes": "0755 root:root",
    "/etc/vllm-fleet/secrets": "0700 root:root",
    "/var/lib/vllm-fleet": "0755 root:root",
    "/var/lib/vllm-fleet/lanes": "0755 root:root",
    "/var/cache/vllm-fleet": "0755 root:root",
    "/var/log/vllm-fleet": "0750 root:vllm",
    # What was there before stays as it was.
    "/etc": "0755 root:root",
    "/usr": "0755 root:root",
    "/usr/bin": "0755 root:root",
    "/opt": "0755 root:root",
    "/var/lib": "0755 root:root",
}


def test_owners_and_modes(host):
    assert owned(host, *EXPECTED) == EXPECTED


def test_the_service_user_writes_nowhere_in_them(host):
    places = "/opt/vllm-fleet /etc/vllm-fleet /var/lib/vllm-fleet /var/log/vllm-fleet"
    found = as_vllm(host, f"find {places} -writable 2>/dev/null")
    assert found.stdout == ""


def test_the_program_runs_for_the_service_user(host):
    program = "/opt/vllm-fleet/bin/vllm-fleet"
    assert host.check_output(f"head -c 18 {program}") == "#!/usr/bin/python3"
    shown = as_vllm(host, f"{program} --help")
    assert shown.rc == 0, shown.stderr
    assert "start-check" in shown.stdout


def test_the_program_answers_bad_input_in_one_line(host):
    found = as_vllm(host, "/opt/vllm-fleet/bin/vllm-fleet wait-ready nobody")
    assert found.rc == 2
    assert found.stdout == ""
    assert found.stderr.splitlines() == [found.stderr.strip()]
    assert "unreadable_file: cannot read the lane file /etc/vllm-fleet/lanes/nobody/current/lane.json" in found.stderr


def test_the_program_carries_its_nvml_binding(host):
    program = "/opt/vllm-fleet/bin/vllm-fleet"
    found = host.run(f"PYTHONPATH={program} /usr/bin/python3 -c 'import pynvml; print(pynvml.__file__)'")
    assert found.stdout.strip() == "/opt/vllm-fleet/bin/vllm-fleet/pynvml.py", found.stderr

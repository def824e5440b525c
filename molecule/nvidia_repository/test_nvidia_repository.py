"""NVIDIA's repository: a pinned key, an exact version, one family that moves together, and a key that has changed."""

from __future__ import annotations

import json

from tests.testinfra_helpers import converge

NAMES = ("nvidia-kernel-open-dkms", "nvidia-driver-cuda", "libcuda1", "libnvidia-ml1", "nvidia-persistenced")


def versions(host):
    lines = host.check_output("dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev}\\n' " + " ".join(NAMES))
    return {line.split()[0]: tuple(line.split()[1:]) for line in lines.splitlines()}


def driver(host):
    return json.loads(host.run("/opt/vllm-fleet/bin/vllm-fleet driver --json").stdout)["driver"]


def test_the_pinned_version_is_installed_although_there_is_a_newer_one(host):
    assert versions(host) == dict.fromkeys(NAMES, ("580.1.01-1", "hi"))
    found = driver(host)
    assert (found["installed"], found["next_boot"], found["flavour"]) == ("580.1.01", "580.1.01", "open")


def test_the_source_is_bound_to_its_own_key(host):
    text = host.file("/etc/apt/sources.list.d/vllm-fleet-nvidia.sources").content_string
    assert "Signed-By: /usr/share/keyrings/vllm-fleet-nvidia.gpg" in text
    assert not host.file("/etc/apt/trusted.gpg").exists


def test_the_whole_family_moves_forth_and_back_with_its_module(host):
    for version in ("580.2.02", "580.1.01"):
        done = converge(nvidia_driver_version=version)
        assert done.returncode == 0, done.stdout
        assert versions(host) == dict.fromkeys(NAMES, (f"{version}-1", "hi"))
        assert driver(host)["next_boot"] == version


def test_another_key_is_refused_in_words_and_nothing_moves(host):
    host.check_output("make-repository second 580.1.01 580.2.02")
    done = converge(nvidia_driver_version="580.2.02")
    assert done.returncode != 0
    assert "repository_key" in done.stdout
    assert "another key than the pinned keyring" in " ".join(done.stdout.split())
    assert set(versions(host).values()) == {("580.1.01-1", "hi")}
    host.check_output("make-repository first 580.1.01 580.2.02")


def test_a_keyring_with_another_checksum_is_refused(host):
    done = converge(keyring_sha256="0" * 64)
    assert done.returncode != 0
    assert "checksum" in done.stdout
    assert converge().returncode == 0

"""The NVML adapter against bindings that behave as old, odd or half-working ones do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet.facts import nvml


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"error {value}")
        self.value = value


class Struct:
    def __init__(self, **values):
        self.__dict__.update(values)


class Bindings:
    """Two cards as an old pynvml gives them: bytes everywhere, constants as 1-tuples, no newer functions."""

    nvmlMemory_v2 = (33554472,)

    def __init__(self, **answers):
        self.answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: b"595.84",
            "nvmlSystemGetCudaDriverVersion": lambda: 13020,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetPciInfo": lambda h: Struct(busId=(b"00000000:C4:00.0", b"00000000:81:00.0")[h]),
            "nvmlDeviceGetUUID": lambda h: f"GPU-{h}".encode(),
            "nvmlDeviceGetName": lambda h: b"NVIDIA GeForce RTX 3090\0junk",
            "nvmlDeviceGetMemoryInfo": lambda h: Struct(total=25757220864, used=1048576 * 300),
            "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: (40,),
            "nvmlDeviceGetP2PStatus": lambda a, b, what: (0,),
            **answers,
        }

    def __getattr__(self, name):
        try:
            return self.answers[name]
        except KeyError:
            raise AttributeError(name) from None


def refuse(code):
    def call(*args, **kwargs):
        raise NVMLError(code)

    return call


def test_old_bindings_are_read_all_the_same():
    answer = nvml.read(Bindings())
    assert answer["driver"] == {"userland": "595.84", "cuda": [13, 2]}
    first, second = answer["gpus"]
    # NVML's order was the other way round
    assert [first["bus_id"], second["bus_id"]] == ["0000:81:00.0", "0000:c4:00.0"]
    assert [first["index"], first["uuid"], first["name"]] == [0, "GPU-1", "NVIDIA GeForce RTX 3090"]
    # the older structure's memory, floored: 24,564 MiB are not 24,576
    assert (first["memory_total_mib"], first["memory_used_mib"]) == (24564, 300)
    assert (first["mig"], first["processes"], first["bar1_total_mib"], first["health"]) == (False, None, None, "ok")
    assert answer["pairs"] == [
        {"gpus": [0, 1], "ancestor": "node", "p2p_read": "ok", "p2p_write": "ok", "nvlink_lanes": 0, "acs": None}
    ]


@pytest.mark.parametrize(
    ("raw", "bus_id"),
    [
        (b"00000000:01:00.0", "0000:01:00.0"),
        ("0000:C4:00.0", "0000:c4:00.0"),
        ("00010000:3F:00.1", "10000:3f:00.1"),
        ("FFFFFFFF:FF:FF.0", None),
        (b"", None),
        (None, None),
        ("01:00.0", None),
        ("0000:01:00.0;reboot", None),
    ],
)
def test_bus_ids(raw, bus_id):
    assert nvml.normalise_bus_id(raw) == bus_id


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.text(), st.binary(), st.none(), st.integers(), st.tuples(st.integers())))
def test_no_answer_of_a_library_is_a_traceback(value):
    nvml.normalise_bus_id(value)
    nvml.text(value)
    nvml.number(value)


@pytest.mark.parametrize(
    ("read", "write", "shown"),
    [
        ({(0, 1): 0, (1, 0): 0}, {(0, 1): 0, (1, 0): 0}, ("ok", "ok")),
        # granted one way only: no grant
        ({(0, 1): 0, (1, 0): 1}, {(0, 1): 0, (1, 0): 0}, ("chipset_not_supported", "ok")),
        ({(0, 1): 5, (1, 0): 5}, {(0, 1): 4, (1, 0): 4}, ("not_supported", "disabled_by_regkey")),
        ({(0, 1): 6, (1, 0): 0}, {(0, 1): 2, (1, 0): 6}, ("unknown", "gpu_not_supported")),
        ({(0, 1): 99, (1, 0): 0}, {(0, 1): 3, (1, 0): 3}, ("unknown", "topology_not_supported")),
    ],
)
def test_p2p_needs_both_directions(read, write, shown):
    tables = {0: read, 1: write}
    bindings = Bindings(nvmlDeviceGetP2PStatus=lambda a, b, what: tables[what][(a, b)] if what in tables else 5)
    (pair,) = nvml.read(bindings)["pairs"]
    assert (pair["p2p_read"], pair["p2p_write"]) == shown


def links(remotes, kind=0, granted=5):
    """NVLink answers: per handle the remote bus ids of its links; None is a link that is down."""

    def entry(handle, link):
        if not remotes[handle]:
            raise NVMLError(3)
        if link >= len(remotes[handle]):
            raise NVMLError(2)
        return remotes[handle][link]

    def remote(handle, link):
        found = entry(handle, link)
        if found == "unreadable":
            raise NVMLError(3)
        return Struct(busId=found)

    return Bindings(
        nvmlDeviceGetNvLinkState=lambda h, link: int(entry(h, link) is not None),
        nvmlDeviceGetNvLinkRemotePciInfo=remote,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda h, link: kind,
        nvmlDeviceGetP2PStatus=lambda a, b, what: granted if what == 2 else 1,
    )


ONE, OTHER, SWITCH = "00000000:C4:00.0", "00000000:81:00.0", "00000000:05:00.0"
HIDDEN = "FFFFFFFF:FF:FF.0"


@pytest.mark.parametrize(
    ("remotes", "kind", "granted", "lanes"),
    [
        ([[OTHER] * 4, [ONE] * 4], 0, 0, 4),
        ([[OTHER, None, OTHER, None], [None, ONE, None, ONE]], 0, 0, 2),
        # all links up, but to a card that is not in this container
        ([["00000000:A1:00.0"] * 4, ["00000000:A2:00.0"] * 4], 0, 0, 0),
        ([[None] * 4, [None] * 4], 0, 5, 0),
        ([[], []], 0, 5, 0),
        # NVSwitch: seen from a guest, and on the bare machine
        ([[HIDDEN] * 18, [HIDDEN] * 18], 2, 0, 18),
        ([[SWITCH] * 18, [SWITCH] * 18], 2, 0, 18),
        ([[HIDDEN] * 18, [HIDDEN] * 18], 2, 5, 0),
        ([["unreadable"] * 4, ["unreadable"] * 4], 0, 0, 4),
        ([[OTHER] * 4, []], 0, 0, 0),
    ],
)
def test_lanes_are_counted_by_their_far_end(remotes, kind, granted, lanes):
    (pair,) = nvml.read(links(remotes, kind, granted))["pairs"]
    assert pair["nvlink_lanes"] == lanes


def test_links_that_cannot_be_read_are_unknown():
    bindings = links([[OTHER] * 4, [ONE] * 4])
    bindings.answers["nvmlDeviceGetNvLinkState"] = refuse(999)
    assert nvml.read(bindings)["pairs"][0]["nvlink_lanes"] is None


@pytest.mark.parametrize(
    ("name", "code", "health"),
    [
        ("nvmlDeviceGetName", 15, "lost"),
        ("nvmlDeviceGetUUID", 999, "unknown"),
        ("nvmlDeviceGetPersistenceMode", 16, "unknown"),
        ("nvmlDeviceGetPersistenceMode", 4, "ok"),
        ("nvmlDeviceGetMigMode", 3, "ok"),
    ],
)
def test_health(name, code, health):
    answer = nvml.read(Bindings(**{name: refuse(code)}))
    assert {gpu["health"] for gpu in answer["gpus"]} == {health}


def test_mig():
    assert nvml.read(Bindings(nvmlDeviceGetMigMode=lambda h: [1, 1]))["gpus"][0]["mig"] is True
    assert nvml.read(Bindings(nvmlDeviceGetMigMode=lambda h: [0, 1]))["gpus"][0]["mig"] is False
    assert nvml.read(Bindings(nvmlDeviceGetMigMode=refuse(999)))["gpus"][0]["mig"] is None


def test_a_process_without_a_size():
    process = Struct(pid=2**22 + 5, usedGpuMemory=None)
    answer = nvml.read(Bindings(nvmlDeviceGetComputeRunningProcesses=lambda h: [process]))
    assert answer["gpus"][0]["processes"] == [{"pid": 2**22 + 5, "name": None, "memory_mib": None}]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (9, "driver_not_loaded"),
        (12, "library_missing"),
        (18, "driver_mismatch"),
        (4, "nvml_error"),
        (999, "nvml_error"),
    ],
)
def test_initialisation_that_fails(code, status):
    answer = nvml.read(Bindings(nvmlInit=refuse(code)))
    assert (answer["status"], answer["gpus"], answer["pairs"]) == (status, None, [])


@pytest.mark.parametrize(
    ("words", "node"), [([1, 0, 0, 0], 0), ([0, 2, 0, 0], 65), ([3, 0, 0, 0], None), ([0, 0, 0, 0], None)]
)
def test_the_node_is_known_when_there_is_one(words, node):
    answer = nvml.read(Bindings(nvmlDeviceGetMemoryAffinity=lambda h, size, scope: words))
    assert answer["gpus"][0]["numa_node"] == node

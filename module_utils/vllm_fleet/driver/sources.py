"""What each source of the driver calls its packages, and the apt files that it needs. Pure functions."""

from __future__ import annotations

import re
from typing import Any, Dict, List

from ..errors import RefusedError
from . import generations, state

DISTRIBUTION, REPOSITORY, RUN_FILE = "distribution", "nvidia_repository", "run_file"
SIGNED = "signed"
SOURCE_FILE = "/etc/apt/sources.list.d/vllm-fleet-nvidia.sources"
PIN_FILE = "/etc/apt/preferences.d/vllm-fleet-nvidia"
ARCHIVE_KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"
#: branch of the driver that a release of Debian carries (packages.debian.org, source nvidia-graphics-drivers)
DEBIAN_BRANCHES = {"bullseye": 470, "bookworm": 535, "trixie": 550}

#: (source, system) -> packages of a compute driver without a display: the module's source, open and proprietary, what
#: comes with either, and the fabric manager. ``{branch}`` is the driver's. Debian's own names are those of
#: packages.debian.org, Ubuntu's those of packages.ubuntu.com, NVIDIA's those of its driver installation guide.
_PACKAGES: Dict[Any, Dict[str, Any]] = {
    (DISTRIBUTION, "debian"): {
        "open": "nvidia-open-kernel-dkms",
        "proprietary": "nvidia-kernel-dkms",
        "with": ["libcuda1", "libnvidia-ml1", "nvidia-smi", "nvidia-persistenced"],
        "fabric": None,
    },
    (DISTRIBUTION, "ubuntu"): {
        "open": "nvidia-dkms-{branch}-server-open",
        "proprietary": "nvidia-dkms-{branch}-server",
        "with": [
            "nvidia-utils-{branch}-server",
            "nvidia-compute-utils-{branch}-server",
            "libnvidia-compute-{branch}-server",
        ],
        "fabric": "nvidia-fabricmanager-{branch}",
    },
    (REPOSITORY, "debian"): {
        "open": "nvidia-kernel-open-dkms",
        "proprietary": "nvidia-kernel-dkms",
        "with": ["nvidia-driver-cuda", "nvidia-persistenced"],
        "fabric": "nvidia-fabricmanager",
    },
    (REPOSITORY, "ubuntu"): {
        "open": "nvidia-dkms-open",
        "proprietary": "nvidia-dkms",
        "with": ["libnvidia-compute", "nvidia-utils", "nvidia-persistenced"],
        "fabric": "nvidia-fabricmanager",
    },
}


def package_names(wanted: Dict[str, Any], flavour: str, system: Dict[str, str], facts: Dict[str, Any]) -> List[str]:
    """Return the packages to install: those that the inventory names, else those that the source is known to have."""
    if wanted["packages"]:
        return list(wanted["packages"])
    branch = wanted["branch"] or generations.branch(wanted["version"])
    names = _PACKAGES[wanted["source"], "ubuntu" if system.get("ID") == "ubuntu" else "debian"]
    if branch is None and "{branch}" in names["open"]:
        raise RefusedError(
            "branch_needed", "Ubuntu has one set of packages for each branch of the driver", "set nvidia_driver_version"
        )
    if wanted["modules"] == SIGNED:
        kind = "-open" if flavour == generations.OPEN else ""
        found = [f"linux-modules-nvidia-{branch}-server{kind}-{item['release']}" for item in facts["kernels"]]
    else:
        found = [names[flavour].format(branch=branch)]
    found += [name.format(branch=branch) for name in names["with"]]
    if facts["nvswitch"] and wanted["fabric_manager"] == "auto":
        if not names["fabric"]:
            raise RefusedError(
                "fabric_manager_unavailable",
                "this box has an NVSwitch and the distribution has no fabric manager for it",
                "set nvidia_driver_source: nvidia_repository",
            )
        found.append(names["fabric"].format(branch=branch))
    return found


def header_packages(facts: Dict[str, Any]) -> List[str]:
    """Return the packages with the headers of every installed kernel, and the metapackages for later ones.

    Without the metapackage the next kernel comes without its headers, and the module is gone after the reboot.
    """
    names = [f"linux-headers-{item['release']}" for item in facts["kernels"] if not item["headers"]]
    metas = [
        item["name"].replace("linux-image-", "linux-headers-", 1)
        for item in facts["packages"] or []
        if re.match(r"linux-image-(?!\d|extra|unsigned)[\w.-]+\Z", item["name"]) and not item["name"].endswith("-dbg")
    ]
    if not metas:
        release = state.next_kernel(facts) or facts["kernels"][-1]["release"]
        flavour = re.sub(r"\A[\d.]+(?:[-+~]\w*\d[\w.]*)*-", "", release)
        metas = [f"linux-headers-{flavour}"]
    return names + sorted(set(metas))


def files(wanted: Dict[str, Any], system: Dict[str, str], present: List[Dict[str, Any]]) -> Dict[str, str]:
    """Return the apt files that the source and the pinned version need, path to text; an empty text means no file.

    :param present: what the other source files of the box offer, as :func:`..facts.packages.sources` reads it.
    """
    found = {SOURCE_FILE: "", PIN_FILE: ""}
    head = "# Written by vllm-fleet (role nvidia_driver).\n"
    if wanted["source"] == REPOSITORY:
        where = wanted["repository"]
        found[SOURCE_FILE] = (
            f"{head}Types: deb\nURIs: {where['uri']}\nSuites: {where['suite']}\n"
            + (f"Components: {where['components']}\n" if where["components"] else "")
            + f"Signed-By: {where['keyring']}\n"
        )
    elif wanted["source"] == DISTRIBUTION and system.get("ID") == "debian":
        found[SOURCE_FILE] = _non_free(head, wanted, system["VERSION_CODENAME"], present)
    if wanted["version"]:
        found[PIN_FILE] = (
            f"{head}# The whole family moves together or not at all; a priority above 1000 also goes back.\n"
            f"Package: *nvidia* libcuda1 libcudadebugger1 libnvcuvid1 cuda-drivers*\n"
            f"Pin: version {wanted['version']}*\nPin-Priority: 1001\n"
        )
    return found


def _non_free(head: str, wanted: Dict[str, Any], name: str, present: List[Dict[str, Any]]) -> str:
    """Return the source of Debian's contrib and non-free; empty where the box has them already.

    One archive has one key: a source that names another file for it than the box's own makes apt refuse both.
    """
    parts = ["contrib", "non-free", *([] if name in ("buster", "bullseye") else ["non-free-firmware"])]
    own = [item for item in present if name in item["suites"]]
    if set(parts) <= {part for item in own for part in item["components"]}:
        return ""
    key = next((item["signed_by"] for item in own if item["signed_by"]), ARCHIVE_KEY)
    return head + "\n".join(
        f"Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: {' '.join(parts)}\nSigned-By: {key}\n"
        for uri, suites in (
            (wanted["mirror"], f"{name} {name}-updates"),
            (wanted["security_mirror"], f"{name}-security"),
        )
    )

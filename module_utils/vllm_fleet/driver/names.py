"""Which packages are the driver's, and which version of it each carries. Pure functions over dpkg's list."""

from __future__ import annotations

import fnmatch
import re
from typing import Any, Dict, Iterable, List, Optional, Sequence

Package = Dict[str, Any]

#: packages that belong to the driver's family, as shell patterns; what is none of the driver's is left out
FAMILY = ("*nvidia*", "libcuda1", "libcudadebugger1", "libnvcuvid1", "libnvoptix1", "cuda-drivers*", "libxnvctrl0")
NOT_FAMILY = ("nvidia-container*", "libnvidia-container*", "nvidia-cuda-*", "nvidia-docker*", "nvidia-kernel-common")
#: of the family, but numbered apart from the driver's release
OTHER_NUMBERS = ("nvidia-persistenced", "nvidia-support", "nvidia-installer-cleanup", "*glx-alternative*",
                 "nvidia-xconfig", "nvidia-settings", "libxnvctrl0", "nvidia-modprobe")  # fmt: skip


def matching(packages: Iterable[Package], patterns: Sequence[str]) -> List[Package]:
    """Return the packages whose name matches one of the shell patterns."""
    return [item for item in packages if any(fnmatch.fnmatchcase(item["name"], pattern) for pattern in patterns)]


def upstream(version: str) -> str:
    """Return the driver's own version in a package's: ``535.309.01`` of ``535.309.01-0+deb12u1``."""
    return re.sub(r"\A\d+:", "", version).split("-", 1)[0].split("+", 1)[0]


def family(packages: Sequence[Package]) -> List[Package]:
    """Return the packages that belong to the driver."""
    return [item for item in matching(packages, FAMILY) if item not in matching(packages, NOT_FAMILY)]


def numbered(packages: Dict[str, str]) -> Dict[str, str]:
    """Return the driver's version of each package that carries the driver's number."""
    items = [{"name": name, "version": version} for name, version in packages.items()]
    apart = {item["name"] for item in matching(items, OTHER_NUMBERS)}
    found = {item["name"]: upstream(item["version"]) for item in family(items) if item["name"] not in apart}
    return {name: version for name, version in found.items() if re.match(r"\d{3}\.\d+", version)}


def driver_version(packages: Dict[str, str]) -> Optional[str]:
    """Return the version of the module's package, else of the libraries'; ``None`` when neither is there."""
    numbers = numbered(packages)
    for pattern in (r".*dkms.*", r"linux-modules-nvidia-.*", r"libcuda1|libnvidia-compute.*"):
        for name in sorted(numbers):
            if re.fullmatch(pattern, name):
                return numbers[name]
    return None

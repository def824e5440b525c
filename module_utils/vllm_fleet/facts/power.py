"""Power limits of NVIDIA cards, through NVML: read, and set."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from . import nvml


def read(library: Any = None) -> Optional[List[Dict[str, Any]]]:
    """Return ``[{"index", "uuid", "bus_id", "limit_mw", "min_mw", "max_mw"}]``; ``None`` without an answer."""
    answer = nvml.read(library)
    if answer["gpus"] is None:
        return None
    return [
        {
            "index": gpu["index"],
            "uuid": gpu["uuid"],
            "bus_id": gpu["bus_id"],
            "limit_mw": card["power_limit_mw"],
            "min_mw": card["power_min_mw"],
            "max_mw": card["power_max_mw"],
        }
        for gpu, card in zip(answer["gpus"], answer["cards"])
    ]


def write(uuid: str, milliwatts: int, library: Any = None) -> Optional[str]:
    """Set one card's limit; return NVML's error text, or ``None`` when it is set."""
    library = library if library is not None else nvml.bindings()
    try:
        library.nvmlInit()
        try:
            library.nvmlDeviceSetPowerManagementLimit(library.nvmlDeviceGetHandleByUUID(uuid), milliwatts)
        finally:
            library.nvmlShutdown()
    except Exception as error:  # pynvml raises NVMLError; what it is, the caller shows
        return str(error) or type(error).__name__
    return None

"""From an order to the process: the P2P state of a lane, its environment and its engine arguments."""

from __future__ import annotations

from ..errors import RefusedError
from ..runtime_env import DECISION_NAMES
from .links import Links, group_pairs, pipeline_edges

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Sequence, Tuple

    Values = Dict[str, Tuple[Optional[str], str]]


PCI_BUS_ID = "PCI_BUS_ID"
SYS, NVL, OFF = "SYS", "NVL", "off"


class P2pState:
    """What P2P a lane may use, judged over the pairs that it uses.

    :ivar level: ``SYS``, ``NVL`` or ``off``.
    :ivar failed_groups: pairs inside tensor-parallel groups that failed a check.
    :ivar failed_links: the same plus failed pipeline edges; any of them is a veto, because NCCL's switch is one for the
        whole process.
    :ivar unproven: used pairs that run neither on usable P2P nor on NVLink.
    :ivar granted: whether NVML grants P2P on some used pair.
    :ivar by_verdict: whether a stored verdict made the difference.
    :ivar custom_all_reduce: whether every group pair runs on NVLink or passed a check.
    """

    def __init__(self, links: Links, order: Sequence[int], tensor: int) -> None:
        groups, edges = list(group_pairs(order, tensor)), list(pipeline_edges(order, tensor))
        used = groups if tensor > 1 else edges
        self.failed_groups = [pair for pair in groups if links.failed(*pair)]
        self.failed_links = [pair for pair in groups + edges if links.failed(*pair)]
        self.unproven = [pair for pair in used if not (links.usable(*pair) or links.nvlink(*pair))]
        granted = [pair for pair in used if links.granted(*pair)]
        self.granted = bool(granted)
        usable = [pair for pair in used if links.usable(*pair)]
        failed_nvlink = any((links.pair(*pair) or {}).get("nvlink_lanes") != 0 for pair in self.failed_links)
        if usable and not self.failed_links and not any(pair in self.unproven for pair in granted):
            self.level = SYS
        elif any(links.nvlink(*pair) for pair in used) and not failed_nvlink:
            self.level = NVL
        else:
            self.level = OFF
        self.by_verdict = bool(self.failed_links) or (self.level == SYS and any(links.passed(*pair) for pair in usable))
        self.custom_all_reduce = all(links.nvlink(*pair) or links.passed(*pair) for pair in groups)


def fixed_values() -> Values:
    """Return the fixed settings of the reference layout, ``name -> (value, source)``."""
    return {
        "CUDA_DEVICE_ORDER": (PCI_BUS_ID, "fixed"),
        "VLLM_SKIP_P2P_CHECK": ("1", "fixed"),
        "NCCL_P2P_LEVEL": ("SYS", "fixed"),
        "NCCL_P2P_DISABLE": (None, "fixed"),
        "NCCL_PROTO": ("LL", "fixed"),
    }


def selected_values(state: P2pState, nccl_proto: str) -> Values:
    """Return the settings for a P2P state, ``name -> (value, source)``."""
    source = "verdict" if state.by_verdict else "selector"
    off = state.level == OFF
    return {
        "CUDA_DEVICE_ORDER": (PCI_BUS_ID, "selector"),
        "VLLM_SKIP_P2P_CHECK": ("0", "selector"),
        "NCCL_P2P_LEVEL": (None if off else state.level, source),
        "NCCL_P2P_DISABLE": ("1" if off else None, source),
        "NCCL_PROTO": (None if off and nccl_proto == "default" else "LL", "selector"),
    }


def with_caller(values: Values, caller: Dict[str, str], veto: bool) -> Values:
    """Return the values with the caller's own put over them.

    A failed check is the one thing that the caller can't overrule: it keeps P2P from the links that failed. A blank
    CUDA_DEVICE_ORDER is no order.
    """
    merged = dict(values)
    for name, value in caller.items():
        if name == "CUDA_VISIBLE_DEVICES" or (name == "CUDA_DEVICE_ORDER" and not value):
            continue
        merged[name] = (value, "caller")
    if veto:
        for name in ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "VLLM_SKIP_P2P_CHECK"):
            merged[name] = (values[name][0], "verdict")
    return merged


def environment(values: Values, gpus: Sequence[Dict[str, Any]], source: str) -> Dict[str, Dict[str, Optional[str]]]:
    """Return the decision's ``env``.

    The engine takes indices under CUDA_DEVICE_ORDER=PCI_BUS_ID; under another order an index would mean another card,
    so UUIDs are named then.

    :param gpus: the lane's GPUs in rank order.
    :param source: the source of CUDA_VISIBLE_DEVICES.
    :raises RefusedError: ``unresolved_gpu`` when a UUID is needed and unknown.
    """
    if values["CUDA_DEVICE_ORDER"][0] == PCI_BUS_ID:
        visible = ",".join(str(gpu["index"]) for gpu in gpus)
    else:
        unknown = [gpu["index"] for gpu in gpus if gpu["uuid"] is None]
        if unknown:
            raise RefusedError(
                "unresolved_gpu",
                f"the caller's CUDA_DEVICE_ORDER is {values['CUDA_DEVICE_ORDER'][0]}, so GPUs must be named by UUID,"
                f" and the UUID of GPU {unknown[0]} is unknown",
                f"Unset CUDA_DEVICE_ORDER or set it to {PCI_BUS_ID}.",
            )
        visible = ",".join(gpu["uuid"] for gpu in gpus)
    full = dict(values, CUDA_VISIBLE_DEVICES=(visible, source))
    return {name: {"value": full[name][0], "source": full[name][1]} for name in DECISION_NAMES}


def engine_args(state: P2pState) -> List[str]:
    """Return the engine arguments of a selected lane."""
    return [] if state.custom_all_reduce else ["--disable-custom-all-reduce"]

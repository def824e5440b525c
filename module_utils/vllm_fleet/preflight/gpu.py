"""Checks of the GPUs, their driver and what else runs on them."""

from __future__ import annotations

from typing import Any, Dict, List

from .. import versions
from .registry import Box, Finding, Lane, check, fail, ok, shorten, unknown, warn, with_gpu, with_nvidia
from .serving import in_unit, options

#: process titles that vLLM gives its workers; one of them outside the lane's unit outlived its server
_ENGINE_TITLES = ("VLLM::", "EngineCore", "multiproc_worker", "vllm serve", "vllm.entrypoints")


def lane_gpus(lane: Lane, box: Box) -> List[Dict[str, Any]]:
    """Return the facts of the GPUs that the decision gives the lane; without one, those that the policy allows."""
    gpus: List[Dict[str, Any]] = (box["topology"] or {}).get("gpus") or []
    decision = box["decision"] or {}
    if decision.get("status") in ("selected", "fixed") and decision.get("order"):
        return [gpu for gpu in gpus if gpu["index"] in decision["order"]]
    named = lane["policy"].get("gpus")
    if named:
        return [gpu for gpu in gpus if any(_named(gpu, str(name)) for name in named)]
    excluded = lane["policy"].get("exclude") or []
    return [gpu for gpu in gpus if not any(_named(gpu, str(name)) for name in excluded)]


def _named(gpu: Dict[str, Any], name: str) -> bool:
    return name == str(gpu["index"]) if name.isdigit() else str(gpu["uuid"]).startswith(name)


def _title(gpu: Dict[str, Any]) -> str:
    return f"GPU {gpu['index']} ({gpu['uuid']})"


@check(
    "gpus_readable",
    {
        "gpus_ok": ok("the management library answers and shows GPUs"),
        "gpus_none": fail("the management library answers and shows no GPU"),
        "driver_not_loaded": fail("the driver's kernel module is not loaded", absent=True),
        "driver_library_missing": fail("the driver's management library is not installed", absent=True),
        "gpus_unreadable": unknown("the management library gives no usable answer", absent=True),
    },
    applies=with_gpu,
)
def gpus_readable(lane: Lane, box: Box) -> List[Finding]:
    """The accelerator's management library answers and shows at least one GPU. A driver that is not there is a fail;
    what follows from a driver that does not answer is the topology policy's to decide."""
    facts = box["topology"] or {}
    extra = facts.get("extra") or {}
    if facts.get("gpus") is None:
        reason = {"driver_not_loaded": "driver_not_loaded", "library_missing": "driver_library_missing"}
        text = str(extra.get("message") or "no GPU could be read")
        fix = "check the driver: its module, its library and the device nodes"
        return [Finding(reason.get(str(extra.get("status")), "gpus_unreadable"), text, "a driver that answers", fix)]
    if not facts["gpus"]:
        return [Finding("gpus_none", "no GPU is visible", "GPUs for the lane", "check the driver and the slots")]
    return [Finding("gpus_ok", f"{len(facts['gpus'])} GPUs, driver {facts['driver']['loaded'] or 'unknown'}")]


@check(
    "topology",
    {
        "topology_ok": ok("the GPUs and their links satisfy the lane's policy"),
        "topology_doubt": warn("the decision holds, with a warning"),
        "topology_refused": fail("the decision is refused; its own reason code stands in the message"),
        "topology_refused_unread": fail("the decision is refused because the GPUs could not be read", absent=True),
        "topology_unknown": unknown("no decision was made", absent=True),
    },
    applies=with_gpu,
)
def topology(lane: Lane, box: Box) -> List[Finding]:
    """The topology decision accepts the box. A refusal is given with its reason code, such as ``too_few_gpus`` or
    ``p2p_failed``."""
    decision = box["decision"]
    if decision is None:
        return [Finding("topology_unknown", "no decision was made")]
    if decision["status"] == "refused":
        reason = "topology_refused" if (box["topology"] or {}).get("gpus") is not None else "topology_refused_unread"
        text, _, fix = str(decision.get("message", "")).partition(" Fix: ")
        return [Finding(reason, f"{decision['reason']}: {text}", "", fix or "correct the lane's policy or the box")]
    noted = [item for item in decision.get("warnings") or [] if item["code"] != "display_attached"]
    if noted:
        return [Finding("topology_doubt", f"{item['code']}: {item['message']}") for item in noted]
    order = ",".join(str(index) for index in decision.get("order") or [])
    return [
        Finding(
            "topology_ok", f"{decision['status']} ({decision['reason']}), GPUs {order or 'as the driver lists them'}"
        )
    ]


@check(
    "driver_match",
    {
        "driver_match_ok": ok("the loaded module and the libraries are of one version"),
        "driver_mismatch": fail("the module that is loaded is not of the version of the libraries on disk"),
        "driver_unknown": unknown("one of the two versions could not be read", absent=True),
    },
    applies=with_nvidia,
)
def driver_match(lane: Lane, box: Box) -> List[Finding]:
    """The loaded kernel module and the user-space libraries are of the same version. An unattended upgrade moves the
    libraries at once and the module at the next boot; new processes fail in between."""
    facts = box["topology"] or {}
    driver = facts.get("driver") or {}
    loaded, userland = driver.get("loaded"), driver.get("userland")
    refused = (facts.get("extra") or {}).get("status") == "driver_mismatch"
    text = f"module {loaded or 'unknown'}, libraries {userland or 'unknown'}"
    if refused or (loaded and userland and loaded != userland):
        fix = "reboot, and hold every package of the driver against unattended upgrades"
        return [Finding("driver_mismatch", text, "one version", fix)]
    if loaded is None or userland is None:
        return [Finding("driver_unknown", text)]
    return [Finding("driver_match_ok", f"driver {loaded}")]


@check(
    "driver_next_boot",
    {
        "next_boot_ok": ok("the next boot brings the driver up as it is now"),
        "reboot_due": warn("a reboot is due, and the next boot has the module"),
        "next_boot_without_driver": warn(
            "the next boot would come up without the driver: don't reboot before it is solved"
        ),
        "next_boot_unknown": unknown("which kernel boots next, or its module, could not be read", absent=True),
    },
    applies=with_nvidia,
)
def driver_next_boot(lane: Lane, box: Box) -> List[Finding]:
    """The kernel that boots next has the driver's module, of the version that is installed. The lane starts without it;
    the box would not come back from a power cut."""
    found = box["driver"]
    blocked = found["reboot_blocked"] if found else ["next_boot_unknown"]
    if not found or "next_boot_unknown" in blocked:
        return [Finding("next_boot_unknown", "which kernel boots next, or its module, could not be read")]
    text = f"kernel {found['next_kernel']} boots next, module {found['next_boot'] or 'none'}"
    if blocked:
        needed = f"the module {found['installed'] or 'of the driver'} for that kernel"
        return [Finding("next_boot_without_driver", text, needed, "vllm-fleet driver says what to do; don't reboot")]
    if found["reboot_required"]:
        return [Finding("reboot_due", f"{', '.join(found['reasons'])}; {text}", "", "drain the box and reboot it")]
    return [Finding("next_boot_ok", text)]


@check(
    "driver_cuda",
    {
        "driver_cuda_ok": ok("the driver's CUDA release is new enough"),
        "driver_cuda_too_old": fail("the driver's CUDA release is older than the engine needs"),
        "driver_cuda_unknown": unknown("the driver's CUDA release could not be read", absent=True),
    },
    applies=lambda lane: with_gpu(lane) and bool(lane["needs"].get("driver_cuda")),
)
def driver_cuda(lane: Lane, box: Box) -> List[Finding]:
    """The driver's CUDA release, as NVML gives it, is at least the engine's, compared as numbers."""
    need, found = lane["needs"]["driver_cuda"], box["driver_cuda"]
    if found is None:
        return [
            Finding("driver_cuda_unknown", "the driver's CUDA release could not be read", f"CUDA {versions.show(need)}")
        ]
    if versions.newer(need, found):
        text = f"the driver's CUDA is {versions.show(found)}"
        return [Finding("driver_cuda_too_old", text, f"CUDA {versions.show(need)} or newer", "upgrade the driver")]
    return [Finding("driver_cuda_ok", f"the driver's CUDA is {versions.show(found)}")]


@check(
    "nouveau",
    {
        "nouveau_absent": ok("nouveau is not loaded"),
        "nouveau_loaded": fail("nouveau is loaded and owns the cards"),
        "nouveau_unknown": unknown("neither the kernel's modules nor the drivers of the cards could be read"),
    },
    applies=with_nvidia,
)
def nouveau(lane: Lane, box: Box) -> List[Finding]:
    """The ``nouveau`` module is not loaded and owns no card; the driver's module would find none."""
    cards = ((box["topology"] or {}).get("extra") or {}).get("pci") or []
    drivers = [card["driver"] for card in cards]
    if "nouveau" in [*(box["kernel_modules"] or []), *drivers]:
        fix = "blacklist nouveau, rebuild the initramfs and reboot"
        return [Finding("nouveau_loaded", "the nouveau module is loaded", "the driver's module alone", fix)]
    if box["kernel_modules"] is None and (not drivers or None in drivers):
        return [Finding("nouveau_unknown", "neither /proc/modules nor the cards' drivers could be read")]
    return [Finding("nouveau_absent", "nouveau is not loaded")]


@check(
    "gpu_processes",
    {
        "gpus_free": ok("no foreign process on the lane's GPUs"),
        "gpu_orphan": fail("a worker of a dead engine still holds a GPU of the lane"),
        "gpu_occupied": fail("another process runs on a GPU of the lane"),
        "gpu_shared": warn("another process runs on a GPU of the lane, which the policy allows"),
        "gpu_processes_unknown": unknown("the processes could not be listed"),
    },
    applies=with_gpu,
)
def gpu_processes(lane: Lane, box: Box) -> List[Finding]:
    """The lane's GPUs carry no process but the lane's own. A worker that outlived its engine is named as such."""
    gpus = lane_gpus(lane, box)
    if not gpus:
        return [Finding("gpu_processes_unknown", "the lane's GPUs are not known")]
    findings = []
    unlisted = [gpu["index"] for gpu in gpus if gpu.get("processes") is None]
    for gpu in gpus:
        for entry in gpu.get("processes") or []:
            owner = box["processes"].get(str(entry["pid"]), {})
            if in_unit(owner.get("cgroup"), lane["lane"]):
                continue
            command = owner.get("command") or entry.get("name") or "unknown command"
            size = f", {entry['memory_mib']} MiB" if entry.get("memory_mib") is not None else ""
            text = f"pid {entry['pid']} ({command}) on {_title(gpu)}{size}"
            if any(title in command for title in _ENGINE_TITLES) and "vllm@" not in str(owner.get("cgroup")):
                findings.append(Finding("gpu_orphan", text, "a GPU of its own", f"kill {entry['pid']}"))
            elif lane["policy"].get("allow_busy"):
                findings.append(Finding("gpu_shared", text))
            else:
                findings.append(Finding("gpu_occupied", text, "a GPU of its own", "stop that process or move the lane"))
    if findings:
        return findings
    if unlisted:
        return [Finding("gpu_processes_unknown", f"the processes of GPU {shorten(unlisted)} could not be listed")]
    return [Finding("gpus_free", f"no foreign process on {len(gpus)} GPUs")]


@check(
    "gpu_memory",
    {
        "gpu_memory_ok": ok("each GPU of the lane has the budget free"),
        "gpu_memory_short": fail("a GPU of the lane has less free memory than the budget"),
        "gpu_memory_unknown": unknown("the memory of a GPU could not be read", absent=True),
    },
    applies=lambda lane: with_gpu(lane) and bool(_budget_wanted(lane)),
)
def gpu_memory(lane: Lane, box: Box) -> List[Finding]:
    """Each GPU of the lane has its budget *free*: what the profile names, and ``--gpu-memory-utilization`` times the
    driver's total, which is less than the card's label. Memory of the lane's own processes counts as free."""
    gpus = lane_gpus(lane, box)
    utilization = options(lane).get("--gpu-memory-utilization", "")
    findings = []
    for gpu in gpus:
        total, used = gpu.get("memory_total_mib"), gpu.get("memory_used_mib")
        if total is None or used is None:
            findings.append(Finding("gpu_memory_unknown", f"the memory of {_title(gpu)} could not be read"))
            continue
        need = int(lane["needs"].get("gpu_memory_mib") or 0)
        if _is_fraction(utilization):
            need = max(need, int(float(utilization) * total))
        if total - used < need:
            text = f"{total - used} of {total} MiB free on {_title(gpu)}"
            fix = "free the card (display, other processes) or lower the budget"
            findings.append(Finding("gpu_memory_short", text, f"{need} MiB", fix))
    if not gpus:
        return [Finding("gpu_memory_unknown", "the lane's GPUs are not known")]
    return findings or [Finding("gpu_memory_ok", f"the budget is free on {len(gpus)} GPUs")]


def _budget_wanted(lane: Lane) -> bool:
    return bool(lane["needs"].get("gpu_memory_mib")) or _is_fraction(options(lane).get("--gpu-memory-utilization", ""))


def _is_fraction(text: str) -> bool:
    try:
        return 0.0 < float(text) <= 1.0
    except ValueError:
        return False


@check(
    "display",
    {
        "display_none": ok("no display on the lane's GPUs"),
        "display_attached": warn("a display is attached: it takes memory that the budget counts on"),
        "display_unknown": unknown("whether a display is attached could not be read", absent=True),
    },
    applies=with_nvidia,
)
def display(lane: Lane, box: Box) -> List[Finding]:
    """No display is attached to the lane's GPUs; a desktop takes some hundred MiB of a card."""
    gpus = lane_gpus(lane, box)
    attached = [_title(gpu) for gpu in gpus if gpu.get("display")]
    if attached:
        return [
            Finding("display_attached", f"a display on {shorten(attached)}", "none", "use another card for the display")
        ]
    if not gpus or any(gpu.get("display") is None for gpu in gpus):
        return [Finding("display_unknown", "whether a display is attached could not be read")]
    return [Finding("display_none", "no display attached")]


@check(
    "persistence",
    {
        "persistence_on": ok("persistence mode is on"),
        "persistence_off": warn(
            "persistence mode is off: the driver unloads between starts, and power limits are lost"
        ),
        "persistence_unknown": unknown("the persistence mode could not be read", absent=True),
    },
    applies=with_nvidia,
)
def persistence(lane: Lane, box: Box) -> List[Finding]:
    """Persistence mode is on for the lane's GPUs, so that the driver stays initialised between starts."""
    modes = box["persistence"]
    gpus = lane_gpus(lane, box)
    off = [_title(gpu) for gpu in gpus if modes.get(gpu["uuid"]) is False]
    if off:
        fix = "systemctl enable --now nvidia-persistenced"
        return [Finding("persistence_off", f"persistence mode is off on {shorten(off)}", "on", fix)]
    if not gpus or any(modes.get(gpu["uuid"]) is None for gpu in gpus):
        return [Finding("persistence_unknown", "the persistence mode could not be read")]
    return [Finding("persistence_on", "persistence mode is on")]

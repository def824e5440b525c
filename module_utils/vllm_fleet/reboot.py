"""Whether a box is rebooted, and whether the reboot did what it was for. Pure; ``box_boot`` reads and records.

The record on the box lets a run that was interrupted go on, and keeps a cause that a reboot does not cure from becoming
a loop::

    {"schema": 1, "phase": "requested|done|failed", "since", "by", "reasons": ["…"], "lanes": ["…"],
     "before": {…}, "after_boot_id": null | "…"}

``before``, and the facts that the functions take, are snapshots of :mod:`.facts.boot`.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

from . import checks
from .errors import UsageError

PATH = "/var/lib/vllm-fleet/reboot.json"

NONE, REPORT, REFUSE, REBOOT, PROVE = "none", "report", "refuse", "reboot", "prove"

Facts = Mapping[str, Any]


def well_formed(record: Any) -> Dict[str, Any]:
    """Return a parsed record.

    :raises UsageError: ``unreadable_record``, it is none.
    """
    try:
        before = record["before"]
        texts = [record["since"], before["boot_id"] or "", *record["reasons"], *record["lanes"]]
        good = record["phase"] in ("requested", "done", "failed") and all(isinstance(text, str) for text in texts)
        good = (
            good and isinstance(before["gpus"], dict) and (before["module"] is None or "installed" in before["module"])
        )
        good = good and {"pci", "driver"} <= set(before["gpus"]) and "after_boot_id" in record
    except (KeyError, TypeError):
        good = False
    if not good:
        raise UsageError("unreadable_record", f"{PATH} holds no record of a reboot", "look at it, then remove it")
    return dict(record)


def plan(
    allowed: Optional[bool],
    required: Optional[bool],
    reasons: Sequence[str],
    blocked: Sequence[str],
    again: bool,
    record: Optional[Facts],
    now: Facts,
) -> Dict[str, str]:
    """Return ``{"action", "reason", "message"}``; ``action`` is one of the five words of this module.

    :param allowed: whether the play may reboot; ``None`` when nobody has decided.
    :param required: whether a reboot is needed; ``None`` when that could not be found out.
    :param reasons: codes of why it is needed.
    :param blocked: codes of why a reboot would not help, such as a next kernel without the module.
    :param again: reboot although the last one for this cause did not cure it.
    """
    why = ", ".join(reasons) or "no reason given"
    if record and record["phase"] == "requested" and record["before"]["boot_id"] != now["boot_id"]:
        message = f"the reboot that was asked for at {record['since']} has happened; what remains is the proof"
        return _answer(PROVE, "resumed", message)
    if required is None:
        return _answer(REPORT, "reboot_unknown", "it could not be found out whether a reboot is needed")
    if not required:
        return _answer(NONE, "not_required", "no reboot is needed")
    if not again and _survived(reasons, record, now):
        return _answer(
            REFUSE, "survived_reboot",
            f"a reboot is needed ({why}), but the one that was made for it, recorded at {record and record['since']}, "
            "did not help. Fix: see which module the kernel loads (an old one in the initramfs, or built for another "
            "kernel only), then set reboot_again=true for one more",
        )  # fmt: skip
    if allowed is None:
        return _answer(
            REFUSE, "reboot_undecided",
            f"a reboot is needed ({why}) and nobody has decided about it. "
            "Fix: set reboot_allowed to true, or to false to go on without",
        )  # fmt: skip
    if not allowed:
        return _answer(REPORT, "reboot_pending", f"a reboot is needed ({why}) and not allowed: reboot_allowed is false")
    if now["container"]:
        return _answer(
            REFUSE, "container",
            "this box is a container: its kernel belongs to another machine. Fix: reboot that one, or set "
            "reboot_allowed=false",
        )  # fmt: skip
    if blocked:
        return _answer(
            REFUSE, "reboot_blocked",
            f"a reboot is needed ({why}), but would not bring it: {', '.join(blocked)}. Fix: clear that first",
        )  # fmt: skip
    return _answer(REBOOT, "reboot_required", f"a reboot is needed: {why}")


def _answer(action: str, reason: str, message: str) -> Dict[str, str]:
    return {"action": action, "reason": reason, "message": message}


def _survived(reasons: Sequence[str], record: Optional[Facts], now: Facts) -> bool:
    """Return whether a finished reboot had the same cause: the same reasons, and the same module on disk."""
    if not record or record["phase"] not in ("done", "failed") or sorted(record["reasons"]) != sorted(reasons):
        return False
    # After a proof that passed, the same cause may come up anew on a later boot.
    same_boot = record["phase"] == "failed" or record["after_boot_id"] == now["boot_id"]
    return same_boot and _installed(record["before"]) == _installed(now)


def _installed(facts: Facts) -> Optional[str]:
    return facts["module"]["installed"] if facts["module"] else None


def request(by: str, reasons: Sequence[str], lanes: Sequence[str], now: Facts, time: str) -> Dict[str, Any]:
    """Return the record of a reboot that is about to be made."""
    return {
        "schema": 1, "phase": "requested", "since": time, "by": by, "reasons": sorted(reasons), "lanes": list(lanes),
        "before": dict(now), "after_boot_id": None,
    }  # fmt: skip


def close(record: Facts, results: Sequence[checks.Result], now: Facts, time: str) -> Dict[str, Any]:
    """Return the record after the proof."""
    phase = "failed" if checks.failed(results) else "done"
    return {**record, "phase": phase, "since": time, "after_boot_id": now["boot_id"]}


def judge(before: Facts, after: Facts) -> List[checks.Result]:
    """Return whether a reboot did what it was for: another boot, the installed module runs, no GPU is missing."""
    results = [_judge_boot(before, after)]
    if after["module"]:
        results.append(_judge_module(before, after))
    results.append(_judge_gpus(before["gpus"], after["gpus"], bool(after["module"])))
    return results


def _judge_boot(before: Facts, after: Facts) -> checks.Result:
    if before["boot_id"] is None or after["boot_id"] is None:
        return checks.result("reboot", checks.UNKNOWN, "boot_id_unreadable", "the kernel's boot id can't be read")
    if before["boot_id"] == after["boot_id"]:
        return checks.result("reboot", checks.FAIL, "boot_id_unchanged", "still the same boot", "reboot the box")
    return checks.result("reboot", checks.PASS, "rebooted", f"boot {after['boot_id']}, kernel {after['kernel']}")


def _judge_module(before: Facts, after: Facts) -> checks.Result:
    name, loaded, installed = (after["module"][key] for key in ("name", "loaded", "installed"))
    if installed is None:
        return checks.result(
            "module", checks.FAIL, "module_not_installed", f"kernel {after['kernel']} has no module {name}",
            "install it for this kernel; with DKMS: dkms autoinstall",
        )  # fmt: skip
    if loaded is None:
        return checks.result(
            "module", checks.FAIL, "module_not_loaded", f"{name} {installed} is installed and not loaded",
            f"modprobe {name}; the kernel log says why it refuses",
        )  # fmt: skip
    if not loaded or not installed:
        return checks.result(
            "module", checks.UNKNOWN, "module_unversioned", f"{name} tells neither version nor sources"
        )
    wanted = _installed(before)
    if loaded != installed or (wanted is not None and loaded != wanted):
        expected = installed if loaded != installed else wanted
        return checks.result(
            "module", checks.FAIL, "module_mismatch", f"{name} {loaded} is loaded, {expected} was expected",
            "look for an older copy in the initramfs and below /lib/modules: modinfo -F filename names the one on disk",
        )  # fmt: skip
    return checks.result("module", checks.PASS, "module_as_installed", f"{name} {loaded} is loaded and installed")


def _judge_gpus(before: Facts, after: Facts, driver_expected: bool) -> checks.Result:
    fix = "look at the kernel log, then power-cycle the box and reseat the card"
    if after["pci"] != before["pci"]:
        message = f"{after['pci']} GPUs on the bus, {before['pci']} before the reboot"
        return checks.result("gpu_count", checks.FAIL, "gpu_count_changed", message, fix)
    expected = before["driver"] if before["driver"] is not None else after["pci"] or None
    if expected is None or (after["driver"] is None and before["driver"] is None and not driver_expected):
        return checks.result("gpu_count", checks.UNKNOWN, "gpus_unknown", "no driver answered before the reboot")
    if after["driver"] is None:
        message = f"the driver does not answer; {expected} GPUs were expected"
        return checks.result("gpu_count", checks.FAIL, "gpus_unreadable", message, "vllm-fleet doctor says more")
    if after["driver"] != expected:
        message = f"the driver answers for {after['driver']} GPUs, {expected} were expected"
        return checks.result("gpu_count", checks.FAIL, "gpu_count_changed", message, fix)
    return checks.result("gpu_count", checks.PASS, "gpu_count_equal", f"{expected} GPUs, as before")


def why_away(error: str) -> Dict[str, Any]:
    """Say in words why a box does not answer; ``fatal`` when waiting can't help.

    :param error: what the connection's error said.
    """
    text = error.lower()
    if "host key verification failed" in text or "identification has changed" in text:
        return {"fatal": True, "reason": "host_key_changed", "message": "its SSH host key is another one than before"}
    for words, message in (
        ("connection refused", "refuses SSH (the system is not up yet)"),
        ("timed out", "no answer (firmware, memory training)"),
        ("no route to host", "no answer (firmware, memory training)"),
        ("permission denied", "SSH is up and does not let us in yet"),
        ("not permitted to log in yet", "SSH is up and does not let us in yet"),
    ):
        if words in text:
            return {"fatal": False, "reason": "away", "message": message}
    return {"fatal": False, "reason": "away", "message": "away"}

"""Where the lab keeps things, and what it consists of."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STATE = ROOT / "lab" / ".state"
INVENTORY = ROOT / "inventories" / "lab"

#: downloads and the base image, shared by all checkouts of one user; rebuilt when absent
CACHE = Path(os.environ.get("VLLM_FLEET_CACHE") or Path.home() / ".cache" / "vllm-fleet")

#: names of containers and of the network carry the checkout, so that two clones on one machine are two labs
PREFIX = "vf-" + hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]
NETWORK = PREFIX
LABEL = "vllm-fleet.checkout"

USER = "ops"


@dataclass(frozen=True)
class BoxSpec:
    """What a box of the lab is made of.

    :param name: host name, and its name in the inventory.
    :param nvml: name of the facts file in ``lab/nvml_sim/boxes`` that says which GPUs it shows; None for no GPU.
    :param shm_size: size of ``/dev/shm``, in podman's notation.
    :param image: podman image with systemd and sshd to use instead of the lab's own.
    :param host_number: last byte of its address in the lab's /24 network; None takes a free one.
    """

    name: str
    nvml: Path | None = None
    shm_size: str = "1g"
    image: str | None = None
    host_number: int | None = None


NVML_SIM = ROOT / "lab" / "nvml_sim"
LAB_BOXES = (
    BoxSpec("box1", NVML_SIM / "boxes" / "box1.json", host_number=11),
    BoxSpec("box2", NVML_SIM / "boxes" / "box2.json", host_number=12),
    BoxSpec("edge1", host_number=21),
)

#: lanes that the lab's inventory serves; each gets an API key
LAB_LANES: dict[str, tuple[str, ...]] = {"box1": ("main",), "box2": ("main",)}
#: the tiny checkpoint, here and on the boxes
CHECKPOINT = STATE / "checkpoints" / "tiny"
BOX_CHECKPOINT = "/srv/models/tiny"

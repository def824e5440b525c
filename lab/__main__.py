"""The lab: real systemd boxes in containers on this machine, a tiny checkpoint and a real engine."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from . import ask, boxes, converge, engine_lock, environment, host, registry, vm, wheels
from .settings import LAB_BOXES, LAB_LANES, VENV, BoxSpec
from .shell import LabError, say


def _up(args: argparse.Namespace) -> int:
    """Make, start or repair the lab's boxes; provision them; ask every lane a question."""
    machine = host.ready()
    say(f"   {host.describe(machine)}")
    registry.make_api_keys(LAB_LANES)
    boxes.up(list(LAB_BOXES), machine)
    if args.boxes_only:
        return 0
    wheels.ensure()
    try:
        converge.play()
        converge.play(converge.BALANCER)
        if any(map(boxes.amid_rollout, LAB_LANES)):
            converge.play(converge.RESUME)
    finally:
        boxes.harvest_packages()
    return _status(args)


def _status(args: argparse.Namespace) -> int:
    """Show the boxes and what their lanes answer."""
    known = registry.registry()
    if not known:
        say("   no lab here. Fix: make lab")
        return 1
    for box in known.values():
        state = "reachable" if boxes.answers(box) else "NOT REACHABLE (make lab repairs it)"
        say(f"   {box.name}: {box.address}, container {box.container}, {state}")
    return 0 if ask.report() else 1


def _down(args: argparse.Namespace) -> int:
    """Remove the boxes, the network and the state; the cache stays unless --purge is given."""
    for name in vm.names():
        vm.down(name)
    boxes.down(args.purge)
    return 0


def _env(args: argparse.Namespace) -> int:
    """Install missing host packages and make .venv from the lock."""
    host.ready()
    environment.ensure()
    return 0


def _lock(args: argparse.Namespace) -> int:
    """Write the CPU engine's lock anew."""
    wheels.lock(args.uv)
    return 0


def _engine_lock(args: argparse.Namespace) -> int:
    """Write the lock of an engine of the catalog anew."""
    if args.engine == wheels.ENGINE:
        wheels.lock(args.uv)
    else:
        say(f"   {engine_lock.make(args.engine, args.uv, args.requirements)}")
    return 0


def _cost(args: argparse.Namespace) -> int:
    """Run the playbook twice and print what the second run cost."""
    say(converge.cost())
    return 0


def _spec(args: argparse.Namespace) -> BoxSpec:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", args.name):
        raise LabError(f"box name {args.name!r}: give a lower-case letter, then letters, digits and dashes, 31 in all")
    if args.name in {spec.name for spec in LAB_BOXES}:
        raise LabError(f"box name {args.name!r} is one of the lab's own. Fix: choose another")
    nvml = getattr(args, "nvml", None)
    if nvml and not nvml.is_file():
        raise LabError(f"no facts file {nvml}")
    return BoxSpec(args.name, nvml, getattr(args, "shm_size", "1g"), getattr(args, "image", None))


def _box_create(args: argparse.Namespace) -> int:
    """Make a box beside the lab's own, or repair it."""
    boxes.up([_spec(args)], host.ready())
    return 0


def _box_destroy(args: argparse.Namespace) -> int:
    """Remove such a box."""
    boxes.destroy(_spec(args).name)
    return 0


def _box_inventory(args: argparse.Namespace) -> int:
    """Print an inventory (JSON, which is YAML too) with that one box."""
    box = registry.registry().get(_spec(args).name)
    if box is None:
        raise LabError(f"no box {args.name}. Fix: python3 -m lab box create {args.name}")
    say(json.dumps({"all": {"hosts": {box.name: registry.connection(box)}}}, indent=2))
    return 0


def _vm_up(args: argparse.Namespace) -> int:
    """Make a virtual machine, or start one that is off, and wait until it answers over SSH."""
    vm.up(_spec(args).name)
    return 0


def _vm_down(args: argparse.Namespace) -> int:
    """Switch it off and remove it."""
    vm.down(_spec(args).name)
    return 0


def _vm_inventory(args: argparse.Namespace) -> int:
    """Print an inventory with that one machine."""
    say(json.dumps({"all": {"hosts": {_spec(args).name: vm.connection(args.name)}}}, indent=2))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        group: argparse._SubParsersAction[argparse.ArgumentParser], name: str, function: object
    ) -> argparse.ArgumentParser:
        command = group.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.set_defaults(run=function)
        return command

    add(commands, "env", _env)
    up = add(commands, "up", _up)
    up.add_argument("--boxes-only", action="store_true", help="stop when the boxes can be reached")
    down = add(commands, "down", _down)
    down.add_argument("--purge", action="store_true", help="remove the cache and the images too")
    add(commands, "status", _status)
    add(commands, "converge-cost", _cost)
    add(commands, "lock", _lock).add_argument("--uv", default=str(VENV / "bin" / "uv"), help="the uv program")
    locking = add(commands, "engine-lock", _engine_lock)
    locking.add_argument("engine", help="id of the engine in the catalog")
    locking.add_argument("--requirements", type=Path, help="exact versions of its release, which get their hashes")
    locking.add_argument("--uv", default=str(VENV / "bin" / "uv"), help="the uv program")
    box = commands.add_parser("box", help="boxes beside the lab's own, for tests")
    box_commands = box.add_subparsers(dest="box_command", required=True, metavar="COMMAND")
    create = add(box_commands, "create", _box_create)
    create.add_argument("name")
    create.add_argument("--nvml", type=Path, help="facts file of the GPUs that the box shows")
    create.add_argument("--shm-size", default="1g", help="size of /dev/shm, such as 64m")
    create.add_argument("--image", help="podman image with systemd and sshd instead of the lab's own")
    for name, function in (("destroy", _box_destroy), ("inventory", _box_inventory)):
        add(box_commands, name, function).add_argument("name")
    machine = commands.add_parser("vm", help="whole virtual machines, for what needs a kernel of its own")
    vm_commands = machine.add_subparsers(dest="vm_command", required=True, metavar="COMMAND")
    for name, function in (("up", _vm_up), ("down", _vm_down), ("inventory", _vm_inventory)):
        add(vm_commands, name, function).add_argument("name")
    args = parser.parse_args()
    result: int = args.run(args)
    return result


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        say(f"lab: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        say("lab: interrupted; run the same command again, it goes on from here")
        sys.exit(130)

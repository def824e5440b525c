"""The program ``vllm-fleet``: one line a command, each loaded only when it is the one that was asked for."""

from __future__ import annotations

import argparse
import importlib
import sys

from .errors import FleetError, from_os

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Dict, List, Optional, Tuple


#: command -> (module under ``commands``, help line)
COMMANDS: Dict[str, Tuple[str, str]] = {
    "topology": ("topology", "decide which GPUs a lane gets, in which order, and which links it may trust"),
    "p2p-check": ("p2p_check", "prove the links between GPUs with real transfers and store the verdict"),
    "probe": ("probe", "run one small computation on each GPU under a timeout"),
    "checkpoint": ("checkpoint", "check that a checkpoint is complete, by its index, sizes and manifest"),
    "checkpoint-config": ("checkpoint_config", "set one key in a checkpoint's JSON file and nothing else"),
    "products": ("products", "record or verify the build products of an engine tree"),
    "preflight": ("preflight", "run every check of a lane and give one verdict"),
    "doctor": ("doctor", "the preflight as a table for a person, with the fix for each finding"),
    "start-check": ("start_check", "what the unit runs before the engine: preflight, decision, runtime environment"),
    "wait-ready": ("wait_ready", "what the unit runs after the engine: ends when it has answered a completion"),
    "driver": ("driver", "how the NVIDIA driver stands: loaded, installed and next-boot versions, and what to do"),
    "drift-check": ("drift_check", "what has moved under a serving box, for the daily timer"),
    "power-limits": ("power_limits", "set the power limits of this box's GPUs, for the unit at a boot"),
    "watchdog": (
        "watchdog",
        "what runs beside a lane: ends an engine that hangs, keeps the boxes of one lane together",
    ),
    "render": ("render", "print a lane's command line and environment"),
    "bench": ("bench", "measure a lane with the engine's own benchmark and compare with the release before"),
    "lint-args": ("lint_args", "say which engine arguments a given engine version does not know"),
    "import-env": ("import_env", "turn the .env of a start script into host variables"),
}


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Format help at a fixed width: asking for the terminal's imports more than all the rest of argparse."""
    return argparse.HelpFormatter(prog, width=100)


def build_parser(command: Optional[str]) -> argparse.ArgumentParser:
    """Return the parser, with the arguments of ``command`` only (the others stay unloaded)."""
    parser = argparse.ArgumentParser(
        prog="vllm-fleet", description="Verified vLLM serving on a GPU box.", formatter_class=_formatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog=parser.prog)
    # One parser is enough when the command is known; the whole list is for help and for a word that is no command.
    listed = {command: COMMANDS[command]} if command in COMMANDS else COMMANDS
    for name, (module, help_line) in listed.items():
        sub = commands.add_parser(name, help=help_line, description=help_line, formatter_class=_formatter)
        if name == command:
            loaded = importlib.import_module(f".commands.{module}", __package__)
            loaded.add_arguments(sub)
            sub.set_defaults(run=loaded.run)
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Run one command; errors become one line on stderr and an exit status, never a traceback."""
    arguments = sys.argv[1:] if argv is None else argv
    command = next((word for word in arguments if not word.startswith("-")), None)
    args = build_parser(command).parse_args(arguments)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 2
    except (FleetError, OSError) as error:
        readable = error if isinstance(error, FleetError) else from_os(error)
        print(f"vllm-fleet {args.command}: {readable.one_line()}", file=sys.stderr)
        return readable.exit_code

"""Asks an installed vLLM's own parser about a command line. Runs on the engine's Python, alone, without GPU or model.

Reads ``{"entry": "serve" | "api_server", "argv": [words after the entry]}`` on stdin and prints one JSON line at last:
``{"status": "accepted" | "refused" | "broken", "message": "...", "version": "..."}``. Only the standard library and the
engine itself are imported; nothing else of this project is.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

#: where the option table of the server has lived, newest first
CLI_MODULES = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
PARSER_MODULES = ("vllm.utils.argparse_utils", "vllm.utils")
#: what the server checks after the parser: attribute of the arguments, modules, manager, its table in old versions
NAME_REGISTRIES = (
    (
        "tool_call_parser",
        "tool call parser",
        ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers"),
        "ToolParserManager",
        "tool_parsers",
    ),
    (
        "reasoning_parser",
        "reasoning parser",
        ("vllm.reasoning", "vllm.entrypoints.openai.reasoning_parsers"),
        "ReasoningParserManager",
        "reasoning_parsers",
    ),
)


class RefusedByEngineError(Exception):
    """The engine does not take the command line; the text is its own."""


def first_with(names: Sequence[str], attribute: str) -> Any:
    """Return an attribute from the first module that has it."""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(error.name + ".")):
                continue
            raise
        if hasattr(module, attribute):
            return getattr(module, attribute)
    raise LookupError(f"none of {', '.join(names)} has {attribute}")


def build(entry: str) -> Tuple[Callable[[List[str]], Any], Callable[[Any], Any]]:
    """Return ``(parse, validate)`` of the engine's own command line."""
    parser_class = first_with(PARSER_MODULES, "FlexibleArgumentParser")
    if entry == "serve":
        try:
            serve = importlib.import_module("vllm.entrypoints.cli.serve")
        except ModuleNotFoundError:
            serve = None
        if serve is not None:
            root = parser_class(prog="vllm")
            commands = root.add_subparsers(required=True, dest="subparser")
            command = serve.cmd_init()[0]
            command.subparser_init(commands)
            return (lambda argv: root.parse_args(["serve", *argv])), command.validate
    parser = first_with(CLI_MODULES, "make_arg_parser")(parser_class(prog="api_server"))
    validate = first_with(CLI_MODULES, "validate_parsed_serve_args")
    return parser.parse_args, validate


def last_words(text: str) -> str:
    """Return the parser's complaint without its usage lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [number for number, line in enumerate(lines) if "error:" in line]
    return " ".join(lines[found[-1] :]) if found else " ".join(lines[-3:])


def parse(entry: str, argv: List[str]) -> Any:
    """Parse and validate; return the namespace.

    :raises RefusedByEngineError: with the engine's own message.
    """
    run, validate = build(entry)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = run(argv)
            validate(args)
    except SystemExit as stop:
        raise RefusedByEngineError(last_words(said.getvalue()) or f"the parser ended with status {stop.code}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise RefusedByEngineError(f"{type(error).__name__}: {error}") from None
    return args


def registered(modules: Sequence[str], manager: str, table: str) -> Optional[List[str]]:
    """Return the names that an engine registers, None for one without such a register (a build may take any name)."""
    try:
        registry = first_with(modules, manager)
    except LookupError:
        return None
    return sorted(registry.list_registered() if hasattr(registry, "list_registered") else getattr(registry, table))


def check_names(args: Any) -> None:
    """Check what the parser leaves open and the server refuses later: names of parsers and of quantization methods.

    :raises RefusedByEngineError: with the name and the names that this engine has.
    """
    if getattr(args, "tool_parser_plugin", None) or getattr(args, "reasoning_parser_plugin", None):
        return  # a plugin may add any name
    for attribute, what, modules, manager, table in NAME_REGISTRIES:
        value = getattr(args, attribute, None)
        if not value:
            continue
        names = registered(modules, manager, table)
        if names is not None and value not in names:
            raise RefusedByEngineError(f"invalid {what}: {value} (chose from {{ {','.join(names)} }})")
    method = getattr(args, "quantization", None)
    if method:
        known = importlib.import_module("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS
        if method not in known:
            raise RefusedByEngineError(f"Unknown quantization method: {method}. Must be one of {sorted(known)}.")


def describe() -> Dict[str, Any]:
    """Return every name this engine knows, for the table of ``engine_args``."""
    parser = first_with(CLI_MODULES, "make_arg_parser")(first_with(PARSER_MODULES, "FlexibleArgumentParser")())
    names = {"flags": sorted(parser._option_string_actions)}
    for _attribute, _what, modules, manager, table in NAME_REGISTRIES:
        names[table] = registered(modules, manager, table) or []
    methods = importlib.import_module("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS
    return {**names, "quantization": sorted(methods)}


def main() -> None:
    """Answer one question on stdin."""
    question = json.loads(sys.stdin.read())
    answer: Dict[str, Any] = {"status": "accepted", "message": "", "version": ""}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # whatever the engine prints at import is not the answer
            answer["version"] = importlib.import_module("vllm").__version__
            if question.get("describe"):
                answer.update(describe())
            else:
                check_names(parse(question["entry"], question["argv"]))
    except RefusedByEngineError as error:
        answer.update(status="refused", message=str(error))
    except Exception as error:
        answer.update(status="broken", message=f"{type(error).__name__}: {error}")
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()

"""Is a command line valid for a version of vLLM? The answer from a table, where the engine itself is not at hand.

Findings are ``{"code", "status", "flag", "message", "fix", "source"}``; ``status`` is ``fail`` where the engine would
refuse to start or serve something else than was asked for, else ``warn``. Codes: ``unknown``, ``removed``,
``deprecated``, ``abbreviation``, ``ambiguous``, ``unknown_value``, ``inert``, ``conflict``, ``env_not_text``,
``table_uncertain``.
"""

from __future__ import annotations

import json
import pkgutil
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from .arguments import Group, argument_value, canonical_flag, is_flag
from .checks import FAIL, WARN
from .errors import UsageError
from .schema import suggestion

Finding = Dict[str, str]
Version = Tuple[int, ...]

_VERSION = re.compile(r"([0-9]+(?:\.[0-9]+)*)(?:\.?[a-z]+[0-9]+)*(?:\+([a-z0-9.]+))?", re.ASCII)

#: flags whose words are names out of a list that the parser itself does not check
_NAMED_VALUES = {
    "--tool-call-parser": "tool_parsers",
    "--reasoning-parser": "reasoning_parsers",
    "--quantization": "quantization",
}


def load_table() -> Dict[str, Any]:
    """Return the table that is part of this package."""
    raw = pkgutil.get_data(__package__, "data/engine_args.json")
    assert raw is not None  # noqa: S101 - the file is part of the package
    table: Dict[str, Any] = json.loads(raw.decode("utf-8"))
    return table


def parse_version(text: str) -> Tuple[Version, str]:
    """Return a version's numbers and its vendor, ``0.6.3+corex.3.2.3`` as ``((0, 6, 3), "corex")``.

    :raises UsageError: ``bad_version``.
    """
    found = _VERSION.fullmatch(text)
    if not found:
        raise UsageError("bad_version", f"{text!r} is no version of vLLM such as 0.33.0 or 0.6.3+corex.3.2.3.")
    numbers = tuple(int(part) for part in found.group(1).split("."))
    vendor = (found.group(2) or "").split(".")[0]
    return numbers, vendor if vendor in ("corex",) else ""


def _in_spans(version: Version, spans: Iterable[Sequence[Optional[str]]]) -> bool:
    return any(
        (first is None or version >= parse_version(first)[0]) and (gone is None or version < parse_version(gone)[0])
        for first, gone in spans
    )


class Knowledge:
    """What the table says about one version."""

    def __init__(self, version: str, table: Optional[Mapping[str, Any]] = None) -> None:
        self.text = version
        self.version, self.vendor = parse_version(version)
        self.table = table if table is not None else load_table()
        self.snapshots = [parse_version(item["version"])[0] for item in self.table["snapshots"]]
        below = [index for index, snapshot in enumerate(self.snapshots) if snapshot <= self.version]
        above = [index for index, snapshot in enumerate(self.snapshots) if snapshot >= self.version]
        # outside the table the nearest snapshot is the best guess there is
        self.below = below[-1] if below else above[0]
        self.above = above[0] if above else below[-1]
        self.outside = not below or not above

    def has(self, kind: str, name: str) -> Optional[bool]:
        """Return whether this version knows a name; None when the table cannot say.

        :param kind: ``flags``, ``tool_parsers``, ``reasoning_parsers`` or ``quantization``.
        """
        record = self.table["lifetimes"].get(kind, {}).get(name)
        if record:
            return _in_spans(self.version, record["spans"])
        marks = self.table[kind].get(name)
        if marks is None:
            return False
        before, after = marks[self.below] == "x", marks[self.above] == "x"
        return before if before == after else None

    def names(self, kind: str) -> List[str]:
        """Return every name that this version may know, for prefixes and suggestions."""
        every = {*self.table[kind], *self.table["lifetimes"].get(kind, {})}
        return sorted(name for name in every if self.has(kind, name) is not False)

    def lifetime(self, flag: str) -> Mapping[str, Any]:
        """Return a flag's record, empty when there is none."""
        record: Mapping[str, Any] = self.table["lifetimes"]["flags"].get(flag, {})
        return record

    def ever(self, kind: str, name: str) -> bool:
        """Return whether any version of the table knows a name."""
        return name in self.table[kind] or name in self.table["lifetimes"].get(kind, {})

    def at_least(self, text: str) -> bool:
        """Return whether this version is that one or a later one."""
        return self.version >= parse_version(text)[0]


def _finding(code: str, status: str, flag: str, message: str, fix: str = "", source: str = "") -> Finding:
    return {"code": code, "status": status, "flag": flag, "message": message, "fix": fix, "source": source}


def _sentence(*parts: str) -> str:
    text = "; ".join(part for part in parts if part)
    return text[:1].upper() + text[1:] + "." if text else ""


def _dead(know: Knowledge, flag: str, reverse: bool) -> Finding:
    """Return the finding for a flag that this version does not know but another one does."""
    record = know.lifetime(flag)
    spans = record.get("spans", [])
    earlier = [gone for _, gone in spans if gone and know.at_least(gone)]
    later = [first for first, _ in spans if first and not know.at_least(first)]
    replaced = record.get("replaced_by", "")
    fix = f"Use {replaced}." if replaced and "nothing" not in replaced else "Leave it out."
    if earlier:
        return _finding(
            "removed",
            FAIL,
            flag,
            _sentence(f"gone since vLLM {earlier[-1]}, {know.text} refuses it", record.get("note", "")),
            fix,
            record["source"],
        )
    if later:
        return _finding(
            "unknown",
            FAIL,
            flag,
            f"First known to vLLM {later[0]}; {know.text} refuses it.",
            "Leave it out, or use a build that has it added.",
            record["source"],
        )
    marks = know.table["flags"][flag]
    known = [item["version"] for item, mark in zip(know.table["snapshots"], marks) if mark == "x"]
    if reverse and marks[: know.below + 1].count("x"):
        last = [item["version"] for item, mark in zip(know.table["snapshots"][: know.below + 1], marks) if mark == "x"][
            -1
        ]
        return _finding(
            "removed", FAIL, flag, f"Known to vLLM {last}, refused by {know.text}.", "Leave it out.", "snapshots"
        )
    return _finding(
        "unknown",
        FAIL,
        flag,
        f"vLLM {know.text} does not know it; {', '.join(known)} does.",
        "Leave it out.",
        "snapshots",
    )


def _name_finding(know: Knowledge, word: str) -> Tuple[str, List[Finding]]:
    """Return ``(the flag that the parser takes, findings)`` for one flag as it was written."""
    flag = canonical_flag(word)
    dotted = flag.split(".", 1)[0]  # --compilation-config.mode sets one key of the JSON value
    if re.fullmatch(r"-O[0-9]", flag) or dotted == "-O":
        return "--optimization-level", []
    state = know.has("flags", dotted)
    if state:
        return dotted, []
    if state is None:
        snapshots = know.table["snapshots"]
        low, high = snapshots[know.below]["version"], snapshots[know.above]["version"]
        message = f"The table knows vLLM {low} and {high}, which disagree about it, and nothing between."
        return dotted, [_finding("table_uncertain", WARN, dotted, message, "Ask the engine's own parser.", "snapshots")]
    if dotted.startswith("--"):
        longer = [name for name in know.names("flags") if name.startswith(dotted)]
        if len(longer) == 1:
            message = f"Taken for {longer[0]} only as its beginning; a later flag with the same beginning breaks it."
            return longer[0], [_finding("abbreviation", WARN, dotted, message, f"Write {longer[0]}.", "argparse")]
        if len(longer) > 1 and not know.ever("flags", dotted):
            message = f"The beginning of several flags: {', '.join(longer[:4])}; the engine refuses it."
            return dotted, [_finding("ambiguous", FAIL, dotted, message, "Write the flag out.", "argparse")]
    if know.ever("flags", dotted):
        return dotted, [_dead(know, dotted, reverse=True)]
    hint = suggestion(dotted, know.names("flags"), 0.85)
    message = f"vLLM {know.text} does not know it, nor does any version of the table."
    return dotted, [
        _finding("unknown", FAIL, dotted, message, hint or "Leave it out, or use a build that has it.", "snapshots")
    ]


def _aged(know: Knowledge, flag: str) -> List[Finding]:
    """Return the findings for a flag that is known: deprecated, or without effect on this vendor's build."""
    findings = []
    record = know.lifetime(flag)
    since = record.get("deprecated")
    first_span = record.get("spans", [[None, None]])[0]
    if since and know.at_least(since) and _in_spans(know.version, [first_span]):
        gone = f"; gone in {first_span[1]}" if first_span[1] else ""
        findings.append(
            _finding(
                "deprecated",
                WARN,
                flag,
                _sentence(f"deprecated since vLLM {since}{gone}", record.get("note", "")),
                "Leave it out.",
                record["source"],
            )
        )
    elif since and len(record["spans"]) > 1 and not _in_spans(know.version, [first_span]):
        message = _sentence(record["note"], "it asks for the default")
        findings.append(_finding("inert", WARN, flag, message, "Leave it out.", record["source"]))
    vendor = know.table["vendors"].get(know.vendor, {}).get(flag)
    if vendor:
        findings.append(_finding("inert", WARN, flag, _sentence(vendor["note"]), "Leave it out.", vendor["source"]))
    return findings


def _value_findings(know: Knowledge, groups: Sequence[Group]) -> List[Finding]:
    findings = []
    for flag, kind in _NAMED_VALUES.items():
        value = argument_value(groups, flag)
        # a plugin may register any name
        if value and kind != "quantization" and argument_value(groups, "--tool-parser-plugin"):
            continue
        if value and know.has(kind, value) is False:
            record = know.table["lifetimes"].get(kind, {}).get(value, {})
            since = f" It came with vLLM {record['spans'][0][0]}." if record else ""
            known = ", ".join(know.names(kind)) or "none"
            findings.append(
                _finding(
                    "unknown_value",
                    FAIL,
                    flag,
                    f"{value} is not among the names of vLLM {know.text}.{since}",
                    f"Known: {known}. A build with it added can be told apart only by its own parser.",
                    record.get("source", "the registry of this version"),
                )
            )
    return findings


def _number(text: Optional[str]) -> Optional[int]:
    return int(text) if text and text.isdigit() else None


def _conflicts(know: Knowledge, groups: Sequence[Group]) -> List[Finding]:
    """Return what no single flag shows: combinations that the engine refuses or reads in another way."""
    findings: List[Finding] = []
    present = {canonical_flag(group[0]) for group in groups}

    def add(flag: str, message: str, fix: str, source: str, status: str = FAIL, code: str = "conflict") -> None:
        findings.append(_finding(code, status, flag, message, fix, source))

    steps = _number(argument_value(groups, "--num-scheduler-steps"))
    sequences = _number(argument_value(groups, "--max-num-seqs"))
    tokens = _number(argument_value(groups, "--max-num-batched-tokens"))
    context = _number(argument_value(groups, "--max-model-len"))
    chunked = "--enable-chunked-prefill" in present
    if steps and steps > 1 and know.has("flags", "--num-scheduler-steps"):
        source = "vLLM 0.6.3, worker/multi_step_model_runner.py and core/scheduler.py"
        if chunked and not know.at_least("0.6.3"):
            add(
                "--num-scheduler-steps",
                "Refused together with --enable-chunked-prefill.",
                "Leave one of them out.",
                source,
            )
        elif chunked and know.vendor == "corex":
            message = (
                "With --enable-chunked-prefill it wants the flash-attn backend; this card runs XFormers, so the "
                "workers stop at their start."
            )
            add("--num-scheduler-steps", message, "Leave --num-scheduler-steps out.", source)
        elif chunked:
            message = "With --enable-chunked-prefill it wants the flash-attn backend; other backends stop the workers."
            add("--num-scheduler-steps", message, "Leave --num-scheduler-steps out.", source, WARN)
        if tokens and context and tokens < context:
            message = (
                f"Multi-step scheduling does not split prompts: those above {tokens} tokens (--max-num-batched-tokens) "
                f"are ignored, so the {context} tokens of --max-model-len cannot be used."
            )
            add("--num-scheduler-steps", message, "Leave --num-scheduler-steps out.", source)
        stages = _number(argument_value(groups, "--pipeline-parallel-size"))
        if stages and stages > 1:
            add("--num-scheduler-steps", "Refused with pipeline stages.", "Leave it out.", source)
    elif tokens and context and tokens < context <= 32768 and not chunked and not know.at_least("0.8.0"):
        message = f"Without chunked prefill, {tokens} tokens are too few for a prompt of {context} tokens; refused."
        add("--max-num-batched-tokens", message, "Add --enable-chunked-prefill.", "vLLM 0.6.3, config.py")
    if tokens and sequences and tokens < sequences:
        message = f"{tokens} is below --max-num-seqs {sequences}; the scheduler refuses it."
        add("--max-num-batched-tokens", message, f"Use {sequences} or more.", "vLLM, config/scheduler.py")
    if argument_value(groups, "--preemption-mode") == "recompute" and know.has("flags", "--preemption-mode"):
        message = (
            "Single sequences are recomputed by default; it changes groups of several (n > 1) only, for which this "
            "version calls recomputing unsupported."
        )
        add("--preemption-mode", message, "Leave it out.", "vLLM 0.6.3, core/scheduler.py", WARN, "inert")
    if "--enforce-eager" in present and "--max-seq-len-to-capture" in present:
        add("--max-seq-len-to-capture", "Nothing is captured in eager mode.", "Leave it out.", "vLLM", WARN, "inert")
    if "--enable-auto-tool-choice" in present and "--tool-call-parser" not in present:
        add("--enable-auto-tool-choice", "Refused without --tool-call-parser.", "Name a parser.", "vLLM, cli_args.py")
    if (
        "--reasoning-parser" in present
        and "--enable-reasoning" not in present
        and know.has("flags", "--enable-reasoning")
    ):
        add(
            "--reasoning-parser", "This version wants --enable-reasoning with it.", "Add it.", "vLLM 0.9.2, cli_args.py"
        )
    for flag in sorted(present):
        opposite = "--no-" + flag[2:]
        if opposite in present:
            add(flag, f"Both {flag} and {opposite} are given; the last one counts.", "Keep one.", "argparse", WARN)
    seen: Dict[str, int] = {}
    for group in groups:
        flag = canonical_flag(group[0])
        seen[flag] = seen.get(flag, 0) + 1
        if seen[flag] == 2 and "." not in flag:
            add(flag, "Given more than once; only the last one counts.", "Keep one.", "argparse", WARN, "inert")
    return findings


def _environment_findings(know: Knowledge, env: Mapping[str, str]) -> List[Finding]:
    findings = []
    for name, value in env.items():
        record = know.table["environment"].get(name)
        records = [record] if record else []
        records += [item for item in know.table["environment_values"].get(name, []) if value.startswith(item["prefix"])]
        for item in records:
            if item.get("vendor", know.vendor) != know.vendor:
                continue
            replaced = item.get("replaced_by")
            fix = f"Use {replaced}." if replaced else "Leave it out, or do not count on it."
            if item.get("gone") and know.at_least(item["gone"]):
                message = _sentence(f"no longer a variable of vLLM since {item['gone']}", item.get("note", ""))
                findings.append(_finding("removed", WARN, name, message, fix, item["source"]))
            elif _in_spans(know.version, item.get("inert", [])):
                findings.append(_finding("inert", WARN, name, _sentence(item["note"]), fix, item["source"]))
    return findings


def lint(
    groups: Sequence[Group],
    version: str,
    env: Optional[Mapping[str, str]] = None,
    bare_env: Iterable[str] = (),
    concurrency: Optional[int] = None,
    table: Optional[Mapping[str, Any]] = None,
) -> List[Finding]:
    """Return the findings for a command line and its environment.

    :param groups: the arguments, each flag with its words (:func:`.arguments.group_words`).
    :param version: of the engine, with a vendor's suffix where it is a vendor's build.
    :param bare_env: names whose value is a number or truth value to YAML, not a text.
    :param concurrency: how many requests the caller sends at a time, where it says so.
    :raises UsageError: ``bad_version``.
    """
    know = Knowledge(version, table)
    findings: List[Finding] = []
    if know.outside:
        nearest = know.table["snapshots"][know.below]["version"]
        message = f"The table does not reach vLLM {version}; judged by {nearest}."
        findings.append(_finding("table_uncertain", WARN, "", message, "Ask the engine's own parser.", "snapshots"))
    taken: List[Group] = []
    for group in groups:
        if not is_flag(group[0]):
            continue
        flag, named = _name_finding(know, group[0])
        rest = [group[0].split("=", 1)[1]] if "=" in group[0] else []
        taken.append([flag, *rest, *group[1:]])
        findings += named
        if not named:
            findings += _aged(know, flag)
    findings += _value_findings(know, taken)
    findings += _conflicts(know, taken)
    findings += _environment_findings(know, env or {})
    for name in bare_env:
        message = "Its value is a number or truth value to YAML; whoever starts the process has to make a text of it."
        findings.append(_finding("env_not_text", WARN, name, message, "Put the value in quotes.", "observed files"))
    sequences = _number(argument_value(taken, "--max-num-seqs"))
    if concurrency and sequences and sequences > concurrency:
        message = f"Requests come {concurrency} at a time; more sequences matter only for requests with n > 1."
        findings.append(_finding("inert", WARN, "--max-num-seqs", message, "", "the file's concurrency"))
    return findings


def migrate(
    groups: Sequence[Group], version: str, env: Mapping[str, str], table: Optional[Mapping[str, Any]] = None
) -> Tuple[List[Group], Dict[str, str], List[str]]:
    """Propose the same command line for another version: ``(groups, env, changes)``.

    What that version does not know goes, abbreviations are written out, variables that nothing reads go; each change is
    one line for a person. Names of parsers and other values stay as they are.
    """
    know = Knowledge(version, table)
    kept: List[Group] = []
    changes: List[str] = []
    for group in groups:
        flag, named = _name_finding(know, group[0])
        codes = {item["code"] for item in named} or {item["code"] for item in _aged(know, flag)}
        record = know.lifetime(flag)
        if codes & {"removed", "unknown"} or (codes & {"deprecated", "inert"} and record.get("migrate") == "drop"):
            reason = (named or _aged(know, flag))[0]
            changes.append(f"dropped {' '.join(group)}: {reason['message']} {reason['fix']}".strip())
        elif "abbreviation" in codes:
            written = [flag + ("=" + group[0].split("=", 1)[1] if "=" in group[0] else ""), *group[1:]]
            kept.append(written)
            changes.append(f"wrote {canonical_flag(group[0])} out as {flag}.")
        else:
            kept.append(list(group))
    new_env = dict(env)
    for name in env:
        record = know.table["environment"].get(name, {})
        if record.get("migrate") != "drop":
            continue
        if (record.get("gone") and know.at_least(record["gone"])) or _in_spans(know.version, record.get("inert", [])):
            del new_env[name]
            replaced = f" Its place took {record['replaced_by']}." if record.get("replaced_by") else ""
            changes.append(f"dropped {name}: {_sentence(record.get('note', 'nothing reads it'))}{replaced}")
    return kept, new_env, changes

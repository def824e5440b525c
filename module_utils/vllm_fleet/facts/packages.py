"""Package adapter: what dpkg has installed and holds, and what apt would do, asked without changing anything."""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile
from typing import Any, Dict, List, Optional, Sequence

from .host import read_text, run, under

Package = Dict[str, Any]

_FORMAT = "${Package}\t${Version}\t${db:Status-Abbrev}\n"
_APT_S = 300.0
#: the answer when apt was not asked
NOTHING: Dict[str, Any] = {"status": 0, "output": "", "missing": [], "installs": {}, "removes": []}
SOURCES = "/etc/apt/sources.list.d"
PREFERENCES = "/etc/apt/preferences.d"


def os_release(root: str = "/") -> Dict[str, str]:
    """Return ``ID``, ``VERSION_CODENAME`` and the rest of /etc/os-release."""
    text = read_text(under(root, "/etc/os-release")) or ""
    return {name: value.strip("\"'") for name, value in re.findall(r"^(\w+)=(.*)$", text, re.M)}


def parse_installed(text: str) -> List[Package]:
    """Return ``[{"name", "version", "held", "state"}]`` of dpkg-query's lines; state is ``ok`` or ``half``."""
    found = []
    for line in text.splitlines():
        name, version, status = [*line.split("\t"), "", ""][:3]
        if len(status) < 2 or status[1] in "nc":  # not installed, or only its settings are left
            continue
        state = "ok" if status[1] == "i" and not status[2:].strip() else "half"
        found.append({"name": name, "version": version, "held": status[0] == "h", "state": state})
    return found


def installed() -> Optional[List[Package]]:
    """Return every package of the box; ``None`` without dpkg."""
    status, output = run(["dpkg-query", "--show", f"--showformat={_FORMAT}"], timeout=60.0)
    return parse_installed(output) if status == 0 else None


def parse_sources(text: str, deb822: bool) -> List[Dict[str, Any]]:
    """Return ``[{"suites", "components", "signed_by"}]`` of a source file of either format, without the disabled."""
    found = []
    if not deb822:
        for line in text.splitlines():
            match = re.match(r"deb\s+(?:\[([^]]*)\]\s+)?\S+\s+(\S+)\s*([^#]*)", line.strip())
            if match:
                key = re.search(r"signed-by=(\S+)", match.group(1) or "")
                found.append(_stanza([match.group(2)], match.group(3).split(), key.group(1) if key else None))
        return found
    for block in re.split(r"\n\s*\n", text):
        fields = {
            name.lower(): value.strip()
            for name, value in re.findall(r"^([\w-]+):[ \t]*(.*(?:\n[ \t].*)*)", block, re.M)
        }
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() not in (
            "no",
            "false",
            "0",
        ):
            suites, components = fields.get("suites", "").split(), fields.get("components", "").split()
            found.append(_stanza(suites, components, fields.get("signed-by")))
    return found


def _stanza(suites: List[str], components: List[str], signed_by: Optional[str]) -> Dict[str, Any]:
    return {"suites": suites, "components": components, "signed_by": signed_by}


def sources(without: str, root: str = "/") -> List[Dict[str, Any]]:
    """Return what every source file of the box offers, but for the file ``without``."""
    found = []
    paths = sorted(glob.glob(under(root, f"{SOURCES}/*")))
    for path in [under(root, "/etc/apt/sources.list"), *paths]:
        if path != under(root, without) and path.endswith((".list", ".sources")):
            found += parse_sources(read_text(path) or "", path.endswith(".sources"))
    return found


def parse_simulation(text: str) -> Dict[str, Any]:
    """Return ``{"installs": {name: version}, "removes": [names]}`` of ``apt-get --simulate install``."""
    installs = dict(re.findall(r"^Inst (\S+) (?:\[[^]]*\] )?\((\S+)", text, re.M))
    removes = re.findall(r"^Remv (\S+)", text, re.M)
    return {"installs": {name.split(":")[0]: version for name, version in installs.items()}, "removes": removes}


def simulate(names: Sequence[str], files: Dict[str, str], refresh: bool, move: bool = False) -> Dict[str, Any]:
    """Ask apt what installing the packages would do, as if ``files`` (path to text) were on the box already.

    Works on a private view of apt's configuration and lists, so nothing of the box is written and no lock is taken.

    :param files: sources below /etc/apt/sources.list.d and preferences below /etc/apt/preferences.d.
    :param refresh: fetch the lists first; without it the box's own are used.
    :param move: packages that are held may change, and go back too.
    :returns: ``{"status": 0, "output": "…", "missing": [names], "installs": {…}, "removes": [names]}``.
    """
    directory = tempfile.mkdtemp(prefix="vllm-fleet-apt-")
    try:
        options = _private_view(directory, files, refresh)
        if refresh:
            status, output = run(["apt-get", "--quiet", *options, "update"], timeout=_APT_S, env=_environment())
            # apt ends with 0 although an index could not be fetched
            if status != 0 or re.search(r"^(?:E|Err)[: ]", output, re.M):
                return {**NOTHING, "status": status or 100, "output": output}
        argv = ["apt-get", "--simulate", "--no-install-recommends", *options]
        argv += ["--allow-change-held-packages", "--allow-downgrades"] if move else []
        argv += ["install", *names]
        status, output = run(argv, timeout=_APT_S, env=_environment())
        missing = re.findall(r"^E: (?:Unable to locate package (\S+)|Package '([^']+)' has no)", output, re.M)
        missing += re.findall(r"^E: Version ('[^']+') for '(\S+?)' was not found", output, re.M)
        names_missing = sorted({part for pair in missing for part in pair if part})
        return {"status": status, "output": output, "missing": names_missing, **parse_simulation(output)}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _environment() -> Dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}


def _private_view(directory: str, files: Dict[str, str], refresh: bool) -> List[str]:
    options: List[str] = []
    for place, setting in ((SOURCES, "Dir::Etc::sourceparts"), (PREFERENCES, "Dir::Etc::preferencesparts")):
        copy = os.path.join(directory, os.path.basename(place))
        os.mkdir(copy)
        for path in glob.glob(f"{place}/*"):
            if path not in files and os.path.isfile(path):
                shutil.copy(path, copy)
        for path, text in files.items():
            if os.path.dirname(path) == place and text:
                with open(os.path.join(copy, os.path.basename(path)), "w", encoding="utf-8") as handle:
                    handle.write(text)
        options += ["-o", f"{setting}={copy}/"]
    if refresh:
        lists = os.path.join(directory, "lists")
        # the lists of the box save most of the download; apt asks only for what is newer
        if os.path.isdir("/var/lib/apt/lists"):
            shutil.copytree("/var/lib/apt/lists", lists, ignore=shutil.ignore_patterns("lock", "partial"))
        os.makedirs(os.path.join(lists, "partial"), exist_ok=True)
        options += ["-o", f"Dir::State::lists={lists}/", "-o", "APT::Sandbox::User=root"]
    cache = os.path.join(directory, "cache")
    os.mkdir(cache)
    return [*options, "-o", f"Dir::Cache={cache}/", "-o", "Acquire::Languages=none"]


def lists_age(root: str = "/") -> Optional[float]:
    """Return the time of the last refresh of the package lists, in seconds since the epoch; ``None`` when never."""
    newest = [os.path.getmtime(path) for path in glob.glob(under(root, "/var/lib/apt/lists/*_Packages*"))]
    return max(newest) if newest else None

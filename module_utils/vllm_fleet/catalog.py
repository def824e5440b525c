"""Reads the catalog's YAML on the controller; the boxes get JSON and need no YAML library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

from . import platform_format
from .errors import UsageError
from .profile import Catalog, lane_place
from .profile_schema import check_engine, check_profile

#: numbers of YAML 1.1 that mean something else than they look like: octal, binary, sexagesimal, with underscores
_ODD_NUMBER = re.compile(
    r"[-+]?(0[0-9_]+|0[box][0-9a-fA-F_]+|[0-9]+(:[0-9]+)+(\.[0-9_]*)?|[0-9][0-9]*_[0-9_.]*)", re.ASCII
)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "yaml_missing",
            "the catalog is YAML, and this Python has no PyYAML.",
            "pip install pyyaml (controller only).",
        ) from None
    return yaml


def read_text(path: str, what: str) -> str:
    """Return a file's text.

    :raises UsageError: ``unreadable_file``, also for text that is not UTF-8.
    """
    try:
        with open(path, "rb") as handle:
            return handle.read().decode("utf-8-sig")
    except OSError as error:
        raise UsageError("unreadable_file", f"cannot read the {what} {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError("unreadable_file", f"the {what} {path} is not UTF-8 text.") from None


def read_lock(path: str, engine: str) -> str:
    """Return the text of an engine's lock.

    :raises UsageError: ``no_lock``, ``unreadable_file``.
    """
    if not Path(path).exists():
        raise UsageError(
            "no_lock",
            f"engine {engine} has no {path}, the list of its wheels.",
            f"make it: make engine-lock E={engine}",
        )
    return read_text(path, "engine lock")


def parse_yaml(text: str, source: str, as_written: bool = False) -> Any:
    """Parse one YAML document without surprises: duplicate keys and ambiguous numbers are refused.

    :param as_written: make every scalar the text that stands in the file (``010``, ``true``, an empty one).
    :raises UsageError: ``bad_yaml`` with the place.
    """
    yaml = _yaml()
    # both bases construct plain data only
    loader_class: Any = type("Loader", (yaml.BaseLoader if as_written else yaml.SafeLoader,), {})

    def refuse(problem: str, node: Any) -> Exception:
        error: Exception = yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return error

    def mapping(loader: Any, node: Any) -> Dict[Any, Any]:
        if not as_written:
            loader.flatten_mapping(node)
        result: Dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            try:
                seen = key in result
            except TypeError:
                raise refuse("a key is not plain text", key_node) from None
            if seen:
                raise refuse(f"the key {key!r} stands twice", key_node)
            result[key] = loader.construct_object(value_node, deep=True)
        return result

    def number(loader: Any, node: Any) -> Any:
        if _ODD_NUMBER.fullmatch(node.value):
            raise refuse(f"the number {node.value} is ambiguous; write it in decimal or in quotes", node)
        kind = node.tag.rsplit(":", 1)[-1]
        return getattr(loader, f"construct_yaml_{kind}")(node)

    loader_class.add_constructor("tag:yaml.org,2002:map", mapping)
    if not as_written:
        loader_class.add_constructor("tag:yaml.org,2002:int", number)
        loader_class.add_constructor("tag:yaml.org,2002:float", number)
        loader_class.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
    try:
        return yaml.load(text, Loader=loader_class)
    except yaml.YAMLError as error:
        raise UsageError("bad_yaml", f"{source}: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise UsageError("bad_yaml", f"{source}: nested too deeply.") from None


def load(directory: str) -> Catalog:
    """Read and validate every engine and profile below ``directory``.

    :raises UsageError: ``unreadable_file``, ``bad_yaml``, ``bad_schema`` or ``unknown_key``, naming file and key.
    """
    found: Dict[str, Dict[str, Dict[str, Any]]] = {"engines": {}, "profiles": {}}
    for kind, check in (("engines", check_engine), ("profiles", check_profile)):
        folder = Path(directory, kind)
        try:
            files = sorted(file for file in folder.iterdir() if file.suffix == ".yml" and file.name[0] != ".")
        except OSError as error:
            raise UsageError("unreadable_file", f"cannot list the catalog folder {folder}: {error.strerror}.") from None
        for file in files:
            source = f"{kind}/{file.name}"
            data = check(parse_yaml(read_text(str(file), "catalog file"), source), source)
            if data["id"] != file.stem:
                raise UsageError("bad_schema", f"{source}: id: found {data['id']!r}, allowed: the file's name.")
            found[kind][data["id"]] = data
    return Catalog(found["profiles"], found["engines"])


def load_platform(path: str, catalog: Catalog, engine: str = "") -> Dict[str, Any]:
    """Read a file in the platform's own format as a profile.

    :param engine: id of the engine that runs it; empty for the one that such files are written for.
    :raises UsageError: as :func:`parse_yaml` and :func:`.platform_format.to_profile`.
    """
    data = parse_yaml(read_text(path, "profile source"), path, as_written=True)
    return platform_format.to_profile(data, path, catalog.engine(engine or platform_format.DEFAULT_ENGINE))


def platform_reader(catalog: Catalog, defaults: Mapping[str, Any]) -> Callable[[Any], Optional[Dict[str, Any]]]:
    """Return the function that gives a lane with a ``profile_source`` its profile, and None to others.

    :param defaults: ``profile_source`` for lanes that name no profile, ``base_dir`` for relative paths.
    :raises UsageError: ``bad_schema`` for a lane that names both.
    """

    def read(lane: Any) -> Optional[Dict[str, Any]]:
        where = lane_place(lane)
        source = lane.get("profile_source")
        if source is None and "profile" not in lane:
            source = defaults.get("profile_source")
        if source is None:
            return None
        if "profile" in lane:
            raise where.at("profile").error(lane["profile"], "profile or profile_source, not both")
        if not isinstance(source, str) or not source:
            raise where.at("profile_source").error(source, "the path of a file in the platform's format")
        engine = lane.get("engine", "")
        return load_platform(str(Path(defaults.get("base_dir") or "", source)), catalog, engine)

    return read


def dump_yaml(data: Any) -> str:
    """Return plain data as YAML: order kept, texts that YAML would read as something else quoted."""
    yaml = _yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[misc,name-defined]
        def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
            return super().increase_indent(flow, False)

    text: str = yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=4096)
    return text


def dump_platform(document: Mapping[str, Any]) -> str:
    """Return the platform's YAML; read back as written, it is the same document."""
    plain = dict(document)
    if re.fullmatch(r"0|[1-9][0-9]*", str(plain.get("concurrency"))):
        plain["concurrency"] = int(plain["concurrency"])
    return dump_yaml(plain)


def bare_values(text: str) -> List[str]:
    """Return the names in a platform file's ``env`` whose value is a number, a truth value or null to YAML."""
    yaml = _yaml()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    names = []
    for key, value in root.value:
        if key.value != "env" or not isinstance(value, yaml.SequenceNode):
            continue
        for item in value.value:
            fields = {field.value: content for field, content in item.value}
            if not fields["value"].tag.endswith(":str"):
                names.append(str(fields["name"].value))
    return names

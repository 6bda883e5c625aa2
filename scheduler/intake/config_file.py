"""Reads config files: YAML files that no other user can write. Returns the text and the line number of each value."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scheduler.core.config import OPTIONS, TEXTS, read_option
from scheduler.core.errors import STATE_FILE, FileTrouble, SchedulerError, UsageError, said
from scheduler.core.own_classes import MOST_CLASSES, MOST_TEXTS
from scheduler.intake.tail import cannot_be_read, check_places, not_read, places_of, read_private

if TYPE_CHECKING:
    import yaml

LARGEST = 64 * 1024  # bytes; ten times the example config. Parsing YAML takes 10 µs per byte
MAPPING = "failure_classes"  # the only setting with a value that is a mapping
_SCALARS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp"))


@dataclass(frozen=True, slots=True)
class Entry:
    """Value of a key as written in the file: a text, a list of texts, or None for null or a missing value.

    For the setting `failure_classes` it is a mapping of mappings of texts and lists.
    """

    value: str | list[str] | dict[str, Any] | None
    line: int


def read_entries(
    path: str, trust_group: bool = False, others: Collection[str] = ()
) -> tuple[dict[str, Entry], list[SchedulerError]]:
    """Read a config file; return its entries by key, and the mistakes found in the file.

    ``others``: keys that are no settings of a scheduler (`machine_settings.py`); they are left out.
    ``trust_group``: whether the file, and the folders on its path, may be writable for their groups. If ``trust_group``
    is False but the file sets its key `trust_group` to true, the folders may be writable for their groups, but the file
    must not be. Raises UsageError if the file cannot be read or is no config file, and FileTrouble if other users could
    write or replace the file.
    """
    try:
        data, places = _private(path, trust_group), places_of(path)
    except FileNotFoundError:
        how = "the target of this link does not exist" if os.path.islink(path) else "no such config file"
        raise UsageError(how, where=path, do="name another file with --config") from None
    except OSError as error:
        raise cannot_be_read(error, path) from None
    try:
        check_places(path, places, trust_group=True)
        entries, errors = _entries(_text(data, path), path, others)
        told = entries.get("trust_group")
        check_places(path, places, trust_group or (told is not None and _true(told)))
    except OSError as error:
        raise cannot_be_read(error, path) from None
    return entries, errors


def _private(path: str, trust_group: bool) -> bytes:
    try:
        return read_private(path, LARGEST + 1, trust_group)
    except FileTrouble as error:
        exposed = error.exposure
        if exposed is None or not exposed.also:
            raise
        # The file's own `trust_group` does not count for the file itself.
        also = " (or set GPUJOB_SET_TRUST_GROUP=true, or start with --trust-group true)"
        raise not_read(replace(exposed, also=also), path) from None


def _true(entry: Entry) -> bool:
    try:
        return bool(read_option("trust_group", entry.value, ""))
    except UsageError:
        return False  # the mistake is reported with those of the other values


def _text(data: bytes, path: str) -> str:
    if len(data) > LARGEST:
        raise UsageError(f"larger than {LARGEST >> 10} KiB, so it is not read as a config file", where=path)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UsageError("not UTF-8 but UTF-16", where=path, do="save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError("not UTF-8", where=f"{path}:{line}", do="save it as UTF-8") from None


def _entries(text: str, path: str, others: Collection[str]) -> tuple[dict[str, Entry], list[SchedulerError]]:
    import yaml

    root = _tree(text, path)
    entries: dict[str, Entry] = {}
    errors: list[SchedulerError] = []
    if root is None or (root.tag == "tag:yaml.org,2002:null" and not root.value):
        return entries, errors
    if not isinstance(root, yaml.MappingNode):
        where = f"{path}:{root.start_mark.line + 1}"
        raise UsageError("must contain `key: value` lines", where=where, do="see config.example.yaml")
    seen: dict[str, int] = {}
    for key, node in root.value:
        line = key.start_mark.line + 1
        where = f"{path}:{line}"
        try:
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError("a key must be a plain word", where=where)
            name = key.value
            if name in seen:
                raise UsageError(f"{name} is set in line {seen[name]} already", where=where, do="keep one of them")
            seen[name] = line
            if name in others:
                continue
            if name not in OPTIONS:
                read_option(name, None, where)
            entries[name] = Entry(_value(name, node, where), line)
        except UsageError as error:
            if isinstance(key, yaml.ScalarNode) and key.value == "state_file":
                error.code = STATE_FILE
            errors.append(error)
    return entries, errors


def _tree(text: str, path: str) -> Any:
    """Return the YAML document as nodes, not as Python values. Raises UsageError if the text is not YAML."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        where = f"{path}:{text.count(chr(10), 0, error.position) + 1}"
        raise UsageError(
            f"contains the character {error.character:#06x}", where=where, do="save it as plain text"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else path
        problem = error.problem or error.context or "it cannot be read"
        do = (
            "indent with spaces"
            if "'\\t'" in problem
            else "check the indentation, or quote the value"
            if "mapping values" in problem
            else ""
        )
        raise UsageError(f"not YAML: {problem}", where=where, do=do) from None
    except RecursionError:
        raise UsageError("nested too deeply", where=path) from None


def _value(name: str, node: yaml.Node, where: str) -> str | list[str] | dict[str, Any] | None:
    """Return the text of a value as written, so that 010 does not become 8, nor 3.10 become 3.1.

    The YAML type of a value matters in two cases: for null the result is None, and a boolean is refused if the setting
    is a text. Raises UsageError if the value is not allowed.
    """
    import yaml

    if isinstance(node, yaml.ScalarNode):
        if node.tag not in _SCALARS:
            raise _foreign(name, node, where)
        if node.tag.endswith(":null"):
            return None
        if node.tag.endswith(":bool") and name in TEXTS:
            raise UsageError(
                f"{name}: must be a text, not {said(node.value)}", where=where, do="put quotes around the value"
            )
        return str(node.value)
    if node.tag not in ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
        raise _foreign(name, node, where)
    if isinstance(node, yaml.SequenceNode) and name == "gpu_ids":
        items = node.value
        if all(isinstance(item, yaml.ScalarNode) and item.tag in _SCALARS for item in items):
            return [item.value for item in items]
        raise UsageError(f"{name}: must be a list of GPU ids", where=where, do="write [0, 2] or 0-3")
    if isinstance(node, yaml.MappingNode) and name == MAPPING:
        return _mapping(name, node, where, depth=2)
    kind = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    raise UsageError(f"{name}: must be one value, not {kind}", where=where)


def _mapping(name: str, node: yaml.MappingNode, where: str, depth: int) -> dict[str, Any]:
    """Return a mapping whose values are texts, lists of texts, or, if ``depth`` is above 1, mappings of them.

    Raises UsageError for a key that occurs twice. Aliases cannot make the result large: the numbers are limited.
    """
    import yaml

    found: dict[str, Any] = {}
    file, _, _ = where.rpartition(":")
    for key, value in node.value[: MOST_CLASSES + 1]:
        place = f"{file}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{name}: a key must be a plain word", where=place)
        if key.value in found:
            raise UsageError(f"{name}: {said(key.value)} is set twice", where=place, do="keep one of them")
        found[key.value] = _inner(name, value, place, depth)
        if depth > 1:
            read_option(
                name, {key.value: found[key.value]}, place
            )  # so that a mistake is told with the line of the class
    return found


def _inner(name: str, node: yaml.Node, where: str, depth: int) -> Any:
    import yaml

    if isinstance(node, yaml.MappingNode) and depth > 1 and node.tag == "tag:yaml.org,2002:map":
        return _mapping(name, node, where, depth - 1)
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_inner(name, one, where, 0) for one in node.value[: MOST_TEXTS + 1]] if depth else "a list"
    if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
        return None if node.tag.endswith(":null") else str(node.value)
    if isinstance(node, yaml.MappingNode):
        raise UsageError(f"{name}: must be a text or a list of texts, not a mapping", where=where)
    raise _foreign(name, node, where)


def _foreign(name: str, node: yaml.Node, where: str) -> UsageError:
    tag = node.tag.replace("tag:yaml.org,2002:", "!!")
    return UsageError(f"{name}: the YAML tag {said(tag)} is not allowed", where=where, do="write a plain value")

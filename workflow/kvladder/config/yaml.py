"""Strict YAML: duplicates are refused, and numbers are what they look like.

PyYAML follows YAML 1.1, where ``1e9`` is a string, ``no`` a boolean, ``22:22`` the number 1342 and ``0644`` the number
420. Configurations here follow YAML 1.2's core schema, less octal numbers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError


class ConfigError(ValueError):
    """A configuration that can't be used; the message names the key, the value and what is allowed."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars and without duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN))$"
    ),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^(?:<<)$"), ["<"])


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ConfigError(f"line {line}: key {key_node.value!r} reads as {type(key).__name__} {key!r}: quote it")
        if key in seen:
            raise ConfigError(f"key {key!r} stands twice, at line {seen[key]} and line {line}")
        seen[key] = line
    loader.flatten_mapping(node)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


def _construct_map(loader: _Loader, node: yaml.MappingNode) -> Any:
    data: dict[Any, Any] = {}
    yield data
    data.update(_mapping(loader, node))


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_map)


def load_text(text: str, where: str = "configuration") -> dict[str, Any]:
    """Parse one YAML document that must be a mapping.

    Raises ConfigError with file and line for syntax errors, duplicate or non-string keys.
    """
    try:
        data = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader subclass)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping, found {type(data).__name__}")
    return data


def load_file(path: Path) -> dict[str, Any]:
    """Parse one YAML file; see `load_text`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return load_text(text, str(path))


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Deep merge of mappings, as several ``--configfile`` combine; anything else is replaced whole."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def problems(error: ValidationError, prefix: str = "") -> list[str]:
    """One line a problem: key, what is wrong, the value."""
    lines = []
    for item in error.errors(include_url=False):
        message = item["msg"].removeprefix("Value error, ")
        where = prefix + ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            message = f"unknown key {item['loc'][-1]!r}"
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] != "value_error":
            message += f", got {item['input']!r}"
        lines.append(f"{where.strip('.')}: {message}" if where.strip(".") else message)
    return lines

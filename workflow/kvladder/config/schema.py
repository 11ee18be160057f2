"""JSON Schemas and the key reference, generated from the models: ``python -m kvladder.config.schema`` writes them.

``workflow/schemas/*.schema.json`` and the part of ``config/README.md`` below its marker are never edited by hand; a
test fails when they differ from what the models say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvladder.config import pitfalls, records, registry
from kvladder.config.base import Name, parse_size, tier_size
from kvladder.config.bench import BenchBlock, BenchConfig, BenchGoals, CellRecord
from kvladder.config.experiment import ExperimentConfig
from kvladder.config.rooflines import Rooflines
from kvladder.config.stack import StackConfig, StackStamp
from kvladder.config.timelines import CaptureRecord

ROOT = Path(__file__).parents[3]
_NAME_PATTERN = get_args(Name)[1].pattern
MARKER = "<!-- generated below by `make schemas`; edit the models instead -->"

RECORDS: dict[str, type[BaseModel]] = {
    "request": records.RequestRecord,
    "counters": records.CounterSnapshot,
    "probe": records.ProbeSample,
    "rooflines": Rooflines,
    "trial": records.TrialRecord,
    "start": records.StartRecord,
    "verdict": records.Verdict,
    "stack": StackConfig,
    "stamp": StackStamp,
    "bench": BenchConfig,
    "cell": CellRecord,
    "capture": CaptureRecord,
}
"""Files that kvladder reads and writes, by schema name."""


def experiment_schema() -> dict[str, Any]:
    """JSON Schema of a config file; setups and workloads are one of the kinds there are."""
    schema = ExperimentConfig.model_json_schema(by_alias=True)
    definitions = schema.setdefault("$defs", {})
    families: tuple[registry.Family, ...] = ("setups", "workloads")
    for family in families:
        choices = []
        for kind in registry.kinds(family):
            model = registry.load(family, kind).CONFIG.model_json_schema(by_alias=True)
            definitions |= model.pop("$defs", {})
            definitions[model["title"]] = model
            choices.append({"$ref": f"#/$defs/{model['title']}"})
        entry = schema["properties"][family]
        # pydantic says "anything under a well-formed name"; what may stand there is one of the kinds.
        entry["propertyNames"] = {"pattern": next(iter(entry.pop("patternProperties")))}
        entry["additionalProperties"] = {"oneOf": choices}
    return schema


def schemas() -> dict[str, str]:
    """Every schema file's name and text."""
    found = {"experiment": experiment_schema()}
    found |= {name: model.model_json_schema(by_alias=True) for name, model in RECORDS.items()}
    return {
        f"{name}.schema.json": json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        for name, schema in found.items()
    }


def reference() -> str:
    """Markdown: what to think of, then tables of every key: type, default, meaning."""
    parts = [pitfalls.markdown(), "## Experiment", _table(ExperimentConfig)]
    for field in ("model", "engine", "load", "gates", "right_kv"):
        (model,) = _models(ExperimentConfig.model_fields[field].annotation)
        parts += [f"## `{field}`", _doc(model), _table(model)]
    families: tuple[registry.Family, ...] = ("setups", "workloads")
    for family in families:
        for kind in registry.kinds(family):
            model = registry.load(family, kind).CONFIG
            parts += [f"## {family.removesuffix('s')} kind `{kind}`", _doc(model), _table(model)]
            for name, info in model.model_fields.items():
                for nested in _models(info.annotation):
                    parts += [f"### `{name}` of `{kind}`", _doc(nested), _table(nested)]
    parts += ["## Truth bench (`config/client-truth.yaml`)", _doc(BenchConfig), _table(BenchConfig)]
    for name, model in (("blocks", BenchBlock), ("goals", BenchGoals)):
        parts += [f"### `{name}`", _doc(model), _table(model)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _doc(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _table(model: type[BaseModel]) -> str:
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, info in model.model_fields.items():
        # `kind` is narrowed in every subclass, which drops the base's description.
        meaning = info.description or ("Names this kind." if name == "kind" else "")
        cells = [f"`{info.alias or name}`", _type(info), _default(info), meaning]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "see below"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _type(info: FieldInfo) -> str:
    return _known(info.metadata) or _name(info.annotation)


def _known(metadata: Iterable[Any]) -> str | None:
    """Word for one of our own field types, by what it is made of; None for any other annotated type."""
    for item in metadata:
        if getattr(item, "func", None) is parse_size:
            return "size (`8GiB`, `1e9`)"
        if getattr(item, "func", None) is tier_size:
            return "size (`8GiB`, `1e9`), or `{gpu: 2.0}`: twice the device pool"
        if getattr(item, "pattern", None) == _NAME_PATTERN:
            return "name"
    return None


def _name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_name(part) for part in arguments if part is not type(None))
    if hasattr(annotation, "__metadata__"):
        return _known(annotation.__metadata__) or _name(arguments[0])
    if origin is list:
        return f"list of {_name(arguments[0])}"
    if origin is dict:
        return f"map of {_name(arguments[1])}" if arguments[1] is not Any else "map"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "map"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(annotation.__name__, "any")


def write(root: Path = ROOT) -> None:
    """Write the schemas and the generated part of ``config/README.md``."""
    folder = root / "workflow" / "schemas"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in schemas().items():
        (folder / name).write_text(text, encoding="utf-8")
    readme = root / "config" / "README.md"
    head = readme.read_text(encoding="utf-8").partition(MARKER)[0]
    readme.write_text(f"{head}{MARKER}\n\n{reference()}", encoding="utf-8")


if __name__ == "__main__":
    write()

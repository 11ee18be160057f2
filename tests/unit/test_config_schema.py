"""Generated files say what the models say."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from kvladder.config import registry, schema


@pytest.mark.parametrize("name", sorted(schema.schemas()))
def test_schema_file_is_up_to_date(name: str) -> None:
    stored = (schema.ROOT / "workflow" / "schemas" / name).read_text(encoding="utf-8")
    assert stored == schema.schemas()[name], "run `make schemas`"


def test_key_reference_is_up_to_date_and_complete() -> None:
    stored = (schema.ROOT / "config" / "README.md").read_text(encoding="utf-8")
    assert stored.partition(schema.MARKER)[2].strip() == schema.reference().strip(), "run `make schemas`"
    for family in ("setups", "workloads"):
        for kind in registry.kinds(family):  # type: ignore[arg-type]
            assert f"kind `{kind}`" in stored


def test_types_in_the_key_reference() -> None:
    """Not everything that has a validator is a size, and not everything annotated a name."""
    cells = [line.split(" | ") for line in schema.reference().splitlines() if line.startswith("| `")]
    types = {(row[0].strip("| `")): row[1] for row in cells}
    assert types["args"] == "map of text or integer or number or true or false"
    assert types["levels"] == "list of integer"
    assert types["suites"] == "map of list of name"
    assert types["experiment"] == "name"
    assert types["kv_pool_bytes"] == "size (`8GiB`, `1e9`)"
    assert types["cpu_bytes"] == types["kv_pool_bytes"] + ", or `{gpu: 2.0}`: twice the device pool"


def test_every_key_but_structural_ones_has_a_meaning() -> None:
    rows = [line for line in schema.reference().splitlines() if line.startswith("| `")]
    silent = [row for row in rows if row.rstrip().endswith("|  |")]
    assert not silent, silent


def test_schema_accepts_the_demo_and_refuses_an_unknown_key() -> None:
    # Sizes may be text in a file; the schema is of the validated form, as editors and other tools see it.
    data = yaml.safe_load((schema.ROOT / "config" / "config.yaml").read_text(encoding="utf-8"))
    rules = schema.experiment_schema()
    data["setups"] = {"plain": {"kind": "plain"}}
    data["engine"]["kv_pool_bytes"] = 67108864
    jsonschema.validate(data, rules)
    data["setups"]["plain"]["cpu_bytes"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(json.dumps(data)), rules)

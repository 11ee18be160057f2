"""Strict YAML (reports: Yamale#34, snakemake#3650, pyyaml#165, yacs#17)."""

from __future__ import annotations

import pytest

from kvladder.config.yaml import ConfigError, load_file, load_text, merge


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1.0e9", 1e9),
        ("1e+9", 1e9),
        ("22:22", "22:22"),
        ("0644", "0644"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("3.10", 3.1),
        ("12_345", 12345),
        ("-3", -3),
        ("~", None),
        ("", None),
        ("2026-11-29", "2026-11-29"),
    ],
)
def test_scalars_are_what_they_look_like(text: str, value: object) -> None:
    loaded = load_text(f"key: {text}")["key"]
    assert loaded == value
    assert type(loaded) is type(value)


def test_duplicate_key_names_both_lines() -> None:
    with pytest.raises(ConfigError, match=r"key 'native' stands twice, at line 2 and line 4"):
        load_text("setups:\n  native:\n    cpu_bytes: 8\n  native:\n    cpu_bytes: 16\n")


def test_duplicate_key_is_found_in_flow_style_and_in_lists() -> None:
    with pytest.raises(ConfigError, match="'b' stands twice"):
        load_text("a: [{b: 1, b: 2}]")


@pytest.mark.parametrize(("key", "kind"), [("1_2", "int"), ("1e3", "float"), ("true", "bool"), ("~", "NoneType")])
def test_key_that_is_no_string_is_refused(key: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"reads as {kind}.*quote it"):
        load_text(f"setups:\n  {key}: {{kind: plain}}\n")


def test_yaml_1_1_boolean_names_stay_names() -> None:
    assert list(load_text("setups: {no: 1, off: 2, y: 3}")["setups"]) == ["no", "off", "y"]


def test_merge_key_is_shallow_and_keeps_what_yaml_says() -> None:
    loaded = load_text("base: &b {load: {n: 8, len: 4096}, x: 1}\nuse:\n  <<: *b\n  load: {n: 16}\n")
    assert loaded["use"] == {"load": {"n": 16}, "x": 1}


def test_merge_of_files_is_deep() -> None:
    assert merge({"a": {"n": 8, "len": 4}, "l": [1]}, {"a": {"n": 1}, "l": [2]}) == {"a": {"n": 1, "len": 4}, "l": [2]}


def test_not_a_mapping_and_missing_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="expected a mapping, found list"):
        load_text("- a")
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_file(tmp_path / "none.yaml")


def test_syntax_error_names_file_and_line(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1\nb: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"(?s)bad\.yaml.*line 2"):
        load_file(path)

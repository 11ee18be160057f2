"""Bad input: one message with the key, the value and what is allowed; nothing starts, nothing is deleted."""

from __future__ import annotations

import copy
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import CONFIG, Project


def refused(project: Project, *parts: str, arguments: tuple[str, ...] = (), **environment: str) -> str:
    """Run; the one message must have these parts, and nothing may have been written."""
    done = project.snakemake("--cores", "2", *arguments, **environment)
    assert done.code != 0, done.text
    assert "Traceback" not in done.text, done.text
    assert len(done.messages) == 1, done.text
    for part in parts:
        assert part in done.text, done.text
    assert not (project.folder / "results").exists()
    assert not (project.folder / "stacks/stub/.venv").exists()
    return done.messages[0]


def changed(path: str, value: Any) -> dict[str, Any]:
    """The tiny configuration with one value replaced, by a path with slashes."""
    data = copy.deepcopy(CONFIG)
    *parents, last = path.split("/")
    place = data
    for key in parents:
        place = place[key]
    place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("repeets", 3, ("repeets", "unknown key")),
        ("engine/block_sise", 16, ("engine.block_sise", "unknown key")),
        ("setups/plain/cpu_bytes", "1GiB", ("setups.plain.cpu_bytes", "unknown key")),
        ("repeats", "three", ("repeats", "'three'")),
        ("engine/kv_pool_bytes", "2 lots", ("engine.kv_pool_bytes", "GiB")),
        ("setups/plain/kind", "plane", ("setups.plain", "'plane'", "plain, ")),
        ("workloads/repeat/kind", "repet", ("workloads.repeat", "'repet'", "repeat")),
        ("suites", {"main": ["burst"]}, ("suites.main", "'burst'", "repeat")),
        ("baseline", "none", ("baseline", "'none'", "prefix-cache")),
        ("stack", "gpu", ("stack", "'gpu'", "stub")),
        ("workloads/repeat/prompt_tokens", 5000, ("workloads.repeat", "5001", "1024")),
        ("engine/kv_pool_bytes", "64KiB", ("workloads.repeat", "kv_pool")),
        ("gates", {"off": ["drain"]}, ("gates.off", "'drain'", "drained")),
        ("host_slots", 0, ("host_slots", "0")),
        ("model/shape", None, ("model", "shape")),
    ],
)
def test_configuration(project: Project, path: str, value: Any, parts: tuple[str, ...]) -> None:
    project.write_config(yaml.safe_dump(changed(path, value)))
    refused(project, *parts)


TINY = yaml.safe_dump(CONFIG, sort_keys=False)


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        # C12: the second one would silently win.
        ("  prefix-cache:\n", "  plain:\n", ("'plain'", "twice", "line")),
        # C11: names that YAML reads as numbers or truth values; a version that is a number.
        ("  plain:\n", "  1_2:\n", ("quote it", "12")),
        ("  plain:\n", "  true:\n", ("quote it", "True")),
        ("stack: stub", "stack: 3.10", ("stack", "3.1")),
        ("repeats: 2", "repeats: [2", ("config.yaml", "line")),
        # C15: names are folders and wildcards.
        ("  plain:\n", "  fp8(e4m3):\n", ("setups", "fp8(e4m3)")),
        ("  plain:\n", "  org/model:\n", ("setups", "org/model")),
        ("  plain:\n", "  '..':\n", ("setups", "..")),
        ("  plain:\n", "  a b:\n", ("setups", "a b")),
        ("  plain:\n", "  '[1-K_9-2]':\n", ("setups", "[1-K_9-2]")),
        ("  plain:\n", "  x{y}:\n", ("setups", "x{y}")),
        ("experiment: tiny", "experiment: ../tiny", ("experiment", "../tiny")),
    ],
)
def test_yaml(project: Project, old: str, new: str, parts: tuple[str, ...]) -> None:
    assert old in TINY
    project.write_config(TINY.replace(old, new, 1))
    refused(project, *parts)


def test_numbers_that_yaml_takes_for_strings(project: Project) -> None:
    # C11: 1e9 is a number here.
    project.write_config(TINY.replace("kv_pool_bytes: 2MiB", "kv_pool_bytes: 1e9"))
    assert project.plan()["measure_trial"] == 6


def test_the_name_no_is_a_name(project: Project) -> None:
    # C11: YAML 1.1 would call the setup False.
    project.write_config(TINY.replace("  plain:\n", "  no:\n", 1).replace("stack: stub", "stack: stub\nbaseline: no"))
    done = project.snakemake("-n")
    assert done.code == 0, done.text
    assert "measure no, repeat" in done.text


def test_names_that_look_like_patterns(project: Project) -> None:
    # C15: v1.0 isn't v1x0, and native+fs isn't nativee.
    names = ["v1.0", "v1x0", "native+fs", "nativefs"]
    project.config(setups={name: {"kind": "plain"} for name in names}, baseline="v1.0")
    done = project.snakemake("-n")
    assert done.jobs()["measure_trial"] == 8
    assert all(f"measure {name}, repeat" in done.text for name in names)


def test_command_line_values(project: Project) -> None:
    assert project.plan("--config", "repeats=3")["measure_trial"] == 9
    assert project.plan("--config", "engine={max_num_seqs: 4, block_size: 64}")["measure_trial"] == 6
    refused(project, "repeats", "'1_2344_5678'", arguments=("--config", 'repeats="1_2344_5678"'))
    refused(project, "repetas", "unknown key", arguments=("--config", "repetas=3"))


def test_config_files_merge_in_order_and_replace_the_default(project: Project) -> None:
    other = {**CONFIG, "experiment": "other", "setups": {"plain": {"kind": "plain"}}}
    (project.folder / "other.yaml").write_text(yaml.safe_dump(other), encoding="utf-8")
    (project.folder / "more.yaml").write_text("repeats: 5\nengine: {max_num_seqs: 4}\n", encoding="utf-8")
    done = project.snakemake("-n", "--configfile", "other.yaml", "more.yaml")
    assert done.jobs()["measure_trial"] == 5, "the default file isn't mixed in, engine's other keys stay"
    missing = project.snakemake("-n", "--configfile", "absent.yaml")
    assert missing.code != 0
    assert "absent.yaml" in missing.text


def test_no_default_configuration(project: Project) -> None:
    (project.folder / "config/config.yaml").unlink()
    refused(project, "config/config.yaml", "No such file")


def test_missing_patch(project: Project) -> None:
    project.append("stacks/stub/stack.yaml", "patches: {engine: kvladder-stub-engine}\n")
    refused(project, "patches.engine", "patches/engine/0.32.0+stub")


def test_missing_lock(project: Project) -> None:
    project.edit("stacks/stub/stack.yaml", "source: preinstalled", "source: venv")
    refused(project, "requirements.lock", "is missing")


def test_budget_that_is_no_number(project: Project) -> None:
    refused(project, "KVLADDER_BUDGET_S", "'soon'", KVLADDER_BUDGET_S="soon")


def test_nothing_is_deleted(finished: Project) -> None:
    before = sorted(path for path in finished.folder.rglob("results/**/*"))
    finished.write_config(yaml.safe_dump(changed("repeets", 3)))
    assert finished.snakemake("--cores", "2").code != 0
    assert sorted(path for path in finished.folder.rglob("results/**/*")) == before


@pytest.mark.parametrize("locale", ["C.UTF-8", "POSIX"])
def test_blanks_quotes_and_accents_in_the_path(project: Project, tmp_path: Path, locale: str) -> None:
    # C14, with a virtual environment inside the folder, as a clone has it.
    odd = Project(tmp_path / "été 1 'q'")
    project.folder.rename(odd.folder)
    odd.config(repeats=1, setups={"plain": {"kind": "plain"}})
    environment = {"LC_ALL": locale, "LANG": locale}
    if locale == "POSIX":
        environment |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = odd.snakemake("-n", **environment)
        if done.code != 0:
            assert len(done.messages) == 1, done.text
            assert "PYTHONUTF8=1" in done.messages[0]
        environment["PYTHONUTF8"] = "1"  # as the Makefile sets it
    done = odd.snakemake("tables", "--cores", "2", **environment)
    assert done.code == 0, done.text
    assert len(odd.trials()) == 1


def test_a_user_without_name_and_home(project: Project) -> None:
    # C18, with what the Makefile sets for such a user.
    become = ["unshare", "--user", "--map-user=4242", "--map-group=4242"]
    if shutil.which("unshare") is None or subprocess.run([*become, "true"], check=False).returncode != 0:
        pytest.skip("user namespaces can't be made here")
    project.config(repeats=1, start="folded", setups={"plain": {"kind": "plain"}})
    environment = project.environment(
        HOME="/proc/nonexistent", USER="uid4242", XDG_CACHE_HOME=str(project.folder / ".cache")
    )
    for name in ("LOGNAME", "LNAME", "USERNAME"):
        environment.pop(name, None)
    command = [*become, *project.command("report", "--cores", "2")]
    done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (project.folder / "reports/tiny.pdf").is_file()


def test_a_port_in_use(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        project.config(engine=CONFIG["engine"] | {"port": port})
        done = project.snakemake("--cores", "2")
        assert done.code != 0, done.text
        assert "Traceback" not in done.text, done.text
        assert len(done.messages) == 2, "what there is to do, and why not"
        assert all(part in done.messages[1] for part in ("engine.port", str(port), "in use")), done.text
        assert not (project.folder / "results").exists()
        assert not (project.folder / "stacks/stub/.venv").exists()
        # What starts no server works, also while a server of ours has the port.
        assert project.plan()["measure_trial"] == 6
        assert project.snakemake("--unlock").code == 0
        done = project.snakemake("env", "--cores", "1")
        assert done.code == 0, done.text
        assert len(done.messages) == 1, done.text
    done = project.snakemake("start", "--cores", "2")
    assert done.code == 0, "no lock is left behind"


def test_a_port_in_use_and_nothing_to_measure(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    project.config(engine=CONFIG["engine"] | {"port": port}, repeats=1, setups={"plain": {"kind": "plain"}})
    done = project.snakemake("measure", "--cores", "2")
    assert done.code == 0, done.text
    with socket.create_server(("127.0.0.1", port)):
        done = project.snakemake("figures", "--cores", "2")
        assert done.code == 0, done.text
        assert done.jobs()["draw_figure"] >= 1

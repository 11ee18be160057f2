"""The report: what it says of known data, that nothing in it is markup from outside, and that it is reproducible."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from table_factory import DEMO, OURS, config_of, judge, write_judged
from trial_factory import Family, Load, write_trial

from kvladder import tables
from kvladder.config import registry
from kvladder.figures.parts import style
from kvladder.report import formats, page
from kvladder.report.build import build

SHORT = {"demo": {"repeat": Load(warm_rounds=1), "burst": Load(requests=4, concurrency=4, warm_rounds=1)}}
EVIL = "<img src=x onerror=alert(1)>\"'&</script>"


class Page(HTMLParser):
    """Tags and visible text of a page; refuses what would load something."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.json = ""
        self._raw = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("script", "style"):
            self._raw = tag
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith(("#", "data:")), value

    def handle_endtag(self, tag: str) -> None:
        self._raw = ""

    def handle_data(self, data: str) -> None:
        if self._raw == "script":
            self.json += data
        elif not self._raw:
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


@pytest.fixture
def no_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layout of a PDF takes seconds, and so do figures; tests of the words need neither."""
    monkeypatch.setattr(page, "pdf", lambda html: b"")
    monkeypatch.setattr(style, "save", lambda module, tables, folder: [])


def report(root: Path, folders: Iterable[Path], config: dict[str, Any], name: str = "r") -> dict[str, Path]:
    built = tables.build(list(folders), root / "tables", baseline=config["baseline"])
    for kind in registry.kinds("figures"):
        style.save(registry.load("figures", kind), built, root / "figures")
    out = {ending: root / f"{name}.{ending}" for ending in ("html", "pdf", "md")}
    build(root / "tables", root / "figures", out["html"], out["pdf"], out["md"], config)
    return out


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("demo")
    folders = write_judged(
        root, invalid=[("mooncake-store", repeat) for repeat in range(3)], failed=[("native-host-fs", 1)]
    )
    return report(root, folders, config_of(DEMO))


def test_the_verdict_says_what_the_data_say(demo: dict[str, Path]) -> None:
    words = Page(demo["html"].read_text(encoding="utf-8")).words
    assert "repeat: a prompt of 3,000 tokens" in words
    assert "burst: 4 prompts of 3,000 tokens, at once" in words
    assert re.search(
        r"native-host answers fastest on a first hit, the first token after 0\.3\d\d s: 1\d\.\d× as fast", words
    )
    assert "range of 3 blocks" in words
    assert "which is no 95 % interval" in words
    assert "mooncake-store has no valid trial: 3 invalid ( tier-was-used" in words.replace("(tier", "( tier")
    assert "1 failed of 3 trials" in words
    assert "The A/A control plain-2 , configured as plain is, takes" in words
    assert OURS in words


def test_what_is_unknown_is_a_dash(demo: dict[str, Path]) -> None:
    rows = [line for line in demo["md"].read_text(encoding="utf-8").splitlines() if line.startswith("| mooncake-store")]
    assert rows
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert set(cells[1:-1]) == {"–"}
        assert cells[-1] == "0 of 3"


def test_the_page_stands_alone(demo: dict[str, Path]) -> None:
    text = demo["html"].read_text(encoding="utf-8")
    page = Page(text)
    assert not {"link", "iframe", "object", "embed"} & set(page.tags)
    assert "prefers-color-scheme: dark" in text
    assert len(page.ids) == len(set(page.ids))
    assert json.loads(page.json)["baseline"] == "plain"
    # No fetch from a style, no colour of a figure that a dark page couldn't swap.
    assert not re.search(r"url\((?!#)|@import", text)
    for role, colour in style.COLOURS.items():
        drawn = text.count(f"var(--figure-{role}, {colour})")
        assert len(re.findall(rf"(?:fill|stroke): {colour}", text)) == 0, (role, drawn)


def test_the_pdf_is_one(demo: dict[str, Path]) -> None:
    assert demo["pdf"].read_bytes().startswith(b"%PDF-")


def test_equal_input_gives_equal_reports(tmp_path: Path) -> None:
    setups = {name: DEMO[name] for name in ("plain", "native-host")}
    folders = write_judged(tmp_path, setups, repeats=2, suites=SHORT)
    one = report(tmp_path, folders, config_of(setups, 2), "one")
    two = report(tmp_path, folders, config_of(setups, 2), "two")
    for ending in ("html", "md", "pdf"):
        assert one[ending].read_bytes() == two[ending].read_bytes(), ending


def test_nothing_from_outside_becomes_markup(tmp_path: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["expected"].update(title=EVIL, ours_in_path=EVIL, granularity=128)
        data["host"]["cpu"] = EVIL
        data["servers"][0]["argv"] = ["python", EVIL]
        data["stack"]["packages"] = {EVIL: EVIL}
        data["effective"]["engine_version"] = EVIL

    folders = [
        write_trial(tmp_path, setup="plain", family=Family(), repeat=repeat, edit_trial=edit) for repeat in range(3)
    ]
    judge(folders[0])
    judge(folders[1])
    judge(folders[2], "invalid", EVIL)
    config = config_of(["plain"], title=EVIL)
    config["model"] = {"path": EVIL}
    out = report(tmp_path, folders, config)
    text = out["html"].read_text(encoding="utf-8")
    page = Page(text)
    assert "img" not in page.tags
    assert page.tags.count("script") == 1
    assert EVIL in page.words
    assert page.words.count(EVIL) >= 6
    assert "&amp;lt;" not in text and "&amp;amp;" not in text
    data = json.loads(page.json)
    assert data["title"] == EVIL
    summary = out["md"].read_text(encoding="utf-8")
    assert "<img" not in summary and "</script" not in summary


@pytest.mark.usefixtures("no_pdf")
def test_no_valid_trial_and_no_trial_at_all(tmp_path: Path) -> None:
    folders = write_judged(tmp_path / "a", {"plain": DEMO["plain"]}, repeats=2, invalid=[("plain", 0), ("plain", 1)])
    words = Page(report(tmp_path / "a", folders, config_of(["plain"], 2))["html"].read_text(encoding="utf-8")).words
    assert "No trial is valid, so nothing can be compared." in words
    words = Page(report(tmp_path / "b", [], config_of(["plain"], 2))["html"].read_text(encoding="utf-8")).words
    assert "plain has no valid trial: 2 not measured" in words
    assert "0 of 2" in words


@pytest.mark.usefixtures("no_pdf")
def test_without_a_control_the_noise_is_unknown(tmp_path: Path) -> None:
    setups = {name: DEMO[name] for name in ("plain", "native-host")}
    out = report(tmp_path, write_judged(tmp_path, setups, suites=SHORT), config_of(setups))
    assert "There is no A/A control" in Page(out["html"].read_text(encoding="utf-8")).words


@pytest.mark.usefixtures("no_pdf")
def test_six_blocks_are_said_to_be_95_percent(tmp_path: Path) -> None:
    setups = {name: DEMO[name] for name in ("plain", "native-host")}
    out = report(tmp_path, write_judged(tmp_path, setups, repeats=6, suites=SHORT), config_of(setups, 6))
    words = Page(out["html"].read_text(encoding="utf-8")).words
    assert "95 % interval, 6 blocks" in words
    assert "range of 6" not in words


@pytest.mark.usefixtures("no_pdf")
def test_a_tier_that_does_not_help_is_not_called_fast(tmp_path: Path) -> None:
    setups = {
        "plain": DEMO["plain"],
        "idle": ("native", Family("cpu", 128, 1.0, 1.0, 1.0, "OffloadingConnector")),
        "slow": ("mooncake-store", Family("remote", 128, 1.5, 1.6, 2.3, "MooncakeStoreConnector")),
    }
    out = report(tmp_path, write_judged(tmp_path, setups, suites=SHORT), config_of(setups))
    words = Page(out["html"].read_text(encoding="utf-8")).words
    assert "On a first hit, no tier is clearly faster than computing it" in words
    assert re.search(r"Slower than computing it on a first hit: slow \(1\.\d+× the time of plain", words)
    assert "Not distinguishable from plain on a first hit: idle" in words
    assert re.search(r"cold pass, which stores, took longer than plain 's in every block so far: slow 2\.\d+×", words)


@pytest.mark.slow
def test_two_hundred_setups_with_long_names_within_three_minutes(tmp_path: Path) -> None:
    """200 setups × 5 repeats with names of 90 characters that differ in the last two."""
    ends = [f"{number // 15:x}{number % 15:x}" for number in range(199)]
    setups = {"plain": DEMO["plain"], **{f"{'n' * 88}{end}": DEMO["native-host"] for end in ends}}
    folders = write_judged(tmp_path, setups, repeats=5, suites=SHORT)
    start = time.process_time()
    out = report(tmp_path, folders, config_of(setups, 5))
    assert time.process_time() - start < 180
    page = Page(out["html"].read_text(encoding="utf-8"))
    for setup in setups:
        assert setup in page.words  # in the key, if shortened elsewhere


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0 s"), (0.2134, "0.213 s"), (0.0712, "71.2 ms"), (12.345, "12.3 s"), (123.4, "123 s")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert formats.seconds(value) == text


def test_formats() -> None:
    assert formats.ratio(0.0901) == "0.090"
    assert formats.ratio(1.029) == "1.03"
    assert formats.span(0.971, 1.041) == "0.97–1.04"
    assert formats.size(2 << 30) == "2.00 GiB"
    assert formats.size(None) == formats.number(None) == formats.times(None) == formats.span(None, 1.0) == "–"
    assert formats.listing(["a"]) == "a"
    assert formats.listing(list("abcdefghij"), 3) == "a, b, c and 7 more"
    assert formats.scale([3.4, 0.19]) == (1.0, "s", 3)
    assert formats.scale([0.2, 0.012]) == (1e3, "ms", 1)


def said(
    tmp_path: Path, names: Iterable[str], *, repeats: int = 3, invalid: Iterable[tuple[str, int]] = (), **more: Any
) -> str:
    """Words of the report on some of `DEMO`'s setups."""
    setups = {name: DEMO[name] for name in names}
    folders = write_judged(tmp_path, setups, repeats=repeats, suites=SHORT, invalid=invalid, **more)
    text = report(tmp_path, folders, config_of(setups, repeats))["html"].read_text(encoding="utf-8")
    return re.sub(r" (?=[,.:;)'])", "", Page(text).words)


NOISE_WORDS = ("Not distinguishable from plain", "within noise;")


@pytest.mark.usefixtures("no_pdf")
@pytest.mark.parametrize("repeats", [1, 3])
def test_one_block_is_missing_data_and_never_noise(tmp_path: Path, repeats: int) -> None:
    lost = [("native-host", repeat) for repeat in range(1, repeats)]
    words = said(tmp_path, ["plain", "native-host"], repeats=repeats, invalid=lost)
    assert "On a first hit, no tier can be ranked yet: none has two blocks in which it and plain" in words
    assert re.search(r"Only one block has both valid, so no range yet and no rank; time against plain's: "
                     r"native-host 0\.0\d\d×\.", words)  # fmt: skip
    assert re.search(r"The cold pass against plain's in one block, with no range yet: native-host 1\.\d\d×", words)
    assert "so nothing here is ranked" in words
    assert "one block, no range" in words
    assert not any(each in words for each in NOISE_WORDS)
    assert "fastest" not in words


@pytest.mark.usefixtures("no_pdf")
def test_a_single_block_is_not_ranked_among_setups_with_more(tmp_path: Path) -> None:
    lost = [("native-host", 1), ("native-host", 2)]
    words = said(tmp_path, ["plain", "native-host", "lmcache-mp"], invalid=lost)
    assert "lmcache-mp answers fastest of the tiers that have two blocks or more, on a first hit" in words
    assert re.search(r"no range yet and no rank; time against plain's: native-host 0\.\d+×", words)
    assert not any(each in words for each in NOISE_WORDS)


@pytest.mark.usefixtures("no_pdf")
def test_runners_up_say_on_how_many_blocks_they_stand(tmp_path: Path) -> None:
    # Blocks: native-host 0, 1, 2; mooncake-store 0, 1; lmcache-mp 2, 3, of which one is shared with the fastest.
    lost = [("native-host", 3), ("mooncake-store", 2), ("mooncake-store", 3), ("lmcache-mp", 0), ("lmcache-mp", 1)]
    words = said(
        tmp_path, ["plain", "native-host", "mooncake-store", "lmcache-mp"], repeats=4, invalid=lost
    )  # fmt: skip
    assert re.search(r"Next, against plain: mooncake-store \d\.\d+× \(2 blocks\) as fast", words)
    assert re.search(r"too few blocks in common with native-host to rank the two: "
                     r"lmcache-mp \d\.\d+× \(2 blocks, 1 in common\) as fast", words)  # fmt: skip
    assert "Not distinguishable from native-host" not in words


@pytest.mark.usefixtures("no_pdf")
def test_no_block_in_common_gives_no_ratio(tmp_path: Path) -> None:
    words = said(tmp_path, ["plain", "native-host"], repeats=2, invalid=[("plain", 0), ("native-host", 1)])
    assert "no tier can be ranked yet" in words
    assert re.search(r"In no block together with plain, so with no ratio: native-host \(0\.\d+ s, 1 trial\)", words)
    assert "no block in common" in words
    assert not any(each in words for each in NOISE_WORDS)


@pytest.mark.usefixtures("no_pdf")
def test_a_baseline_without_a_valid_trial(tmp_path: Path) -> None:
    words = said(tmp_path, ["plain", "native-host"], invalid=[("plain", repeat) for repeat in range(3)])
    assert "plain has no valid value, so there are no ratios." in words
    assert re.search(r"Without a ratio, on a first hit: native-host 0\.\d+ s \(3 trials\)", words)
    assert not any(each in words for each in NOISE_WORDS)


@pytest.mark.usefixtures("no_pdf")
def test_controls_are_named_and_no_contenders(tmp_path: Path) -> None:
    words = said(tmp_path, ["plain", "plain-2", "prefix-cache", "native-host"])
    assert "native-host answers fastest on a first hit" in words
    assert "plain-2 A/A control" in words and "prefix-cache control: device cache" in words
    assert re.search(r"For comparison: prefix-cache, the engine's own device cache, takes .* \(3 trials\)", words)
    assert re.search(r"The A/A control plain-2, configured as plain is, takes [\d.–]+× its TTFT over 3 blocks", words)
    assert not re.search(r"(Not distinguishable|Next|Faster|Slower)[^.]*(plain-2|prefix-cache)", words)


@pytest.mark.usefixtures("no_pdf")
def test_a_control_of_one_block_sets_no_floor(tmp_path: Path) -> None:
    words = said(tmp_path, ["plain", "plain-2"], invalid=[("plain-2", 1), ("plain-2", 2)])
    seen = r"has one block with it, in which it takes [\d.]+–[\d.]+× its TTFT over \d+ passes: don't build on"
    assert re.search(rf"The A/A control plain-2, configured as plain is, {seen} differences of that size", words)
    assert "There is no A/A control" not in words


@pytest.mark.usefixtures("no_pdf")
def test_a_control_that_is_never_valid_beside_the_baseline_shows_nothing(tmp_path: Path) -> None:
    words = said(tmp_path, ["plain", "plain-2"], invalid=[("plain-2", repeat) for repeat in range(3)])
    assert "The A/A control plain-2 is not valid beside plain in two blocks yet" in words


@pytest.mark.usefixtures("no_pdf")
@pytest.mark.parametrize("repeats", [5, 6])
def test_no_difference_comes_with_what_would_have_been_seen(tmp_path: Path, repeats: int) -> None:
    noise = {"plain": (1.0,) * 6, "native-host": (1.0, 0.9, 1.1, 0.95, 1.05, 0.98)}

    def cold_ns(setup: str, repeat: int) -> int:
        return int(3e9 * noise[setup][repeat])

    words = said(tmp_path, list(noise), repeats=repeats, cold_ns=cold_ns)
    assert "In the cold pass, which stores, no tier is clearly slower than plain." in words
    # A range, of five blocks, promises nothing.
    seen = re.search(r"than plain\. A difference of (\d+) % or more would have been seen in 4 of 5 such", words)
    assert (seen is not None) == (repeats == 6)
    assert seen is None or 10 <= int(seen[1]) <= 30


@pytest.mark.usefixtures("no_pdf")
def test_a_setup_that_is_there_twice_is_named(tmp_path: Path) -> None:
    setups = {**{name: DEMO[name] for name in ("plain", "native-host")}, "native-host-2": DEMO["native-host"]}
    folders = write_judged(tmp_path, setups, suites=SHORT)
    text = report(tmp_path, folders, config_of(setups))["md"].read_text(encoding="utf-8").replace("*", "")
    assert "native-host and native-host-2 are configured alike: their difference is their noise." in text


@pytest.mark.usefixtures("no_pdf")
def test_two_modes_are_not_averaged(tmp_path: Path) -> None:
    slow = {"native-host": 3}

    def cold_ns(setup: str, repeat: int) -> int:
        return 3_400_000_000 * (slow.get(setup, 1) if repeat % 2 else 1)

    words = said(tmp_path, ["plain", "native-host"], repeats=6, cold_ns=cold_ns)
    assert re.search(r"the first token after 0\.\d+ s or 0\.\d+ s \(two modes\)", words)
    assert "two modes: 3 and 3 trials" in words


@pytest.mark.usefixtures("no_pdf")
def test_the_headline_shows_what_a_first_request_pays(tmp_path: Path) -> None:
    setups = {name: DEMO[name] for name in ("plain", "native-host")}
    text = report(tmp_path, write_judged(tmp_path, setups, suites=SHORT), config_of(setups))["md"].read_text("utf-8")
    header, _, base, row = [line for line in text.splitlines() if line.startswith("|")][:4]
    assert header == "| setup | repeat: TTFT, first hit | repeat: first-request cost | burst: wall time, first hit |"
    assert base.startswith("| plain (baseline) | ") and base.split("|")[3].strip() == "1×"
    assert re.match(r"\| native-host .* \| 0\.\d+ s, 1\d\.\d× as fast \| 1\.0\d×", row)


@pytest.mark.usefixtures("no_pdf")
def test_gates_that_are_off_or_failed_without_deciding_are_said(tmp_path: Path) -> None:
    setups = {name: DEMO[name] for name in ("plain", "native-host")}
    folders = write_judged(tmp_path, setups, repeats=2, suites=SHORT)
    for folder in folders:
        path = folder / "verdict.json"
        verdict = json.loads(path.read_text(encoding="utf-8"))
        of = {"required": False, "expected": "x", "source": "y", "workload": None}
        verdict["gates"] += [
            {"gate": "cold-is-cold", "decision": "not-checked", "seen": "switched off in gates.off", **of},
            {"gate": "quiet-host", "decision": "fail" if "native" in str(folder) else "pass", "seen": "80%", **of},
        ]
        path.write_text(json.dumps(verdict), encoding="utf-8")
    built = report(tmp_path, folders, config_of(setups, 2))
    for text in (Page(built["html"].read_text(encoding="utf-8")).words, built["md"].read_text(encoding="utf-8")):
        assert "Switched off by the configuration, so not checked: cold-is-cold." in text
        assert re.search(r"The gate quiet-host is advisory and failed in valid trials of \W*native-host", text)

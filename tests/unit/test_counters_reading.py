"""Pages to windows: names, restarts, sums, histograms; on made-up pages and on recorded real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvladder.counters import lmcache, mooncake
from kvladder.counters.reading import (
    ACTIVE,
    Delta,
    Histogram,
    engine_reading,
    parse_page,
    parse_pages,
)

RECORDED = Path(__file__).parents[1] / "data" / "metrics" / "vllm-0.32.0"
BASE = 'engine="0",model_name="m"'


def engine_page(
    prompt: float, computed: float, gpu: float, external: float, start: float = 1000.0, **cached: float
) -> str:
    lines = [
        f"process_start_time_seconds {start}",
        "# TYPE vllm:prompt_tokens_total counter",
        f"vllm:prompt_tokens_total{{{BASE}}} {prompt}",
        "# TYPE vllm:prompt_tokens_by_source_total counter",
        f'vllm:prompt_tokens_by_source_total{{{BASE},source="local_compute"}} {computed}',
        f'vllm:prompt_tokens_by_source_total{{{BASE},source="local_cache_hit"}} {gpu}',
        f'vllm:prompt_tokens_by_source_total{{{BASE},source="external_kv_transfer"}} {external}',
    ]
    if cached:
        lines.append("# TYPE vllm:prompt_tokens_cached_by_source_total counter")
    for source, value in cached.items():
        lines.append(f'vllm:prompt_tokens_cached_by_source_total{{{BASE},source="{source}"}} {value}')
    return "\n".join(lines) + "\n"


def delta(start: str | None, end: str | None) -> Delta:
    return Delta(parse_pages({"engine": start}), parse_pages({"engine": end}))


def test_aliases_created_and_odd_lines_of_one_page() -> None:
    """C1: exact names, ``_created`` never counted, NaN unknown, odd but legal lines read, a broken one counted."""
    start = "prefix_cache_hits_total 0\n"
    end = (
        "# TYPE gpu_prefix_cache_hits_total counter\n"
        "gpu_prefix_cache_hits_total 640\n"
        "# TYPE prefix_cache_hits_total counter\n"
        "prefix_cache_hits_total 640\n"
        "# TYPE prefix_cache_hits_created gauge\n"
        "prefix_cache_hits_created 1.79e+09\n"
        'queries_total{engine="0",} 900\n'
        'timed_total{engine="0"} 7 1767607200000\n'
        "broken_total NaN\n"
        'half_a_line{engine="0" 12\n'
        "not a number_total x\n"
        "after_total 3\n"
    )
    page = parse_page(end)
    assert page.broken == 2
    assert "prefix_cache_hits_created" not in page.samples
    window = delta(start, end)
    assert window.counter("engine", "prefix_cache_hits_total") == 640
    assert window.counter("engine", "prefix_cache_hits") is None
    assert window.counter("engine", "queries_total", engine="0") == 900
    assert window.counter("engine", "timed_total") == 7
    assert window.counter("engine", "broken_total") is None
    assert window.counter("engine", "after_total") == 3


def test_sources_over_the_prompt_are_a_problem() -> None:
    """C2a: the three numbers are named, and nothing is clamped."""
    reading = engine_reading(delta(engine_page(0, 0, 0, 0), engine_page(17050, 0, 0, 20480)), "cpu")
    assert reading.by_source["cpu"] == 20480
    assert reading.problems == [
        "sources do not add up to prompt tokens: cpu 20480 + computed 0 = 20480, prompt 17050",
    ]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (engine_page(12, 12, 0, 0, start=2000.0), "process start time"),
        (engine_page(12, 12, 0, 0), "was 91"),
    ],
)
def test_restarted_engine_gives_no_numbers(end: str, why: str) -> None:
    """C3: neither a negative number nor the end's value, and every series of that server is unknown."""
    window = delta(engine_page(9100, 9100, 0, 0), end)
    assert window.counter("engine", "vllm:prompt_tokens_total") is None
    reading = engine_reading(window, "cpu")
    assert set(reading.by_source.values()) == {None}
    (problem,) = reading.problems
    assert "engine restarted inside the window" in problem
    assert why in problem


def test_counter_without_a_type_that_goes_back_is_a_restart() -> None:
    window = delta("stored_bytes 9.1e9\n", "stored_bytes 1.2e9\n")
    assert window.counter("engine", "stored_bytes") is None
    assert window.problems == ["engine restarted inside the window (stored_bytes went back by 7.9e+09)"]


def test_missing_is_unknown() -> None:
    """C3's variant: a series or a page that isn't there at the end is unknown, not minus everything."""
    start = engine_page(9100, 9100, 0, 0)
    assert delta(start, "process_start_time_seconds 1000\n").counter("engine", "vllm:prompt_tokens_total") is None
    assert delta(start, None).counter("engine", "vllm:prompt_tokens_total") is None
    assert delta(None, start).counter("engine", "vllm:prompt_tokens_total") is None
    assert delta(start, start).counter("lmcache", "vllm:prompt_tokens_total") is None
    # One of two series of a sum that vanished makes the sum unknown.
    two = 'a_total{engine="0"} 5\na_total{engine="1"} 5\n'
    assert delta(two, 'a_total{engine="0"} 9\n').counter("engine", "a_total") is None
    assert delta(two, 'a_total{engine="0"} 9\na_total{engine="1"} 6\n').counter("engine", "a_total") == 5


def test_a_series_that_appears_counts_from_zero() -> None:
    assert delta("up 1\n", "stores_total 4\n").counter("engine", "stores_total") == 4
    assert delta(None, "stores_total 4\n").counter("engine", "stores_total") is None


def test_histogram_with_its_tail_beyond_the_buckets() -> None:
    """C4: window deltas; p99 is only known to be beyond the last bound; the mean comes from sum and count."""

    def page(below: int, tail: int, total: float) -> str:
        return (
            "# TYPE queue_seconds histogram\n"
            f'queue_seconds_bucket{{le="1.0"}} {below // 2}\n'
            f'queue_seconds_bucket{{le="10.0"}} {below}\n'
            f'queue_seconds_bucket{{le="+Inf"}} {below + tail}\n'
            f"queue_seconds_sum {total}\nqueue_seconds_count {below + tail}\n"
        )

    histogram = delta(page(500, 0, 50.0), page(570, 30, 950.0)).histogram("engine", "queue_seconds")
    assert histogram is not None
    assert histogram.mean() == 9.0
    assert str(histogram.quantile(0.99)) == "> 10"
    median = histogram.quantile(0.5)
    assert median is not None
    assert not median.beyond
    assert 1 < median.value < 10


def test_no_quantile_without_buckets() -> None:
    """C4's second page: sum and count give a mean and nothing else."""
    page = "queue_seconds_sum {}\nqueue_seconds_count {}\n"
    histogram = delta(page.format(0, 0), page.format(900, 100)).histogram("engine", "queue_seconds")
    assert histogram == Histogram((), 100, 900.0)
    assert histogram.mean() == 9.0
    assert histogram.quantile(0.99) is None
    assert delta("up 1\n", "up 1\n").histogram("engine", "queue_seconds") is None
    empty = delta(page.format(5, 5), page.format(5, 5)).histogram("engine", "queue_seconds")
    assert empty is not None
    assert empty.mean() is None


def test_version_026_has_no_split_and_the_setup_says_the_tier() -> None:
    reading = engine_reading(delta(engine_page(0, 0, 0, 0), engine_page(3000, 56, 0, 2944)), "remote")
    assert reading.by_source == {"gpu": 0, "cpu": 0, "nvme": 0, "remote": 2944, "computed": 56, "unknown": 0}
    assert reading.problems == []


@pytest.mark.parametrize("tier", [None, "gpu", "unknown"])
def test_external_hits_without_a_tier_are_unknown(tier: str | None) -> None:
    reading = engine_reading(delta(engine_page(0, 0, 0, 0), engine_page(3000, 56, 0, 2944)), tier)
    assert reading.by_source["unknown"] == 2944
    assert reading.by_source["gpu"] == 0


def test_version_032_splits_by_tier() -> None:
    zero = dict.fromkeys(("device", "host", "disk", "p2p", "external_unspecified"), 0.0)
    start = engine_page(0, 0, 0, 0, **zero)
    end = engine_page(3000, 56, 0, 2944, **{**zero, "host": 1024.0, "disk": 1792.0, "external_unspecified": 128.0})
    reading = engine_reading(delta(start, end), "remote")
    assert reading.by_source == {"gpu": 0, "cpu": 1024, "nvme": 1792, "remote": 128, "computed": 56, "unknown": 0}


def test_a_split_that_counts_twice_is_not_used() -> None:
    """A preempted request is admitted, and counted, twice."""
    end = engine_page(3000, 56, 0, 2944, host=5888.0)
    reading = engine_reading(delta(engine_page(0, 0, 0, 0, host=0.0), end), "cpu")
    assert (reading.by_source["cpu"], reading.by_source["unknown"]) == (0, 2944)


def lmcache_page(l1: int, l2: int, *, written: int = 0, read: int = 0, used: int = 0, evicted: int = 0) -> str:
    return (
        f"lmcache_mp_lookup_hit_l1_tokens_total {l1}\nlmcache_mp_lookup_hit_l2_tokens_total {l2}\n"
        f"lmcache_mp_l1_write_chunks_total {written}\nlmcache_mp_l1_read_chunks_total {read}\n"
        f"lmcache_mp_l1_evicted_chunks_total {evicted}\nlmcache_mp_l1_memory_usage_bytes {used}\n"
    )


@pytest.mark.parametrize(
    ("levels", "shares"),
    [
        ((2944, 0), {"cpu": 2944, "nvme": 0, "unknown": 0}),
        ((0, 3000), {"cpu": 0, "nvme": 2944, "unknown": 0}),
        ((1024, 1920), {"cpu": 1024, "nvme": 1920, "unknown": 0}),
        # Looked up is more than was loaded: one level can't have given all, and the rest could be of either.
        ((1024, 2048), {"cpu": 896, "nvme": 1920, "unknown": 128}),
        ((4096, 4096), {"cpu": 0, "nvme": 0, "unknown": 2944}),
        # Less than was loaded: these lookups are not those hits.
        ((0, 128), {"cpu": 0, "nvme": 0, "unknown": 2944}),
    ],
)
def test_lmcache_levels(levels: tuple[int, int], shares: dict[str, int]) -> None:
    """What is sure to have come from a level is its."""
    start = {"engine": engine_page(0, 0, 0, 0), "lmcache": lmcache_page(0, 0)}
    end = {"engine": engine_page(3000, 56, 0, 2944), "lmcache": lmcache_page(*levels)}
    reading = lmcache.mp_reading(Delta(parse_pages(start), parse_pages(end)))
    assert {tier: reading.by_source[tier] for tier in shares} == shares
    assert reading.problems == []


def test_lmcache_bytes_follow_the_pool() -> None:
    start = {"engine": engine_page(0, 0, 0, 0), "lmcache": lmcache_page(0, 0)}
    end = {
        "engine": engine_page(3000, 56, 0, 2944),
        "lmcache": lmcache_page(2944, 0, written=12, read=11, used=8000, evicted=4),
    }
    reading = lmcache.mp_reading(Delta(parse_pages(start), parse_pages(end)))
    assert (reading.stored_bytes, reading.loaded_bytes) == (12_000, 11_000)


@pytest.mark.parametrize(
    ("device", "given", "loaded"), [(0, None, 11_000), (1024, None, None), (1024, 5, 5000), (0, 5, 11_000)]
)
def test_lmcache_counts_what_the_device_has_as_read(device: int, given: int | None, loaded: int | None) -> None:
    """The locks of chunks that were looked up and not needed are given back as if they had been read."""
    start = {"engine": engine_page(0, 0, 0, 0), "lmcache": lmcache_page(0, 0)}
    pool = lmcache_page(2944, 0, written=12, read=11, used=8000, evicted=4)
    pool += "" if given is None else f"lmcache_mp_num_chunks_loaded_total {given}\n"
    end = {"engine": engine_page(3000, 56, device, 2944 - device), "lmcache": pool}
    assert lmcache.mp_reading(Delta(parse_pages(start), parse_pages(end))).loaded_bytes == loaded


def test_a_mooncake_put_in_flight_is_work_however_still_the_page_is() -> None:
    """A batch of gigabytes over TCP takes seconds in which no counter moves: seen on a GPU, where the first hit then
    found half of the prompt."""
    page = (
        "master_key_count 3473\nmaster_allocated_bytes 7283408896\n"
        "master_put_start_requests_total 0\nmaster_put_end_requests_total 0\nmaster_put_revoke_requests_total 0\n"
        "master_batch_put_start_requests_total 7\nmaster_batch_put_end_requests_total {}\n"
        "master_batch_put_revoke_requests_total {}\n"
    )
    for ended, revoked, in_flight in ((6, 0, 1), (7, 0, 0), (6, 1, 0)):
        found = mooncake.store_activity(parse_pages({"mooncake": page.format(ended, revoked)}))
        assert found is not None
        assert found[f"{ACTIVE}master_batch_put_in_flight"] == in_flight
        assert found[f"{ACTIVE}master_put_in_flight"] == 0


def test_lmcache_stores_in_flight() -> None:
    """A store that has begun and not ended is work, on its way to either level, however still the counters are."""
    page = (
        "lmcache_mp_l1_write_chunks_total 4\nlmcache_mp_num_submitted_stores_total 5\n"
        "lmcache_mp_num_finished_stores_total 4\nlmcache_mp_l2_store_submitted_requests_total 3\n"
    )
    found = lmcache.mp_store_activity(parse_pages({"lmcache": page}))
    assert found == {
        "lmcache_mp_l1_write_chunks_total": 4,
        f"{ACTIVE}lmcache_mp_num_submitted_stores_total": 1,
        f"{ACTIVE}lmcache_mp_l2_store_submitted_requests_total": 3,
    }
    assert lmcache.mp_store_activity({"lmcache": None}) is None


def test_lmcache_second_level_bytes() -> None:
    """Chunks read from L2 have the size of one of the pool; what was written L2 says itself, and a chunk that was there
    already isn't written again."""
    start = {"engine": engine_page(0, 0, 0, 0), "lmcache": lmcache_page(0, 0) + "lmcache_mp_l2_usage_bytes 0\n"}
    second = (
        "lmcache_mp_l2_store_completed_requests_total 2\nlmcache_mp_l2_store_completed_objects_chunks_total 12\n"
        "lmcache_mp_l2_prefetch_load_completed_chunks_total 3\nlmcache_mp_l2_usage_bytes 11000\n"
    )
    pool = lmcache_page(0, 0, written=15, read=17, used=15_000)
    end = {"engine": engine_page(3000, 3000, 0, 0), "lmcache": pool + second}
    reading = lmcache.mp_reading(Delta(parse_pages(start), parse_pages(end)))
    assert (reading.disk_write_bytes, reading.disk_read_bytes) == (11_000, 3000)
    # Of the pool's writes three came from L2, of its reads twelve went there: neither passed the engine.
    assert (reading.stored_bytes, reading.loaded_bytes) == (12_000, 5000)

"""Whatever signal the job gets, its servers leave."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from serving_world import World, marked, read_until, wait_for

FULL = ("--children", "same,deaf,away")


def finish(job: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, err = job.communicate(timeout=20)
    return out.splitlines(), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_cleanly_and_restores_handlers(world: World, number: signal.Signals) -> None:
    job = world.job(world.spec(*FULL, "--shm", f"psm_{world.mark}"), grace_s=0.5)
    read_until(job, "READY")
    job.send_signal(number)
    out, err = finish(job)
    assert f"INTERRUPTED {number.name}" in out
    assert "HANDLERS True" in out
    assert job.returncode == 128 + number, err
    assert world.is_clean()


@pytest.mark.parametrize("mode", ["asyncio", "uvloop"])
def test_signal_gets_out_of_an_event_loop(world: World, mode: str) -> None:
    job = world.job(world.spec(), mode=mode)
    read_until(job, "READY")
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    out, err = finish(job)
    assert "INTERRUPTED SIGTERM" in out, err
    assert job.returncode == 143


def test_signal_while_starting(world: World) -> None:
    job = world.job(world.spec(name="side"), world.spec("--delay", 30, place=1))
    read_until(job, "PROGRESS engine: starting")
    wait_for(lambda: len(world.pids()) == 2)
    job.send_signal(signal.SIGTERM)
    out, _ = finish(job)
    assert "INTERRUPTED SIGTERM" in out
    assert world.is_clean()


def test_second_signal_while_stopping_skips_nothing(world: World) -> None:
    job = world.job(world.spec("--ignore-term", "--shm", f"psm_{world.mark}"), grace_s=1.5)
    read_until(job, "READY")
    job.send_signal(signal.SIGINT)
    read_until(job, "PROGRESS engine: stopping")
    for _ in range(5):
        time.sleep(0.1)
        assert job.poll() is None, "still stopping"
        job.send_signal(signal.SIGTERM)
        job.send_signal(signal.SIGINT)
    out, err = finish(job)
    assert "INTERRUPTED SIGINT" in out, "the first signal is the one that counts"
    assert err == "" and "HANDLERS True" in out
    assert world.is_clean()


def test_second_signal_leaves_the_clean_up_of_the_body_alone(world: World) -> None:
    tidied = False
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), world.servers(world.spec()):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            tidied = True
    assert tidied and marked(world.mark) == []


def test_signal_in_a_normal_stop_waits_for_its_end(world: World) -> None:
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), world.servers(world.spec("--ignore-term"), grace_s=1.0):
        timer = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.4; kill -TERM {os.getpid()}"])
    timer.wait()
    assert marked(world.mark) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_signals_at_any_moment_around_the_exit(world: World) -> None:
    """Aimed at the first instructions of the exit, where no flag could have been set yet."""
    for delay_ms in (0, 1, 2, 4, 8):
        raised = False
        try:
            with world.servers(world.spec()) as group:
                timer = signal.setitimer
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
                timer(signal.ITIMER_REAL, 0.02)
                time.sleep(0.016)
                end = time.perf_counter() + delay_ms / 1000
                while time.perf_counter() < end:
                    pass
        except KeyboardInterrupt:
            raised = True
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert raised and not group[0].alive and marked(world.mark) == []


def ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_ignored_hangup_stays_ignored(world: World) -> None:
    """As under nohup."""
    job = world.job(world.spec(), preexec_fn=ignore_hangup)
    read_until(job, "READY")
    job.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    out, _ = finish(job)
    assert "INTERRUPTED SIGTERM" in out


@pytest.mark.parametrize("mode", ["sleep", "fork"])
def test_sigkill_of_the_job_takes_everything_along(world: World, mode: str) -> None:
    job = world.job(
        world.spec("--shm", f"psm_{world.mark}", name="side"),
        world.spec(*FULL, "--ignore-term", "--shm", f"vllm_offload_{world.mark}", place=1),
        mode=mode,
        grace_s=0.5,
    )
    read_until(job, "READY")
    wait_for(lambda: len(world.pids()) == 5)
    job.kill()
    job.wait()
    if mode == "fork":
        # The forked child keeps our pipe open for 3 s: the servers have to go before it does.
        wait_for(lambda: len(marked(world.mark)) == 1 and not world.shm_names(), seconds=2.8)
    wait_for(world.is_clean)
    job.communicate()


def test_sigkill_while_starting(world: World) -> None:
    job = world.job(world.spec("--delay", 30))
    read_until(job, "PROGRESS engine: starting")
    wait_for(world.pids)
    job.kill()
    job.communicate()
    wait_for(world.is_clean)

import logging
import subprocess
import sys
import threading

import pytest
import torch
from thread_limit import limit_threads

import ftw
from ftw.host.memory import HostMemory
from ftw.pinned import memory_report as memory
from ftw.pinned.memory_report import MemoryMonitor, MemoryReport, MemorySnapshot

CPU = torch.device("cpu")
MIB = 1 << 20


def touched(nbytes: int) -> HostMemory:
    made = HostMemory(nbytes)
    made.view()[:] = bytes(nbytes)
    return made


def test_report_sees_a_peak_that_was_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be a new maximum of the process, as in the next test: that is left out here."""
    resident, is_touched, is_sampled = memory.resident_nbytes, threading.Event(), threading.Event()
    samples: list[int] = []

    def sample() -> int:
        if threading.current_thread() is threading.main_thread():
            return resident()
        if samples:  # the one before has been taken note of
            is_sampled.set()
            return 0
        if is_touched.is_set():
            samples.append(resident())
            return samples[0]
        return 0

    monkeypatch.setattr(memory, "resident_nbytes", sample)
    monkeypatch.setattr(memory, "_read_maxima", lambda device: memory._Maxima(0, 0))
    with MemoryMonitor(CPU) as watch:
        held = touched(512 * MIB)
        is_touched.set()
        assert is_sampled.wait(600)
        held.close()
        report = watch.report("host", "because", {"table": 5})
    assert report.peak.host_resident == max(samples[0], report.before.host_resident)
    assert report.peak.host_resident >= report.after.host_resident + 400 * MIB  # other pages may come and go
    assert (report.device, report.placement, report.reason, report.total_pinned_bytes) == ("cpu", "host", "because", 5)


MAXIMUM_SCRIPT = """
import torch
from ftw.pinned import memory_report as memory
from ftw.host.memory import HostMemory

memory._SAMPLE_SECONDS = 600
with memory.MemoryMonitor(torch.device("cpu")) as watch:
    held = HostMemory(512 << 20)
    held.view()[:] = bytes(512 << 20)
    held.close()
    report = watch.report("host", "", {})
print(report.peak.host_resident, memory._read_maxima(torch.device("cpu")).host_resident, report.after.host_resident)
"""


def test_report_sees_a_new_maximum_that_was_not_sampled() -> None:
    done = subprocess.run([sys.executable, "-c", MAXIMUM_SCRIPT], capture_output=True, text=True, check=True)
    peak, maximum, after = map(int, done.stdout.split())
    assert peak == maximum >= after + 400 * MIB


def test_watch_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    with MemoryMonitor(CPU) as watch:
        assert [thread.name for thread in set(threading.enumerate()) - before] == ["ftw-memory"]
        watch.report("host", "", {})
        assert set(threading.enumerate()) <= before
    with pytest.raises(KeyError), MemoryMonitor(CPU):
        raise KeyError
    assert set(threading.enumerate()) <= before


def test_peak_is_the_worst_of_each_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([MemorySnapshot(9, 1, 2, 30, 0), MemorySnapshot(7, 0, 5, 20, 8)])
    monkeypatch.setattr(memory, "snapshot", lambda device: next(moments))
    monkeypatch.setattr(memory, "_SAMPLE_SECONDS", 60)
    with MemoryMonitor(CPU) as watch:
        report = watch.report("host", "", {})
    assert report.peak == MemorySnapshot(7, 1, 5, max(30, report.peak.host_resident), 8)


def test_error_while_sampling_is_raised_by_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    has_failed = threading.Event()
    resident = memory.resident_nbytes

    def fail() -> int:
        if threading.current_thread() is threading.main_thread():
            return resident()
        has_failed.set()
        raise OSError("no /proc any more")

    monkeypatch.setattr(memory, "resident_nbytes", fail)
    with MemoryMonitor(CPU) as watch:
        has_failed.wait(600)
        with pytest.raises(OSError, match="no /proc any more"):
            watch.report("host", "", {})


def test_watch_without_a_thread_reports_what_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit_threads(monkeypatch, 0)
    with caplog.at_level(logging.WARNING, "ftw"), MemoryMonitor(CPU) as watch:
        report = watch.report("host", "", {})
    assert report.peak.host_resident >= report.before.host_resident
    assert "is not sampled: can't start new thread" in caplog.text


@pytest.mark.parametrize(("before", "after", "freed"), [(10, 30, 20), (30, 10, 0)], ids=["grown", "shrunk"])
def test_freed_bytes_are_what_the_driver_has_more(before: int, after: int, freed: int) -> None:
    first, last = (MemorySnapshot(free, 0, 0, 0, 0) for free in (before, after))
    assert MemoryReport("cuda:0", "host", "", {}, first, first, last).freed_bytes == freed


def test_snapshot_of_a_cpu_counts_the_host_alone() -> None:
    found = memory.snapshot("cpu")
    assert (found.device_free, found.device_allocated, found.device_reserved) == (0, 0, 0)
    assert found.host_resident > 10 * MIB
    assert found.host_pinned >= 0


@pytest.mark.parametrize("device", ["cuda:99", "mps", "banana"])
def test_snapshot_of_a_device_that_is_not_there_is_a_device_error(device: str) -> None:
    with pytest.raises(ftw.DeviceError, match=device):
        memory.snapshot(device)

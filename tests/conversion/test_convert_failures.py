"""Conversions that fail, are refused half-way, or are killed: what they leave behind."""

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw, write_sharded
from folders import state
from interrupts import interruptible
from leaks import descriptors
from thread_limit import limit_threads

import ftw
from ftw.conversion.writing import writer as writer_module
from ftw.conversion.writing.chunk_reader import ChunkReader
from ftw.errors import CheckpointError, OutputError
from ftw.host import OpenFolder
from ftw.host.libc import exchange_names

STAGING = ".out.ftw-partial"


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """A conversion of a few MiB then takes several chunks."""
    monkeypatch.setattr(writer_module, "_CHUNK_NBYTES", 1 << 20)


def sharded(folder: Path, *, nbytes: int = 24 << 20, seed: int = 0) -> Path:
    """Two shards, each several buffers long."""
    generator = torch.Generator().manual_seed(seed)
    quarter = {"size": (nbytes // 4,), "generator": generator, "dtype": torch.uint8}
    tensors = {f"t{number}": torch.randint(0, 256, **quarter) for number in range(4)}
    tensors["model.embed_tokens.weight"] = torch.randn((64, 8), generator=generator)
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:2]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[2:]},
    }
    return write_sharded(folder, shards, {"architectures": ["X"], "tie_word_embeddings": False})


def fail_in_write(monkeypatch, code: int, after: int) -> None:
    real = os.pwrite
    calls = []

    def pwrite(descriptor: int, data, offset: int) -> int:
        calls.append(offset)
        if len(calls) > after:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


def fail_in_read(monkeypatch, error: BaseException) -> None:
    real = ChunkReader.read

    def read(self, chunk, buffer):
        if any(part.tensor.name == "t3" for part in chunk.parts):
            raise error
        return real(self, chunk, buffer)

    monkeypatch.setattr(ChunkReader, "read", read)


@pytest.fixture(params=[False, True], ids=["new", "overwrite"])
def old_target(request, tmp_path) -> bool:
    """Whether a valid FTW lies at the target already."""
    if request.param:
        write_ftw(tmp_path / "work" / "out", {"old": torch.ones(9)})
    return request.param


def assert_target_is_as_before(work: Path, old_target: bool, *, is_left: bool = False) -> None:
    names = [STAGING] * is_left + ["out"] * old_target
    assert sorted(path.name for path in work.iterdir()) == names if names else not work.exists()
    if old_target:
        assert ftw.verify(work / "out").is_ok
        with ftw.open_checkpoint(work / "out") as checkpoint:
            assert list(checkpoint.tensors) == ["old"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "io"])
def test_convert_error_of_a_write_names_the_shard_and_leaves_nothing(tmp_path, monkeypatch, old_target, code):
    source = sharded(tmp_path / "src")
    fail_in_write(monkeypatch, code, after=0)  # before the first tensor is complete
    with pytest.raises(OSError, match=r"freetoken-00000\.ftw") as caught:
        ftw.convert(source, tmp_path / "work" / "out", overwrite=True)
    assert caught.value.errno == code
    assert_target_is_as_before(tmp_path / "work", old_target)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "io"])
def test_convert_error_of_a_write_can_be_resumed(tmp_path, monkeypatch, caplog, old_target, code):
    source = sharded(tmp_path / "src")
    target = tmp_path / "work" / "out"
    with monkeypatch.context() as patch:
        fail_in_write(patch, code, after=15)
        with pytest.raises(OSError, match=r"freetoken-00000\.ftw"):
            ftw.convert(source, target, overwrite=True)
    assert_target_is_as_before(tmp_path / "work", old_target, is_left=True)
    assert caplog.messages == [
        f"{target}: target: what was written is kept in {target.parent / STAGING}; resume=True continues it"
    ]
    seen = []
    result = ftw.convert(
        source, target, overwrite=True, resume=True, progress=lambda done, total: seen.append((done, total))
    )
    assert result.resumed_nbytes == 2048 + 2 * (6 << 20)  # whole tensors
    assert seen[:2] == [(2048, 4 * (6 << 20) + 2048), (2048 + (6 << 20), 4 * (6 << 20) + 2048)]
    assert seen[-1] == (4 * (6 << 20) + 2048, 4 * (6 << 20) + 2048)
    assert ftw.verify(target, against=source).is_ok
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt(), MemoryError()],
    ids=["io", "interrupt", "memory"],
)
def test_convert_error_of_a_read_can_be_resumed(tmp_path, monkeypatch, old_target, error):
    source = sharded(tmp_path / "src")
    with monkeypatch.context() as patch:
        fail_in_read(patch, error)
        with pytest.raises(type(error)):
            ftw.convert(source, tmp_path / "work" / "out", overwrite=True)
    assert_target_is_as_before(tmp_path / "work", old_target, is_left=True)
    assert ftw.convert(source, tmp_path / "work" / "out", overwrite=True, resume=True).resumed_nbytes
    assert ftw.verify(tmp_path / "work" / "out", against=source).is_ok


@pytest.mark.parametrize("change", ["truncate", "append", "touch", "remove"], ids=str)
def test_convert_notices_a_shard_that_changes_while_it_reads(tmp_path, old_target, change):
    source = sharded(tmp_path / "src")
    shard = source / "model-00002-of-00002.safetensors"

    def spoil(done: int, total: int) -> None:
        if not shard.exists():
            return
        size = shard.stat().st_size
        if change == "truncate":
            os.truncate(shard, 1000)
        elif change == "append":
            os.truncate(shard, size + 1)
        elif change == "touch":
            os.utime(shard, ns=(1, 1))
        else:
            shard.unlink()

    with pytest.raises((CheckpointError, FileNotFoundError), match="model-00002-of-00002"):
        ftw.convert(source, tmp_path / "work" / "out", overwrite=True, progress=spoil)
    # What was made of another state of the source is of no use; but a file may be missing for a moment, on a network.
    assert_target_is_as_before(tmp_path / "work", old_target, is_left=change == "remove")


def test_convert_refuses_a_disk_that_is_too_small_before_it_writes(tmp_path, monkeypatch, old_target):
    source = sharded(tmp_path / "src", nbytes=1 << 20)
    (source / "tokenizer.json").write_bytes(bytes(5000))
    ftw.convert(source, tmp_path / "whole")
    needed = sum(path.stat().st_size for path in (tmp_path / "whole").iterdir())
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        if fits:
            ftw.convert(source, tmp_path / "work" / "out", overwrite=True)
            continue
        monkeypatch.setattr(os, "pwrite", None)
        with pytest.raises(OutputError, match=f"target: needs {needed} bytes, {free} free on its disk"):
            ftw.convert(source, tmp_path / "work" / "out", overwrite=True)
        assert_target_is_as_before(tmp_path / "work", old_target)
        monkeypatch.undo()


def test_convert_is_refused_while_another_one_writes_the_target(tmp_path, old_target):
    source = sharded(tmp_path / "src", nbytes=1 << 20)
    work = tmp_path / "work"
    (work / STAGING / "deep").mkdir(parents=True)
    (work / STAGING / "freetoken-00000.ftw").write_bytes(b"of the other")
    before = state(work)
    script = (
        "import fcntl, os, sys\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(work / STAGING)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(OutputError, match="out: target: another conversion is writing it"):
            ftw.convert(source, work / "out", overwrite=True)
        assert state(work) == before
        other.stdin.close()
    ftw.convert(source, work / "out", overwrite=True)
    assert [path.name for path in work.iterdir()] == ["out"]


def test_convert_is_refused_while_another_one_is_half_way(tmp_path):
    source, other = sharded(tmp_path / "src", nbytes=1 << 20), sharded(tmp_path / "other", nbytes=1 << 20, seed=1)
    target = tmp_path / "work" / "out"
    refused = []

    def begin_second(done: int, total: int) -> None:
        with pytest.raises(OutputError, match="another conversion is writing it"):
            ftw.convert(other, target, overwrite=True)
        refused.append(done)

    ftw.convert(source, target, overwrite=True, progress=begin_second)
    assert refused
    assert ftw.verify(target, against=source).is_ok
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_convert_may_follow_at_once_on_another_one(tmp_path, monkeypatch):
    """The second starts when the first's folder has its name, and the first is not quite done."""
    source, other = sharded(tmp_path / "src", nbytes=1 << 20), sharded(tmp_path / "other", nbytes=1 << 20, seed=1)
    target = tmp_path / "work" / "out"
    target.parent.mkdir()  # or its making would be synced, too
    second = threading.Thread(target=ftw.convert, args=(other, target), kwargs={"overwrite": True})
    real = OpenFolder.sync

    def begin_second(folder: OpenFolder) -> None:
        if folder.path == target.parent:
            monkeypatch.setattr(OpenFolder, "sync", real)
            second.start()
        real(folder)

    monkeypatch.setattr(OpenFolder, "sync", begin_second)
    ftw.convert(source, target, overwrite=True)
    second.join()
    assert ftw.verify(target, against=other).is_ok
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_convert_second_start_after_publication_keeps_its_staging_folder(tmp_path, monkeypatch):
    """The first must not remove, on its way out, a staging folder that is no longer its own."""
    source = sharded(tmp_path / "src", nbytes=1 << 20)
    staging = tmp_path / STAGING

    def begin_second(folder: OpenFolder) -> None:
        if folder.path == tmp_path:
            staging.mkdir()
            (staging / "freetoken-00000.ftw").write_bytes(b"of the second")

    monkeypatch.setattr(OpenFolder, "sync", begin_second)
    ftw.convert(source, tmp_path / "out")
    assert (staging / "freetoken-00000.ftw").read_bytes() == b"of the second"


def test_convert_cleans_what_a_killed_one_left(tmp_path, old_target):
    source = sharded(tmp_path / "src", nbytes=1 << 20)
    staging = tmp_path / "work" / STAGING
    (staging / "deep").mkdir(parents=True)
    for name in ("freetoken-00000.ftw", "deep/tokenizer.json", "freetoken_weight.json.tmp", "stale", ".ftw-journal"):
        (staging / name).write_bytes(b"left")
    (staging / "link").symlink_to(source)
    ftw.convert(source, tmp_path / "work" / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["out"]
    assert ftw.verify(tmp_path / "work" / "out", against=source).is_ok
    assert not {"stale", "link", "deep"} & {path.name for path in (tmp_path / "work" / "out").iterdir()}
    assert len(list(source.iterdir())) == 4


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two_renames"])
def test_convert_overwrite_removes_the_old_folder_either_way(tmp_path, monkeypatch, exchange):
    """A file system that cannot exchange two names gets two renames."""
    if not exchange:
        monkeypatch.setattr(OpenFolder, "exchange", lambda folder, one, other: False)
    source = sharded(tmp_path / "src", nbytes=1 << 20)
    write_ftw(tmp_path / "work" / "out", {"old": torch.ones(9)})
    (tmp_path / "work" / ".out.ftw-old").mkdir()
    (tmp_path / "work" / ".out.ftw-old" / "left").write_bytes(b"by a killed conversion")
    for _ in range(2):
        ftw.convert(source, tmp_path / "work" / "out", overwrite=True)
        assert ftw.verify(tmp_path / "work" / "out", against=source).is_ok
        assert [path.name for path in (tmp_path / "work").iterdir()] == ["out"]


def test_convert_overwrite_puts_the_old_folder_back_where_the_second_rename_fails(tmp_path, monkeypatch, old_target):
    source = sharded(tmp_path / "src", nbytes=1 << 20)
    real = OpenFolder.rename

    def rename(folder: OpenFolder, old: str, new: str) -> None:
        if old == STAGING:
            raise OSError(errno.EIO, "broken")
        real(folder, old, new)

    monkeypatch.setattr(OpenFolder, "exchange", lambda folder, one, other: False)
    monkeypatch.setattr(OpenFolder, "rename", rename)
    with pytest.raises(OSError, match="broken"):
        ftw.convert(source, tmp_path / "work" / "out", overwrite=True)
    assert_target_is_as_before(tmp_path / "work", old_target, is_left=True)


def test_convert_overwrite_never_leaves_the_name_empty(tmp_path, monkeypatch):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if not exchange_names(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot exchange two names")
    source = sharded(tmp_path / "src", nbytes=1 << 20)
    target = tmp_path / "work" / "out"
    write_ftw(target, {"old": torch.ones(9)})
    monkeypatch.setattr(os, "rename", None)  # which a kill could come after
    ftw.convert(source, target, overwrite=True)
    assert ftw.verify(target, against=source).is_ok
    assert [path.name for path in target.parent.iterdir()] == ["out"]


# real processes


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_convert_killed_at_any_point_leaves_a_valid_target_or_none(tmp_path, overwrite):
    generator = random.Random(7)
    source = sharded(tmp_path / "src", nbytes=100 << 20)
    target = tmp_path / "work" / "out"
    command = [sys.executable, "-m", "ftw.cli", "convert", source, target, "--shard-size", "32MiB", "--overwrite"]
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    whole = time.monotonic() - began
    if not overwrite:
        shutil.rmtree(target)

    def is_killed_after(seconds: float) -> bool:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        status = process.wait()
        if overwrite or target.exists():
            assert ftw.verify(target, against=source).is_ok
            if not overwrite:
                shutil.rmtree(target)
        return status == -signal.SIGKILL

    killed = [is_killed_after(whole * (0.15 + 0.85 * (number + generator.random()) / 12)) for number in range(12)]
    while not any(killed):  # the run that was measured was a slow one
        whole /= 2
        killed.append(is_killed_after(0.15 * whole))
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    assert ftw.verify(target, against=source).is_ok
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("interrupts", [1, 3], ids=["once", "thrice"])
def test_convert_interrupted_exits_with_130_and_can_be_resumed(tmp_path, interrupts):
    source = sharded(tmp_path / "src", nbytes=64 << 20)
    target = tmp_path / "work" / "out"
    # The interrupt comes when the conversion is surely under way: from its own progress function.
    script = (
        "import os, signal, sys\n"
        "import ftw\n"
        "from ftw.cli import main\n"
        "real = ftw.convert\n"
        "def interrupted(*arguments, **named):\n"
        "    def progress(done, total):\n"
        f"        for _ in range({interrupts}): os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(*arguments, **{**named, 'progress': progress})\n"
        "ftw.convert = interrupted\n"
        "main.run(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", script, "convert", source, target]
    with interruptible():
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    kept = f"{target}: target: what was written is kept in {target.parent / STAGING}; "
    lines = [f"ftw: warning: {kept}--resume continues it", "ftw: error: interrupted"]
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (130, "", lines)
    assert os.listdir(target.parent) == [STAGING]
    assert ftw.convert(source, target, resume=True).resumed_nbytes
    assert ftw.verify(target, against=source).is_ok


def test_convert_lock_is_free_after_a_failure(tmp_path, monkeypatch):
    """In the same process: the descriptor that holds the lock is closed."""
    source = write_checkpoint(tmp_path / "src", llama_tensors(), llama_config())
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *arguments: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(OSError, match="broken"):
            ftw.convert(source, tmp_path / "out")
    before = descriptors()
    ftw.convert(source, tmp_path / "out")
    assert descriptors() <= before
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


@pytest.mark.parametrize("allowed", range(4))
def test_convert_takes_the_threads_that_there_can_be(tmp_path, monkeypatch, allowed):
    source = sharded(tmp_path / "src")
    limit_threads(monkeypatch, allowed)
    ftw.convert(source, tmp_path / "out")
    monkeypatch.undo()
    assert ftw.verify(tmp_path / "out", against=source).is_ok


@pytest.mark.parametrize("options", [{}, {"dry_run": True}, {"resume": True}], ids=["plain", "dry-run", "resume"])
@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("/", "/: target: (is a mount point|and the source)"),
        ("a\0b", r"a\\x00b: target: contains a zero byte, which is not allowed in a file name"),
        ("file/below/it", "file/below/it: target: lies below .*file, which is a file; a folder is needed there"),
    ],
    ids=["root", "zero-byte", "below-a-file"],
)
def test_convert_refuses_targets_that_no_folder_can_be(tmp_path, monkeypatch, target, problem, options):
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"")
    source = sharded(tmp_path / "src", nbytes=1 << 20)
    with pytest.raises(OutputError, match=problem):
        ftw.convert(source, target, **options)


def test_convert_refuses_more_shards_than_a_reader_takes(tmp_path):
    weights = {f"t{number}": torch.zeros(1, dtype=torch.uint8) for number in range(10_001)}
    source = write_checkpoint(tmp_path / "src", weights, llama_config())
    with pytest.raises(OutputError, match="shards: 10001 of at most 4096 bytes would be needed, at most 10000 are"):
        ftw.convert(source, tmp_path / "out", shard_limit=4096)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    ftw.convert(source, tmp_path / "out", shard_limit=8192)
    assert ftw.verify(tmp_path / "out", against=source).is_ok


def test_convert_tells_the_dtypes_that_are_allowed(tmp_path):
    header = b'{"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    with pytest.raises(CheckpointError, match=r"a: dtype is F6_E2M3, which FTW has no name for; .*BF16.* are allowed"):
        ftw.convert(tmp_path / "model.safetensors", tmp_path / "out")


def test_convert_that_cannot_resume_does_not_offer_to(tmp_path, monkeypatch, caplog):
    source = sharded(tmp_path / "src")
    with monkeypatch.context() as patch:
        fail_in_write(patch, errno.ENOSPC, after=15)
        with pytest.raises(OSError, match="freetoken-00000"):
            ftw.convert(source, tmp_path / "out")
    assert "continues it" in caplog.text
    caplog.clear()
    with pytest.raises(OutputError, match="belongs to another state of the source"):
        ftw.convert(source, tmp_path / "out", resume=True, shard_limit=1 << 20)
    assert not caplog.messages
    assert ftw.convert(source, tmp_path / "out", resume=True).resumed_nbytes

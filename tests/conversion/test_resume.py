"""`--resume`: what a conversion resumes, what it takes for its own, and that the bytes are always the same."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from amounts import amount
from builders import llama_config, llama_tensors, write_checkpoint, write_sharded
from folders import state, tree
from ftw.cli.main import main
from places import SUPPORT

import ftw
from ftw.conversion import staging
from ftw.conversion.staging import StagingFolder
from ftw.conversion.writing import writer
from ftw.conversion.writing.checksums import Checksums, TensorHasher
from ftw.errors import OutputError
from ftw.host import OpenFolder, file_lock

STAGING = ".out.ftw-partial"
JOURNAL = ".ftw-journal"
KIB = 1 << 10
NAMES = [f"t{number}" for number in range(8)]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_CHUNK_NBYTES", 16 * KIB)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randint(1, 256, (20_000 + 5000 * number,), generator=generator, dtype=torch.uint8)
        for number, name in enumerate(NAMES)
    }
    tensors["t5"] = torch.zeros_like(tensors["t5"])  # equal to a hole
    folder = write_checkpoint(tmp_path / "src", {**llama_tensors(), **tensors}, llama_config())
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work" / "out"


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> dict[str, bytes]:
    convert(source, tmp_path / "whole")
    return tree(tmp_path / "whole")


def convert(source: Path, target: Path, **options: object) -> ftw.ConversionResult:
    return ftw.convert(source, target, **{"embed": "host", "shard_limit": 48 * KIB, **options})  # type: ignore[arg-type]


def interrupt(source: Path, target: Path, after: int = 120_000, **options: object) -> Path:
    """Convert until so many bytes have been read, and return the folder that is left."""

    def progress(done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, progress=progress, **options)
    left = target.with_name(f".{target.name}.ftw-partial")
    assert (left / JOURNAL).is_file()
    return left


def write_bytes(path: Path, place: int) -> None:
    """Change a file and leave its size and its time as they were, as archives and package managers do."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def assert_whole(target: Path, whole: dict[str, bytes]) -> None:
    assert tree(target) == whole
    assert os.listdir(target.parent) == [target.name]


def foresee(source: Path, target: Path, **options: object) -> ftw.ConversionResult:
    """Return what a dry run tells, which leaves all around the target as it is."""
    before = state(target.parent)
    try:
        return convert(source, target, **{"resume": True, "dry_run": True, **options})
    finally:
        assert state(target.parent) == before


def kept_nbytes(whole: dict[str, bytes], count: int) -> int:
    """Return the bytes of the first tensors of the region."""
    return sum(entry["nbytes"] for entry in json.loads(whole["freetoken_weight.json"])["tensors"][:count])


def test_resume_gives_the_same_bytes(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    left = interrupt(source, target)
    lines = (left / JOURNAL).read_bytes().splitlines()
    mtimes = {path.name: path.stat().st_mtime_ns for path in left.glob("*.ftw")}
    seen: list[int] = []
    result = convert(source, target, resume=True, progress=lambda done, total: seen.append(done))
    assert_whole(target, whole)
    assert len(lines) > 3
    assert result.resumed_nbytes == kept_nbytes(whole, len(lines) - 1)
    assert result.to_dict()["resumed_bytes"] == result.resumed_nbytes
    assert seen == sorted(seen)
    assert seen[-1] == kept_nbytes(whole, 99)
    first = target / "freetoken-00000.ftw"
    assert first.stat().st_mtime_ns == mtimes[first.name]  # it was complete, and has not been written again


def test_resume_records_the_sha256s_of_what_it_keeps(source: Path, target: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", sha256=True)
    interrupt(source, target, sha256=True)
    result = convert(source, target, resume=True, sha256=True)
    assert result.resumed_nbytes > 0
    assert_whole(target, tree(tmp_path / "whole"))
    assert convert(source, target, resume=True, sha256=True).was_complete
    with pytest.raises(OutputError):
        convert(source, target, resume=True)  # is another output


def test_resume_keeps_no_tensor_whose_sha256_is_not_that_of_the_source(
    source: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bytes would be that were made to fit the checksum."""
    convert(source, tmp_path / "one", sha256=True)
    convert(tmp_path / "one", tmp_path / "whole")
    left = interrupt(tmp_path / "one", target)
    flip_byte(left)
    real = TensorHasher.end

    def end(hasher: TensorHasher, tensor: ftw.TensorInfo) -> Checksums:
        return real(hasher, tensor)._replace(xxh3_64=str(tensor.xxh3_64))

    with monkeypatch.context() as patch:
        patch.setattr(TensorHasher, "end", end)
        convert(tmp_path / "one", target, resume=True)
    assert_whole(target, tree(tmp_path / "whole"))


def test_resume_begins_if_nothing_was_left(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    assert convert(source, target, resume=True).resumed_nbytes == 0
    assert_whole(target, whole)


def test_resume_of_a_resumed_conversion(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    total = kept_nbytes(whole, 99)
    for after in (60_000, 120_000, 200_000, total):
        interrupt(source, target, after, resume=True)
    assert convert(source, target, resume=True).resumed_nbytes == total
    assert_whole(target, whole)


def test_a_conversion_without_resume_begins_anew(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    interrupt(source, target)
    assert convert(source, target).resumed_nbytes == 0
    assert_whole(target, whole)


def flip_byte(left: Path) -> None:
    path = left / "freetoken-00001.ftw"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def spoil_padding(left: Path) -> None:
    path = left / "freetoken-00001.ftw"
    data = bytearray(path.read_bytes())
    place = max(place for place in range(4096, len(data)) if data[place])  # the last byte of a tensor
    data[place + 1] = 1
    path.write_bytes(data)


def shorten(left: Path) -> None:
    os.truncate(left / "freetoken-00001.ftw", 5000)


def remove(left: Path) -> None:
    (left / "freetoken-00000.ftw").unlink()


def lengthen(left: Path) -> None:
    last = max(left.glob("*.ftw"))
    os.truncate(last, last.stat().st_size + 1_000_000)


def lengthen_first(left: Path) -> None:
    first = min(left.glob("*.ftw"))
    os.truncate(first, first.stat().st_size + 4096)


def link_away(left: Path) -> None:
    path = left / "freetoken-00001.ftw"
    path.rename(left.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def tear_last_line(left: Path) -> None:
    os.truncate(left / JOURNAL, (left / JOURNAL).stat().st_size - 3)


def tear_first_line(left: Path) -> None:
    lines = (left / JOURNAL).read_bytes().splitlines(keepends=True)
    lines[1] = lines[1][:5] + b"\n"
    (left / JOURNAL).write_bytes(b"".join(lines))


def add_lines(left: Path) -> None:
    with (left / JOURNAL).open("ab") as file:
        file.write(b"0123456789abcdef\n" * 100)


def add_rubbish(left: Path) -> None:
    with (left / JOURNAL).open("ab") as file:
        file.write(os.urandom(100_000))


def add_files(left: Path) -> None:
    (left / "stale").mkdir()
    (left / "stale" / "file").write_bytes(b"1")
    (left / "freetoken-00099.ftw").write_bytes(b"1")
    (left / "link").symlink_to("/")
    (left / f"{JOURNAL}.tmp").write_bytes(b"1")


SPOILS: list[Callable[[Path], None]] = [
    flip_byte, spoil_padding, shorten, remove, lengthen, lengthen_first, link_away,
    tear_last_line, tear_first_line, add_lines, add_rubbish, add_files,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_resume_takes_only_what_is_right(
    source: Path, target: Path, whole: dict[str, bytes], spoil: Callable[[Path], None]
) -> None:
    left = interrupt(source, target)
    spoil(left)
    foreseen = foresee(source, target)
    resumed = convert(source, target, resume=True).resumed_nbytes
    assert resumed <= foreseen.resumed_nbytes <= kept_nbytes(whole, 99)
    (target.parent / "elsewhere").unlink(missing_ok=True)
    assert_whole(target, whole)


def test_resume_of_zeros_whose_shard_is_short(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    """Bytes that were never written read as the zeros that they should be; the shard has its length all the same."""
    left = interrupt(source, target, kept_nbytes(whole, 99))
    entry = next(entry for entry in json.loads(whole["freetoken_weight.json"])["tensors"] if entry["name"] == "t5")
    shards = json.loads(whole["freetoken_weight.json"])["shards"]
    shard = next(shard for shard in reversed(shards) if shard["global_off"] <= entry["global_off"])
    os.truncate(left / shard["file"], entry["global_off"] - shard["global_off"])
    convert(source, target, resume=True)
    assert_whole(target, whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda source, options: os.utime(source / "model.safetensors", ns=(1, 1)),
        lambda source, options: write_bytes(source / "model.safetensors", -9),
        lambda source, options: options.update(shard_limit=64 * KIB),
        lambda source, options: options.update(embed="gpu"),
        lambda source, options: options.update(sha256=True),
        lambda source, options: (source / "merges.txt").write_text("more"),
    ],
    ids=["time", "content", "shard_size", "embed", "sha256", "metadata"],
)
def test_resume_of_another_conversion_is_refused_and_loses_nothing(
    source: Path, target: Path, whole: dict[str, bytes], change: Callable[[Path, dict[str, object]], object]
) -> None:
    left = interrupt(source, target)
    before = tree(left)
    options: dict[str, object] = {}
    change(source, options)
    with pytest.raises(
        OutputError, match=rf"out: target: .*{STAGING} belongs to another state .* a new conversion begins"
    ) as caught:
        convert(source, target, resume=True, **options)
    assert tree(left) == before
    with pytest.raises(OutputError) as foreseen:
        foresee(source, target, **options)
    assert str(foreseen.value) == str(caught.value)
    convert(source, target, **options)
    assert ftw.verify(target, against=source).is_ok


def test_resume_of_what_is_done_does_nothing(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    convert(source, target)
    (target / JOURNAL).write_bytes(b"of a conversion that was killed when it had published the folder")
    mtimes = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    for overwrite in (False, True):
        result = convert(source, target, resume=True, overwrite=overwrite)
        assert (result.resumed_nbytes, result.was_complete) == (kept_nbytes(whole, 99), True)
        assert_whole(target, whole)
        assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()}.items() <= mtimes.items()


@pytest.mark.parametrize(
    "change",
    [
        lambda source, target: write_bytes(source / "model.safetensors", -9),
        lambda source, target: (source / "merges.txt").write_text("more"),
        lambda source, target: (source / "tokenizer.json").write_text("[]"),
        lambda source, target: (target / "config.json").unlink(),
        lambda source, target: os.truncate(target / "freetoken-00000.ftw", 4096),
        lambda source, target: write_bytes(target / "freetoken-00001.ftw", 100),
        lambda source, target: (target / "freetoken_weight.json").write_text("{}"),
    ],
    ids=["other_weights", "more_metadata", "other_metadata", "no_config", "short_shard", "other_bytes", "index"],
)
def test_resume_where_another_output_is_there_is_refused(
    source: Path, target: Path, change: Callable[[Path, Path], object]
) -> None:
    convert(source, target)
    change(source, target)
    before = tree(target)
    with pytest.raises(OutputError, match="exists and is not empty"):
        convert(source, target, resume=True)
    assert tree(target) == before


def test_resume_overwrites_what_is_another_output(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    convert(source, target, shard_limit=4096)
    interrupt(source, target, overwrite=True)
    assert ftw.verify(target, against=source).is_ok
    assert convert(source, target, overwrite=True, resume=True).resumed_nbytes
    assert_whole(target, whole)


def test_resume_clears_the_old_folder_that_a_kill_left(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    """Killed between the exchange of the names and the removal of the old folder."""
    convert(source, target, shard_limit=4096)
    target.rename(target.with_name(STAGING))
    convert(source, target.with_name("new"))
    target.with_name("new").rename(target)
    convert(source, target, overwrite=True, resume=True)
    assert_whole(target, whole)


def test_resume_of_another_checkpoint_of_the_same_shapes(source: Path, target: Path, tmp_path: Path) -> None:
    """Its folder and its files have the same names, sizes and times."""
    other = tmp_path / "elsewhere" / "src"
    shutil.copytree(source, other)
    write_bytes(other / "model.safetensors", -9)
    interrupt(source, target)
    with pytest.raises(OutputError, match="belongs to another state"):
        convert(other, target, resume=True)
    convert(source, target, resume=True)
    with pytest.raises(OutputError, match="exists and is not empty"):
        convert(other, target, resume=True)
    convert(other, target, resume=True, overwrite=True)
    assert ftw.verify(target, against=other).is_ok
    assert not ftw.verify(target, against=source).is_ok


def test_journal_that_is_no_file_is_none(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    target.with_name(STAGING).mkdir()
    os.mkfifo(target.with_name(STAGING) / JOURNAL)
    convert(source, target, resume=True)
    assert_whole(target, whole)


def test_old_folder_that_was_put_aside_gets_its_name_back(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    """Killed between the two renames of a file system that cannot exchange names."""
    convert(source, target, shard_limit=4096)
    before = tree(target)
    target.rename(target.with_name(".out.ftw-old"))
    interrupt(source, target.with_name("new"))
    target.with_name(".new.ftw-partial").rename(target.with_name(STAGING))
    with pytest.raises(OutputError, match="exists and is not empty"):
        convert(source, target)
    assert tree(target) == before
    assert convert(source, target, overwrite=True, resume=True).resumed_nbytes
    assert_whole(target, whole)


def test_interrupts_while_the_last_chunk_is_written_leave_no_thread(
    source: Path, target: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first waits for the writing thread, whose disk is slow."""
    real, may_write = os.pwrite, threading.Event()
    real_shutdown = ThreadPoolExecutor.shutdown
    interrupts = []

    def pwrite(*arguments: object) -> int:
        may_write.wait(600)
        return real(*arguments)  # type: ignore[arg-type]

    def shutdown(pool: ThreadPoolExecutor, wait: bool = True, **options: object) -> None:
        if pool._thread_name_prefix == "ftw-write" and len(interrupts) < 3:
            interrupts.append(1)
            if len(interrupts) == 3:
                may_write.set()
            raise KeyboardInterrupt
        real_shutdown(pool, wait, **options)  # type: ignore[arg-type]

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, progress=progress)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ftw-write")]
    convert(source, target, resume=True)
    assert_whole(target, whole)


def test_conversion_that_is_told_to_end_can_be_resumed(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    """SIGTERM ends it at once, as SIGKILL does."""
    script = (
        "import os, signal, sys, ftw\n"
        "from ftw.conversion.writing import writer\n"
        "writer._CHUNK_NBYTES = 16384\n"
        "def progress(done, total):\n"
        "    if done > 120_000: os.kill(os.getpid(), signal.SIGTERM)\n"
        "ftw.convert(sys.argv[1], sys.argv[2], embed='host', shard_limit=49152, progress=progress)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, source, target], capture_output=True, timeout=600)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, b"")
    assert convert(source, target, resume=True).resumed_nbytes
    assert_whole(target, whole)


def test_resume_of_tensors_without_bytes(tmp_path: Path, target: Path) -> None:
    tensors = {"a": torch.empty(0, 3), "b": torch.ones(5000), "c": torch.empty(2, 0), "d": torch.empty(0)}
    source = write_checkpoint(tmp_path / "src", tensors, llama_config())
    options = {"embed": "gpu"}
    interrupt(source, target, 20_000, **options)
    assert convert(source, target, resume=True, **options).resumed_nbytes == 20_000
    assert ftw.verify(target, against=source).is_ok


def test_journal_never_comes_from_the_source(source: Path, target: Path) -> None:
    (source / JOURNAL).write_bytes(b"plan 0\n")
    result = convert(source, target)
    assert not (target / JOURNAL).exists()
    assert ("file", JOURNAL, "a name that the FTW itself uses") in result.plan.left_out


# Dry runs


def test_dry_run_tells_what_would_be_resumed(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    needed = foresee(source, target).needed_nbytes
    assert (needed, os.listdir(target.parent)) == (sum(map(len, whole.values())), [])
    left = interrupt(source, target)
    held = sum(512 * path.stat().st_blocks for path in left.iterdir())
    foreseen, anew = foresee(source, target), foresee(source, target, resume=False)
    assert (anew.needed_nbytes, anew.resumed_nbytes) == (needed, 0)
    assert foreseen.resumed_nbytes == kept_nbytes(whole, len((left / JOURNAL).read_bytes().splitlines()) - 1)
    assert needed - held < foreseen.needed_nbytes < needed - foreseen.resumed_nbytes  # padding is kept, too
    result = convert(source, target, resume=True)
    assert (result.resumed_nbytes, result.needed_nbytes) == (foreseen.resumed_nbytes, foreseen.needed_nbytes)
    assert_whole(target, whole)


def test_dry_run_counts_what_was_left_as_room(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(source), str(target), "--embed", "host", "--shard-size", "48KiB", "--dry-run"]
    left = interrupt(source, target)
    (left / "freetoken-00099.ftw").write_bytes(bytes(8192))  # written, and not yet in the journal
    needed, usage = foresee(source, target, resume=False).needed_nbytes, shutil.disk_usage(target.parent)
    held = sum(512 * path.stat().st_blocks for path in left.iterdir())
    for short in (0, 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=needed - held - short: usage._replace(free=free))
        for options in ([], ["--resume"]):
            assert main([*command, *options]) == short
            assert ("free on its disk" in capsys.readouterr().err) is bool(short)


def test_dry_run_where_a_journal_is_ahead_of_the_shards(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    left = interrupt(source, target)
    for shard in left.glob("*.ftw"):
        os.truncate(shard, 0)
    held = sum(512 * path.stat().st_blocks for path in left.iterdir())
    foreseen = foresee(source, target)
    assert (foreseen.needed_nbytes, foreseen.free_nbytes > 0) == (sum(map(len, whole.values())) - held, True)


def test_dry_run_of_what_is_done_compares_no_bytes(source: Path, target: Path, whole: dict[str, bytes]) -> None:
    convert(source, target)
    write_bytes(target / "freetoken-00001.ftw", 100)
    for overwrite in (False, True):
        result = foresee(source, target, overwrite=overwrite)
        assert (result.needed_nbytes, result.resumed_nbytes, result.was_complete) == (0, kept_nbytes(whole, 99), True)
    (target / "config.json").unlink()
    with pytest.raises(OutputError, match="exists and is not empty"):
        foresee(source, target)
    assert not foresee(source, target, overwrite=True).was_complete


def test_dry_run_beside_a_conversion_is_refused_and_does_not_disturb_it(
    source: Path, target: Path, whole: dict[str, bytes]
) -> None:
    messages = []

    def progress(done: int, total: int) -> None:
        for resume in (False, True):
            with pytest.raises(OutputError) as caught:
                convert(source, target, resume=resume, dry_run=True)
            messages.append(str(caught.value))

    convert(source, target, progress=progress)
    assert set(messages) == {f"{target}: target: another conversion is writing it"}
    assert_whole(target, whole)


def test_dry_run_of_a_target_that_is_being_replaced_is_refused(source: Path, target: Path) -> None:
    """Though it is what the dry run would find complete."""
    convert(source, target)
    messages = []

    def progress(done: int, total: int) -> None:
        with pytest.raises(OutputError) as caught:
            convert(source, target, resume=True, dry_run=True)
        messages.append(str(caught.value))

    convert(source, target, overwrite=True, progress=progress)
    assert set(messages) == {f"{target}: target: another conversion is writing it"}


def test_dry_run_while_a_replaced_folder_is_removed_is_refused(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the staging folder's name by then."""
    convert(source, target)
    real, messages = OpenFolder.remove, []

    def remove(folder: OpenFolder, name: str) -> None:
        if target.with_name(STAGING).exists():
            with pytest.raises(OutputError) as caught:
                convert(source, target, resume=True, dry_run=True)
            messages.append(str(caught.value))
        real(folder, name)

    monkeypatch.setattr(OpenFolder, "remove", remove)
    convert(source, target, overwrite=True)
    assert set(messages) == {f"{target}: target: another conversion is writing it"}


def test_dry_run_takes_no_lock(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for a moment, in which a conversion might start."""
    interrupt(source, target)
    monkeypatch.setattr(fcntl, "flock", None)
    monkeypatch.setattr(file_lock, "lock_shared", None)
    for resume in (False, True):
        foresee(source, target, resume=resume)


@pytest.mark.parametrize("resume", [False, True], ids=["anew", "resume"])
@pytest.mark.parametrize("step", ["is_locked", "held_nbytes", "is_resumable", "is_journal_of", "read_journal"], ids=str)
def test_dry_run_beside_a_conversion_that_starts_and_ends(
    source: Path, target: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, step: str, resume: bool
) -> None:
    """The conversion is not refused, and the dry run may find what was left gone at any step."""
    interrupt(source, target)
    owners = {"is_locked": file_lock, "held_nbytes": StagingFolder}
    module = owners.get(step) or staging
    real, converted = getattr(module, step), []

    def begin_other(*arguments: object) -> object:
        monkeypatch.undo()
        converted.append(convert(source, target))
        return real(*arguments)

    monkeypatch.setattr(module, step, begin_other)
    result = convert(source, target, resume=resume, dry_run=True)
    assert (result.needed_nbytes, result.resumed_nbytes) == (sum(map(len, whole.values())), 0)
    assert len(converted) == (resume or step in ("is_locked", "held_nbytes"))
    if converted:
        assert_whole(target, whole)


@pytest.mark.parametrize("vanishes", ["folder", "files"], ids=str)
def test_dry_run_while_what_was_left_vanishes_as_it_is_measured(
    source: Path, target: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, vanishes: str
) -> None:
    left, real = interrupt(source, target), os.lstat

    def lstat(path: object, **options: object) -> os.stat_result:
        if str(path).startswith(f"{left}/"):
            for file in left.iterdir():
                file.unlink()
            if vanishes == "folder":
                left.rmdir()
            monkeypatch.setattr(os, "lstat", real)
        return real(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "lstat", lstat)
    assert convert(source, target, resume=True, dry_run=True).needed_nbytes == sum(map(len, whole.values()))
    assert not any(left.glob("*"))


def put_aside(source: Path, target: Path) -> Path:
    """Leave what a conversion leaves that is killed between the two renames."""
    convert(source, target)
    return target.rename(target.with_name(".out.ftw-old"))


def test_dry_run_judges_a_folder_that_was_put_aside_in_the_targets_place(
    source: Path, target: Path, whole: dict[str, bytes]
) -> None:
    put_aside(source, target)
    result = foresee(source, target)
    assert (result.needed_nbytes, result.resumed_nbytes, result.was_complete) == (0, kept_nbytes(whole, 99), True)
    for options in ({"resume": False}, {"shard_limit": 4096}):
        with pytest.raises(OutputError, match=r"out: target: exists and is not empty.*; overwrite=True replaces"):
            foresee(source, target, **options)
    replaced = foresee(source, target, resume=False, overwrite=True)
    assert (replaced.needed_nbytes, replaced.was_complete) == (sum(map(len, whole.values())), False)
    assert convert(source, target, resume=True).was_complete
    assert_whole(target, whole)


def test_dry_run_counts_what_was_left_beside_a_folder_that_was_put_aside(source: Path, target: Path) -> None:
    interrupt(source, target.with_name("new"))
    put_aside(source, target)
    target.with_name(".new.ftw-partial").rename(target.with_name(STAGING))
    (target.with_name(".out.ftw-old") / "config.json").unlink()
    foreseen = foresee(source, target, overwrite=True)
    assert foreseen.resumed_nbytes > 0
    result = convert(source, target, overwrite=True, resume=True)
    assert (result.needed_nbytes, result.resumed_nbytes) == (foreseen.needed_nbytes, foreseen.resumed_nbytes)


def test_dry_run_leaves_out_of_account_what_would_not_be_restored(
    source: Path, target: Path, whole: dict[str, bytes]
) -> None:
    aside = put_aside(source, target)
    target.mkdir()  # the name is taken
    assert not foresee(source, target).was_complete
    target.rmdir()
    (aside / "freetoken_weight.json").unlink()  # no FTW
    assert foresee(source, target).needed_nbytes == sum(map(len, whole.values()))
    assert not convert(source, target, resume=True).was_complete


def test_dry_run_between_the_two_renames_of_a_conversion_is_refused(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, target)
    real, messages = OpenFolder.rename, []

    def rename(folder: OpenFolder, old: str, new: str) -> None:
        if new == target.name:
            for dry_run in (False, True):
                with pytest.raises(OutputError) as caught:
                    convert(source, target, resume=True, dry_run=dry_run)
                messages.append(str(caught.value))
        real(folder, old, new)

    monkeypatch.setattr(OpenFolder, "exchange", lambda folder, one, other: False)
    monkeypatch.setattr(OpenFolder, "rename", rename)
    convert(source, target, overwrite=True)
    assert messages == 2 * [f"{target}: target: another conversion is writing it"]


# Processes that are killed, and system calls that fail


def run_trials(tmp_path: Path, kind: str, count: int, killed: int, resumed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 60_000, (40,), generator=generator).tolist()
    tensors = {
        f"model.layers.{number}.w": torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
        for number, size in enumerate(sizes)
    }
    tensors |= {**llama_tensors(), "large": torch.randn(50_000, generator=generator), "none": torch.empty(0, 3)}
    names = sorted(tensors)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    shards = {file: {name: tensors[name] for name in names[place::2]} for place, file in enumerate(files)}
    source = write_sharded(tmp_path / "src", shards, llama_config())
    (source / "tokenizer.json").write_text("{}" * 3000)
    script = SUPPORT / "convert_trials.py"
    done = subprocess.run(
        [sys.executable, script, source, tmp_path / "trials", kind, *map(str, (count, killed, resumed, 1))],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    shutil.rmtree(tmp_path / "trials", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    assert found["problems"] == []
    return found


@pytest.mark.timeout(3600)
def test_resume_after_each_of_many_random_kills(tmp_path: Path) -> None:
    """Conversions that are killed up to three times; a child that a slow machine let end first is not counted."""
    killed, resumed = amount(60, 200), amount(20, 75)
    found = run_trials(tmp_path, "kills", amount(40, 150), killed, resumed)
    assert found["killed"] >= killed
    assert found["resumed"] >= resumed


@pytest.mark.timeout(3600)
def test_resume_after_each_of_many_faults(tmp_path: Path) -> None:
    """A disk that is full from some call on, a call that fails, writes that are short: as many of each."""
    resumed = amount(14, 40)
    found = run_trials(tmp_path, "faults", amount(36, 90), killed=0, resumed=resumed)
    assert found["failed"] >= resumed
    assert found["resumed"] >= resumed

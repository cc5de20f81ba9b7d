"""Files on the hub, read by ranges: answers that are not what was asked for, and the interface of a weight file."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import llama_config, llama_tensors, padded, write_checkpoint, write_sharded
from hub_server import answer_range, cut, offline
from inspecting import assert_same_report

import ftw
from ftw.errors import CheckpointError
from ftw.files import WeightFile
from ftw.hub import HubPath, list_repository, parse_hub_id
from ftw.hub.place import open_weight_file
from ftw.hub.remote_file import HEADER_NBYTES, MAX_REQUESTS, HubFile, fetch_headers

KIB = 1 << 10


def ignored(content: bytes, first: int, last: int) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, content


def shifted(content: bytes, first: int, last: int) -> tuple[int, dict[str, str], bytes]:
    return answer_range(content, first + 1, last)


def fewer(content: bytes, first: int, last: int) -> tuple[int, dict[str, str], bytes]:
    return answer_range(content, first, last - 1)


def of_another_size(content: bytes, first: int, last: int) -> tuple[int, dict[str, str], bytes]:
    return answer_range(content + b"x", first, last)


def without_range(content: bytes, first: int, last: int) -> tuple[int, dict[str, str], bytes]:
    return 206, {}, content[first : last + 1]


def longer(content: bytes, first: int, last: int) -> tuple[int, dict[str, str], bytes]:
    status, headers, body = answer_range(content, first, last)
    return status, headers, body + b"x"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (ignored, "the hub answers a request for bytes 0-262143 with status 200, 206 is needed"),
        (shifted, "the hub answers with 'bytes 1-262143/2099200', 'bytes 0-262143/2099200' is needed"),
        (fewer, "the hub answers with 'bytes 0-262142/2099200', 'bytes 0-262143/2099200' is needed"),
        (of_another_size, "the hub answers with 'bytes 0-262143/2099201', 'bytes 0-262143/2099200' is needed"),
        (without_range, "the hub answers with '', 'bytes 0-262143/2099200' is needed"),
        (longer, "the hub answers with more than the 262144 bytes asked for at byte 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_hub_answers_are_held_against_what_was_asked(hub, tmp_path, answer, problem):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").write_bytes(bytes(2_099_200))
    hub.add("org/name", tmp_path / "m")
    hub.answer_range = answer
    with pytest.raises(CheckpointError) as caught:
        ftw.inspect("org/name")
    assert str(caught.value) == f"org/name/model.safetensors: file: {problem}"
    assert len(hub.reads()) == 1


def test_hub_answer_that_is_cut_off_is_continued(hub, tmp_path):
    folder = write_checkpoint(tmp_path / "m", padded(llama_tensors()), llama_config())
    hub.add("org/name", folder)
    hub.fail("cdn", cut(100_000), 1)
    hub.fail("cdn", cut(0), 1)
    hub.fail("cdn", cut(1_000, is_reset=True), 1)
    assert_same_report("org/name", folder)
    assert len(hub.reads()) in (5, 6)  # a reset may be seen before the answer


def test_hub_answer_that_is_always_cut_off(hub, tmp_path):
    hub.add("org/name", write_checkpoint(tmp_path / "m", padded(llama_tensors()), llama_config()))
    hub.fail("cdn", cut(10_000))
    with pytest.raises(CheckpointError) as caught:
        ftw.inspect("org/name")
    assert str(caught.value) == "org/name/model.safetensors: file: the hub's answer ends at byte 0, 262144 bytes short"
    assert len(hub.reads()) == 7


def test_hub_first_failure_ends_the_parallel_reads(hub, tmp_path, monkeypatch):
    """The other reads get no answer before those that have not begun are dropped, so they are as many as at a time."""
    shards = {f"model-{n:05}-of-00200.safetensors": padded({}, 300 * KIB, f"t{n}") for n in range(1, 201)}
    folder = write_sharded(tmp_path / "m", shards)
    hub.add("org/name", folder)
    first_file = (folder / "model-00001-of-00200.safetensors").read_bytes()
    are_dropped, real = threading.Event(), ThreadPoolExecutor.shutdown

    def answer(content: bytes, first: int, last: int) -> tuple[int, dict[str, str], bytes]:
        assert content == first_file or are_dropped.wait(600)
        return ignored(content, first, last)

    def shutdown(pool: ThreadPoolExecutor, wait: bool = True, **options: bool) -> None:
        real(pool, wait=False, **options)
        if pool._thread_name_prefix == "ftw-hub":
            are_dropped.set()
        real(pool, wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
    hub.answer_range = answer
    with pytest.raises(CheckpointError, match=r"^org/name/model-00001-of-00200.safetensors: file: the hub answers a"):
        ftw.inspect("org/name")
    num_files = sum(request.is_cdn for request in hub.requests)
    assert num_files <= MAX_REQUESTS + 1  # the thread that failed may begin another


def test_hub_that_stops_answering(hub, tmp_path, monkeypatch):
    hub.add("org/name", write_checkpoint(tmp_path / "m", llama_tensors()))
    path = HubPath(list_repository(parse_hub_id("org/name")), "model.safetensors")
    with offline(monkeypatch), pytest.raises(ConnectionError) as caught:
        HubFile(path).read(0, 8)
    assert str(caught.value).startswith("org/name/model.safetensors: file: cannot be fetched from the hub: ")
    assert str(caught.value).isprintable()


def test_hub_file_reads_what_a_weight_file_reads(hub, tmp_path):
    (tmp_path / "m").mkdir()
    content = np.random.default_rng(0).bytes(3 * HEADER_NBYTES)
    (tmp_path / "m" / "x.gguf").write_bytes(content)
    hub.add("org/name", tmp_path / "m")
    path = HubPath(list_repository(parse_hub_id("org/name")), "x.gguf")
    file = open_weight_file(path.as_path())
    own = {"identity", "open", "open_direct"}  # of a file on this machine
    assert {name for name in dir(WeightFile) if name[0] != "_"} - own <= set(dir(HubFile))
    assert file.nbytes == len(content)
    for start, end in (
        (0, 8),
        (5, HEADER_NBYTES + 5),
        (HEADER_NBYTES - 1, HEADER_NBYTES),
        (HEADER_NBYTES, len(content)),
    ):
        assert file.read(start, end - start) == content[start:end]
    assert hub.served["x.gguf"] == HEADER_NBYTES + 5 + 2 * HEADER_NBYTES
    with pytest.raises(CheckpointError, match="ends at byte 786432, 1 bytes short"):
        file.read(len(content) - 7, 8)


def test_hub_headers_of_many_files_share_a_budget(monkeypatch):
    asked = []
    monkeypatch.setattr(HubFile, "fetch_header", lambda self, nbytes: asked.append(nbytes))
    for count in (1, 2, 256, 2000, 8000):
        asked.clear()
        fetch_headers([HubFile.__new__(HubFile)] * count)
        assert len(asked) == (count if count > 1 else 0)
        assert set(asked) <= {min(256 * KIB, max((64 << 20) // count, 16 * KIB))}

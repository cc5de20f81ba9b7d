"""What a person reads first: the answer, refusals in the caller's words, failures as JSON, and the edges of streams."""

import contextlib
import ctypes
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint
from ftw.cli import output as output_module
from ftw.cli import progress as progress_module
from ftw.cli.main import main
from ftw.cli.output import print_warning
from ftw.cli.progress import show_progress, show_waiting

import ftw
from ftw.errors import FtwError, NotEligibleError, OutputError, in_command_words, in_python_words
from ftw.host import disk

TABLE = "model.embed_tokens.weight"


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "untied", llama_tensors(), llama_config())


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tied", llama_tensors(head=False), llama_config(tie_word_embeddings=True))


def printed(capsys: Any, *arguments: object, status: int = 0) -> str:
    assert main([*map(str, arguments)]) == status
    return str(capsys.readouterr().out)


# the answer


def test_inspect_begins_with_the_answer_and_ends_it_with_what_to_type(capsys: Any, untied: Path) -> None:
    lines = printed(capsys, "inspect", untied).splitlines()
    assert lines[:5] == [
        f"{untied}: yes, {TABLE} can leave the GPU: untied: config says tie_word_embeddings=false and lm_head.weight "
        "is stored",
        "leaving the GPU frees 1.00 KiB of VRAM: room for 32 KV tokens of 32 B",
        f"to use it in Python: ftw.load({str(untied)!r}, embed='host')",
        f"to convert it first, if you like: ftw convert {untied} TARGET --embed host",
        "",
    ]


def test_inspect_says_why_a_table_must_stay(capsys: Any, tied: Path) -> None:
    first, second, *_ = printed(capsys, "inspect", tied).splitlines()
    why = "the LM head uses this same table (tie_word_embeddings is true; LlamaForCausalLM has one, and none is stored)"
    assert first == f"{tied}: no, {TABLE} must stay on the GPU: {why}"
    assert second.startswith("what to do: ")


def test_inspect_names_tables_that_can_leave_though_the_first_cannot(capsys: Any, tmp_path: Path) -> None:
    tensors = {**llama_tensors(head=False), "model.embed_tokens_per_layer.weight": torch.ones(64, 16)}
    source = write_checkpoint(tmp_path, tensors, llama_config(tie_word_embeddings=True))
    out = printed(capsys, "inspect", source)
    assert "other tables can leave the GPU: model.embed_tokens_per_layer.weight\nleaving the GPU frees 4.00 KiB" in out
    assert f"to convert it first, if you like: ftw convert {source} TARGET --embed auto\n" in out


def test_inspect_of_an_ftw_says_what_its_index_does(capsys: Any, untied: Path, tmp_path: Path) -> None:
    ftw.convert(untied, tmp_path / "out", embed="host", sha256=True)
    out = printed(capsys, "inspect", tmp_path / "out")
    assert f"written by ftw {ftw.__version__}, layout plain\n" in out
    assert "checksums: 4 of 4 tensors have one, 4 a SHA-256\n" in out
    assert f"placed for host memory: {TABLE}\n" in out
    told = json.loads(printed(capsys, "inspect", tmp_path / "out", "--json"))
    assert told["ftw"] == {
        "producer": f"ftw {ftw.__version__}", "layout": "plain", "num_checksums": 4, "num_sha256": 4,
        "host_tensors": [TABLE],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("message", "command", "python"),
    [
        ("x; use embed='gpu' or 'auto'", "x; use --embed gpu or auto", "x; use embed='gpu' or 'auto'"),
        ("overwrite=True replaces it", "--overwrite replaces it", "overwrite=True replaces it"),
        ("; --decode-df11 (decode_df11=True) makes", "; --decode-df11 makes", "; decode_df11=True makes"),
        ("--follow-links (follow_links=True)", "--follow-links", "follow_links=True"),
        ("--layout freetoken (layout='freetoken')", "--layout freetoken", "layout='freetoken'"),
        ("tie_word_embeddings=true", "tie_word_embeddings=true", "tie_word_embeddings=true"),
    ],
    ids=["embed", "overwrite", "both", "links", "layout", "config"],
)
def test_advice_is_in_the_callers_words(message: str, command: str, python: str) -> None:
    assert (in_command_words(message), in_python_words(message)) == (command, python)


def test_python_is_advised_in_python(tied: Path, tmp_path: Path) -> None:
    with pytest.raises(NotEligibleError, match=r"; use embed='gpu' or 'auto'$") as caught:
        ftw.convert(tied, tmp_path / "out", embed="host")
    assert (caught.value.reason, caught.value.subject) == ("tied", TABLE)
    ftw.convert(tied, tmp_path / "out")
    with pytest.raises(OutputError, match=r"out: target: exists and is not empty; overwrite=True replaces an FTW"):
        ftw.convert(tied, tmp_path / "out")


# failures as JSON


@pytest.mark.parametrize(
    ("arguments", "status", "reason", "subject"),
    [
        (["inspect", "/nowhere"], 1, None, None), (["verify", "nowhere.gguf"], 1, None, None),
        (["convert", "tied", "out", "--embed", "host"], 3, "tied", TABLE), (["inspect"], 2, None, None),
        (["inspect", "tied", "--vram", "3"], 2, None, None), (["convert", "broken", "out"], 1, None, "header"),
    ],
    ids=["path", "verify", "refused", "usage", "value", "broken"],
)  # fmt: skip
def test_failure_under_json_is_one_object(
    capsys: Any, tied: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, reason: str | None,
    subject: str | None,
) -> None:  # fmt: skip
    monkeypatch.chdir(tied.parent)
    (tied.parent / "broken").mkdir()
    (tied.parent / "broken" / "model.safetensors").write_bytes(b"\xff" * 8)
    assert main([*arguments, "--json"]) == status
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (list(told), told["reason"], told["subject"]) == (["error", "reason", "subject"], reason, subject)
    assert err == f"ftw: error: {told['error']}\n"


def test_object_of_a_failed_check_says_so(capsys: Any, tied: Path, untied: Path, tmp_path: Path) -> None:
    told = json.loads(printed(capsys, "inspect", tied, "--check", "--json", status=3))
    assert (told["host"]["eligible"], told["reason"], told["subject"]) == (False, "tied", TABLE)
    assert "error" not in json.loads(printed(capsys, "inspect", untied, "--check", "--json"))
    ftw.convert(untied, tmp_path / "out")
    with (tmp_path / "out" / "freetoken-00000.ftw").open("r+b") as file:
        file.write(b"\xff" * 8)
    told = json.loads(printed(capsys, "verify", tmp_path / "out", "--json", status=1))
    assert told["error"] == told["problems"][0]


@pytest.mark.parametrize("word", ["-h", "--help"], ids=str)
def test_help_has_no_type_of_a_flag_and_no_escape(capsys: Any, word: str) -> None:
    for command in ("inspect", "convert", "verify", "bench"):
        out = printed(capsys, command, word)
        assert "<bool>" not in out
        assert "\x1b" not in out
        assert "--quiet" in out


@pytest.mark.parametrize(
    ("arguments", "where"),
    [(["convert", "a", "b", "--embed", "cpu"], "ftw convert --help"), (["nope"], "ftw --help"),
     (["inspect", "--vram", "x", "a"], "ftw inspect --help"),
     (["bench", "decode", "--layers", "0"], "ftw bench --help")],
    ids=["choice", "command", "size", "number"],
)  # fmt: skip
def test_wrong_usage_points_to_the_help(capsys: Any, arguments: list[str], where: str) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.endswith(f"; see '{where}'\n")
    assert "Value error" not in err


@pytest.mark.parametrize("arguments", [["inspect"], ["verify"], ["convert", "out"]], ids=lambda words: words[0])
def test_quiet_prints_errors_alone(capsys: Any, tmp_path: Path, arguments: list[str]) -> None:
    source = write_checkpoint(tmp_path / "src", llama_tensors(), llama_config(vocab_size=100))  # which warns
    command = [arguments[0], str(source), *(str(tmp_path / word) for word in arguments[1:])]
    assert main([*command, "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*command, "--quiet", "--json", *["--overwrite"] * len(arguments[1:])]) == 0
    json.loads(capsys.readouterr().out)
    if arguments[0] == "inspect":
        assert main(command) == 0
        assert "ftw: warning: " in capsys.readouterr().err


# verify


def test_verify_is_not_ok_where_nothing_was_compared(capsys: Any, untied: Path, tmp_path: Path) -> None:
    out = printed(capsys, "verify", untied)
    assert out == f"{untied}: readable, 2.14 KiB; 0 of 4 tensors have checksums, so contents were not compared\n"
    assert json.loads(printed(capsys, "verify", untied, "--json"))["content_checked"] is False
    assert ": ok, 4 tensors, 2.14 KiB, 0 checksums, 4 equal" in printed(capsys, "verify", untied, "--against", untied)
    ftw.convert(untied, tmp_path / "out")
    assert ": ok, 4 tensors, 2.14 KiB, 4 checksums\n" in printed(capsys, "verify", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "freetoken_weight.json").read_text())
    del index["tensors"][0]["xxh3_64"]
    (tmp_path / "out" / "freetoken_weight.json").write_text(json.dumps(index))
    told = "3 of 4 tensors have checksums, so the contents of the others were not compared\n"
    assert told in printed(capsys, "verify", tmp_path / "out")


# the budget


def test_reserve_is_kept_and_can_be_set(capsys: Any, untied: Path) -> None:
    told = json.loads(printed(capsys, "inspect", untied, "--vram", "24GiB", "--json"))["budget"]
    assert told["reserved_bytes"] == 1 << 30
    told = json.loads(printed(capsys, "inspect", untied, "--vram", "24GiB", "--reserve", "2GiB", "--json"))["budget"]
    assert told["after"]["left_bytes"] == (22 << 30) - told["weights_bytes"]
    for wrong in (["--reserve", "1GiB"], ["--vram", "1GiB", "--reserve", "2GiB"]):
        assert main(["inspect", str(untied), *wrong]) == 2


def test_budget_without_tables_does_not_speak_of_them(capsys: Any, tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftw.cli.inspect._MIN_VRAM", 1)
    out = printed(capsys, "inspect", tied, "--vram", "1024", "--reserve", "0")
    assert "  left: 144 B too little for weights\n" in out
    assert "weights and tables" not in out


# targets


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ({}, {"embed": "host"}, f"{TABLE} is placed for the GPU, by this conversion for host memory"),
        ({}, {"sha256": True}, "has no SHA-256, this conversion records one"),
        ({}, {"shard_limit": 4096}, "its shards take at most 8.00 GiB, those of this conversion 4.00 KiB"),
        ({"edit": "tensors"}, {}, "it holds 1 tensor that this conversion would not write, the first is lm_head"),
        ({"edit": "config"}, {}, "config.json is not that of the source"),
        ({"edit": "bytes"}, {}, "differs from the source at byte"),
    ],
    ids=["embed", "sha256", "shards", "tensors", "config", "bytes"],
)
def test_resume_says_how_a_finished_target_differs(
    untied: Path, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], difference: str
) -> None:
    edit = first.get("edit")
    ftw.convert(untied, tmp_path / "out")
    if edit == "config":
        (tmp_path / "out" / "config.json").write_text("{}")
    elif edit == "bytes":
        with (tmp_path / "out" / "freetoken-00000.ftw").open("r+b") as file:
            file.write(b"\xff" * 8)
    elif edit == "tensors":
        write_checkpoint(untied, llama_tensors(head=False), llama_config())
    with pytest.raises(OutputError, match="exists and is not empty, and not what this conversion makes: ") as caught:
        ftw.convert(untied, tmp_path / "out", resume=True, **second)
    assert difference in str(caught.value)


def test_source_and_target_the_same_says_just_that(capsys: Any, untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(untied.parent)
    assert main(["convert", "untied", "./untied"]) == 1
    assert capsys.readouterr().err == "ftw: error: ./untied: target: is the source itself, another folder is needed\n"


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mount a tmpfs, in a folder, where this process may."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=60)


@pytest.mark.parametrize("dry_run", [False, True], ids=["write", "dry"])
def test_read_only_target_is_refused_by_a_dry_run_too(capsys: Any, untied: Path, tmp_path: Path, dry_run: bool) -> None:
    with mounted(tmp_path / "disk", "-o", "ro") as folder:
        assert main(["convert", str(untied), str(folder / "out"), *["--dry-run"] * dry_run]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f"ftw: error: {folder / 'out'}: target: cannot be made in {folder}: read-only file system\n",
    )


def test_dry_run_refuses_files_that_are_longer_than_allowed(untied: Path, tmp_path: Path) -> None:
    pytest.importorskip("resource")
    script = (
        "import resource, sys, ftw\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))\n"
        "try: ftw.convert(sys.argv[1], sys.argv[2], dry_run=True)\n"
        "except ftw.OutputError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, untied, tmp_path / "out"], capture_output=True, text=True, timeout=600
    )
    assert "target: no file of 16.00 KiB can be made in" in done.stdout, done.stderr
    assert not (tmp_path / "out").exists()


def test_dry_run_says_what_is_needed_and_free(capsys: Any, untied: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert "\nneeds 17." in printed(capsys, "convert", untied, tmp_path / "out", "--dry-run")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("hard", "used", "valid", "left"),
    [(100, 1024, 3, 99 * 1024), (1, 5000, 3, 0), (0, 5000, 3, None), (100, 0, 1, None), (None, 0, 0, None)],
    ids=["left", "exceeded", "no-limit", "not-valid", "no-quota"],
)
def test_quota_bounds_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard: int | None, used: int, valid: int, left: int | None
) -> None:
    def answer(number: Any, descriptor: Any, command: Any, user: Any, buffer: Any) -> int:
        if hard is None:
            ctypes.set_errno(errno.ESRCH)
            return -1
        ctypes.memmove(buffer, disk._QUOTA.pack(hard, 0, used, 0, 0, 0, 0, 0, valid), disk._QUOTA.size)
        return 0

    monkeypatch.setattr(disk, "libc_function", lambda name: answer)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    assert disk.free_disk_nbytes(tmp_path) == (1 << 40 if left is None else left)


# the library


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_read_into_takes_a_torch_tensor(untied: Path, dtype: torch.dtype) -> None:
    with ftw.open_checkpoint(untied) as checkpoint:
        raw = bytearray(1024)
        checkpoint.read_into(TABLE, raw)
        tensor = torch.empty(1024 // dtype.itemsize, dtype=dtype, requires_grad=dtype.is_floating_point)
        checkpoint.read_into(TABLE, tensor)
        assert bytes(tensor.detach().view(torch.uint8).numpy()) == bytes(raw)
        with pytest.raises(TypeError, match="not contiguous; a contiguous one on the CPU is needed"):
            checkpoint.read_into(TABLE, torch.empty(64, 16, dtype=torch.bfloat16)[:, ::2])
        with pytest.raises(TypeError, match="a tensor on meta"):
            checkpoint.read_into(TABLE, torch.empty(512, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize(
    "make", [bytearray, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)], ids=["bytes", "torch"]
)
def test_read_into_refuses_a_buffer_that_is_too_short(untied: Path, make: Any) -> None:
    with ftw.open_checkpoint(untied) as checkpoint:
        with pytest.raises(ftw.CheckpointError, match="the buffer has 1000 bytes, it has 1024; offset= reads a part"):
            checkpoint.read_into(TABLE, make(1000))
        checkpoint.read_into(TABLE, make(1000), offset=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float32", torch.float16], ids=str)
def test_load_takes_the_name_of_a_dtype(untied: Path, dtype: Any) -> None:
    with ftw.load(untied, embed="host", device="cpu", dtype=dtype) as model:
        found = model.embedding(torch.tensor([1])).dtype
    assert str(found).removeprefix("torch.") == str(dtype).removeprefix("torch.")


def test_reprs_are_a_line(untied: Path, tmp_path: Path) -> None:
    result = ftw.convert(untied, tmp_path / "out", embed="host")
    with ftw.load(untied, embed="host", device="cpu") as model:
        values = [ftw.inspect(untied), result, model, model.memory]
        assert model.memory.after.host_pinned - model.memory.before.host_pinned == model.memory.total_pinned_bytes
    shown = [repr(value) for value in values]
    assert all("\n" not in text and len(text) < 400 for text in shown), shown
    assert [text.partition("(")[0] for text in shown] == ["Report", "ConversionResult", "LoadedModel", "MemoryReport"]
    assert all(
        words in text
        for words, text in zip(["may leave the GPU", "1 shard", "1.00 KiB", "1 table"], shown, strict=True)
    )


# streams


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_warning_has_a_line_of_its_own_beside_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_module, "_DELAY", 0)
    with show_progress("convert", "bar") as update:
        update(1 << 20, 1 << 30)
        terminal.write("^C")
        print_warning("what was written is kept")
    before, _, after = terminal.getvalue().partition("ftw: warning: what was written is kept")
    assert "convert" in before
    assert before.endswith(("\r", "\n"))
    assert after.startswith("\n")


def test_what_takes_long_says_so_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with show_waiting("inspect") as say:
        say("nothing is shown where stderr is no terminal")
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_module, "_SILENT", 0.001)
    monkeypatch.setattr(progress_module, "_INTERVAL", 0.001)
    with show_waiting("inspect") as say:
        say("reading headers")
        while "inspect, reading headers: 00:0" not in terminal.getvalue():
            pass
    assert terminal.getvalue().endswith("\r")


def test_pipe_that_its_reader_has_closed_ends_the_command_as_other_tools(untied: Path) -> None:
    script = f"set -o pipefail; {sys.executable} -m ftw.cli inspect {untied} | head -c 0"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) in [(141, ""), (0, "")]


def test_broken_pipe_of_stderr_is_no_traceback(untied: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "ftw.cli", "inspect", "/nowhere"], stderr=writing, timeout=600)
    os.close(writing)
    assert done.returncode == 1


def test_reasons_of_errors_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(NotEligibleError("a", reason="tied", subject="b")))
    assert (str(error), error.reason, error.subject) == ("a", "tied", "b")
    assert isinstance(error, FtwError)
    assert output_module.describe_failure("a", error) == {"error": "a", "reason": "tied", "subject": "b"}

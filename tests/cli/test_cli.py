"""The command line: exit statuses, what goes to stdout and to stderr, and names that are hard to print."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint
from ftw.cli import inspect as inspect_module
from ftw.cli.main import main

import ftw
from ftw.sizes import format_size

ODD_NAMES = [
    "with space", "größe", "new\nline", "-dash", "[red]x", "[bold]", ":smile:", "tab\t", "back\\slash", "esc\x1b[31m",
    "%s{0}", "quote'\"", "\udcff",
]  # fmt: skip


@pytest.fixture
def untied(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "untied", llama_tensors(), llama_config())


@pytest.fixture
def tied(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "tied", llama_tensors(head=False), llama_config(tie_word_embeddings=True))


def command(*arguments: object, **options) -> subprocess.CompletedProcess:
    options = {"capture_output": True, "text": True, "timeout": 600, **options}
    return subprocess.run([sys.executable, "-m", "ftw.cli", *map(str, arguments)], **options)


def fails(capsys, status: int, *arguments: object) -> str:
    """Run a command that fails: one line on stderr, which is returned, and nothing on stdout."""
    assert main(list(map(str, arguments))) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ftw: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("ftw: error: ").rstrip("\n")


# statuses


def test_cli_failure_is_one(capsys, tmp_path):
    assert fails(capsys, 1, "inspect", "/nowhere") == (
        "/nowhere: path: does not exist, a file, a folder or a hub id is needed"
    )
    (tmp_path / "model.safetensors").write_bytes(b"GGUF" + bytes(20))
    assert "is a GGUF file under another name" in fails(capsys, 1, "inspect", tmp_path)
    assert "path: does not exist" in fails(capsys, 1, "inspect", tmp_path / "model.safetensors" / "x")


@pytest.mark.parametrize(
    "arguments",
    [["nope"], ["inspect"], ["inspect", "a", "b"], ["inspect", "--nope", "a"], ["convert", "a"], ["bench", "nothing"],
     ["convert", "a", "b", "--embed", "cpu"], ["convert", "a", "b", "--shard-size", "many"], ["verify"],
     ["convert", "a", "b", "--shard-size", "5000"], ["convert", "a", "b", "--shard-size", "0"],
     ["convert", "a", "b", "--shard-size", "9" * 400], ["--nope"]],
    ids=lambda arguments: "_".join(arguments)[:30],
)  # fmt: skip
def test_cli_wrong_usage_is_two(capsys, arguments):
    fails(capsys, 2, *arguments)


def test_cli_refusal_is_three(capsys, tied, tmp_path):
    text = fails(capsys, 3, "convert", tied, tmp_path / "out", "--embed", "host")
    assert text == (
        f"{tied}: model.embed_tokens.weight: refused: the LM head uses this same table (tie_word_embeddings is true; "
        "LlamaForCausalLM has one, and none is stored); use --embed gpu or auto"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_cli_check_is_three_where_the_table_must_stay(capsys, tied, untied, as_json):
    assert main(["inspect", str(tied), "--check", *as_json]) == 3
    [line] = capsys.readouterr().err.splitlines()
    assert "model.embed_tokens.weight: refused: the LM head uses this same table" in line
    assert main(["inspect", str(untied), "--check", *as_json]) == 0
    assert main(["inspect", str(tied), *as_json]) == 0


def test_cli_interrupt_is_130(capsys, untied, monkeypatch):
    def interrupted(source: str, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_module, "inspect", interrupted)
    assert fails(capsys, 130, "inspect", untied) == "interrupted"


def test_cli_existing_target_fails_on_one_line(capsys, untied, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    assert fails(capsys, 1, "convert", untied, tmp_path / "out") == (
        f"{tmp_path / 'out'}: target: exists and is not empty; --overwrite replaces an FTW folder"
    )
    fails(capsys, 1, "convert", untied, tmp_path / "out", "--overwrite")


def test_cli_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"ftw {ftw.__version__}\n", "")


def test_cli_without_arguments_prints_help(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert all(name in out for name in ("Usage", "inspect", "convert", "verify", "bench", "demo"))


@pytest.mark.parametrize("name", ["inspect", "convert", "verify", "bench", "demo"], ids=str)
def test_cli_help_of_a_command(capsys, name):
    assert main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert ("Usage" in out, err) == (True, "")


# data


@pytest.mark.parametrize("which", ["untied", "tied"], ids=str)
def test_cli_inspect_json_is_the_report(capsys, request, which):
    source = request.getfixturevalue(which)
    assert main(["inspect", str(source), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == ftw.inspect(str(source)).to_dict()
    assert err == ""


def test_cli_inspect_warns_on_stderr(capsys, tmp_path):
    source = write_checkpoint(tmp_path / "src", llama_tensors(), llama_config(vocab_size=100))
    assert main(["inspect", str(source), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["warnings"]
    assert err.startswith("ftw: warning: model.embed_tokens.weight has 64 rows")
    assert err.count("\n") == 1


def test_cli_inspect_of_a_checkpoint_without_tables(capsys, tmp_path):
    source = write_checkpoint(tmp_path / "src", {"x": torch.ones(2)})
    assert main(["inspect", str(source)]) == 0
    assert "no lookup table" in capsys.readouterr().out
    assert main(["inspect", str(source), "--check"]) == 3


def test_cli_convert_and_verify_json(capsys, untied, tmp_path):
    out_folder = tmp_path / "out"
    assert main(["convert", str(untied), str(out_folder), "--embed", "host", "--json", "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert not out_folder.exists()
    assert main(["convert", str(untied), str(out_folder), "--embed", "host", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == list(planned)
    assert (planned.pop("dry_run"), result.pop("dry_run")) == (True, False)
    assert planned.pop("free_bytes") > result["needed_bytes"] < result.pop("free_bytes")  # others write there, too
    assert result == planned
    assert planned["embed"]["tables"] == ["model.embed_tokens.weight"]
    assert main(["verify", str(out_folder), "--against", str(untied), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == ftw.verify(str(out_folder), against=str(untied)).to_dict()
    assert err == ""


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_cli_convert_auto_says_of_each_table_what_it_did(capsys, tied, tmp_path, as_json):
    assert main(["convert", str(tied), str(tmp_path / "out"), "--embed", "auto", *as_json]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    if not as_json:
        assert "stays on the GPU: model.embed_tokens.weight (tied to the LM head" in out
        return
    result = json.loads(out)
    assert result["embed"]["placement"] == "gpu"
    table = result["tables"][0]
    assert (table["name"], table["placement"], table["reason"]) == ("model.embed_tokens.weight", "gpu", "tied")
    assert table["detail"].startswith("tied to the LM head")


def test_cli_convert_resume_says_what_there_was(capsys, untied, tmp_path):
    command = ["convert", str(untied), str(tmp_path / "out"), "--resume"]
    for start in ("wrote ", "complete already: "):
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert out.startswith(f"{start}{tmp_path / 'out'}: ")
        assert (err, "of an earlier conversion" in out) == ("", False)


def test_cli_convert_dry_run_of_a_resume_says_what_there_is(capsys, untied, tmp_path):
    command = ["convert", str(untied), str(tmp_path / "out"), "--resume"]

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ftw.convert(untied, tmp_path / "out", progress=interrupt)
    capsys.readouterr()
    assert main([*command, "--dry-run"]) == 0
    [first, second, *_] = capsys.readouterr().out.splitlines()
    assert first.startswith(f"would write {tmp_path / 'out'}: ")
    assert re.fullmatch(r"of an earlier conversion: \d.* KiB, would be checked", second)
    assert main(["convert", str(untied), str(tmp_path / "out"), "--resume", "--dry-run", "--shard-size", "4KiB"]) == 1
    assert "belongs to another state of the source" in capsys.readouterr().err
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[1] == second.replace("would be checked", "found right")
    assert main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(
        f"target exists; --resume would compare it with the source: {tmp_path / 'out'}: "
    )


def test_cli_convert_json_tells_the_room(capsys, untied, tmp_path, monkeypatch):
    command = ["convert", str(untied), str(tmp_path / "out"), "--json"]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5))
    assert main([*command, "--dry-run"]) == 1
    out, err = capsys.readouterr()
    planned = json.loads(out)
    assert (planned["dry_run"], planned["free_bytes"]) == (True, 5)
    assert f"needs {format_size(planned['needed_bytes'])}, 5 B free on its disk" in err
    assert planned["error"] == err.removeprefix("ftw: error: ").rstrip()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=planned["needed_bytes"]))
    for dry_run, needed in (([], planned["needed_bytes"]), ([], 0), (["--dry-run"], 0)):
        assert main([*command, "--resume", *dry_run]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["dry_run"], result["was_complete"]) == (bool(dry_run), needed == 0)
        assert (result["needed_bytes"], result["free_bytes"]) == (needed, planned["needed_bytes"])


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_cli_verify_with_problems_is_one(capsys, untied, tmp_path, as_json):
    out_folder = tmp_path / "out"
    ftw.convert(untied, out_folder)
    with (out_folder / "freetoken-00000.ftw").open("r+b") as file:
        file.write(b"\x00" * 2048)
    capsys.readouterr()
    assert main(["verify", str(out_folder), *as_json]) == 1
    out, err = capsys.readouterr()
    result = ftw.verify(str(out_folder))
    assert err.splitlines() == [f"ftw: error: {problem}" for problem in result.problems]
    assert result.problems
    assert (json.loads(out)["problems"] if as_json else out) == (list(result.problems) if as_json else "")


# names


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_cli_takes_odd_file_names(capfd, tmp_path, monkeypatch, name):
    """As arguments, as the target, and among the metadata files; shown as they are, or escaped on one line."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "plain", llama_tensors(), llama_config()).rename(tmp_path / name)
    (tmp_path / name / name).write_text("metadata")
    (tmp_path / name / f"{name}.bin").write_text("weights")
    shown = name if name.isprintable() else ascii(name)[1:-1]
    assert main(["inspect", "--", name]) == 0
    assert capfd.readouterr().out.startswith(f"{shown}: yes, model.embed_tokens.weight can leave the GPU: untied")
    assert main(["convert", "--", name, f"{name}.out"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith(f"wrote {shown}.out: 4 tensors")
    assert f"left out: {shown}.bin (weights" in out
    assert err == ""
    assert (tmp_path / f"{name}.out" / name).read_text() == "metadata"
    assert main(["verify", "--against", name, "--", f"{name}.out"]) == 0
    assert capfd.readouterr().out.startswith(f"{shown}.out: ok, ")
    assert main(["inspect", "--json", "--", name]) == 0
    assert json.loads(capfd.readouterr().out)["source"] == name
    assert main(["inspect", "--", f"{name}.absent"]) == 1
    assert capfd.readouterr().err.startswith(f"ftw: error: {shown}.absent: path: does not exist")


@pytest.mark.parametrize("name", ["[red]x", "[/bold]", ":smile:", "with space", "größe", "esc\x1b[31m"], ids=ascii)
def test_cli_prints_odd_tensor_names(capsys, tmp_path, name):
    table = f"{name}.embed_tokens.weight"
    tensors = {table: torch.ones(64, 8), f"{name}.lm_head.weight": torch.zeros(64, 8)}
    source = write_checkpoint(tmp_path / "src", tensors, llama_config())
    shown = table if table.isprintable() else ascii(table)[1:-1]
    assert main(["inspect", str(source)]) == 0
    out = capsys.readouterr().out
    assert out.count(shown) == 3  # in the answer, in the table and below it
    assert "\x1b" not in out
    assert main(["convert", str(source), str(tmp_path / "out"), "--embed", "host"]) == 0
    assert f"placed for host memory: {shown}, " in capsys.readouterr().out


def test_cli_long_table_name_is_not_cut(capsys, tmp_path):
    name = "model." + "very_long_part." * 30 + "embed_tokens.weight"
    source = write_checkpoint(tmp_path / "src", {name: torch.ones(4, 4), "lm_head.weight": torch.zeros(4, 4)}, {})
    assert main(["inspect", str(source)]) == 0
    assert f"{name}: ok, " in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"], ids=str)
def test_cli_stdout_of_any_encoding_takes_any_name(tmp_path, encoding):
    source = write_checkpoint(tmp_path / "größe😀\udcff", llama_tensors(), llama_config())
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = command("inspect", source, env=environment, text=False)
    assert (done.returncode, done.stderr) == (0, b"")
    done = command("inspect", source, "--json", env=environment, text=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout.decode(encoding))["source"] == str(source)


@pytest.mark.parametrize("command_name", ["inspect", "convert", "verify"], ids=str)
def test_cli_json_escapes_what_would_act_on_a_terminal(capsys, tmp_path, command_name):
    odd = "größe\x9b31m\u202eb\x7f\u2028c\U000e0001"
    table = f"{odd}.embed_tokens.weight"
    source = write_checkpoint(tmp_path / "src", {table: torch.ones(4, 4)}, llama_config(architectures=[odd]))
    (source / f"{odd}.json").write_text("{}")
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    (tmp_path / "out" / f"{odd}.json").unlink()
    capsys.readouterr()
    arguments = {"inspect": ["src"], "convert": ["src", str(tmp_path / "new")], "verify": ["out"]}[command_name]
    main([command_name, "--json", str(tmp_path / arguments[0]), *arguments[1:]])
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n"))
    found = json.loads(out)
    if command_name == "verify":
        assert found["problems"]
        assert "gr\\xf6\\xdfe" in found["problems"][0]
    else:
        assert found["tables"][0]["name"] == table
        assert '"name": "größe\\u009b31m\\u202eb\\u007f\\u2028c\\udb40\\udc01.embed_tokens.weight"' in out


# processes


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_cli_stays_silent_when_the_reader_of_its_output_has_left(tmp_path, size, as_json):
    tensors = {f"t{number}": torch.ones(2) for number in range(3 if size == "small" else 2000)}
    source = write_checkpoint(tmp_path / "src", tensors)
    for number in range(0 if size == "small" else 1500):
        (source / f"{number}.bin").touch()
    reading, writing = os.pipe()
    os.close(reading)
    arguments = ("convert", source, tmp_path / "out", "--dry-run", "--shard-size", "4KiB", *as_json)
    done = command(*arguments, stdout=writing, stderr=subprocess.PIPE, capture_output=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_cli_full_disk_under_stdout_is_one_line(untied):
    with Path("/dev/full").open("w") as full:
        done = command("inspect", untied, stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 1
    assert done.stderr == "ftw: error: stdout: file: no space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"], ids=["stdout", "stderr", "both"])
@pytest.mark.parametrize(
    "arguments", ["inspect untied", "inspect nowhere", "--version"], ids=["good", "bad", "version"]
)
def test_cli_runs_with_closed_streams(untied, closed, arguments):
    shell = f"{sys.executable} -m ftw.cli {arguments} {closed}"
    done = subprocess.run(shell, shell=True, cwd=untied.parent, capture_output=True, text=True, timeout=600)
    has_stdout = closed == "2>&-"
    assert done.returncode == ("nowhere" in arguments or not has_stdout)
    assert "Traceback" not in done.stderr
    if has_stdout and done.returncode:
        assert done.stdout == ""
    if closed == ">&-" and "nowhere" not in arguments:
        assert done.stderr == "ftw: error: stdout: file: bad file descriptor\n"


def test_cli_progress_is_silent_where_stderr_is_no_terminal(tmp_path):
    source = write_checkpoint(tmp_path / "src", {"big": torch.zeros(48 << 20, dtype=torch.uint8)})
    for arguments in (("convert", source, tmp_path / "out"), ("verify", tmp_path / "out", "--against", source)):
        done = command(*arguments)
        assert (done.returncode, done.stderr) == (0, "")


def test_cli_installed_command_and_module_are_the_same(untied):
    installed = Path(sys.executable).with_name("ftw")
    done = subprocess.run([installed, "inspect", untied, "--json"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == command("inspect", untied, "--json").stdout


@pytest.mark.parametrize(
    "code",
    ["import ftw", "import ftw.cli.main", "from ftw.cli.main import main; main(['inspect', 'untied'])",
     "from ftw.cli.main import main; main(['convert', 'untied', 'out', '--embed', 'host'])",
     "from ftw.cli.main import main; main(['verify', 'untied', '--against', 'untied', '--json'])"],
    ids=["import", "import_cli", "inspect", "convert", "verify"],
)  # fmt: skip
def test_cli_starts_without_heavy_imports(untied, code):
    heavy = ("torch", "triton", "numpy", "transformers", "huggingface_hub", "safetensors")
    script = f"import sys; {code}; print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=untied.parent, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


# the demo


def test_cli_demo_makes_a_checkpoint_that_transformers_loads(capfd, tmp_path):
    folder = tmp_path / "demo"
    assert main(["demo", "--folder", str(folder)]) == 0
    out, err = capfd.readouterr()
    assert "every byte of 999 rows equals the checkpoint's" in out
    assert "all steps as expected" in out
    assert err.count("\n") == 1  # the refusal, which is a step of it
    assert ftw.verify(folder / "out", against=folder / "Qwen3-tiny").is_ok
    Qwen3MoeForCausalLM = pytest.importorskip("transformers").Qwen3MoeForCausalLM

    for name in ("Qwen3-tiny", "Qwen3-tiny-tied"):
        _, info = Qwen3MoeForCausalLM.from_pretrained(folder / name, output_loading_info=True)
        assert {key: value for key, value in info.items() if value} == {}


def test_cli_names_are_not_cut_into_lines_in_a_pipe(capsys, tmp_path):
    name = "a" * 300 + ".embed_tokens.weight"
    write_checkpoint(tmp_path, {**llama_tensors(), name: torch.ones(64, 8)}, llama_config())
    assert main(["inspect", str(tmp_path)]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("aaa") and "64" in line]
    assert name in row

"""Conversion of checkpoints with DF11 tables: as they are, or, with --decode-df11, as plain bf16 ones."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint
from df11_builders import MODULE, TABLE, read_fixture, under, write_df11
from ftw.cli.main import main

import ftw
from ftw.conversion.writing import writer
from ftw.errors import NotEligibleError

HEAD = {"lm_head.weight": torch.ones(600, 72, dtype=torch.bfloat16)}
PARTS, TOLD = read_fixture("normal")
NOTHING_TO_DECODE = "decode_df11=True: no lookup table is stored as DF11, so none is decoded"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    return write_df11(tmp_path / "src", PARTS, (600, 72), HEAD)


def test_decoded_table_is_plain_laid_out_for_the_host_and_verifies(source: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(source), str(out), "--embed", "host", "--decode-df11", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    decoded = [{"name": TABLE, "from": sorted(under(MODULE, PARTS))}]
    assert [{**entry, "from": sorted(entry["from"])} for entry in result["decoded"]] == decoded
    assert (result["num_source_tensors"], result["num_tensors"]) == (len(PARTS) + 1, 2)
    index = json.loads((out / "freetoken_weight.json").read_text())
    assert index["ftw"]["decoded"] == result["decoded"]
    with ftw.open_checkpoint(out) as checkpoint:
        table = checkpoint.tensors[TABLE]
        assert (table.dtype, table.shape, table.role, table.placement) == ("BF16", (600, 72), "token_embedding", "host")
        found = b"".join(bytes(chunk) for chunk in checkpoint.iter_chunks(TABLE))
    assert hashlib.sha256(found).hexdigest() == TOLD["sha256"]
    assert main(["verify", str(out), "--against", str(source)]) == 0
    assert "2 equal to those of" in capsys.readouterr().out
    data = bytearray((out / "freetoken-00000.ftw").read_bytes())
    data[5] ^= 1
    (out / "freetoken-00000.ftw").write_bytes(data)
    assert f"{out}: {TABLE}: differs from the source at byte 5" in ftw.verify(out, against=source).problems


def test_without_the_option_it_stays_and_the_refusal_names_the_option(source: Path, tmp_path: Path) -> None:
    with pytest.raises(NotEligibleError, match="; decode_df11=True makes"):
        ftw.convert(source, tmp_path / "out", embed="host")
    result = ftw.convert(source, tmp_path / "out", embed="auto")
    assert not result.plan.decoded
    assert (result.plan.tables[0].reason, len(result.plan.shard_plan.tensors)) == ("df11", len(PARTS) + 1)
    assert ftw.verify(tmp_path / "out", against=source).is_ok
    plain = ftw.convert(tmp_path / "out", tmp_path / "plain", embed="host", decode_df11=True)  # later, from the FTW
    assert [table.name for table in plain.plan.placement.host_tables] == [TABLE]
    assert ftw.verify(tmp_path / "plain", against=source).is_ok


def test_interrupted_decoding_goes_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_CHUNK_NBYTES", 8192)
    ftw.convert(source, tmp_path / "whole", decode_df11=True)

    def interrupt(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ftw.convert(source, tmp_path / "out", decode_df11=True, progress=interrupt)
    assert ftw.convert(source, tmp_path / "out", decode_df11=True, resume=True).resumed_nbytes
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_what_was_decoded_is_known_to_an_ftw_made_anew(source: Path, tmp_path: Path) -> None:
    ftw.convert(source, tmp_path / "one", decode_df11=True, embed="host")
    result = ftw.convert(tmp_path / "one", tmp_path / "two", shard_limit=8192)
    assert any("embed='host' keeps it" in warning for warning in result.plan.warnings)
    for against in (tmp_path / "one", source):
        assert ftw.verify(tmp_path / "two", against=against).is_ok


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_where_nothing_is_stored_as_df11_the_option_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, as_json: list[str]
) -> None:
    plain = write_checkpoint(tmp_path / "plain", llama_tensors(), llama_config())
    arguments = [command, str(plain), *([str(tmp_path / "out")] if command == "convert" else []), *as_json]
    assert main([*arguments, "--decode-df11"]) == 0
    output = capsys.readouterr()
    [line] = output.err.splitlines()
    assert line.startswith("ftw: warning: ")
    assert line.endswith(NOTHING_TO_DECODE.replace("decode_df11=True", "--decode-df11"))
    if as_json:
        assert json.loads(output.out)["warnings"] == [NOTHING_TO_DECODE]


def test_where_nothing_is_stored_as_df11_loading_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = write_checkpoint(tmp_path / "plain", llama_tensors(), llama_config())
    with ftw.load(plain, device="cpu", decode_df11=True) as model:
        assert model.verdict.warnings == (NOTHING_TO_DECODE,)
    assert caplog.messages == [f"{plain}: {NOTHING_TO_DECODE}"]


def test_where_a_table_is_stored_as_df11_the_option_says_nothing(source: Path, tmp_path: Path) -> None:
    assert ftw.inspect(source, decode_df11=True).verdict.warnings == ()
    assert ftw.convert(source, tmp_path / "out", decode_df11=True).plan.warnings == ()

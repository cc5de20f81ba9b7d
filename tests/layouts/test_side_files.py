"""The n-gram table of Qwen4-Exp lies in safetensors files beside the FTW, of which any range can be read."""

import json

import pytest
from arrangements import arranged, change
from freetoken_sources import make_bytes

import ftw
from ftw.layouts.freetoken import side_files

TABLE = "model.language_model.layers.0.ple.ple_embedding.ngram_embedding."
PARTS = [f"{TABLE}shard_0.weight", f"{TABLE}shard_1.weight"]


def content(file, step=1 << 20) -> bytes:
    """Return the bytes of a side file, read in steps."""
    whole = bytearray(file.nbytes)
    for start in range(0, file.nbytes, step):
        file.read_into(memoryview(whole)[start : start + step], offset=start)
    return bytes(whole)


def as_fp8(_spec, _config, tensors):
    for part in PARTS:
        tensors[part][0] = "F8_E4M3"
    tensors[f"{TABLE}weight_scale"] = ["BF16", [], tensors[PARTS[0]][2]]


def test_side_file_is_one_that_reads_as_a_checkpoint(tmp_path):
    with arranged(change("qwen4_exp", as_fp8), tmp_path / "source") as arrangement:
        (file,) = arrangement.side_files
        (tmp_path / file.name).write_bytes(content(file))
        assert arrangement.index_entries["side_files"] == [file.name] == ["ple-table-00000.safetensors"]
        assert content(file, 7) == content(file)
    with ftw.open_checkpoint(tmp_path / file.name) as table:
        assert list(table.tensors) == list(file.tensors)
        for part in PARTS:
            buffer = bytearray(table.tensors[part].nbytes)
            table.read_into(part, buffer)
            assert buffer == make_bytes(part, "F8_E4M3", [120, 8])


def test_wide_elements_come_first(tmp_path):
    with arranged(change("qwen4_exp", as_fp8), tmp_path) as arrangement:
        assert arrangement.side_files[0].tensors == (f"{TABLE}weight_scale", *PARTS)


def test_header_is_as_the_safetensors_package_writes_it(tmp_path):
    with arranged(change("qwen4_exp", lambda *_: None), tmp_path) as arrangement:
        whole = content(arrangement.side_files[0])
        length = int.from_bytes(whole[:8], "little")
        assert length % 8 == 0
        entries = [
            {"dtype": "BF16", "shape": [120, 8], "data_offsets": [1920 * number, 1920 * (number + 1)]}
            for number in range(2)
        ]
        wanted = json.dumps(dict(zip(PARTS, entries, strict=True)), separators=(",", ":")).encode()
        assert whole[8 : 8 + length].rstrip(b" ") == wanted
        assert len(whole) == 8 + length + 2 * 1920


def test_new_file_begins_when_one_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(side_files, "SIDE_FILE_NBYTES", 1920)
    with arranged(change("qwen4_exp", lambda *_: None), tmp_path) as arrangement:
        assert {file.name: file.tensors for file in arrangement.side_files} == {
            "ple-table-00000.safetensors": (PARTS[0],),
            "ple-table-00001.safetensors": (PARTS[1],),
        }


def test_other_families_have_none(tmp_path):
    with arranged(change("llama", lambda *_: None), tmp_path) as arrangement:
        assert arrangement.side_files == ()
        assert arrangement.index_entries["side_files"] == []


def _drop_part(_spec, _config, tensors):
    del tensors[PARTS[1]]


def _drop_scale(spec, config, tensors):
    as_fp8(spec, config, tensors)
    del tensors[f"{TABLE}weight_scale"]


def _shorten_part(_spec, _config, tensors):
    tensors[PARTS[1]][1] = [119, 8]


def _widen_part(_spec, _config, tensors):
    tensors[PARTS[0]][0] = tensors[PARTS[1]][0] = "F32"


def _add_layer(_spec, _config, tensors):
    for part in PARTS:
        tensors[part.replace("layers.0", "layers.1")] = tensors[part]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_drop_part, r"its part 1 is missing, config\.json says that it has 2"),
        (_drop_scale, r"is F8_E4M3, its table has no weight_scale"),
        (_shorten_part, r"all parts must be alike, BF16 or F8_E4M3"),
        (_widen_part, r"all parts must be alike, BF16 or F8_E4M3"),
        (_add_layer, r"there are 4 of its parts, config\.json says that it has 2"),
    ],
    ids=["missing", "no-scale", "shorter", "f32", "two-tables"],
)
def test_table_that_freetoken_cannot_join_is_refused(tmp_path, edit, problem):
    with pytest.raises(ftw.CheckpointError, match=problem), arranged(change("qwen4_exp", edit), tmp_path):
        pass

"""Which files of a folder are the model: model.safetensors or an index, names that only look so, files of odd names."""

import json
from pathlib import Path

import pytest
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw, write_sharded
from inspecting import assert_names_file, stored_bytes
from layouts import FOLDER, INDEX, gguf, index_of, shards, weights, write_layout

import ftw
from ftw.errors import CheckpointError, SourceNotFoundError
from ftw.files import is_debris, original_of
from ftw.hub import Place
from ftw.readers import find

WHOLE = {"model.safetensors": weights("t1", "t2")}
SHARDS = shards(2)
LISTED = {**SHARDS, INDEX: index_of(SHARDS)}
TAKEN = "model.safetensors is taken, as transformers does"


def found(folder: Path) -> tuple[list[str], dict[str, str], tuple[str, ...]]:
    """Return what is taken of a folder, what is left out, and the warnings."""
    with ftw.open_checkpoint(folder) as checkpoint:
        files = [file.path.relative_to(folder).as_posix() for file in checkpoint.files]
        return files, {entry.name: entry.reason for entry in checkpoint.left_out}, checkpoint.warnings


# model.safetensors beside an index


def test_index_whose_shards_are_gone_gives_way_to_the_file(tmp_path: Path) -> None:
    write_layout(tmp_path, {**WHOLE, INDEX: index_of(shards(5))})
    files, left_out, (warning,) = found(tmp_path)
    assert (files, left_out) == (["model.safetensors"], {})
    names = "model-00001-of-00005.safetensors, model-00002-of-00005.safetensors, model-00003-of-00005.safetensors"
    assert warning == f"{TAKEN}; the index beside it names {names} and 2 more, which are not there"


def test_index_that_lacks_one_shard_gives_way_to_the_file(tmp_path: Path) -> None:
    write_layout(tmp_path, {**WHOLE, **LISTED})
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    files, left_out, (warning,) = found(tmp_path)
    assert (files, [*left_out]) == (["model.safetensors"], ["model-00001-of-00002.safetensors"])
    assert warning.endswith("the index beside it names model-00002-of-00002.safetensors, which is not there")


def test_index_without_the_file_needs_all_its_shards(tmp_path: Path) -> None:
    write_layout(tmp_path, LISTED)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        ftw.open_checkpoint(tmp_path)


OTHER_SHARDS = {
    "bytes": (shards(2, fill=7), "they differ: t1 has other bytes"),
    "names": (shards(3), "they differ: model.safetensors has no t3"),
    "fewer": (shards(1), "they differ: the index has no t2"),
    "none": (shards(2), "their headers say the same, and no difference was found where bytes were compared"),
    "broken": ({**shards(1), "x.safetensors": b"{"}, "they cannot be compared: x.safetensors: "),
}


@pytest.mark.parametrize("case", OTHER_SHARDS)
def test_file_is_taken_of_two_complete_copies_and_what_differs_is_said(tmp_path: Path, case: str) -> None:
    files, difference = OTHER_SHARDS[case]
    good = {name: content for name, content in files.items() if content != b"{"}
    listed = index_of(good)
    if case == "broken":
        listed["weight_map"]["t2"] = "x.safetensors"
    write_layout(tmp_path, {**WHOLE, **files, INDEX: listed})
    taken, left_out, (warning,) = found(tmp_path)
    assert (taken, set(left_out)) == (["model.safetensors"], set(files))
    assert set(left_out.values()) == {"model.safetensors is the checkpoint"}
    assert warning.startswith(f"{TAKEN}, and not the {len(files)} file")
    assert f"which vLLM and SGLang take; {difference}" in warning


def test_shape_that_differs_is_said(tmp_path: Path) -> None:
    one, two = llama_tensors(), {name: tensor.float() for name, tensor in llama_tensors().items()}
    write_sharded(tmp_path, {"model-00001-of-00001.safetensors": two}, llama_config())
    write_checkpoint(tmp_path, one)
    (warning,) = ftw.inspect(tmp_path).verdict.warnings
    assert warning.endswith("they differ: lm_head.weight is BF16 [64, 8] and F32 [64, 8]")


def test_index_that_names_the_file_and_others_counts(tmp_path: Path) -> None:
    files = {"model.safetensors": weights("t1"), "mtp.safetensors": weights("t2")}
    write_layout(tmp_path, {**files, INDEX: index_of(files)})
    taken, left_out, (warning,) = found(tmp_path)
    assert (taken, left_out) == (["model.safetensors", "mtp.safetensors"], {})
    assert (
        warning
        == "all 2 files of the index are taken, as vLLM and SGLang do; transformers takes model.safetensors alone"
    )
    (tmp_path / "mtp.safetensors").unlink()
    assert found(tmp_path)[0] == ["model.safetensors"]


def test_index_of_the_file_alone_says_nothing(tmp_path: Path) -> None:
    write_layout(tmp_path, {**WHOLE, INDEX: index_of(WHOLE)})
    assert found(tmp_path) == (["model.safetensors"], {}, ())


@pytest.mark.parametrize("name", ["model.safetensors", INDEX], ids=["file", "index"])
def test_either_copy_is_taken_when_it_is_named(tmp_path: Path, name: str) -> None:
    write_layout(tmp_path, {**WHOLE, **LISTED})
    with ftw.open_checkpoint(tmp_path / name) as checkpoint:
        assert len(checkpoint.files) == (1 if name == "model.safetensors" else 2)
        assert checkpoint.warnings == ()
    result = ftw.verify(tmp_path / "model.safetensors", against=tmp_path / INDEX)
    assert (result.is_ok, result.num_compared) == (True, 2)


def test_broken_index_beside_the_file_is_told(tmp_path: Path) -> None:
    write_layout(tmp_path, {**WHOLE, INDEX: "{"})
    files, _, (warning,) = found(tmp_path)
    assert files == ["model.safetensors"]
    assert warning.startswith(f"{TAKEN}; the index beside it is not read: {INDEX}: json: is not JSON")


@pytest.mark.parametrize("name", ["other.safetensors", "sub/x.safetensors", "x.safetensors.index.json"])
def test_file_that_the_config_names_is_taken_as_transformers_does(tmp_path: Path, name: str) -> None:
    content = weights("u") if name.endswith(".safetensors") else index_of(SHARDS)
    write_layout(tmp_path, {**WHOLE, **SHARDS, name: content, "config.json": {"transformers_weights": name}})
    files, _, (warning,) = found(tmp_path)
    assert files == ([name] if name.endswith(".safetensors") else [*SHARDS])
    assert warning.startswith(f"{name} is taken, which config.json names as transformers_weights")


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "x.bin", "gone.safetensors"])
def test_file_that_the_config_may_not_name_is_refused(tmp_path: Path, name: str) -> None:
    write_layout(tmp_path / "m", {**WHOLE, "config.json": {"transformers_weights": name}})
    (tmp_path / "x.safetensors").write_bytes(weights("u"))
    with pytest.raises(CheckpointError, match="transformers_weights: ") as caught:
        ftw.open_checkpoint(tmp_path / "m")
    assert_names_file(caught.value, tmp_path / "m" / "config.json")


def test_index_of_a_variant_is_opened_by_its_name(tmp_path: Path) -> None:
    files = shards(2, "model.fp16")
    name = "model.safetensors.index.fp16.json"
    write_layout(tmp_path, {**files, name: index_of(files)})
    assert ftw.inspect(tmp_path / name).num_tensors == 2


# An index that names a tied head


HEAD = "lm_head.weight"


def write_listed_head(folder: Path, name: str = HEAD, **config: object) -> Path:
    """Write shards whose index names a tensor that no shard has."""
    write_sharded(folder, {"model-00001-of-00001.safetensors": llama_tensors(head=False)}, llama_config(**config))
    listed = json.loads((folder / INDEX).read_text())
    listed["weight_map"][name] = "model-00001-of-00001.safetensors"
    (folder / INDEX).write_text(json.dumps(listed))
    return folder


@pytest.mark.parametrize("name", [HEAD, "output.weight", "model.lm_head.weight"])
def test_tied_head_that_no_shard_has_is_told(tmp_path: Path, name: str) -> None:
    report = ftw.inspect(write_listed_head(tmp_path, name, tie_word_embeddings=True))
    assert report.verdict.token_embedding.reason == "tied"
    warning = f"{name} is named by the index, and no file holds it, as where it is tied to the table"
    assert warning in report.verdict.warnings
    assert ftw.verify(tmp_path).is_ok


def test_head_that_no_shard_has_and_no_flag_ties_is_not_called_untied(tmp_path: Path) -> None:
    report = ftw.inspect(write_listed_head(tmp_path, tie_word_embeddings=...))
    assert not report.is_host_eligible


@pytest.mark.parametrize(
    ("name", "flag"), [(HEAD, False), ("model.layers.0.mlp.up_proj.weight", True)], ids=["untied", "layer"]
)
def test_other_tensor_that_no_shard_has_is_refused(tmp_path: Path, name: str, flag: bool) -> None:
    write_listed_head(tmp_path, name, tie_word_embeddings=flag)
    problem = f"{name}: the index places it in 'model-00001-of-00001.safetensors', which has no such tensor"
    with pytest.raises(CheckpointError) as caught:
        ftw.open_checkpoint(tmp_path)
    assert str(caught.value) == f"{tmp_path / INDEX}: {problem}"
    (line,) = ftw.verify(tmp_path).problems
    assert line.endswith(problem)


# Names that only look like weights


DEBRIS = [
    "._model.safetensors", ".model.safetensors", ".#x.safetensors", ".~x.safetensors", "~$x.safetensors",
    ".goutputstream-ABCDEF.safetensors", ".nfs0001.safetensors", "model.safetensors.part", "model.safetensors~",
    "model.safetensors.crdownload", "model.safetensors.incomplete", "model.safetensors.lock", "x.safetensors.aria2",
    "model.safetensors.tmp", ".model.safetensors.swp", "x.safetensors.download", ".DS_Store", "Thumbs.db",
    "desktop.ini", ".gitattributes", ".model.safetensors.Xy12Zq",
]  # fmt: skip


@pytest.mark.parametrize("shape", ["one", "several"])
def test_what_tools_leave_is_no_weight_file(tmp_path: Path, shape: str) -> None:
    good = {"one.safetensors": weights("t1"), **({"two.safetensors": weights("t2")} if shape == "several" else {})}
    write_layout(tmp_path, {**good, **dict.fromkeys(DEBRIS, b"\0\1\2 no weights")})
    assert found(tmp_path) == ([*good], {}, ())
    write_layout(tmp_path / "g", {"m.gguf": gguf(), **{name.replace("safetensors", "gguf"): b"x" for name in DEBRIS}})
    assert found(tmp_path / "g") == (["m.gguf"], {}, ())


COPIES = [
    "{} (1)", "{}(2)", "{} - Copy", "{} - Copy (3)", "Copy of {}", "{} copy", "{} copy 2",
    "{}.sync-conflict-20260101-101010-ABCDEFG", "{} (A B's conflicted copy 2026-01-01)",
]  # fmt: skip


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_copy_that_a_tool_made_is_left_out_beside_its_original(tmp_path: Path, copy: str, suffix: str) -> None:
    name = f"{copy.format('one')}.{suffix}"
    content = gguf() if suffix == "gguf" else weights("t")
    write_layout(tmp_path, {name: content})
    assert found(tmp_path) == ([name], {}, ())  # alone it is what was downloaded
    write_layout(tmp_path, {f"one.{suffix}": content})
    assert found(tmp_path) == ([f"one.{suffix}"], {name: f"called a copy of one.{suffix}"}, ())


@pytest.mark.parametrize(
    "name", ["model.safetensors", "a(b).gguf", "Copy.gguf", "x (1)", "model-1.gguf", "copycat.gguf"]
)
def test_name_of_its_own_is_no_copy_and_no_debris(name: str) -> None:
    assert original_of(name) in (None, "x")
    assert not is_debris(name)


@pytest.mark.parametrize("real", ["m.gguf", "m.safetensors", "model.safetensors", "freetoken_weight.json"])
def test_folder_called_like_a_weight_file_is_none(tmp_path: Path, real: str) -> None:
    names = ["my.gguf", "old.safetensors", "x.safetensors.index.json", "model.safetensors", INDEX]
    write_layout(tmp_path, {name: FOLDER for name in names if name != real})
    if real == "freetoken_weight.json":
        write_ftw(tmp_path, llama_tensors())
    else:
        write_layout(tmp_path, {real: gguf() if real.endswith("gguf") else weights("t")})
    assert found(tmp_path)[1:] == ({}, ())


def test_link_to_a_folder_called_like_a_weight_file_is_none(tmp_path: Path) -> None:
    write_layout(tmp_path / "m", {"m.safetensors": weights("t")})
    (tmp_path / "m" / "old.safetensors").symlink_to(tmp_path)
    assert found(tmp_path / "m")[0] == ["m.safetensors"]


# Parts of a GGUF model


PROJECTOR = "a projector of images or sound, not the model"
DRAFT = "a draft model for speculative decoding, not the model"
BESIDE_GGUF = {
    "X-mmproj.gguf": (gguf(), PROJECTOR),
    "X.mmproj.gguf": (gguf(), PROJECTOR),
    "mmproj-X-f16.gguf": (gguf(), PROJECTOR),
    "X-mmproj-Q8_0.gguf": (gguf(), PROJECTOR),
    "X-mtp.gguf": (gguf(), DRAFT),
    "X.MTP-Q4_K.gguf": (gguf(), DRAFT),
    "vision.gguf": (gguf("clip"), PROJECTOR),
    "other.gguf": (gguf("llama", "mmproj"), PROJECTOR),
    "lora.gguf": (gguf("llama", "adapter"), "an adapter, not the model"),
    "steer.gguf": (gguf("controlvector"), "a control vector, not the model"),
    "draft.gguf": (gguf("eagle3"), DRAFT),
    "calibration.gguf": (gguf("llama", "imatrix"), "an importance matrix, not the model"),
}


@pytest.mark.parametrize("name", BESIDE_GGUF)
def test_part_of_a_gguf_model_is_known_by_its_name_or_by_its_metadata(tmp_path: Path, name: str) -> None:
    content, reason = BESIDE_GGUF[name]
    write_layout(tmp_path, {name: content, "model.gguf": gguf("llama", "model")})
    assert found(tmp_path) == (["model.gguf"], {name: reason}, ())


@pytest.mark.parametrize("name", ["smtp.gguf", "mtpx.gguf", "ammproj.gguf"])
def test_name_that_only_holds_such_a_word_is_a_model(tmp_path: Path, name: str) -> None:
    write_layout(tmp_path, {name: gguf(), "model.gguf": gguf()})
    with pytest.raises(CheckpointError, match="holds 2 GGUF models"):
        ftw.open_checkpoint(tmp_path)


def test_projectors_alone_are_as_many_models(tmp_path: Path) -> None:
    write_layout(tmp_path, {"a.gguf": gguf("clip"), "b.gguf": gguf("clip")})
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models \(a\.gguf, b\.gguf\)"):
        ftw.open_checkpoint(tmp_path)


def test_broken_file_beside_a_model_is_not_called_anything(tmp_path: Path) -> None:
    write_layout(tmp_path, {"a.gguf": b"GGUF", "b.gguf": gguf()})
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models \(a\.gguf, b\.gguf\)"):
        ftw.open_checkpoint(tmp_path)


# Adapters and what training leaves


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors", "adapters.safetensors", "0000100_adapters.safetensors",
        "pytorch_lora_weights.safetensors", "optimizer.safetensors",
    ],
)  # fmt: skip
def test_adapter_beside_shards_without_an_index_is_left_out(tmp_path: Path, name: str) -> None:
    write_layout(tmp_path, {**SHARDS, name: weights("t1", "lora_a")})
    files, left_out, warnings = found(tmp_path)
    assert (files, warnings) == ([*SHARDS], ())
    assert left_out[name].endswith(", not the model")
    for shard in SHARDS:
        (tmp_path / shard).unlink()
    assert found(tmp_path)[0] == [name]  # alone it is opened


# Files of odd names


def test_file_of_any_name_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    blob = f"sha256-{0:064x}"
    contents = {"gguf": gguf(), "safetensors": weights("t")}
    for kind, content in contents.items():
        for name in (blob, "weights", "ggml-model.bin", "m.SAFETENSOR"):
            (tmp_path / name).write_bytes(content)
            report = ftw.inspect(tmp_path / name)
            assert (report.format, report.num_tensors) == (kind, 1)


def test_index_of_an_ftw_under_another_name_is_opened(tmp_path: Path) -> None:
    folder = write_ftw(tmp_path, llama_tensors())
    (folder / "freetoken_weight.json").rename(folder / "mine.json")
    with ftw.open_checkpoint(folder / "mine.json") as checkpoint:
        assert (checkpoint.format, len(stored_bytes(checkpoint, "model.norm.weight"))) == ("ftw", 16)


def test_shard_of_an_ftw_is_refused_by_its_folder(tmp_path: Path) -> None:
    folder = write_ftw(tmp_path, llama_tensors())
    with pytest.raises(ftw.SourceNotFoundError, match="is a shard of an FTW; name its folder"):
        ftw.open_checkpoint(folder / "freetoken-00000.ftw")


def test_odd_names_in_a_folder_count_where_nothing_else_is_there(tmp_path: Path) -> None:
    blobs = {f"sha256-{number:064x}": content for number, content in enumerate([gguf(), "license", '{"stop": []}'])}
    write_layout(tmp_path, {**blobs, "config.json": llama_config()})
    assert found(tmp_path) == ([f"sha256-{0:064x}"], {}, ())
    write_layout(tmp_path, {"more": weights("t")})
    with pytest.raises(CheckpointError, match=r"2 begin like one \(more, sha256-0+\), name one of them"):
        ftw.open_checkpoint(tmp_path)
    write_layout(tmp_path, {"model.safetensors": weights("t")})
    assert found(tmp_path) == (["model.safetensors"], {}, ())


@pytest.mark.parametrize("content", [b"", b"GGU", bytes(8) + b"}", (1 << 40).to_bytes(8, "little") + b"{}", b"{}"])
def test_file_that_begins_like_no_format_is_not_found(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    for source in (tmp_path, tmp_path / "file"):
        with pytest.raises(SourceNotFoundError, match="holds none, ftw or gguf or safetensors is needed"):
            find(Place(source))


def test_link_of_an_odd_name_is_opened(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(gguf())
    (tmp_path / "link").symlink_to("blob")
    assert ftw.inspect(tmp_path / "link").num_tensors == 1


# Layers in folders of their own


MODULES = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Dense"}]


@pytest.mark.parametrize("stem", ["model", "x"], ids=["whole", "several"])
def test_dense_layer_goes_with_its_folder(tmp_path: Path, stem: str) -> None:
    source = write_checkpoint(tmp_path / "src", llama_tensors(), llama_config(), f"{stem}.safetensors")
    dense = {"2_Dense/model.safetensors": weights("linear.weight"), "2_Dense/config.json": {}}
    write_layout(
        source, {"modules.json": MODULES, "1_Pooling/config.json": {}, **dense, "onnx/model.safetensors": b"x"}
    )
    result = ftw.convert(source, tmp_path / "out")
    copy = tmp_path / "out" / "2_Dense" / "model.safetensors"
    assert copy.read_bytes() == dense["2_Dense/model.safetensors"]
    assert [entry.name for entry in result.plan.left_out] == ["onnx/model.safetensors"]
    what = "2_Dense/model.safetensors holds a layer of the model by modules.json, and is not among its tensors"
    warning = f"{what}; a conversion copies the file as it is"
    assert warning in result.plan.warnings
    assert warning in ftw.inspect(source).verdict.warnings
    assert ftw.verify(tmp_path / "out", against=source).is_ok
    copy.unlink()
    assert not ftw.verify(tmp_path / "out").is_ok


def test_dense_layer_that_is_a_pickle_is_left_out_with_a_warning(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "src", llama_tensors(), llama_config())
    write_layout(source, {"modules.json": MODULES, "2_Dense/pytorch_model.bin": b"\x80\x02"})
    result = ftw.convert(source, tmp_path / "out")
    assert not (tmp_path / "out" / "2_Dense").exists()
    assert any("it is a pickle, which a conversion leaves out" in warning for warning in result.plan.warnings)


@pytest.mark.parametrize("modules", ["{}", "[", '[1, {"path": 2}, {"path": "../x"}, {"path": "/"}]', "[]"])
def test_odd_list_of_layers_is_no_obstacle(tmp_path: Path, modules: str) -> None:
    source = write_layout(tmp_path / "m", {**WHOLE, "modules.json": modules})
    write_layout(tmp_path, {"x/model.safetensors": weights("t")})
    warnings = found(source)[2]
    assert len(warnings) == (not modules.endswith("]"))
    assert all(
        warning.startswith("what layers lie beside the model is not known: modules.json: ") for warning in warnings
    )

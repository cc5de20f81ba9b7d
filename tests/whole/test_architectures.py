"""Real classes of transformers, saved by it: the verdict against what the reloaded model shares, and the way to FTW."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, Architecture, build
from safetensors import safe_open
from transformers.utils import logging

import ftw
from ftw.dtypes import BY_TORCH_NAME

CASES = [(architecture, tie) for architecture in ARCHITECTURES for tie in architecture.ties]


class SavedModel(NamedTuple):
    """A folder that transformers wrote, and what the model that it reloads is like."""

    folder: Path
    embedding: bytes
    is_shared: bool


def _case_id(case: tuple[Architecture, bool | None]) -> str:
    architecture, tie = case
    return f"{architecture.id}-{'default' if tie is None else 'tied' if tie else 'untied'}"


@pytest.fixture(scope="session", params=CASES, ids=_case_id)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """Save and reload one model; pytest runs the tests of one model together, so each is built once."""
    architecture, tie = request.param
    folder = tmp_path_factory.mktemp("saved") / architecture.id
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    build(architecture, tie).save_pretrained(folder, **architecture.save)
    model = getattr(transformers, architecture.model).from_pretrained(folder)
    weight = _embedding_that_is_read(model).weight
    heads = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    is_shared = any(head.weight.data_ptr() == weight.data_ptr() for head in heads)
    return SavedModel(folder, _bytes_of(weight.detach()), is_shared)


def test_inspect_says_eligible_exactly_when_the_model_shares_nothing(saved: SavedModel) -> None:
    report = ftw.inspect(saved.folder)
    assert report.is_host_eligible is not saved.is_shared
    assert report.verdict.tied is saved.is_shared
    reasons = {table.reason for table in report.verdict.tables if table.role == "token_embedding"}
    assert reasons == ({"tied"} if saved.is_shared else {"ok"})
    assert [warning for warning in report.verdict.warnings if "has no LM head" not in warning] == []


def test_inspect_names_the_table_that_the_model_reads(saved: SavedModel) -> None:
    table = ftw.inspect(saved.folder).verdict.token_embedding
    assert table is not None
    with ftw.open_checkpoint(saved.folder) as checkpoint:
        stored = bytearray(table.nbytes)
        checkpoint.read_into(table.name, stored)
    assert stored == saved.embedding


def test_convert_keeps_every_tensor_as_the_safetensors_library_reads_it(saved: SavedModel, tmp_path: Path) -> None:
    result = ftw.convert(saved.folder, tmp_path / "out", embed="auto")
    assert result.plan.placement.placement == ("gpu" if saved.is_shared else "host")
    expected = _read_with_safetensors(saved.folder)
    with ftw.open_checkpoint(tmp_path / "out") as checkpoint:
        assert set(checkpoint.tensors) == set(expected)
        for name, tensor in expected.items():
            info = checkpoint.tensors[name]
            assert (info.dtype, info.shape) == (_dtype_of(tensor), tuple(tensor.shape)), name
            stored = bytearray(info.nbytes)
            checkpoint.read_into(name, stored)
            assert stored == _bytes_of(tensor), name


def test_convert_to_host_refuses_exactly_the_tied_ones(saved: SavedModel, tmp_path: Path) -> None:
    if not saved.is_shared:
        ftw.convert(saved.folder, tmp_path / "out", embed="host")
        with ftw.open_checkpoint(tmp_path / "out") as checkpoint:
            roles = [info.role for info in checkpoint.tensors.values() if info.placement == "host"]
        assert roles
        assert set(roles) == {"token_embedding"}
        return
    with pytest.raises(ftw.NotEligibleError) as caught:
        ftw.convert(saved.folder, tmp_path / "out", embed="host")
    message = str(caught.value)
    table = ftw.inspect(saved.folder).verdict.token_embedding
    assert table is not None
    assert table.name in message
    assert "refused: the LM head uses this same table" in message
    assert "\n" not in message
    assert not (tmp_path / "out").exists()


def test_saved_llama_is_sharded(tmp_path: Path) -> None:
    sharded = next(architecture for architecture in ARCHITECTURES if architecture.id == "llama_sharded")
    build(sharded, False).save_pretrained(tmp_path, **sharded.save)
    assert (tmp_path / "model.safetensors.index.json").exists()
    with ftw.open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.files) > 2


def test_table_covers_twenty_families() -> None:
    assert len({architecture.config for architecture in ARCHITECTURES}) >= 20
    assert len({_case_id(case) for case in CASES}) == len(CASES)


def _embedding_that_is_read(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that looks up the input ids.

    An untied encoder-decoder reads its encoder's own table, though some classes (Bart) still name the shared one.
    """
    encoder = model.get_encoder() if model.config.is_encoder_decoder else None
    tokens = getattr(encoder, "embed_tokens", None)  # Whisper's encoder hears
    return model.get_input_embeddings() if tokens is None else tokens


def _read_with_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    return tensors


def _dtype_of(tensor: torch.Tensor) -> str:
    return BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")].name


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""

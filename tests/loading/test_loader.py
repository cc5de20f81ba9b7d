import copy
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import (
    llama_config,
    llama_tensors,
    safetensors_bytes,
    tensor_entry,
    write_checkpoint,
    write_ftw,
    write_sharded,
)
from safetensors import safe_open

import ftw

TABLE = "model.embed_tokens.weight"
NARROW = "float4_e2m1fn_x2"  # since torch 2.8
IDS = torch.tensor([[0, 63], [64, -1]])


@pytest.fixture(params=["safetensors", "sharded", "ftw", "freetoken"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the same untied checkpoint in each format."""
    tensors = llama_tensors()
    folder = tmp_path / request.param
    if request.param == "sharded":
        parts = list(tensors)
        shards = {f"model-0000{n + 1}-of-00002.safetensors": {k: tensors[k] for k in parts[n::2]} for n in range(2)}
        return write_sharded(folder, shards, llama_config())
    if request.param == "freetoken":
        write_ftw(folder, tensors)
        (folder / "config.json").write_text(json.dumps(llama_config()))
        return folder
    write_checkpoint(folder, tensors, llama_config())
    if request.param == "ftw":
        ftw.convert(folder, tmp_path / "converted", embed="host")
        return tmp_path / "converted"
    return folder


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.int16), right.view(torch.int16))


def test_host_table_is_looked_up_and_left_out_of_the_weights(source: Path) -> None:
    tensors = llama_tensors()
    with ftw.load(source, embed="host", device="cpu") as model:
        found = model.embedding(IDS)
        assert equal_bits(found[0], tensors[TABLE][[0, 63]])
        assert not found[1].count_nonzero()
        weights = dict(model.weights())
        assert set(weights) == set(tensors) - {TABLE}
        assert all(equal_bits(weights[name], tensors[name]) for name in weights)
        assert model.embedding.placement == "host"
        assert list(model.tables) == [TABLE]


def test_gpu_placement_yields_every_tensor(source: Path) -> None:
    tensors = llama_tensors()
    with ftw.load(source, device="cpu") as model:
        assert model.memory.placement == "gpu"
        assert not model.tables
        assert model.memory.total_pinned_bytes == 0
        weights = dict(model.weights())
        assert set(weights) == set(tensors)
        assert all(equal_bits(weights[name], tensors[name]) for name in weights)


def test_embedding_that_stays_is_the_tensor_that_weights_yields(source: Path) -> None:
    with ftw.load(source, embed="gpu", device="cpu") as model:
        table = model.embedding.table
        assert dict(model.weights())[TABLE].data_ptr() == table.data_ptr()
        assert equal_bits(model.embedding(IDS)[0], table[[0, 63]])


def test_memory_report_counts_the_table(source: Path) -> None:
    with ftw.load(source, embed="host", device="cpu") as model:
        assert model.memory.pinned_bytes == {TABLE: 64 * 8 * 2}
        assert model.memory.total_pinned_bytes == 1024
        assert model.memory.placement == "host"
        assert model.memory.before.host_resident > 0
        assert model.memory.device == "cpu"


def test_tied_table_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tied", llama_tensors(head=False), llama_config(tie_word_embeddings=True))
    with pytest.raises(ftw.NotEligibleError, match=r"tied: model.embed_tokens.weight: refused: the LM head uses"):
        ftw.load(source, embed="host", device="cpu")


def test_auto_keeps_a_tied_table_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_checkpoint(tmp_path / "tied", llama_tensors(head=False), llama_config(tie_word_embeddings=True))
    with caplog.at_level(logging.WARNING, "ftw"), ftw.load(source, embed="auto", device="cpu") as model:
        assert model.memory.placement == "gpu"
        assert "tied to the LM head" in model.memory.reason
        assert equal_bits(model.embedding(IDS)[0], llama_tensors(head=False)[TABLE][[0, 63]])
    assert "tied to the LM head" in caplog.text


def test_auto_takes_an_untied_table_to_the_host(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ftw.load(source, embed="auto", device="cpu") as model:
        assert model.memory.placement == "host"
    assert not caplog.records


def test_dtype_is_that_of_lookups(source: Path) -> None:
    with ftw.load(source, embed="host", device="cpu", dtype=torch.float32) as model:
        assert model.embedding(IDS).dtype == torch.float32
        assert dict(model.weights())["model.norm.weight"].dtype == torch.bfloat16


def test_unknown_embed_is_a_value_error(source: Path) -> None:
    with pytest.raises(ValueError, match="allowed are host, gpu, auto"):
        ftw.load(source, embed="disk", device="cpu")


def test_closed_model_raises(source: Path) -> None:
    model = ftw.load(source, embed="host", device="cpu")
    embedding = model.embedding
    weights = model.weights()
    next(weights)
    model.close()
    with pytest.raises(ftw.ClosedError):
        embedding(IDS)
    with pytest.raises(ftw.ClosedError):
        next(weights)
    with pytest.raises(ftw.ClosedError):
        _ = model.embedding
    model.close()


def test_checkpoint_without_a_table_loads_its_weights(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", {"conv.weight": torch.ones(3, 4, 2)}, {"model_type": "x"})
    with ftw.load(source, embed="auto", device="cpu") as model:
        assert torch.equal(dict(model.weights())["conv.weight"], torch.ones(3, 4, 2))
        with pytest.raises(ftw.NotEligibleError, match="no tensor has the name of a token embedding"):
            _ = model.embedding


@pytest.mark.oracle("safetensors", "0.7")
def test_every_dtype_and_shape_streams(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False, True]),
        "fp8": torch.arange(7, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "double": torch.randn(2, 3, 4, dtype=torch.float64),
        "complex": torch.randn(5, dtype=torch.complex64),
        "uint16": torch.arange(5, dtype=torch.int16).view(torch.uint16),
    }
    source = write_checkpoint(tmp_path / "m", tensors)
    with ftw.load(source, device="cpu") as model:
        found = dict(model.weights())
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        if tensor.numel():
            assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_failed_pinning_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftw.pinned import PinnedBuffer

    closed: list[PinnedBuffer] = []
    close = PinnedBuffer.close

    def refuse(self: PinnedBuffer, device: torch.device) -> None:
        raise ftw.PinError("refused")

    monkeypatch.setattr(PinnedBuffer, "pin", refuse)
    monkeypatch.setattr(PinnedBuffer, "close", lambda self: (closed.append(self), close(self))[1])
    with pytest.raises(ftw.PinError):
        ftw.load(source, embed="host", device="cpu")
    assert len(closed) == 1


@pytest.mark.parametrize("device", ["cuda:99", "meta", "xpu", "no such device", "cuda:-1"])
def test_device_that_torch_has_not_is_refused(source: Path, device: str) -> None:
    with pytest.raises(ftw.DeviceError) as caught:
        ftw.load(source, embed="host", device=device)
    assert device.split(":")[0] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", ["bf16", torch.int32, torch.bool], ids=str)
def test_dtype_that_rows_cannot_have_is_refused(source: Path, dtype: object) -> None:
    with pytest.raises(ValueError, match="a floating-point dtype of torch, the name of one"):
        ftw.load(source, embed="host", device="cpu", dtype=dtype)  # type: ignore[arg-type]


def test_embedding_that_stays_says_gpu_on_a_cpu_too(source: Path) -> None:
    with ftw.load(source, embed="gpu", device="cpu") as model:
        assert model.embedding.placement == model.memory.placement == "gpu"


@pytest.mark.parametrize("head", [False, True], ids=["tied", "conflict"])
@pytest.mark.parametrize("with_weight", [True, False], ids=["beside_weight", "without_weight"])
def test_packed_table_that_stays_is_never_looked_up_as_if_it_were_plain(
    tmp_path: Path, head: bool, with_weight: bool
) -> None:
    tensors = llama_tensors(head=head) | {
        TABLE: torch.ones(64, 1, dtype=torch.int32),
        TABLE.replace("weight", "scales"): torch.ones(64, 1),
        TABLE.replace("weight", "biases"): torch.ones(64, 1),
    }
    if not with_weight:
        del tensors[TABLE]
    source = write_checkpoint(tmp_path / "packed", tensors, llama_config(tie_word_embeddings=True))
    with (
        ftw.load(source, embed="auto", device="cpu") as model,
        pytest.raises(ftw.NotEligibleError, match="biases, scales lie beside it"),
    ):
        _ = model.embedding


@pytest.mark.parametrize("embed", ["host", "gpu"])
def test_scale_is_applied_wherever_the_table_is(source: Path, embed: str) -> None:
    wanted = llama_tensors()[TABLE][[0, 63]] * torch.tensor(8**0.5, dtype=torch.bfloat16)
    with ftw.load(source, embed=embed, device="cpu", scale=8**0.5) as model:
        rows = model.embedding(IDS)
        assert equal_bits(rows[0], wanted)
        assert not rows[1].count_nonzero()


@pytest.mark.parametrize("vocab_range", [None, (10, 40)], ids=["whole", "range"])
def test_hot_rows_are_learnt_and_give_the_same_rows(source: Path, vocab_range: tuple[int, int] | None) -> None:
    ids = torch.tensor([12, 12, 12, 49, 3, 64])
    with (
        ftw.load(source, embed="host", device="cpu", vocab_range=vocab_range) as plain,
        ftw.load(source, embed="host", device="cpu", vocab_range=vocab_range, hot_bytes="64") as model,
    ):
        assert model.embedding.hot is not None
        assert model.embedding.hot.rows.shape == (4, 8)
        for _ in range(2):
            assert equal_bits(model.embedding(ids), plain.embedding(ids))
            model.embedding.update_hot_rows()
            assert 12 in model.embedding.hot_ids()


def test_hot_rows_need_a_table_in_host_memory(source: Path) -> None:
    with pytest.raises(ValueError, match="hot_bytes: embed='gpu' has no table in host memory"):
        ftw.load(source, embed="gpu", device="cpu", hot_bytes="64MiB")


@pytest.mark.parametrize("hot_bytes", ["lots", -1, 1.5], ids=str)
def test_hot_bytes_that_are_no_size_are_refused_before_anything_is_read(tmp_path: Path, hot_bytes: object) -> None:
    with pytest.raises(ValueError, match=r"^hot_bytes: "):
        ftw.load(tmp_path / "missing", embed="host", device="cpu", hot_bytes=hot_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda function: function.__name__)
def test_model_is_not_copied(source: Path, copying: Callable[[object], object]) -> None:
    with (
        ftw.load(source, embed="host", device="cpu") as model,
        pytest.raises(TypeError, match="model: owns memory of this process and is not copied or pickled"),
    ):
        copying(model)


@pytest.mark.skipif(not hasattr(torch, NARROW), reason=f"torch {torch.__version__} has no {NARROW}")
def test_narrow_elements_are_loaded_as_torchs(tmp_path: Path) -> None:
    packed = torch.arange(96, dtype=torch.uint8).view(getattr(torch, NARROW)).view(4, 24)
    scales = torch.ones(4, 3).to(torch.float8_e8m0fnu)
    source = write_checkpoint(tmp_path, {**llama_tensors(), "odd.weight": packed, "odd.scale": scales}, llama_config())
    with safe_open(source / "model.safetensors", framework="pt") as file, ftw.load(source, device="cpu") as model:
        found = dict(model.weights())
        for name in ("odd.weight", "odd.scale"):
            expected = file.get_tensor(name)
            assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape)
            assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "problem"),
    [
        ("F6_E2M3", [4], 3, "dtype is F6_E2M3, which this torch does not have"),
        ("F4", [8, 3], 12, r"is F4 \[8, 3\], torch needs rows of a multiple of 2 elements"),
    ],
    ids=["F6", "odd-row"],
)
def test_elements_that_torch_lacks_are_refused_by_name(
    tmp_path: Path, dtype: str, shape: list[int], nbytes: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, NARROW, torch.uint8, raising=False)
    content = safetensors_bytes({"odd": tensor_entry(dtype, shape, 0, nbytes)}, bytes(nbytes))
    (tmp_path / "model.safetensors").write_bytes(content)
    with ftw.load(tmp_path, device="cpu") as model, pytest.raises(ftw.CheckpointError, match=f"odd: {problem}"):
        dict(model.weights())
    monkeypatch.delattr(torch, NARROW)
    with (
        ftw.load(tmp_path, device="cpu") as model,
        pytest.raises(ftw.CheckpointError, match="this torch does not have"),
    ):
        dict(model.weights())

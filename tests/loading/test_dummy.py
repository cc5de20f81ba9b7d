import pytest
import torch
from gguf import GGMLQuantizationType, quants

from ftw.dtypes import DTYPES
from ftw.ggml_types import PACKED_TYPES, ggml_types_by_name
from ftw.loading.dummy import fill_dummy
from ftw.tensors import TensorInfo


def info(name: str, dtype: str, shape: tuple[int, ...], ggml_type: str | None = None) -> TensorInfo:
    return TensorInfo(name, dtype, shape, 0, 0, ggml_type=ggml_type)


def made(name: str, dtype: str, nbytes: int, ggml_type: str | None = None) -> torch.Tensor:
    target = torch.zeros(nbytes, dtype=torch.uint8)
    fill_dummy(target, info(name, dtype, (nbytes,), ggml_type))
    return target


@pytest.mark.parametrize("ggml_type", PACKED_TYPES)
def test_packed_blocks_decode_to_finite_values(ggml_type: str) -> None:
    known = ggml_types_by_name()[ggml_type]
    blocks = made("t", "U8", 999 * known.type_size, ggml_type).reshape(999, -1)
    values = torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType[ggml_type]))
    assert values.isfinite().all()
    assert values.abs().max() <= 1
    assert (values.abs().amax(dim=1) > 0).all()
    assert len({bytes(block.numpy()) for block in blocks}) > 50


@pytest.mark.parametrize("dtype", [name for name, known in DTYPES.items() if hasattr(torch, known.torch_name or "")])
def test_elements_are_of_the_dtype(dtype: str) -> None:
    wanted = getattr(torch, str(DTYPES[dtype].torch_name))
    values = made("t", dtype, 1 << 16).view(wanted)
    if DTYPES[dtype].torch_elements == 1 and (wanted.is_floating_point or wanted.is_complex):
        numbers = values.to(torch.complex64 if wanted.is_complex else torch.float32)
        assert numbers.isfinite().all()
        assert (numbers.abs() < 20).all()
        assert numbers.abs().unique().numel() > 4
    elif wanted == torch.bool:
        assert set(values.view(torch.uint8).tolist()) == {0, 1}
    else:
        assert values.view(torch.uint8).unique().numel() == 256


def test_normal_values_have_the_scale_of_an_initialised_model() -> None:
    values = made("t", "BF16", 8 << 20).view(torch.bfloat16).float()
    assert 0.019 < values.std() < 0.021
    assert abs(values.mean()) < 0.001


def test_contents_repeat_by_name_and_differ_by_name() -> None:
    assert torch.equal(made("a", "F32", 1 << 20), made("a", "F32", 1 << 20))
    assert not torch.equal(made("a", "F32", 1 << 20), made("b", "F32", 1 << 20))


def test_rows_of_a_table_differ() -> None:
    rows = made("t", "BF16", 8192 * 2048 * 2).view(torch.int16).reshape(8192, 2048)
    assert rows[:, :64].unique(dim=0).shape[0] == 8192


@pytest.mark.parametrize("nbytes", [0, 1, 2, 7, (1 << 21) - 2, (1 << 21) + 3], ids=str)
def test_any_number_of_bytes_is_filled_and_none_more(nbytes: int) -> None:
    guarded = torch.full((nbytes + 64,), 0xA5, dtype=torch.uint8)
    fill_dummy(guarded[:nbytes], info("t", "U8", (nbytes,)))
    assert (guarded[nbytes:] == 0xA5).all()
    assert torch.equal(guarded[:nbytes], made("t", "U8", (1 << 21) + 3)[:nbytes])

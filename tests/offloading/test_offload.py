"""Offloading on a CPU, where the table goes to a buffer of its own; gpu/test_gpu_offload.py has what a GPU adds."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from packed_tables import assert_equal_rows, expected, random_table
from torch import nn
from vocab_parallel import (
    Fp8EmbeddingMethod,
    ParallelLMHead,
    SglangVocabParallelEmbedding,
    VocabParallelEmbedding,
)

import ftw
from ftw.host.limits import HostLimits
from ftw.lookup.embedding import HostEmbedding
from ftw.pinned.buffer import count_pinned_bytes

IDS = torch.tensor([[0, 49], [50, -1]])


@pytest.fixture
def embedding() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(50, 12)


def refusal(target: object, **options: object) -> str:
    """Return the line of a refusal, after which nothing may have changed."""
    with pytest.raises(ftw.NotEligibleError) as caught:
        ftw.offload(target, **options)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


def storage_of(tensor: torch.Tensor) -> "weakref.ref[torch.Tensor]":
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def test_rows_equal_those_of_the_module(embedding: nn.Embedding) -> None:
    rows = embedding(IDS.clamp(0, 49)).detach()
    host = ftw.offload(embedding)
    assert isinstance(host, HostEmbedding)
    found = host(IDS)
    assert torch.equal(found[0], rows[0])
    assert not found[1].count_nonzero()
    assert (host.placement, host.num_embeddings, host.embedding_dim, host.dtype) == ("host", 50, 12, torch.float32)


def test_module_stays_alive_over_the_host_copy(embedding: nn.Embedding) -> None:
    parameter, before = embedding.weight, embedding.weight.detach().clone()
    original = storage_of(parameter)
    host = ftw.offload(embedding)
    assert original.expired()
    assert embedding.weight is parameter
    assert parameter.data_ptr() == host.table.data_ptr()
    assert torch.equal(embedding.state_dict()["weight"], before)
    assert parameter.requires_grad
    host.close()
    assert torch.equal(embedding.state_dict()["weight"], before)


def test_report_tells_the_host_bytes(embedding: nn.Embedding) -> None:
    model = nn.ModuleDict({"embed": embedding})
    host = ftw.offload(model["embed"], device="cpu")
    assert host.name == "embed.weight"
    assert host.memory is not None
    assert host.memory.pinned_bytes == {"embed.weight": 50 * 12 * 4}
    assert (host.memory.device, host.memory.placement, host.memory.freed_bytes) == ("cpu", "host", 0)


def test_rows_have_the_dtype_asked_for(embedding: nn.Embedding) -> None:
    host = ftw.offload(embedding, dtype=torch.bfloat16, name="wte")
    assert (host.dtype, host.name) == (torch.bfloat16, "wte")
    assert torch.equal(host(torch.arange(50)), embedding.weight.detach().bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_bits_are_kept(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (50, 12 * dtype.itemsize), dtype=torch.uint8)
    table = bits.clone().view(dtype)
    host = ftw.offload(table)
    assert torch.equal(host.table.view(torch.uint8), bits)
    assert torch.equal(table.view(torch.uint8), bits)


def test_table_of_several_chunks_is_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftw.offloading.offloader._CHUNK_NBYTES", 100)
    table = torch.randn(50, 12)
    before = table.clone()
    assert torch.equal(ftw.offload(table).table, before)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)], ids=str)
def test_empty_table(shape: tuple[int, int]) -> None:
    host = ftw.offload(torch.empty(shape))
    assert host(torch.tensor([0, 7])).shape == (2, shape[1])
    assert not host(torch.tensor([0, 7])).count_nonzero()


def test_tensor_alone() -> None:
    table = torch.randn(50, 12)
    before, original = table.clone(), storage_of(table)
    host = ftw.offload(table)
    assert original.expired()
    assert host.name == "table"
    assert table.data_ptr() == host.table.data_ptr()
    assert torch.equal(host(torch.arange(50)), before)


def test_inference_tensors_move_too() -> None:
    with torch.inference_mode():
        embedding = nn.Embedding(50, 12)
    before = embedding.weight.detach().clone()
    assert torch.equal(ftw.offload(embedding)(torch.arange(50)), before)
    with torch.inference_mode():
        embedding = nn.Embedding.from_pretrained(before.clone())
        assert torch.equal(ftw.offload(embedding)(torch.arange(50)), before)


def test_parameter_of_any_module() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.Parameter(torch.randn(5, 4))

    module = Scaled()
    before = module.tables.detach().clone()
    assert "found a Scaled" in refusal(module)
    assert torch.equal(ftw.offload(module, parameter="tables")(torch.arange(5)), before)


def test_packed_table() -> None:
    table, ids = random_table("Q4_K", 9, 512), torch.tensor([0, 8, 9])
    wanted = expected(table, ids, "Q4_K", torch.bfloat16)
    module = nn.Module()
    module.register_parameter("qweight", nn.Parameter(table, requires_grad=False))
    del table
    host = ftw.offload(module, parameter="qweight", ggml_type="Q4_K")
    assert (host.ggml_type, host.embedding_dim) == ("Q4_K", 512)
    assert_equal_rows(host(ids), wanted)


# Who else may hold the table.


def tiny_llama(*, is_tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=is_tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_untied_llama_gives_the_same_logits() -> None:
    model, ids = tiny_llama(is_tied=False), torch.tensor([[1, 2, 63]])
    with torch.no_grad():
        before = model(ids).logits
        host = ftw.offload(model.get_input_embeddings())
        assert host.name == "model.embed_tokens.weight"
        assert "model.embed_tokens.weight" in model.state_dict()
        model.set_input_embeddings(host)
        assert torch.equal(model(ids).logits, before)


def test_tied_llama_is_refused_by_the_name_of_its_head() -> None:
    model = tiny_llama(is_tied=True)
    weight = model.get_input_embeddings().weight
    address = weight.data_ptr()
    line = refusal(model.get_input_embeddings())
    assert line.startswith("model.embed_tokens.weight: memory: is also held by lm_head.weight of LlamaForCausalLM")
    assert weight.data_ptr() == address
    assert "model.embed_tokens.weight of LlamaForCausalLM" in refusal(weight) or "lm_head.weight" in refusal(weight)


def test_scaled_embedding_of_gemma_is_refused() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    module = Gemma3TextScaledWordEmbedding(50, 12, 0, embed_scale=3.0)
    assert "Gemma3TextScaledWordEmbedding does more in its forward" in refusal(module)
    weight = module.weight.detach().clone()
    assert torch.equal(ftw.offload(module, parameter="weight")(torch.arange(50)), weight)


def test_bare_tensor_of_a_module_is_refused(embedding: nn.Embedding) -> None:
    assert "held by weight of Embedding; pass that module" in refusal(embedding.weight)


@pytest.mark.parametrize(
    "alias",
    [
        lambda weight: weight.data,
        lambda weight: weight.detach(),
        lambda weight: weight.detach()[3:5],
        lambda weight: weight.view(-1),
        lambda weight: weight.untyped_storage(),
        lambda weight: torch.utils.dlpack.to_dlpack(weight.detach()),
        torch.utils.dlpack.to_dlpack,
        lambda weight: (weight * 2).sum(),
        lambda weight: weight.detach().numpy(),
        lambda weight: memoryview(weight.detach().numpy()),
        lambda weight: (weight.view(-1) ** 2).sum(),
    ],
    ids=[
        "data",
        "detached",
        "rows",
        "view",
        "storage",
        "dlpack",
        "dlpack_itself",
        "autograd_itself",
        "numpy",
        "memoryview",
        "autograd",
    ],
)
def test_table_that_is_held_elsewhere_is_refused_and_left_alone(embedding: nn.Embedding, alias: object) -> None:
    before, address = embedding.weight.detach().clone(), embedding.weight.data_ptr()
    kept = alias(embedding.weight)
    assert "held by" in refusal(embedding)
    assert embedding.weight.data_ptr() == address
    assert torch.equal(embedding.weight, before)
    del kept
    assert torch.equal(ftw.offload(embedding).table, before)


def test_optimizer_of_the_parameter_sees_the_host_copy(embedding: nn.Embedding) -> None:
    """It holds the parameter itself, which has no gradient and never gets one."""
    optimizer = torch.optim.Adam(embedding.parameters())
    original = storage_of(embedding.weight)
    host = ftw.offload(embedding)
    assert original.expired()
    assert optimizer.param_groups[0]["params"][0].data_ptr() == host.table.data_ptr()


def test_what_is_held_weakly_is_no_obstacle(embedding: nn.Embedding) -> None:
    seen = weakref.ref(embedding.weight)
    ftw.offload(embedding)
    assert seen() is embedding.weight


def test_copies_are_no_obstacle(embedding: nn.Embedding) -> None:
    import copy

    copied = copy.deepcopy(embedding)
    ftw.offload(embedding)
    assert torch.equal(copied.weight, embedding.weight)


def test_garbage_is_no_obstacle(embedding: nn.Embedding) -> None:
    gc.disable()
    try:
        cycle: list[object] = [embedding.weight.untyped_storage()]
        cycle.append(cycle)
        del cycle
        ftw.offload(embedding)
    finally:
        gc.enable()


def test_offloading_twice_is_refused(embedding: nn.Embedding) -> None:
    host = ftw.offload(embedding)
    assert "is also held by another tensor [600]" in refusal(embedding)
    host.close()
    again = ftw.offload(embedding)
    assert torch.equal(again.table, embedding.weight)


# What is no plain lookup, or no table.


def test_module_with_max_norm_is_refused() -> None:
    assert "max_norm=1.0" in refusal(nn.Embedding(5, 3, max_norm=1.0))


def test_replaced_forward_is_refused(embedding: nn.Embedding) -> None:
    embedding.forward = lambda ids: F.embedding(ids, embedding.weight) * 2
    assert "has been replaced" in refusal(embedding)


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_module_with_hooks_is_refused(embedding: nn.Embedding, register: str) -> None:
    handle = getattr(embedding, register)(lambda *_: None)
    assert "has hooks" in refusal(embedding)
    handle.remove()
    ftw.offload(embedding)


def test_parametrized_module_is_refused(embedding: nn.Embedding) -> None:
    nn.utils.parametrize.register_parametrization(embedding, "weight", nn.Identity())
    assert "parametrizations" in refusal(embedding)


def test_missing_parameter_is_refused(embedding: nn.Embedding) -> None:
    assert "Embedding has no 'qweight', it has weight" in refusal(embedding, parameter="qweight")


class Computed(torch.Tensor):
    """As torchao's quantised tensors: a wrapper that computes each operation."""

    @classmethod
    def __torch_dispatch__(
        cls, function: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        raise AssertionError("nothing may be computed")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(4), r"found torch.strided [4], contiguous"),
        (torch.zeros(2, 3, 4), "found torch.strided [2, 3, 4]"),
        (torch.zeros(4, 4).T[:, :3], "contiguous [rows, columns]"),
        (torch.zeros(4, 4, device="meta"), "lazy or meta"),
        (torch.eye(4).to_sparse(), "found torch.sparse_coo [4, 4]"),
        (torch.zeros(4, 4, dtype=torch.int8), "found torch.int8, a floating-point dtype is needed"),
        (torch.zeros(4, 4, dtype=torch.uint8), "or uint8 with ggml_type"),
        (torch.zeros(4, 4, dtype=torch.complex64), "found torch.complex64"),
        (torch.zeros(16).view(4, 4), "is a view of another tensor"),
        (nn.parameter.UninitializedParameter(), "lazy or meta"),
        (torch.Tensor._make_wrapper_subclass(Computed, (4, 4)), "found a Computed that computes its values"),
        (torch.zeros(4, 4, requires_grad=True) * 2, "takes part in training"),
    ],
    ids="one_dimension three_dimensions strides meta sparse int8 uint8 complex view lazy subclass computed".split(),
)
def test_tensor_that_is_no_table_is_refused(tensor: torch.Tensor, words: str) -> None:
    assert words in refusal(tensor)


def test_parameter_with_a_gradient_is_refused(embedding: nn.Embedding) -> None:
    embedding(torch.tensor([1])).sum().backward()
    assert "takes part in training" in refusal(embedding)


def test_packed_table_of_another_dtype_is_refused() -> None:
    assert "torch.uint8 is needed" in refusal(torch.zeros(4, 144), ggml_type="Q4_K")
    with pytest.raises(ftw.LookupArgumentError, match="whole blocks"):
        ftw.offload(torch.zeros(4, 143, dtype=torch.uint8), ggml_type="Q4_K")


def test_wrong_arguments(embedding: nn.Embedding) -> None:
    with pytest.raises(TypeError, match="target is a list"):
        ftw.offload([1])
    with pytest.raises(ValueError, match="pass the module that holds it"):
        ftw.offload(torch.zeros(3, 3), parameter="weight")
    with pytest.raises(ftw.DeviceError):
        ftw.offload(embedding, device="cuda:99")
    address = embedding.weight.data_ptr()
    with pytest.raises(ftw.LookupArgumentError, match="dtype"):
        ftw.offload(embedding, dtype=torch.int8)
    assert embedding.weight.data_ptr() == address


def test_failure_while_copying_leaves_everything_as_it_was(
    embedding: nn.Embedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftw.pinned import PinnedBuffer

    closed: list[PinnedBuffer] = []
    close = PinnedBuffer.close
    monkeypatch.setattr(PinnedBuffer, "close", lambda buffer: (closed.append(buffer), close(buffer))[1])

    def refuse(buffer: PinnedBuffer, device: torch.device) -> None:
        raise ftw.PinError("refused")

    monkeypatch.setattr(PinnedBuffer, "pin", refuse)
    address, before = embedding.weight.data_ptr(), embedding.weight.detach().clone()
    with pytest.raises(ftw.PinError):
        ftw.offload(embedding)
    assert len(closed) == 1
    assert embedding.weight.data_ptr() == address
    assert torch.equal(embedding.weight, before)


@pytest.mark.parametrize(
    ("limit", "limits", "words"),
    [
        (4095, HostLimits(None, None, None, is_wsl=False), "1 B more than max_pinned_bytes"),
        (None, HostLimits(4095, None, None, is_wsl=False), "1 B more than the 4.00 KiB of host memory"),
        ("1GiB", HostLimits(0, 4095, None, is_wsl=False), "memory cgroup's limit"),
    ],
    ids=["limit", "host", "cgroup"],
)
def test_table_that_the_host_has_no_room_for_stays(
    embedding: nn.Embedding, monkeypatch: pytest.MonkeyPatch, limit: int | str | None, limits: HostLimits, words: str
) -> None:
    monkeypatch.setattr("ftw.pinned.budget.read_host_limits", lambda: limits)
    monkeypatch.setattr("ftw.offloading.offloader.PinnedBuffer", lambda *args, **options: pytest.fail("took memory"))
    address = embedding.weight.data_ptr()
    limit = limit + count_pinned_bytes() if isinstance(limit, int) else limit
    with pytest.raises(ftw.PinError, match=rf"^offload: wte \(4.00 KiB\): 4.00 KiB to page-lock .*{words}.*no offload"):
        ftw.offload(embedding, name="wte", max_pinned_bytes=limit)
    assert embedding.weight.data_ptr() == address


def test_limit_that_the_table_fits_into_is_allowed(embedding: nn.Embedding) -> None:
    before = embedding.weight.detach().clone()
    limit = 4096 + count_pinned_bytes()
    assert torch.equal(ftw.offload(embedding, max_pinned_bytes=limit).table, before)
    with pytest.raises(ValueError, match="max_pinned_bytes"):
        ftw.offload(embedding, max_pinned_bytes="lots")


# Vocab-parallel embeddings.


@pytest.mark.parametrize("kind", [VocabParallelEmbedding, SglangVocabParallelEmbedding], ids=["vllm", "sglang"])
@pytest.mark.parametrize(("vocab_size", "tp_size"), [(1010, 1), (1010, 2), (1024, 4), (65, 4)], ids=str)
def test_shards_of_a_vocabulary_sum_up_to_the_table(kind: type, vocab_size: int, tp_size: int) -> None:
    """Of 65 ids in 4 shards of 32 rows, the last shard is all padding."""
    table = torch.randn(vocab_size, 8).bfloat16()
    ids = torch.tensor([0, 1, 31, 32, 64, vocab_size - 1, vocab_size, vocab_size + 500, -1])
    ids = torch.cat([ids, torch.randint(0, vocab_size, (50,))])
    total = torch.zeros(len(ids), 8, dtype=torch.bfloat16)
    for rank in range(tp_size):
        module = kind(vocab_size, 8, tp_rank=rank, tp_size=tp_size).load(table)
        own = module(ids)
        indices, rows = module.shard_indices, module.weight.detach().clone()
        host = ftw.offload(module)
        length = indices.org_vocab_end_index - indices.org_vocab_start_index
        assert host.vocab_range == (indices.org_vocab_start_index, length)
        assert host.num_embeddings == length
        assert torch.equal(host(ids), own)
        assert torch.equal(module.weight.view(torch.int16), rows.view(torch.int16))  # with its padding
        total += host(ids)
    is_inside = (ids >= 0) & (ids < vocab_size)
    assert torch.equal(total, table[ids.clamp(0, vocab_size - 1)] * is_inside[:, None])


def test_dtype_of_sglangs_rows_is_kept() -> None:
    module = SglangVocabParallelEmbedding(100, 8, output_dtype=torch.float32).load(torch.randn(100, 8))
    before = module(torch.arange(100))
    host = ftw.offload(module)
    assert host.dtype == torch.float32
    assert torch.equal(host(torch.arange(100)), before)


def test_shard_with_added_ids_is_refused() -> None:
    module = VocabParallelEmbedding(1026, 8, org_num_embeddings=1010)
    assert "16 ids were added to the model's 1010 (LoRA)" in refusal(module)
    assert "LoRA" in refusal(module, parameter="weight")


def test_quantised_shard_is_refused() -> None:
    module = VocabParallelEmbedding(100, 8)
    module.quant_method = Fp8EmbeddingMethod()
    assert "quantised (Fp8EmbeddingMethod)" in refusal(module)


def test_lm_head_is_no_embedding() -> None:
    assert "found a ParallelLMHead" in refusal(ParallelLMHead(100, 8))


def test_tied_head_of_vllm_is_refused() -> None:
    model = nn.ModuleDict({"embed_tokens": VocabParallelEmbedding(100, 8), "lm_head": ParallelLMHead(100, 8)})
    model["lm_head"].tie_weights(model["embed_tokens"])
    assert "held by lm_head.weight of ModuleDict" in refusal(model["embed_tokens"])


def test_tied_head_of_sglang_is_refused() -> None:
    embedding = SglangVocabParallelEmbedding(100, 8)
    model = nn.ModuleDict({"embed_tokens": embedding, "lm_head": embedding})
    assert "embed_tokens of ModuleDict and lm_head of ModuleDict" in refusal(model["embed_tokens"])


def test_packed_shard() -> None:
    module = VocabParallelEmbedding(100, 512, tp_rank=1, tp_size=2)
    table = random_table("Q8_0", 64, 512)
    rows = expected(table, torch.arange(36), "Q8_0", torch.bfloat16)
    del module.weight
    module.qweight = nn.Parameter(table, requires_grad=False)
    del table
    host = ftw.offload(module, parameter="qweight", ggml_type="Q8_0")
    assert host.vocab_range == (64, 36)
    assert_equal_rows(host(torch.arange(64, 100)), rows)
    assert not host(torch.tensor([0, 63, 100, 127])).count_nonzero()


def test_offloaded_table_has_hot_rows_and_a_scale() -> None:
    embedding = nn.Embedding(50, 8, dtype=torch.bfloat16).requires_grad_(False)
    wanted = embedding.weight[[3, 3, 7]] * torch.tensor(8**0.5, dtype=torch.bfloat16)
    with contextlib.closing(ftw.offload(embedding, hot_bytes=64, scale=8**0.5)) as host:
        assert host.hot is not None
        assert host.hot.rows.shape == (4, 8)
        for _ in range(2):
            assert torch.equal(host(torch.tensor([3, 3, 7])), wanted)
            host.update_hot_rows()
        assert host.hot_ids().tolist() == [3, 7]


def test_refused_options_leave_the_module_as_it_was() -> None:
    embedding = nn.Embedding(50, 8).requires_grad_(False)
    before = embedding.weight.data_ptr()
    for options in ({"hot_bytes": "lots"}, {"scale": "x"}):
        with pytest.raises(ftw.LookupArgumentError):
            ftw.offload(embedding, **options)  # type: ignore[arg-type]
    assert embedding.weight.data_ptr() == before


@pytest.mark.parametrize("first", ["embed_tokens", "lm_head"])
def test_embedding_that_is_the_lm_head_too_is_named_as_the_embedding(first: str) -> None:
    class Inner(nn.Module):
        def __init__(self, embedding: nn.Module) -> None:
            super().__init__()
            self.embed_tokens = embedding

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            embedding = nn.Embedding(8, 4)
            if first == "lm_head":
                self.lm_head = embedding
            self.model = Inner(embedding)
            self.lm_head = embedding

    tied = Tied()
    with pytest.raises(ftw.NotEligibleError, match=r"^model\.embed_tokens\.weight: memory: is also held by"):
        ftw.offload(tied.lm_head)

"""The operator that compilers see: its contract, and that compiled models give the rows that eager ones give."""

import copy
import gc
import re
from collections.abc import Iterator

import pytest
import torch
from packed_tables import assert_equal_rows, random_table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import ftw
from ftw.lookup.embedding import HostEmbedding

TABLE = torch.randn(50, 12, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
IDS = torch.tensor([[3, 49, 0], [50, -1, 3]])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """An embedding inside of a model that computes before and after it."""

    def __init__(self, embedding: HostEmbedding, layer: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = embedding
        self.layer = layer
        width = embedding.embedding_dim // (embedding.num_slices or 1)
        self.head = nn.Linear(width, 5, dtype=embedding.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids + 0, layer=self.layer)).relu()


def compiled(model: nn.Module, backend: str = "aot_eager", **options: object) -> nn.Module:
    found = torch.compile(model, backend=backend, fullgraph=True, **options)
    assert isinstance(found, nn.Module)
    return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("columns", [(0, 12), (4, 4)], ids=str)
def test_operator_keeps_its_contract(columns: tuple[int, int], dtype: torch.dtype) -> None:
    embedding = HostEmbedding(TABLE, num_slices=3)
    arguments = (IDS.to(dtype), embedding._storage.handle, *columns, torch.bfloat16)
    torch.library.opcheck(torch.ops.ftw.lookup.default, arguments)


@pytest.mark.parametrize("dynamic", [None, True, False], ids=str)
def test_compiled_model_equals_the_eager_one(dynamic: bool | None) -> None:
    model = Model(HostEmbedding(TABLE))
    fast = compiled(model, dynamic=dynamic)
    for ids in (IDS, IDS[:1], IDS.T, IDS.int(), IDS[0, 0], IDS[:0]):
        assert torch.equal(fast(ids), model(ids))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"scale": 3.4},
        {"vocab_range": (3, 20)},
        {"hot_rows": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_compiled_model_takes_every_kind_of_table(options: dict[str, object]) -> None:
    model = Model(HostEmbedding(TABLE, **options))
    assert torch.equal(compiled(model)(IDS), model(IDS))


def test_compiled_model_takes_packed_tables() -> None:
    model = Model(HostEmbedding(random_table("Q8_0", 20, 64), ggml_type="Q8_0"))
    assert_equal_rows(compiled(model)(IDS), model(IDS))


def test_layers_and_tables_are_told_apart() -> None:
    tables = [TABLE, TABLE + 1]
    models = [Model(HostEmbedding(table, num_slices=3), layer) for table in tables for layer in range(3)]
    whole = nn.ModuleList(models)

    def run(ids: torch.Tensor) -> list[torch.Tensor]:
        return [model(ids) for model in whole]

    found = torch.compile(run, backend="aot_eager", fullgraph=True)(IDS)
    assert all(torch.equal(one, other) for one, other in zip(found, run(IDS), strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_layers_need_no_graph_each(backend: str) -> None:
    embedding = HostEmbedding(torch.randn(50, 64), num_slices=32)
    torch._dynamo.utils.counters.clear()
    run = torch.compile(lambda ids, layer: embedding(ids, layer=layer) * 2, backend=backend, fullgraph=True)
    for layer in range(32):
        assert torch.equal(run(IDS, layer), embedding(IDS, layer=layer) * 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("is_strict", [False, True], ids=["loose", "strict"])
def test_export_is_refused(is_strict: bool) -> None:
    """An exported program would be loaded where its table's number is another one's, or nobody's."""
    words = "wte: export: found torch.export, which cannot take the table along"
    with pytest.raises(Exception, match=words) as caught:
        torch.export.export(Model(HostEmbedding(TABLE, name="wte")), (IDS,), strict=is_strict)
    assert is_strict or isinstance(caught.value, ftw.LookupArgumentError)


@pytest.mark.parametrize("columns", [(4, 12), (0, 13), (-1, 4)], ids=str)
def test_columns_outside_of_the_row_are_refused(columns: tuple[int, int]) -> None:
    embedding = HostEmbedding(TABLE)
    with pytest.raises(ftw.LookupArgumentError, match=r"columns: found"):
        torch.ops.ftw.lookup(IDS, embedding._storage.handle, *columns, torch.bfloat16)


def test_other_dtype_than_the_rows_is_refused() -> None:
    embedding = HostEmbedding(TABLE)
    with pytest.raises(ftw.LookupArgumentError, match=r"dtype: found torch.float32, .* torch.bfloat16"):
        torch.ops.ftw.lookup(IDS, embedding._storage.handle, 0, 12, torch.float32)


def test_fake_and_meta_ids_give_rows_like_them() -> None:
    embedding = HostEmbedding(TABLE, num_slices=3)
    for where in (FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta")):
        with where:
            ids = torch.empty(3, dtype=torch.int64)
            for rows in (embedding(ids, layer=1), embedding(ids, layer=1, out=embedding(ids, layer=1))):
                assert (rows.shape, rows.dtype, rows.device) == ((3, 4), torch.bfloat16, ids.device)
    fake = FakeTensorMode().from_tensor(IDS)
    assert embedding(fake).shape == (2, 3, 12)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_lookup_is_one_step(mode: str) -> None:
    embedding = HostEmbedding(TABLE)
    traced = make_fx(lambda ids: embedding(ids) + 1, tracing_mode=mode)(IDS)
    assert "torch.ops.ftw.lookup" in traced.code
    assert torch.equal(traced(IDS.flip(0)), embedding(IDS.flip(0)) + 1)


def test_mapped_lookup_gives_equal_rows() -> None:
    embedding = HostEmbedding(TABLE)
    assert torch.equal(torch.vmap(embedding)(IDS), embedding(IDS))
    assert torch.equal(torch.vmap(embedding, in_dims=1)(IDS), embedding(IDS.T))
    assert torch.equal(torch.vmap(torch.vmap(embedding))(IDS), embedding(IDS))
    assert torch.equal(torch.func.functionalize(embedding)(IDS), embedding(IDS))


def test_subclasses_of_tensors_are_looked_up() -> None:
    class Own(torch.Tensor):
        pass

    embedding = HostEmbedding(TABLE)
    for ids in (IDS.as_subclass(Own), nn.Parameter(IDS, requires_grad=False)):
        assert torch.equal(embedding(ids).as_subclass(torch.Tensor), embedding(IDS))


def test_compiled_code_fills_out() -> None:
    embedding = HostEmbedding(TABLE)
    out = torch.empty(2, 3, 12, dtype=torch.bfloat16)
    found = torch.compile(lambda ids, out: embedding(ids, out=out) + 1, backend="aot_eager", fullgraph=True)(IDS, out)
    assert torch.equal(out, embedding(IDS))
    assert torch.equal(found, out + 1)


def test_table_is_no_input_of_the_graph() -> None:
    seen: list[torch.Tensor] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen.extend(value for value in inputs if isinstance(value, torch.Tensor))
        seen.extend(graph.parameters())
        seen.extend(graph.buffers())
        return graph.forward

    model = Model(HostEmbedding(TABLE, hot_rows=4))
    torch.compile(model, backend=backend, fullgraph=True)(IDS)
    assert seen
    assert TABLE.shape not in {tensor.shape for tensor in seen}


def test_compiled_lookups_are_counted() -> None:
    embedding = HostEmbedding(TABLE, hot_rows=2)
    fast = compiled(Model(embedding))
    fast(IDS)
    embedding.update_hot_rows()
    assert 3 in embedding.hot_ids()
    assert torch.equal(fast(IDS), Model(embedding)(IDS))


def test_copy_is_found_after_the_original_is_gone() -> None:
    model = Model(HostEmbedding(TABLE))
    copied = copy.deepcopy(model)
    wanted = model(IDS)
    del model
    gc.collect()
    assert torch.equal(compiled(copied)(IDS), wanted)


def test_table_that_is_gone_is_refused() -> None:
    handle = HostEmbedding(TABLE)._storage.handle
    gc.collect()
    with pytest.raises(ftw.ClosedError, match=re.escape(f"{handle}: table: is not in this process")):
        torch.ops.ftw.lookup(IDS, handle, 0, 12, torch.bfloat16)


def test_chosen_handle_is_the_constant_that_compilers_see() -> None:
    embedding = HostEmbedding(TABLE, name="model.embed_tokens.weight", handle="model.embed_tokens")
    graph = make_fx(embedding)(IDS)
    handles = [node.args[1] for node in graph.graph.nodes if node.op == "call_function"]
    assert handles == [embedding.handle] == ["model.embed_tokens"]


def test_handle_of_another_open_table_is_refused_and_free_after_its_close() -> None:
    first = HostEmbedding(TABLE, name="first", handle="same")
    with pytest.raises(ftw.LookupArgumentError, match="second: handle: found 'same', which another table has"):
        HostEmbedding(TABLE, name="second", handle="same")
    first.close()
    second = HostEmbedding(TABLE * 2, name="second", handle="same")
    assert torch.equal(torch.ops.ftw.lookup(IDS[:1], "same", 0, 12, torch.bfloat16), second(IDS[:1]))


@pytest.mark.parametrize("handle", ["", "#1 table", 7], ids=["empty", "own", "number"])
def test_handle_that_is_not_allowed_is_refused(handle: object) -> None:
    with pytest.raises(ftw.LookupArgumentError, match="t: handle: found"):
        HostEmbedding(TABLE, name="t", handle=handle)  # type: ignore[arg-type]


def test_handle_of_no_table_is_refused_by_its_name() -> None:
    with pytest.raises(ftw.ClosedError, match=r"model\.embed_tokens: table: is not in this process"):
        torch.ops.ftw.lookup(IDS, "model.embed_tokens", 0, 12, torch.bfloat16)


def test_closed_table_is_refused_by_compiled_code() -> None:
    model = Model(HostEmbedding(TABLE))
    fast = compiled(model)
    fast(IDS)
    model.embedding.close()
    with pytest.raises(ftw.ClosedError, match="its memory has been given back"):
        fast(IDS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor_gives_equal_rows() -> None:
    embedding = HostEmbedding(TABLE, scale=2.5, num_slices=3)

    def run(ids: torch.Tensor) -> torch.Tensor:
        return embedding(ids + 1, layer=1).float() * 2 + embedding(ids)[..., :4]

    assert torch.equal(torch.compile(run, fullgraph=True)(IDS), run(IDS))

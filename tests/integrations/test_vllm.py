"""The plug-in for vLLM, on a CPU and against fakes of vLLM's classes."""

import contextlib
import copy
import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import FakeVllm, installed
from tiny_vllm_model import COLUMNS, ROWS, PlainModel, TinyModel, make_weights, write_model

import ftw
from ftw.integrations.vllm import register

IDS = torch.tensor([0, 99, 7, 7, 42])
HOST = {"ftw": {"embed": "host"}}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    gc.collect()  # the tables of the last test, whose handles are those of this one
    with contextlib.contextmanager(installed)(monkeypatch) as fake:
        fake.DefaultModelLoader.weights = make_weights()
        fake.BaseModelLoader.make_model = lambda config, prefix: TinyModel(fake)
        register()
        yield fake


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="vllm.ftw")
    return caplog


def asked(vllm: FakeVllm, source: Path, **settings: object) -> SimpleNamespace:
    config = vllm.config(source)
    config.additional_config["ftw"] = {"embed": "host", **settings}
    return config


def wanted(ids: torch.Tensor = IDS, seed: int = 0) -> torch.Tensor:
    return make_weights(seed)["model.embed_tokens.weight"][ids]


def is_on_host(layer: Any) -> bool:
    return type(layer.quant_method).__name__ == "HostEmbeddingMethod"


def test_nothing_is_different_unless_it_was_asked_for(vllm: FakeVllm, source: Path) -> None:
    config = vllm.config(source)
    model = vllm.load(config)
    layer = model.model.embed_tokens
    assert type(layer.quant_method) is vllm.UnquantizedEmbeddingMethod
    assert layer.weight.shape == (128, COLUMNS)
    assert torch.equal(model(IDS), wanted())
    assert config.additional_config == {}
    assert vllm.op_registry_oot == {}
    assert not [name for name in sys.modules if name.startswith("ftw.integrations.vllm.model_load")]


def test_modules_of_lookups_are_not_imported_until_it_is_asked_for() -> None:
    import subprocess

    script = (
        "import sys; from ftw.integrations.vllm import register; register(); register()\n"
        "heavy = {'torch', 'vllm', 'numpy', 'ftw.lookup', 'ftw.checkpoint'} & set(sys.modules)\n"
        "print(sorted(heavy), [type(finder).__name__ for finder in sys.meta_path].count('AfterImport'))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] 1"


@pytest.mark.parametrize("how", ["environment", "additional config", "load format"])
def test_table_is_in_host_memory_and_no_row_is_a_parameter(
    vllm: FakeVllm, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    config, load_format = vllm.config(source), "auto"
    if how == "environment":
        monkeypatch.setenv("FTW_EMBED", "host")
    elif how == "additional config":
        config.additional_config = copy.deepcopy(HOST)
    else:
        ftw.convert(source, tmp_path / "out")
        config, load_format = vllm.config(tmp_path / "out"), "ftw"
    model = vllm.load(config, load_format)
    layer = model.model.embed_tokens
    assert type(layer) is vllm.VocabParallelEmbedding
    assert layer.weight.shape == (0, COLUMNS)
    assert is_on_host(layer)
    assert not is_on_host(model.lm_head)
    assert torch.equal(model(IDS), wanted())
    assert torch.equal(model.lm_head.weight[:ROWS], make_weights()["lm_head.weight"])


def test_registered_layer_is_gone_after_the_model_is_made(vllm: FakeVllm, source: Path) -> None:
    vllm.load(asked(vllm, source))
    assert vllm.op_registry_oot == {}
    assert type(vllm.VocabParallelEmbedding(ROWS, COLUMNS).quant_method) is vllm.UnquantizedEmbeddingMethod


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_has_its_own_rows_and_is_given_ids_of_its_shard(vllm: FakeVllm, source: Path, rank: int) -> None:
    vllm.world.tp_rank, vllm.world.tp_size = rank, 2
    model = vllm.load(asked(vllm, source))
    rows = model(IDS)
    own = (64 * rank <= IDS) & (64 * (rank + 1) > IDS)
    assert torch.equal(rows, wanted() * own.unsqueeze(-1))
    assert vllm.world.sums[-1] is rows
    table = model.model.embed_tokens.quant_method.rows.table
    assert table.shape == (64, COLUMNS)
    assert torch.equal(table[36:], torch.zeros_like(table[36:])) == bool(rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_reads_its_own_rows_out_of_an_ftw_folder(vllm: FakeVllm, source: Path, tmp_path: Path, rank: int) -> None:
    ftw.convert(source, tmp_path / "out")
    vllm.world.tp_rank, vllm.world.tp_size = rank, 2
    model = vllm.load(asked(vllm, tmp_path / "out"), "ftw")
    own = (64 * rank <= IDS) & (64 * (rank + 1) > IDS)
    assert torch.equal(model(IDS), wanted() * own.unsqueeze(-1))


def test_table_of_another_dtype_is_cast_from_an_ftw_folder(vllm: FakeVllm, tmp_path: Path) -> None:
    ftw.convert(write_model(tmp_path / "model", dtype=torch.float32), tmp_path / "out")
    model = vllm.load(asked(vllm, tmp_path / "out"), "ftw")
    assert torch.equal(model(IDS), wanted())


def test_weight_that_an_ftw_folder_lacks_is_named(vllm: FakeVllm, source: Path, tmp_path: Path) -> None:
    ftw.convert(source, tmp_path / "out")

    class Larger(TinyModel):
        def __init__(self, classes: Any) -> None:
            super().__init__(classes)
            self.more = torch.nn.Parameter(torch.zeros(1))

    vllm.BaseModelLoader.make_model = lambda config, prefix: Larger(vllm)
    with pytest.raises(ftw.CheckpointError, match=r"out: more: 1 weights of Larger are not in the checkpoint"):
        vllm.load(asked(vllm, tmp_path / "out"), "ftw")


def test_load_format_ftw_refuses_other_formats(vllm: FakeVllm, source: Path) -> None:
    with pytest.raises(ftw.CheckpointError, match="format: found safetensors, which vLLM loads by itself"):
        vllm.load(asked(vllm, source), "ftw")


def test_ftw_folder_is_loaded_with_its_table_on_the_gpu(
    vllm: FakeVllm, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ftw.convert(source, tmp_path / "out")
    monkeypatch.setenv("FTW_EMBED", "gpu")
    model = vllm.load(vllm.config(tmp_path / "out"), "ftw")
    assert not is_on_host(model.model.embed_tokens)
    assert torch.equal(model(IDS), wanted())


def test_state_dict_has_the_table(vllm: FakeVllm, source: Path) -> None:
    model = vllm.load(asked(vllm, source))
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"][:ROWS], wanted(torch.arange(ROWS)))


def test_reload_gives_the_new_rows_and_makes_no_row_on_the_gpu(vllm: FakeVllm, source: Path) -> None:
    model = vllm.load(asked(vllm, source))
    table = model.model.embed_tokens.quant_method.rows.table.data_ptr()
    made = vllm.reload(model, iter(make_weights(1).items()))
    assert made == 128 * COLUMNS  # of the LM head
    assert torch.equal(model(IDS), wanted(seed=1))
    assert model.model.embed_tokens.quant_method.rows.table.data_ptr() == table
    assert model.model.embed_tokens.weight.shape == (0, COLUMNS)


def test_ftw_folder_is_reloaded(vllm: FakeVllm, source: Path, tmp_path: Path) -> None:
    ftw.convert(source, tmp_path / "out")
    ftw.convert(write_model(tmp_path / "new", seed=1), tmp_path / "new.ftw")
    config = asked(vllm, tmp_path / "out")
    model = vllm.load(config, "ftw")
    config.model_config.model = str(tmp_path / "new.ftw")
    loader = vllm.get_model_loader(SimpleNamespace(load_format="ftw", model_loader_extra_config={}))
    vllm.reload(model, loader.get_all_weights(config.model_config, model))
    assert torch.equal(model(IDS), wanted(seed=1))


def test_hot_rows_are_the_new_ones_after_a_reload(vllm: FakeVllm, source: Path) -> None:
    model = vllm.load(asked(vllm, source, hot_bytes=64))
    rows = model.model.embed_tokens.quant_method.rows
    rows.set_hot_rows([7, 9])
    vllm.reload(model, iter(make_weights(1).items()))
    assert torch.equal(rows.hot.rows[rows.hot.slots[[7, 9]].long()], wanted(torch.tensor([7, 9]), seed=1))


def test_cache_of_compiled_models_gets_a_key_of_its_own(vllm: FakeVllm, source: Path) -> None:
    config = asked(vllm, source)
    model = vllm.load(config)
    key = config.additional_config["ftw_tables"]
    assert key == {"release": ftw.__version__, "handles": ["model.embed_tokens"]}
    assert model.model.embed_tokens.quant_method.rows.handle == "model.embed_tokens"


def test_second_engine_of_a_process_has_another_handle(vllm: FakeVllm, source: Path) -> None:
    first, config = vllm.load(asked(vllm, source)), asked(vllm, source)
    second = vllm.load(config)
    assert config.additional_config["ftw_tables"]["handles"] == ["model.embed_tokens#2"]
    assert torch.equal(first(IDS), second(IDS))


def test_compiled_model_gives_the_same_rows(vllm: FakeVllm, source: Path) -> None:
    model = vllm.load(asked(vllm, source))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(IDS), wanted())
    assert torch.equal(compiled(IDS[:2]), wanted(IDS[:2]))
    torch._dynamo.reset()


def test_lookups_are_warmed_up_for_the_largest_batch(
    vllm: FakeVllm, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        ftw.HostEmbedding, "warm_up", lambda self, max_ids, dtypes: calls.append((self.name, max_ids, dtypes))
    )
    vllm.load(asked(vllm, source))
    assert calls == [("model.embed_tokens", 64, (torch.int64,))]


@pytest.mark.parametrize("tie", ["module", "method", "weight"])
def test_tied_model_is_refused_by_its_embeddings_name(vllm: FakeVllm, source: Path, tie: str) -> None:
    vllm.BaseModelLoader.make_model = lambda config, prefix: TinyModel(vllm, tie)
    with pytest.raises(ftw.NotEligibleError) as refused:
        vllm.load(asked(vllm, source))
    head = "lm_head reads the whole table at every step"
    assert str(refused.value) == (
        f"{source}: model.embed_tokens: tied: {head}; embed 'gpu' or 'auto' leaves it on the GPU"
    )


@pytest.mark.parametrize("tie", ["module", "method", "weight"])
def test_auto_leaves_a_tied_table_on_the_gpu_and_says_so(
    vllm: FakeVllm, source: Path, log: pytest.LogCaptureFixture, tie: str
) -> None:
    vllm.BaseModelLoader.make_model = lambda config, prefix: TinyModel(vllm, tie)
    config = asked(vllm, source, embed="auto")
    model = vllm.load(config)
    assert not is_on_host(model.model.embed_tokens)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "model.embed_tokens: tied: lm_head reads" in log.text
    assert "ftw_tables" not in config.additional_config
    new = {name: tensor for name, tensor in make_weights(1).items() if "embed" in name}
    vllm.reload(model, iter(new.items()))
    assert torch.equal(model(IDS), wanted(seed=1))
    assert "weight" in model.model.embed_tokens.state_dict()


def test_verdict_refuses_before_anything_is_made(vllm: FakeVllm, tmp_path: Path) -> None:
    made: list[object] = []
    vllm.BaseModelLoader.make_model = lambda config, prefix: made.append(config)
    source = write_model(tmp_path / "tied", tied=True)
    with pytest.raises(ftw.NotEligibleError, match=r"tied: model\.embed_tokens\.weight: .*embed='gpu' or 'auto'"):
        vllm.load(asked(vllm, source))
    assert made == []


def test_auto_says_what_the_verdict_says(vllm: FakeVllm, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    vllm.BaseModelLoader.make_model = lambda config, prefix: TinyModel(vllm, "module")
    model = vllm.load(asked(vllm, write_model(tmp_path / "tied", tied=True), embed="auto"))
    assert not is_on_host(model.model.embed_tokens)
    assert "the token embedding stays on the GPU" in log.text


def test_source_that_is_none_is_an_error_for_host_and_a_line_for_auto(
    vllm: FakeVllm, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ftw.SourceNotFoundError):
        vllm.load(asked(vllm, tmp_path / "none"))
    vllm.load(asked(vllm, tmp_path / "none", embed="auto"))
    assert "all tables stay on the GPU" in log.text


def test_quantised_rows_are_refused_and_other_layers_keep_their_methods(
    vllm: FakeVllm, source: Path, log: pytest.LogCaptureFixture
) -> None:
    class PackedMethod(vllm.UnquantizedEmbeddingMethod):  # type: ignore[name-defined,misc]
        pass

    quant = SimpleNamespace(get_quant_method=lambda layer, prefix: PackedMethod())
    vllm.BaseModelLoader.make_model = lambda config, prefix: TinyModel(vllm, quant_config=quant)
    with pytest.raises(ftw.NotEligibleError, match=r"model\.embed_tokens: its rows are quantised \(PackedMethod\)"):
        vllm.load(asked(vllm, source))
    model = vllm.load(asked(vllm, source, embed="auto"))
    assert type(model.model.embed_tokens.quant_method) is PackedMethod
    assert "its rows are quantised" in log.text


@pytest.mark.parametrize("answer", ["nothing", "plain"])
def test_plain_table_of_a_quantised_model_moves(vllm: FakeVllm, source: Path, answer: str) -> None:
    method = vllm.UnquantizedEmbeddingMethod() if answer == "plain" else None
    quant = SimpleNamespace(get_quant_method=lambda layer, prefix: method)
    vllm.BaseModelLoader.make_model = lambda config, prefix: TinyModel(vllm, quant_config=quant)
    model = vllm.load(asked(vllm, source))
    assert is_on_host(model.model.embed_tokens)
    assert torch.equal(model(IDS), wanted())


def test_layer_without_a_prefix_is_named_by_its_path(vllm: FakeVllm, source: Path) -> None:
    vllm.BaseModelLoader.make_model = lambda config, prefix: TinyModel(vllm, prefix="")
    model = vllm.load(asked(vllm, source))
    assert model.model.embed_tokens.quant_method.rows.name == "model.embed_tokens"


def test_layers_of_other_shapes_stay(vllm: FakeVllm, source: Path) -> None:
    class WithPositions(TinyModel):
        def __init__(self, classes: Any) -> None:
            super().__init__(classes)
            self.positions = classes.VocabParallelEmbedding(ROWS, COLUMNS * 2, torch.bfloat16)

    vllm.BaseModelLoader.make_model = lambda config, prefix: WithPositions(vllm)
    assert not is_on_host(vllm.load(asked(vllm, source)).positions)


def test_embedding_of_torch_is_offloaded_inside_of_the_loading(
    vllm: FakeVllm, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    weights = make_weights()
    from builders import llama_config, write_checkpoint

    source = write_checkpoint(tmp_path / "m", weights, llama_config(vocab_size=ROWS))
    vllm.BaseModelLoader.make_model = lambda config, prefix: PlainModel()
    config = asked(vllm, source)
    model = vllm.load(config)
    assert isinstance(model.embed_tokens, ftw.HostEmbedding)
    assert torch.equal(model.embed_tokens(IDS), wanted())
    assert config.additional_config["ftw_tables"]["handles"] == ["embed_tokens"]
    assert "reload_weights does not reach it" in log.text


def test_model_without_any_embedding_is_refused(vllm: FakeVllm, source: Path) -> None:
    class Empty(torch.nn.Module):
        def load_weights(self, weights: Any) -> None:
            pass

    vllm.BaseModelLoader.make_model = lambda config, prefix: Empty()
    with pytest.raises(ftw.NotEligibleError, match=r"Empty: has no VocabParallelEmbedding or nn\.Embedding"):
        vllm.load(asked(vllm, source))
    vllm.world.is_first_rank = False
    assert isinstance(vllm.load(asked(vllm, source)), Empty)  # a later stage of a pipeline has none


def test_log_tells_bytes_tokens_and_that_no_row_is_in_vram(
    vllm: FakeVllm, source: Path, log: pytest.LogCaptureFixture
) -> None:
    config = asked(vllm, source)
    spec = SimpleNamespace(num_kv_heads=1, page_size_bytes=16 * 64, block_size=16)
    windowed = SimpleNamespace(num_kv_heads=1, page_size_bytes=16 * 64, block_size=16, sliding_window=8)
    layers = {name: SimpleNamespace(get_kv_cache_spec=lambda config: spec) for name in ("0", "1")}
    layers["2"] = SimpleNamespace(get_kv_cache_spec=lambda config: windowed)
    layers["3"] = SimpleNamespace(get_kv_cache_spec=lambda config: spec, kv_sharing_target_layer_name="1")
    layers["4"] = SimpleNamespace(get_kv_cache_spec=lambda config: None)
    config.compilation_config.static_forward_context = {**layers, "moe": object()}
    vllm.load(config)
    assert [record.getMessage() for record in log.records] == [
        "ftw: model.embed_tokens: 2.00 KiB (2048 bytes) in host memory, none of it in VRAM: "
        "room for 16 more tokens of KV cache"
    ]


def test_log_tells_where_the_kv_cache_has_a_size_of_its_own(
    vllm: FakeVllm, source: Path, log: pytest.LogCaptureFixture
) -> None:
    config = asked(vllm, source)
    config.cache_config.kv_cache_memory_bytes = 1 << 20
    vllm.load(config)
    assert "none of it in VRAM; the KV cache stays as large as kv_cache_memory_bytes says" in log.text


def test_hot_rows_follow_every_64_steps(vllm: FakeVllm, source: Path) -> None:
    model = vllm.load(asked(vllm, source, hot_bytes=64))
    rows = model.model.embed_tokens.quant_method.rows
    assert rows.hot.rows.shape[0] == 4
    for _ in range(3):
        model(IDS)
    worker = vllm.Worker()
    for step in range(64):
        assert rows.hot_ids().tolist() == []
        assert worker.execute_model(step) == step
    assert rows.hot_ids().tolist() == [0, 7, 42, 99]
    assert worker.steps == 64
    rows.close()
    for step in range(64):
        worker.execute_model(step)
    assert worker.steps == 128


def test_second_engine_counts_the_same_steps(vllm: FakeVllm, source: Path) -> None:
    models = [vllm.load(asked(vllm, source, hot_bytes=64)) for _ in range(2)]
    for model in models:
        model(IDS)
    worker = vllm.Worker()
    for step in range(64):
        worker.execute_model(step)
    assert [model.model.embed_tokens.quant_method.rows.hot_ids().tolist() for model in models] == [[0, 7, 42, 99]] * 2


def test_hot_rows_beside_sleep_mode_are_refused(vllm: FakeVllm, source: Path) -> None:
    config = asked(vllm, source, hot_bytes="1KiB")
    config.model_config.enable_sleep_mode = True
    with pytest.raises(ValueError, match="hot_bytes: found together with enable_sleep_mode"):
        vllm.load(config)


def test_loader_with_a_way_of_its_own_is_left_alone(
    vllm: FakeVllm, source: Path, log: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ftw.NotEligibleError, match="load format 'tensorizer': TensorizerLoader makes layers"):
        vllm.load(asked(vllm, source), "tensorizer")
    model = vllm.load(asked(vllm, source, embed="auto"), "tensorizer")
    assert not is_on_host(model.model.embed_tokens)
    assert "the table stays on the GPU" in log.text


def test_model_that_drafts_is_loaded_as_vllm_loads_it(vllm: FakeVllm, source: Path) -> None:
    config = asked(vllm, source)
    config.model_config.runner_type = "draft"
    assert not is_on_host(vllm.load(config).model.embed_tokens)


def test_layer_that_another_plug_in_has_replaced_is_refused(vllm: FakeVllm, source: Path) -> None:
    class Foreign(vllm.VocabParallelEmbedding):  # type: ignore[name-defined,misc]
        pass

    vllm.op_registry_oot["VocabParallelEmbedding"] = Foreign
    with pytest.raises(ftw.FtwError, match="has been replaced by Foreign of another plug-in"):
        vllm.load(asked(vllm, source))
    assert vllm.op_registry_oot == {"VocabParallelEmbedding": Foreign}


def test_additional_config_that_is_no_dictionary_is_refused(
    vllm: FakeVllm, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTW_EMBED", "host")
    config = vllm.config(source)
    config.additional_config = object()
    with pytest.raises(ValueError, match="additional config: found a object"):
        vllm.load(config)


def test_revision_goes_with_a_hub_id_alone(vllm: FakeVllm, source: Path) -> None:
    from ftw.integrations.vllm.model_load import source_of

    assert source_of(SimpleNamespace(model="org/name", revision="v2")) == "org/name@v2"
    assert source_of(SimpleNamespace(model="org/name", revision=None)) == "org/name"
    assert source_of(SimpleNamespace(model=str(source), revision="v2")) == str(source)


def test_layer_read_as_a_head_is_refused(vllm: FakeVllm, source: Path) -> None:
    layer = vllm.load(asked(vllm, source)).model.embed_tokens
    with pytest.raises(ftw.NotEligibleError, match=r"model\.embed_tokens: table: is read as an LM head"):
        layer.quant_method.apply(layer, torch.zeros(1, COLUMNS))


def test_failed_loading_leaves_the_loader_and_the_registry_as_they_were(vllm: FakeVllm, source: Path) -> None:
    def fail(config: Any, prefix: str) -> Any:
        raise RuntimeError("no room")

    vllm.BaseModelLoader.make_model = fail
    with pytest.raises(RuntimeError, match="no room"):
        vllm.load(asked(vllm, source))
    assert vllm.op_registry_oot == {}

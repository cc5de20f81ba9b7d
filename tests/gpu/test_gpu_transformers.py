"""Models of transformers on a GPU with their tables in host memory: the same tokens, in less VRAM.

Greedy tokens differ from run to run on a GPU that others use, even with the table on the GPU, so these tests run alone.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LogitsProcessorList, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers_models import Saved, assert_same_weights, bits_of, logits, random_ids, save

import ftw
from ftw.integrations.transformers import close, load

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

DEVICE = torch.device("cuda", 0)
ROWS, COLUMNS = 131072, 512
TABLE_NBYTES = ROWS * COLUMNS * 2  # 128 MiB of bf16
STEPS = 256
MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Leave no memory of one test to the next."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A Qwen3 of four layers and random weights, whose table and head take most of it."""
    config = Qwen3Config(
        vocab_size=ROWS, hidden_size=COLUMNS, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return Saved(folder, Qwen3ForCausalLM)


def prompts() -> torch.Tensor:
    """Two prompts, one of them padded on the left."""
    ids = torch.randint(1, ROWS, (2, 12), generator=torch.Generator().manual_seed(5))
    ids[0, :5] = 0
    return ids.to(DEVICE)


def apart(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Give equal scores an order: of two equal maxima, which bf16 often has, a GPU takes now one and now the other."""
    return scores - 1e-5 * torch.arange(scores.shape[-1], device=scores.device)


def greedy(model: PreTrainedModel, steps: int = STEPS, **options: Any) -> torch.Tensor:
    ids = prompts()
    options = {"logits_processor": LogitsProcessorList([apart]), **options}
    own = {"do_sample": False, "repetition_penalty": 2.0, "max_new_tokens": steps, **options}
    found: torch.Tensor = model.generate(ids, attention_mask=(ids != 0).long(), **own)
    assert found.shape == (2, 12 + steps)
    assert len(set(found[0].tolist())) > steps // 2  # random weights alone would stay with one
    return found


@pytest.mark.parametrize(
    "options",
    [{"cache_implementation": "dynamic"}, {"cache_implementation": "static", "disable_compile": True}],
    ids=["dynamic", "static"],
)
def test_eager_tokens_are_the_same(qwen3: Saved, options: dict[str, Any]) -> None:
    expected = greedy(qwen3.load(dtype="auto").to(DEVICE), **options)
    model = load(qwen3.folder, device=DEVICE)
    assert model.device == DEVICE
    assert torch.equal(greedy(model, **options), expected)
    close(model)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # inductor's
def test_compiled_tokens_in_cuda_graphs_are_the_same(qwen3: Saved) -> None:
    """In float32, where two compilations that round differently still choose the same tokens."""
    config = transformers.CompileConfig(mode="reduce-overhead", fullgraph=True)
    options = {"cache_implementation": "static", "compile_config": config}
    torch._dynamo.reset()
    expected = greedy(qwen3.load(dtype=torch.float32).to(DEVICE), **options)
    torch._dynamo.reset()
    model = load(qwen3.folder, device=DEVICE, dtype=torch.float32)
    assert torch.equal(greedy(model, **options), expected)
    torch._dynamo.reset()
    close(model)


def test_hot_rows_change_no_token(qwen3: Saved) -> None:
    model = load(qwen3.folder, device=DEVICE, hot_bytes="1MiB")
    embedding = model.get_input_embeddings()
    expected = greedy(model, 32)
    embedding.update_hot_rows()
    assert embedding.hot_ids().numel()
    assert torch.equal(greedy(model, 32), expected)
    close(model)


def test_table_is_never_on_the_gpu(qwen3: Saved) -> None:
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    free, allocated = torch.cuda.mem_get_info(DEVICE)[0], torch.cuda.memory_allocated(DEVICE)
    model = load(qwen3.folder, device=DEVICE)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    report = model.ftw_memory
    assert report.pinned_bytes == {"model.embed_tokens.weight": TABLE_NBYTES}
    assert torch.cuda.max_memory_allocated(DEVICE) - allocated < weights + 16 * MIB
    assert free - report.peak.device_free < weights + TABLE_NBYTES // 2
    assert report.after.device_allocated - allocated < weights + 16 * MIB
    embedding = model.get_input_embeddings()
    assert embedding.table.is_pinned()
    assert embedding.pinned_nbytes == TABLE_NBYTES
    assert all(tensor.device == DEVICE for tensor in (*model.parameters(), *model.buffers()))
    close(model)
    assert embedding.pinned_nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    """
    LlamaForCausalLM Qwen3MoeForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM Gemma4ForCausalLM
    LlavaForConditionalGeneration Gemma4ForConditionalGeneration
    """.split(),
)
def test_every_family_gives_the_same_logits(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    saved, ids = save(tmp_path, name), random_ids(2, 9).to(DEVICE)
    options = {"experts_implementation": "eager"} if "Moe" in name else {}
    expected = saved.load(dtype=dtype, **options).to(DEVICE)
    found = load(tmp_path, device=DEVICE, dtype=dtype, **options)
    assert_same_weights(found.to("cpu"), expected.to("cpu"))
    assert torch.equal(logits(found.to(DEVICE), ids), logits(expected.to(DEVICE), ids))
    close(found)


def test_loading_on_a_side_stream(qwen3: Saved) -> None:
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        model = load(qwen3.folder, device=DEVICE)
        found = logits(model, prompts())
    stream.synchronize()
    assert torch.equal(found, logits(qwen3.load(dtype="auto").to(DEVICE), prompts()))
    close(model)


def test_model_moves_to_the_cpu_and_back(qwen3: Saved) -> None:
    model = load(qwen3.folder, device=DEVICE)
    expected, weight = logits(model, prompts()), model.get_input_embeddings().weight
    assert weight.device == DEVICE
    assert torch.equal(weight[77].cpu(), weight.data[77])
    model.to("cpu")
    assert model.get_input_embeddings().weight[77].device.type == "cpu"
    assert model(prompts().cpu()).logits.device.type == "cpu"
    assert torch.equal(logits(model.to(DEVICE), prompts()), expected)
    close(model)


def test_offloading_a_model_frees_its_table(qwen3: Saved) -> None:
    model = qwen3.load(dtype="auto").to(DEVICE)
    expected = greedy(model, 32)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, allocated = torch.cuda.mem_get_info(DEVICE)[0], torch.cuda.memory_allocated(DEVICE)
    result = ftw.offload(model)
    assert list(result.tables) == ["model.embed_tokens"]
    assert torch.cuda.memory_allocated(DEVICE) == allocated - TABLE_NBYTES
    assert torch.cuda.mem_get_info(DEVICE)[0] - free >= 0.98 * TABLE_NBYTES
    assert result.freed_bytes >= 0.98 * TABLE_NBYTES
    assert torch.equal(greedy(model, 32), expected)
    assert model.state_dict()["model.embed_tokens.weight"].is_pinned()
    result.close()


def test_offloading_a_plain_module_frees_its_table() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Embedding(ROWS, COLUMNS, dtype=torch.bfloat16, device=DEVICE)
            self.head = nn.Linear(COLUMNS, 8, dtype=torch.bfloat16, device=DEVICE)

    model, ids = Plain(), prompts()
    with torch.no_grad():
        expected = bits_of(model.features(ids))
    result = ftw.offload(model)
    assert result.freed_bytes >= 0.98 * TABLE_NBYTES
    assert torch.equal(bits_of(model.features(ids)), expected)
    result.close()

"""Seeds: small intact checkpoints of each format, made from the test suite's builders, from which mutations start.

A recipe names its seed and places in it, so a seed, once the corpus refers to it, is not changed: add another.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw, write_sharded
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType
from gguf_builder import Blocks, random_blocks, write_gguf

import ftw
from fuzz.documents import Document, parse

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("safetensors", "ftw", "gguf")
ROWS, WIDTH = 24, 8
_PACKED_WIDTH = 64
_U32, _STRING, _ARRAY = GGUFValueType.UINT32, GGUFValueType.STRING, GGUFValueType.ARRAY


class Seed(NamedTuple):
    """An intact checkpoint: its files by name, and which of them is opened; "" for the folder."""

    name: str
    files: dict[str, bytes]
    opened: str

    def documents(self) -> dict[str, Document]:
        """Return its files as documents that belong to the caller."""
        return {name: parse(name, content) for name, content in self.files.items()}


def seed_names(checkpoint_format: str) -> list[str]:
    """Return the names of the seeds of a format; without one, of all."""
    return [name for name in _MAKERS if name.startswith(checkpoint_format)]


@functools.cache
def make_seed(name: str) -> Seed:
    """Build a seed."""
    with tempfile.TemporaryDirectory() as folder:
        opened = _MAKERS[name](Path(folder)) or ""
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
    return Seed(name, files, opened)


def _floats(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _small_config(**overrides: Any) -> dict[str, Any]:
    return llama_config(**{"vocab_size": ROWS, "hidden_size": WIDTH, **overrides})


def _small_tensors(*, head: bool = True, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {"model.embed_tokens.weight": _floats(ROWS, WIDTH), "model.norm.weight": _floats(WIDTH)}
    if head:
        tensors["lm_head.weight"] = _floats(ROWS, WIDTH, seed=1)
    return {**tensors, **others}


def _safetensors(folder: Path) -> None:
    write_checkpoint(folder, _small_tensors(), _small_config())
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


def _safetensors_sharded(folder: Path) -> None:
    shards = {
        "model-00001-of-00002.safetensors": _small_tensors(head=False),
        "model-00002-of-00002.safetensors": {"lm_head.weight": _floats(ROWS, WIDTH)},
    }
    write_sharded(folder, shards, _small_config(tie_word_embeddings=True))


def _many_tables() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "model.language_model.embed_tokens.weight": _floats(ROWS, WIDTH, dtype=torch.float32),
        "model.language_model.embed_tokens_per_layer.weight": _floats(ROWS, 6, dtype=torch.float16),
        "model.engram.embed.shard_0.weight": _floats(5, 4),
        "model.engram.embed.shard_1.weight": _floats(7, 4, seed=1),
        "model.language_model.position_embeddings.weight": _floats(4, WIDTH),
        "model.layers.0.mlp.experts.gate_up_proj": _floats(4, 2, WIDTH),
        "model.scalar": torch.tensor(3, dtype=torch.int64),
        "model.empty": torch.empty(0, 4),
    }
    text = {
        "model_type": "gemma3n_text", "vocab_size": ROWS, "num_hidden_layers": 3, "hidden_size": WIDTH,
        "hidden_size_per_layer_input": 2, "split_ngram_parts": 2, "num_experts": 4, "num_attention_heads": 2,
        "layer_types": ["full_attention", "sliding_attention", "linear_attention"], "tie_word_embeddings": True,
    }  # fmt: skip
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    return tensors, config


def _safetensors_tables(folder: Path) -> None:
    write_checkpoint(folder, *_many_tables())


def _safetensors_df11(folder: Path) -> None:
    config = _small_config(dfloat11_config={"version": "0.5.0", "pattern_dict": {"model\\.embed_tokens": []}})
    write_checkpoint(folder, {"model.norm.weight": _floats(WIDTH)}, config)
    table = {
        "model.embed_tokens.luts": torch.zeros(3, 256, dtype=torch.uint8),
        "model.embed_tokens.encoded_exponent": torch.zeros(90, dtype=torch.uint8),
        "model.embed_tokens.sign_mantissa": torch.zeros(ROWS * WIDTH, dtype=torch.uint8),
        "model.embed_tokens.output_positions": torch.zeros(8, dtype=torch.uint8),
        "model.embed_tokens.gaps": torch.zeros(5, dtype=torch.uint8),
        "model.embed_tokens.split_positions": torch.zeros(1, dtype=torch.int64),
    }
    write_checkpoint(folder, table, None, "model_embed_tokens.safetensors")
    write_checkpoint(folder, {"lm_head.weight": _floats(ROWS, WIDTH)}, None, "lm_head.safetensors")


def _safetensors_scaled(folder: Path) -> None:
    tensors = _small_tensors(
        **{
            "model.embed_tokens.weight": _floats(ROWS, WIDTH, dtype=torch.float8_e4m3fn),
            "model.embed_tokens.weight_scale": _floats(1, dtype=torch.float32),
            "transformer.wte.weight": _floats(ROWS, WIDTH, dtype=torch.float64),
        }
    )
    write_checkpoint(folder, tensors, _small_config())


def _safetensors_bert(folder: Path) -> None:
    tensors = {
        "bert.embeddings.word_embeddings.weight": _floats(ROWS, WIDTH, dtype=torch.float32),
        "bert.embeddings.position_embeddings.weight": _floats(6, WIDTH, dtype=torch.float32),
        "bert.embeddings.token_type_embeddings.weight": _floats(2, WIDTH, dtype=torch.float32),
        "classifier.weight": _floats(2, WIDTH, dtype=torch.float32),
    }
    write_checkpoint(folder, tensors, _small_config(architectures=["BertForSequenceClassification"], model_type="bert"))


def _ftw_plain(folder: Path) -> None:
    write_ftw(folder, llama_tensors())
    (folder / "config.json").write_text(json.dumps(llama_config()))


def _ftw_shards(folder: Path) -> None:
    tensors, config = _many_tables()
    tensors["lm_head.weight"] = _floats(ROWS, WIDTH, seed=2)
    tensors["model.large"] = _floats(3000)
    source = write_checkpoint(folder / "source", tensors, {**config, "tie_word_embeddings": False})
    _convert(source, folder, shard_limit=8192)


def _ftw_packed(folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    _convert(source / _gguf(source), folder)


def _ftw_unrecorded(folder: Path) -> None:
    """Make what FreeToken makes of a GGUF: packed rows without their type or shape, and rows of padding."""
    source = folder / "source"
    source.mkdir()
    tokens = ([f"t{number}" for number in range(ROWS)], GGUFValueType.STRING)
    kvs = {
        "llama.embedding_length": (_U32, _PACKED_WIDTH), "llama.block_count": (_U32, 2),
        "llama.vocab_size": (_U32, ROWS), "general.file_type": (_U32, 2),
    }  # fmt: skip
    table = random_blocks(GGMLQuantizationType.Q4_0, ROWS)
    tensors = {"token_embd.weight": table, "output.weight": _array(ROWS, _PACKED_WIDTH)}
    write_gguf(source / "m.gguf", tensors, kvs)
    del tokens
    _convert(source / "m.gguf", source / "made")
    (folder / "source_metadata.gguf").write_bytes((source / "made" / "source_metadata.gguf").read_bytes())
    rows = torch.from_numpy(np.concatenate([table.data, np.zeros((7, table.data.shape[1]), np.uint8)]))
    write_ftw(folder, {"model.embed_tokens.weight": rows, "lm_head.weight": _floats(ROWS, _PACKED_WIDTH)})


def _ftw_side_file(folder: Path) -> None:
    tensors = _small_tensors(**{"model.layers.0.mlp.experts#L00000": _floats(4, 3, WIDTH)})
    side = "ple-table-00000.safetensors"
    write_checkpoint(folder, {"model.embed_tokens_per_layer.weight": _floats(ROWS, 4)}, _small_config(), side)
    write_ftw(folder, tensors, side_files=[side], quant_format="bf16", counts={"weight": 4})


def _array(*shape: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _kvs(architecture: str = "llama", width: int = _PACKED_WIDTH) -> dict[str, tuple[GGUFValueType, Any]]:
    return {
        f"{architecture}.embedding_length": (_U32, width),
        f"{architecture}.block_count": (_U32, 2),
        f"{architecture}.attention.head_count": (_U32, 4),
        f"{architecture}.attention.head_count_kv": (_ARRAY, [2, 1]),
        "tokenizer.ggml.tokens": (_ARRAY, [f"t{number}" for number in range(ROWS)]),
        "general.name": (_STRING, "seed"),
        "general.quantized": (GGUFValueType.BOOL, True),
        "general.ratio": (GGUFValueType.FLOAT32, 0.5),
    }


def _gguf(folder: Path) -> str:
    tensors = {
        "token_embd.weight": random_blocks(GGMLQuantizationType.Q8_0, ROWS),
        "blk.0.ffn_up_exps.weight": _array(4, 2, 32, dtype=np.float16),
        "output_norm.weight": _array(_PACKED_WIDTH),
        "output.weight": random_blocks(GGMLQuantizationType.Q4_0, ROWS, seed=1),
    }
    write_gguf(folder / "model.gguf", tensors, _kvs())
    return "model.gguf"


def _gguf_v2(folder: Path) -> str:
    tensors = {"token_embd.weight": _array(ROWS, WIDTH, dtype=np.float16), "output.weight": _array(ROWS, WIDTH)}
    path = write_gguf(folder / "model.gguf", tensors, _kvs(width=WIDTH), alignment=64)
    content = bytearray(path.read_bytes())
    content[4:8] = (2).to_bytes(4, "little")
    path.write_bytes(content)
    return "model.gguf"


def _gguf_big(folder: Path) -> str:
    tensors = {
        "token_embd.weight": random_blocks(GGMLQuantizationType.Q4_0, ROWS),
        "per_layer_token_embd.weight": _array(ROWS, 32, dtype=np.float16),
        "output.weight": _array(ROWS, _PACKED_WIDTH),
        "counts": np.arange(5, dtype=np.int64),
    }
    kvs = {**_kvs(), "llama.embedding_length_per_layer_input": (_U32, 16)}
    write_gguf(folder / "model.gguf", tensors, kvs, order=GGUFEndian.BIG)
    return "model.gguf"


def _gguf_packed(folder: Path) -> str:
    """Make one of the types with blocks of 256, each of them in a further table."""
    kinds = ("Q6_K", "Q2_K", "IQ4_XS", "IQ2_XXS", "TQ1_0")
    tensors: dict[str, Any] = {
        f"blk.{number}.ple_ngram_embd.weight": random_blocks(GGMLQuantizationType[kind], 3, 1, seed=number)
        for number, kind in enumerate(kinds)
    }
    tensors["token_embd.weight"] = random_blocks(GGMLQuantizationType.Q4_K, 5, 1)
    tensors["output.weight"] = Blocks(np.zeros((5, 292), np.uint8), GGMLQuantizationType.Q8_K)
    write_gguf(folder / "model.gguf", tensors, _kvs("qwen3", 256), architecture="qwen3")
    return "model.gguf"


def _gguf_bert(folder: Path) -> str:
    tensors = {
        "token_embd.weight": random_blocks(GGMLQuantizationType.NVFP4, ROWS, 1),
        "position_embd.weight": _array(4, _PACKED_WIDTH),
        "token_types.weight": _array(2, _PACKED_WIDTH),
    }
    write_gguf(folder / "model.gguf", tensors, _kvs("bert"), architecture="bert")
    return "model.gguf"


def _gguf_split(folder: Path) -> str:
    tensors = {
        "token_embd.weight": random_blocks(GGMLQuantizationType.MXFP4, ROWS, 2),
        "blk.0.attn_q.weight": _array(WIDTH, WIDTH),
        "output.weight": _array(ROWS, _PACKED_WIDTH, dtype=np.float16),
    }
    write_gguf(folder / "m.gguf", tensors, _kvs(), split_max_tensors=1)
    return "m-00001-of-00003.gguf"


def _gguf_shards(folder: Path) -> str:
    """Make an n-gram table that is cut along its packed rows."""
    tensors: dict[str, Any] = {
        f"ple_ngram_embd.{number}.weight": random_blocks(GGMLQuantizationType.Q4_0, rows, seed=number)
        for number, rows in enumerate((5, 7, 3))
    }
    tensors["token_embd.weight"] = random_blocks(GGMLQuantizationType.IQ4_NL, ROWS)
    tensors["output.weight"] = random_blocks(GGMLQuantizationType.IQ4_NL, ROWS, seed=1)
    write_gguf(folder / "model.gguf", tensors, _kvs())
    return "model.gguf"


def _ftw_packed_shards(folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    _convert(source / _gguf_shards(source), folder, shard_limit=4096)


def _convert(source: Path, folder: Path, **options: Any) -> None:
    """Convert into a folder that is there already."""
    ftw.convert(source, folder / "made", embed="auto", **options)
    for path in (folder / "made").iterdir():
        path.rename(folder / path.name)


_MAKERS: dict[str, Callable[[Path], str | None]] = {
    "safetensors": _safetensors,
    "safetensors-sharded": _safetensors_sharded,
    "safetensors-tables": _safetensors_tables,
    "safetensors-df11": _safetensors_df11,
    "safetensors-scaled": _safetensors_scaled,
    "safetensors-bert": _safetensors_bert,
    "ftw": _ftw_plain,
    "ftw-shards": _ftw_shards,
    "ftw-packed": _ftw_packed,
    "ftw-unrecorded": _ftw_unrecorded,
    "ftw-side-file": _ftw_side_file,
    "ftw-packed-shards": _ftw_packed_shards,
    "gguf": _gguf,
    "gguf-v2": _gguf_v2,
    "gguf-big": _gguf_big,
    "gguf-packed": _gguf_packed,
    "gguf-bert": _gguf_bert,
    "gguf-split": _gguf_split,
    "gguf-shards": _gguf_shards,
}

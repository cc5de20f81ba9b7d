"""Makes the folders freetoken-VERSION/ beside it, with the code of FreeToken's wheels; run once, by hand.

    pip download --no-deps freetoken==0.1.2 && unzip freetoken-0.1.2-*.whl -d /tmp/freetoken-0.1.2    # 0.2.1 likewise
    python tests/data/make_freetoken_fixtures.py 0.1.2 /tmp/freetoken-0.1.2 0.2.1 /tmp/freetoken-0.2.1

The wheel's modules are loaded without their packages' own imports, which need a GPU's libraries. What they write is
theirs: FTWWriter, the sink of its converter that names a layer's banks, the copying of metadata, the packing of GGUF
rows. The driver is this script, since the wheel's begins with `torch.cuda`. The bytes of a tensor are SHAKE-128 of its
name; of booleans the lowest bit of each.

    plain        an embedding, a head, a fused projection that spans shards, a scalar; of 0.2.1 also booleans,
                 64-bit integers and FP8
    banks-flat   expert banks of all layers in one tensor each, the two vectors of scales, a router
    banks-layer  expert banks of one tensor for each layer, of which some lack a bank; n-gram tables in a side file
    gguf         rows of a GGUF as they are packed, and source_metadata.gguf. 0.2.1 pads them with rows of zeros; 0.1.2
                 calls them qweight, and knew one architecture, whose embedding is tied
"""

import hashlib
import importlib
import json
import logging
import math
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "tie_word_embeddings": False}
NGRAM = "model.layers.1.ple.ple_embedding.ngram_embedding"
PACKAGES = ("checkpoint", "layers", "layers.quantization", "models", "models.gguf", "third_party")
ROWS = 21


class Bank(NamedTuple):
    """One bank of a layer, as FreeToken's sink takes it."""

    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def release(self) -> None:
        pass


def tensor_of(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    content = np.frombuffer(hashlib.shake_128(name.encode()).digest(nbytes), np.uint8).copy()
    if dtype == torch.bool:
        content &= 1
    return torch.from_numpy(content).view(dtype).reshape(shape)


def load_wheel(root: Path) -> None:
    """Let `freetoken` mean what lies in a folder."""
    for name in [name for name in sys.modules if name.split(".")[0] == "freetoken"]:
        del sys.modules[name]
    stand_ins: dict[str, dict[str, Any]] = {
        "freetoken": {"__path__": [str(root / "freetoken")]},
        "freetoken.utils": {"__path__": [], "init_logger": lambda *_, **__: logging.getLogger("freetoken")},
        "freetoken.utils.progress": {"byte_bar": lambda *_, **__: MagicMock()},
        **{f"freetoken.{name}": {"__path__": [str(root / "freetoken" / name.replace(".", "/"))]} for name in PACKAGES},
    }
    for name, attributes in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module


class Maker:
    """Makes the folders of one version; `freetoken` is that version's."""

    def __init__(self, version: str, root: Path) -> None:
        load_wheel(root)
        self.is_old = version == "0.1.2"
        self.folder = HERE / f"freetoken-{version}"
        self.ftw = importlib.import_module("freetoken.checkpoint.ftw")
        self.convert = importlib.import_module("freetoken.checkpoint.convert")
        self.reader = importlib.import_module("freetoken.models.gguf.reader")

    def finish(self, writer: Any, source: Path, **keys: Any) -> None:
        """Copy the metadata and write the index, with the keys that this version's conversion writes."""
        copied = self.convert._copy_metadata(str(source), writer.out_dir)
        kinds = [tensor["kind"] for tensor in writer._tensors]
        meta = {
            "source_model_path": "/models/source",
            "fingerprint": hashlib.sha256(Path(writer.out_dir).name.encode()).hexdigest()[:16],
            "quant_format": None,
            "expert_bank_num_layers": None,
            "counts": {kind: kinds.count(kind) for kind in ("weight", "experts_bank")},
            "copied_metadata": copied,
        }
        if not self.is_old:
            meta |= {"layer_quant_formats": None, "side_files": []}
        writer.finalize({**meta, **keys})

    def source(self, scratch: Path, config: dict[str, Any]) -> Path:
        scratch.mkdir()
        sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
        (scratch / "config.json").write_text(json.dumps({**config, **sizes, "num_key_value_heads": 1}))
        return scratch

    def add(self, writer: Any, name: str, dtype: torch.dtype, *shape: int, kind: str = "weight") -> None:
        writer.add_tensor(name, tensor_of(name, dtype, *shape), kind)

    def plain(self, scratch: Path) -> None:
        writer = self.ftw.FTWWriter(str(self.folder / "plain"), shard_limit=8192)
        self.add(writer, "model.embed_tokens.weight", torch.bfloat16, 64, 8)
        self.add(writer, "model.layers.0.self_attn.qkv_proj.weight", torch.bfloat16, 160, 32)  # 10 KiB, in two shards
        self.add(writer, "model.layers.0.self_attn.qkv_proj.input_scale", torch.float32)
        if not self.is_old:
            self.add(writer, "model.layers.0.mlp.down_proj.weight", torch.float8_e4m3fn, 8, 128)
            self.add(writer, "model.layers.0.mask", torch.bool, 33)
            self.add(writer, "model.layers.0.offsets", torch.int64, 5)
        self.add(writer, "lm_head.weight", torch.bfloat16, 64, 8)
        self.finish(writer, self.source(scratch, LLAMA))

    def banks_flat(self, scratch: Path) -> None:
        writer = self.ftw.FTWWriter(str(self.folder / "banks-flat"), shard_limit=16384)
        self.add(writer, "model.embed_tokens.weight", torch.bfloat16, 64, 8)
        self.add(writer, "model.layers.0.mlp.gate.weight", torch.float32, 3, 8)
        self.add(writer, "lm_head.weight", torch.bfloat16, 64, 8)
        self.add(writer, "gate_up", torch.uint8, 4 * 3, 16, 4, kind="experts_bank")
        self.add(writer, "down", torch.uint8, 4 * 3, 8, 4, kind="experts_bank")
        self.add(writer, "gate_up_alpha", torch.float32, 4 * 3, kind="experts_bank")
        self.add(writer, "down_alpha", torch.float32, 4 * 3, kind="experts_bank")
        source = self.source(scratch, {**MOE, "num_experts": 3})
        self.finish(writer, source, quant_format="nvfp4_b12x", expert_bank_num_layers=4)

    def banks_layer(self, scratch: Path) -> None:
        folder = self.folder / "banks-layer"
        writer = self.ftw.FTWWriter(str(folder), shard_limit=16384)
        self.add(writer, "model.embed_tokens.weight", torch.bfloat16, 64, 8)
        sink = self.convert._ConvertSink(writer)
        for layer in range(4):
            shapes = {"gate_up": (3, 16, 8), **({"down": (3, 8, 8)} if layer == 3 else {})}
            names = {bank: self.ftw.layer_bank_entry_name(bank, layer) for bank in shapes}
            sink(layer, {bank: Bank(tensor_of(names[bank], torch.bfloat16, *shape)) for bank, shape in shapes.items()})
        names = [f"{NGRAM}.shard_{number}.weight" for number in range(2)]
        save_file(
            {name: tensor_of(name, torch.bfloat16, 16, 8) for name in names}, folder / "ple-table-00000.safetensors"
        )
        formats = ["nvfp4", "nvfp4", "nvfp4", "bf16"]
        keys = {"layer_quant_formats": formats, "side_files": ["ple-table-00000.safetensors"]}
        source = self.source(scratch, {**MOE, "num_experts": 3, "tie_word_embeddings": True})
        self.finish(writer, source, quant_format="nvfp4", expert_bank_num_layers=4, **keys)

    def packed(self, scratch: Path) -> None:
        architecture, kind, columns = ("gemma4", "Q6_K", 256) if self.is_old else ("qwen3", "Q8_0", 64)
        source = self._write_gguf(
            scratch, architecture, gguf.GGMLQuantizationType[kind], columns, has_head=not self.is_old
        )
        writer = self.ftw.FTWWriter(str(self.folder / "gguf"), shard_limit=4096)
        if self.is_old:
            for tensor in self.reader.iter_gguf_tensors(str(source)):
                writer.add_tensor("model.embed_tokens.qweight", tensor.packed())
        else:
            tensors = importlib.import_module("freetoken.models.gguf.tensors")
            index = self.reader.gguf_tensor_index(str(source))
            for module, name in (("model.embed_tokens", "token_embd.weight"), ("lm_head", "output.weight")):
                info = index[name]
                for found, rows in tensors.fused(module, [info], [tensors.matrix(info)], info.ne[0]):
                    writer.add_tensor(found, rows)
        self.finish(writer, source)

    def _write_gguf(
        self, folder: Path, architecture: str, kind: gguf.GGMLQuantizationType, columns: int, *, has_head: bool
    ) -> Path:
        folder.mkdir()
        writer = gguf.GGUFWriter(folder / "source.gguf", architecture)
        writer.add_block_count(1)
        writer.add_embedding_length(columns)
        writer.add_token_list([f"t{number}" for number in range(ROWS)])
        block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
        for name in ("token_embd.weight", *(["output.weight"] if has_head else [])):
            rows = tensor_of(name, torch.uint8, ROWS, columns // block_size * type_size).numpy()
            writer.add_tensor(name, rows, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder / "source.gguf"


def main() -> None:
    arguments = sys.argv[1:]
    for version, root in zip(arguments[::2], arguments[1::2], strict=True):
        maker = Maker(version, Path(root))
        shutil.rmtree(maker.folder, ignore_errors=True)
        kinds = ("plain", "packed") if maker.is_old else ("plain", "banks_flat", "banks_layer", "packed")
        with tempfile.TemporaryDirectory() as scratch:
            for kind in kinds:
                getattr(maker, kind)(Path(scratch) / kind)


if __name__ == "__main__":
    main()

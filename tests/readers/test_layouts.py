"""`ftw inspect` on folders as other tools leave them takes the files that these tools' own loaders take.

The first part was written by the tools named (transformers 5.24, accelerate 1.15, peft 0.21, sentence-transformers 6.2,
torchao 0.18, optimum-quanto 0.2.7, mlx-lm 0.32, diffusers 0.42, huggingface_hub 2.4; 2026-12-01): these are their names
of files, with a byte for each tensor. The names of the second part were read in sources or documents of the tools.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from layouts import CONFIG, INDEX, Content, gguf, index_of, shards, weights, write_layout

import ftw
from ftw.errors import FtwError

WHOLE = {"model.safetensors": weights("t1", "t2", "t3", "t4")}
SHARDS = shards(4)
LISTED = {**SHARDS, INDEX: index_of(SHARDS)}
HF = {**CONFIG, "generation_config.json": {}}
TOKENIZER = {"tokenizer.json": {}, "tokenizer_config.json": {}}
ADAPTER = {"adapter_model.safetensors": weights("a", "b"), "adapter_config.json": {}, "README.md": ""}
VARIANT = shards(2, "model.fp16")
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.sentence_transformer.modules"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.base.modules.dense.Dense"},
]
UNET = "diffusion_pytorch_model.safetensors"
MISTRAL = shards(2, "consolidated")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
EXL2 = shards(2, "output")
MTP = {"model.safetensors": weights("t1"), "model_mtp.safetensors": weights("t2")}
ONE = shards(1)


class Layout(NamedTuple):
    """What a tool leaves, and what is made of it.

    Attributes:
        files: Names and contents.
        taken: The weight files; "" in place of them is a refusal that says `words`.
        left_out: Names of what is reported as left out.
        words: What a warning says, if there is one.
    """

    files: Mapping[str, Content]
    taken: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    words: str = ""


ALL = tuple(SHARDS)
MODEL = ("model.safetensors",)
WRITTEN = {
    "transformers": Layout({**HF, **WHOLE}, MODEL),
    "transformers, sharded": Layout({**HF, **LISTED}, ALL),
    "transformers, variant": Layout({**HF, "model.fp16.safetensors": weights("t1")}, ("model.fp16.safetensors",)),
    "transformers, variant, sharded": Layout(
        {**HF, **VARIANT, "model.safetensors.index.fp16.json": index_of(VARIANT)}, tuple(VARIANT)
    ),
    # save_pretrained removes the old shards, and leaves their index
    "transformers, sharded, then saved as one": Layout(
        {**HF, **WHOLE, INDEX: index_of(SHARDS)}, MODEL, (), "names model-00001-of-00004.safetensors, "
    ),
    "accelerate, save_state": Layout({**WHOLE, "optimizer.bin": b"", "random_states_0.pkl": b""}, MODEL),
    "accelerate, save_model": Layout(LISTED, ALL),
    "peft": Layout(ADAPTER, ("adapter_model.safetensors",)),
    "peft beside a model": Layout({**HF, **LISTED, **ADAPTER}, ALL, ("adapter_model.safetensors",)),
    "sentence-transformers with a dense layer": Layout(
        {
            **CONFIG, **WHOLE, **TOKENIZER, "modules.json": MODULES, "1_Pooling/config.json": {},
            "2_Dense/config.json": {}, "2_Dense/model.safetensors": weights("linear.weight"),
            "config_sentence_transformers.json": {},
        },
        MODEL, (), "2_Dense/model.safetensors holds a layer of the model",
    ),
    "torchao": Layout({**HF, **WHOLE}, MODEL),
    "optimum-quanto": Layout({**HF, **WHOLE, "quanto_qmap.json": {}, "README.md": ""}, MODEL),
    "mlx-lm": Layout({**WHOLE, INDEX: index_of(WHOLE)}, MODEL),
    "mlx-lm, adapters beside a model": Layout(
        {**SHARDS, "adapters.safetensors": weights("a"), "0000100_adapters.safetensors": weights("a"),
         "adapter_config.json": {}}, ALL, ("0000100_adapters.safetensors", "adapters.safetensors"),
    ),
    "huggingface_hub, mixin": Layout({"config.json": {"n": 4}, **WHOLE, "README.md": ""}, MODEL),
    "diffusers, one part": Layout({"config.json": {}, UNET: weights("t")}, (UNET,)),
    "diffusers, pipeline": Layout(
        {"model_index.json": {}, "unet/config.json": {}, f"unet/{UNET}": weights("t")},
        (), (), "is a diffusers pipeline",
    ),
}  # fmt: skip
LOOKED_UP = {
    "exllamav2": Layout({**CONFIG, **EXL2, "measurement.json": {}, "job_new.json": {}}, tuple(EXL2)),
    "exllamav3, over a sharded model": Layout(
        {**CONFIG, **WHOLE, INDEX: index_of(SHARDS), "quantization_config.json": {}}, MODEL, (), "which are not there"
    ),
    "autogptq": Layout(
        {**CONFIG, "gptq_model-4bit-128g.safetensors": weights("t"), "quantize_config.json": {}},
        ("gptq_model-4bit-128g.safetensors",),
    ),
    "gptqmodel": Layout({**HF, **WHOLE, "quantize_config.json": {}, "quant_log.csv": ""}, MODEL),
    "llm-compressor": Layout({**HF, **WHOLE, "recipe.yaml": ""}, MODEL),
    "llm-compressor, MTP added again": Layout({**HF, **MTP, INDEX: index_of(MTP)}, tuple(MTP), (), "all 2 files"),
    "modelopt": Layout({**HF, **LISTED, "hf_quant_config.json": {}}, ALL),
    "mergekit": Layout({**CONFIG, **ONE, INDEX: index_of(ONE), "mergekit_config.yml": ""}, tuple(ONE)),
    "unsloth, GGUF beside its merge": Layout({**HF, **LISTED, "unsloth.Q4_K_M.gguf": gguf(), "Modelfile": ""}, ALL),
    "unsloth, GGUF repository": Layout(
        {"X-Q4_K_M.gguf": gguf(), "mmproj-F16.gguf": gguf("clip"), "mmproj-BF16.gguf": gguf("clip"),
         "imatrix_unsloth.dat": b"", "imatrix_unsloth.gguf_file": b"GGUF"},
        ("X-Q4_K_M.gguf",), ("mmproj-BF16.gguf", "mmproj-F16.gguf"),
    ),
    "llama.cpp's converter": Layout(
        {"X-F16.gguf": gguf(), "mmproj-X-F16.gguf": gguf("clip", "mmproj"), "imatrix.gguf": gguf("llama", "imatrix"),
         "X-lora.gguf": gguf("llama", "adapter")},
        ("X-F16.gguf",), ("X-lora.gguf", "imatrix.gguf", "mmproj-X-F16.gguf"),
    ),
    "llama.cpp, many types": Layout(
        {"X-Q4_0.gguf": gguf(), "X-Q8_0.gguf": gguf()}, (), (), r"holds 2 GGUF models \(X-Q4_0\.gguf, X-Q8_0\.gguf\)"
    ),
    "lm studio": Layout(
        {"X-Q4_K_M.gguf": gguf(), "mmproj-model-f16.gguf": gguf("clip")}, ("X-Q4_K_M.gguf",), ("mmproj-model-f16.gguf",)
    ),
    "ollama's blobs of one model": Layout(
        {f"sha256-{1:064x}": gguf(), f"sha256-{2:064x}": "MIT", f"sha256-{3:064x}": "{}"}, (f"sha256-{1:064x}",)
    ),
    "mistral": Layout(
        {**HF, **LISTED, "consolidated.safetensors": weights("w"), "params.json": {}, "tekken.json": {}},
        ALL, ("consolidated.safetensors",),
    ),
    "mistral's own": Layout({**MISTRAL, "params.json": {}}, tuple(MISTRAL)),
    "trainer's checkpoint": Layout(
        {**HF, **WHOLE, "optimizer.pt": b"", "rng_state_0.pth": b"", "scheduler.pt": b"", "trainer_state.json": {},
         "training_args.bin": b""}, MODEL,
    ),
    "dfloat11": Layout(
        {"config.json": {"dfloat11_config": {}}, **WHOLE, "lm_head.safetensors": weights("h")},
        ("lm_head.safetensors", *MODEL),
    ),
    "hf download --local-dir": Layout(
        {**HF, **LISTED, ".gitattributes": "", ".cache/huggingface/download/model.safetensors.lock": "",
         ".cache/huggingface/download/x.incomplete": ""}, ALL,
    ),
    "git clone without LFS": Layout({**HF, "model.safetensors": POINTER}, (), (), "is a Git LFS pointer"),
    "copied by macOS, downloaded twice": Layout(
        {**HF, **SHARDS, "._model-00001-of-00004.safetensors": b"\0\5\26\7", ".DS_Store": b"",
         "model-00001-of-00004 (1).safetensors": weights("t1")}, ALL, ("model-00001-of-00004 (1).safetensors",),
    ),
    "an interrupted download": Layout(
        {**HF, INDEX: index_of(SHARDS), **shards(1), "model-00002-of-00004.safetensors.crdownload": b"x"},
        (), (), "is missing",
    ),
    "deepseek's own converter": Layout(
        {"model0-mp2.safetensors": weights("t"), "model1-mp2.safetensors": weights("t")}, (), (), "one rank's part"
    ),
    "vllm, sharded state": Layout(
        {**CONFIG, "model-rank-0-part-0.safetensors": weights("t"), "model-rank-1-part-0.safetensors": weights("t")},
        (), (), "one rank's part",
    ),
}  # fmt: skip
LAYOUTS = {**WRITTEN, **LOOKED_UP}


@pytest.mark.parametrize("name", LAYOUTS)
def test_files_of_a_layout_are_those_of_its_own_loader(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    write_layout(tmp_path, layout.files)
    if not layout.taken:
        with pytest.raises(FtwError, match=layout.words):
            ftw.inspect(tmp_path)
        return
    with ftw.open_checkpoint(tmp_path) as checkpoint:
        assert tuple(file.path.name for file in checkpoint.files) == layout.taken
    report = ftw.inspect(tmp_path)
    assert sorted(entry.name for entry in report.left_out) == [*layout.left_out]
    files = [warning for warning in report.verdict.warnings if "safetensors" in warning]
    assert len(files) == bool(layout.words)
    assert all(layout.words in warning for warning in files)


def test_transformers_takes_the_same_files(tmp_path: Path) -> None:
    """Only where an index names model.safetensors and others, transformers takes less, which the warning says."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    compared = 0
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        folder = write_layout(tmp_path / str(number), layout.files)
        try:
            paths, _ = _get_resolved_checkpoint_files(
                str(folder), variant=None, gguf_file=None, use_safetensors=None, user_agent=None, is_remote_code=False
            )
        except OSError:  # it looks for no other names
            continue
        files = tuple(Path(path).name for path in paths)
        compared += 1
        if layout.taken and "transformers takes" not in " ".join(ftw.inspect(folder).verdict.warnings):
            expected = layout.taken if name != "dfloat11" else MODEL  # whose own loader adds the others
            assert files == expected, name
    assert compared > 15

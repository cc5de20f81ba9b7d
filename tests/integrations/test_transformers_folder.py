"""Folders as tools leave them: `load` gives the model that from_pretrained gives, or refuses in one line."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers_models import Saved, assert_same_weights, logits, random_ids, save

import ftw
from ftw.integrations.transformers import folder as folder_module
from ftw.integrations.transformers import load

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    yield save(tmp_path_factory.mktemp("saved"), "Qwen3ForCausalLM")
    torch.set_num_threads(threads)


@pytest.fixture
def qwen3(saved: Saved, tmp_path: Path) -> Saved:
    return saved._replace(folder=Path(shutil.copytree(saved.folder, tmp_path / "qwen3")))


def change_json(folder: Path, name: str, **values: Any) -> None:
    """Replace values of a JSON file; `...` takes one out."""
    path = folder / name
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder, "config.json", **values)


def generation(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder, "generation_config.json", **values)


def other_weights(name: str) -> Callable[[Path], None]:
    """Write other weights beside those of the model."""

    def write(folder: Path) -> None:
        weights = {name: weight + 1 for name, weight in load_file(folder / WEIGHTS).items()}
        save_file(weights, folder / name, {"format": "pt"})

    return write


def adapter(folder: Path) -> None:
    """Write an adapter as PEFT leaves it in the folder of its base model."""
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}
    change_json(folder, "adapter_config.json", base_model_name_or_path=str(folder), **settings)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    rows, columns = load_file(folder / WEIGHTS)["model.layers.0.self_attn.q_proj.weight"].shape
    weights = {f"{module}.lora_A.weight": torch.ones(2, columns), f"{module}.lora_B.weight": torch.ones(rows, 2)}
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})


def cast(*parts: str, dtype: torch.dtype = torch.bfloat16) -> Callable[[Path], None]:
    """Store those weights whose names hold one of the parts in another dtype, of which config.json says nothing."""

    def write(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        weights = {
            name: weight.to(dtype) if any(part in name for part in parts) else weight
            for name, weight in weights.items()
        }
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
        change_json(folder, "config.json", dtype=...)

    return write


def in_shards(folder: Path) -> None:
    """Split the weights into two files of different dtypes, the first one of the names that sort last."""
    weights = sorted(load_file(folder / WEIGHTS).items())
    (folder / WEIGHTS).unlink()
    halves = {"model-00001-of-00002.safetensors": weights[9:], "model-00002-of-00002.safetensors": weights[:9]}
    places: dict[str, str] = {}
    for dtype, (file, half) in zip((torch.bfloat16, torch.float32), halves.items(), strict=True):
        save_file({name: weight.to(dtype) for name, weight in half}, folder / file, {"format": "pt"})
        places.update((name, file) for name, _ in half)
    change_json(folder, "model.safetensors.index.json", metadata={}, weight_map=places)
    change_json(folder, "config.json", dtype=...)


def other_release(folder: Path) -> None:
    """Name a configuration for newer releases of transformers, and one that lies elsewhere."""
    change_json(
        folder, "config.4.0.0.json", **{**json.loads((folder / "config.json").read_text()), "rms_norm_eps": 0.5}
    )
    elsewhere = folder.parent / "config.5.0.0.json"
    elsewhere.write_text("{}")
    change_json(folder, "config.json", configuration_files=["config.4.0.0.json"])


SAME: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "dtype of the first name": (cast("model."), {}),
    "dtype of the norms": (cast("norm"), {}),
    "dtype of the table": (cast("embed", "lm_head"), {}),
    "dtype of the first shard": (in_shards, {}),
    "generation config": (generation(max_length=50, temperature=0.3, do_sample=True, eos_token_id=[1, 2]), {}),
    "option of both configs": (lambda _: None, {"use_cache": False, "bos_token_id": 7}),
    "generation config and an option": (generation(bos_token_id=3), {"bos_token_id": 7}),
    "generation in config.json": (
        lambda folder: ((folder / "generation_config.json").unlink(), config(max_length=60, eos_token_id=6)(folder))[1],
        {"bos_token_id": 7},
    ),
    "variant": (other_weights("model.fp16.safetensors"), {}),
    "consolidated": (other_weights("consolidated.safetensors"), {}),
    "pickle": (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"), {}),
    "weights that config.json names": (config(transformers_weights=WEIGHTS), {}),
    "name of another model": (config(_name_or_path="org/other", name_or_path="org/other"), {}),
    "attention": (config(_attn_implementation="eager"), {}),
    "old name of the dtype": (config(torch_dtype="bfloat16", dtype=...), {}),
    "code of its own": (config(auto_map={"AutoModelForCausalLM": "modeling.Own"}), {}),
    "plan for ranks": (config(distributed_config={"tp_size": 2}, base_model_tp_plan={"x": "colwise"}), {}),
    "quantised by a method that nobody knows": (config(quantization_config={"quant_method": "nobody's"}), {}),
    "configuration for this release": (other_release, {}),
    "adapter without peft": (adapter, {}),
}


@pytest.mark.parametrize(("change", "options"), SAME.values(), ids=SAME)
def test_folder_gives_what_from_pretrained_gives(
    qwen3: Saved, change: Callable[[Path], None], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.peft.is_peft_available", lambda: False)
    monkeypatch.setattr(folder_module, "is_peft_available", lambda: False)
    change(qwen3.folder)
    expected, found, ids = qwen3.load(**options), load(qwen3.folder, **options), random_ids(2, 7)
    assert found.dtype == expected.dtype
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.config._attn_implementation == expected.config._attn_implementation
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    assert found.name_or_path == found.config.name_or_path == expected.name_or_path
    assert_same_weights(found, expected)
    assert torch.equal(logits(found, ids), logits(expected, ids))


def test_adapter_that_from_pretrained_would_apply_is_refused(qwen3: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter(qwen3.folder)
    monkeypatch.setattr(folder_module, "is_peft_available", lambda: True)
    for embed in ("host", "auto", "gpu"):
        with pytest.raises(
            ftw.CheckpointError, match=r"adapter_config\.json: adapter: found an adapter, .*load_adapter"
        ):
            load(qwen3.folder, embed=embed)


def test_adapter_that_nobody_applies_is_told(qwen3: Saved, caplog: pytest.LogCaptureFixture) -> None:
    adapter(qwen3.folder)
    load(qwen3.folder)
    assert (
        "adapter_config.json: adapter: is left out, as from_pretrained does while peft is not installed" in caplog.text
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            config(transformers_weights="../qwen3/model.safetensors"),
            "file name '../qwen3/model.safetensors', a path of",
        ),
        (config(transformers_weights=3), "transformers_weights: found 3, which"),
        (
            lambda folder: other_weights("shard-00001-model-00001-of-00001.safetensors")(folder),
            "weights: found weights that ranks saved",
        ),
    ],
    ids=["outside", "number", "ranks"],
)
def test_folder_of_other_weights_is_refused(qwen3: Saved, change: Callable[[Path], None], words: str) -> None:
    change(qwen3.folder)
    with pytest.raises(ftw.CheckpointError) as caught:
        load(qwen3.folder)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(qwen3.folder))


def test_further_weights_of_a_class_are_refused(qwen3: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(qwen3.load().config), "extra_files", ("head.safetensors",), raising=False)
    load(qwen3.folder)
    other_weights("head.safetensors")(qwen3.folder)
    with pytest.raises(ftw.CheckpointError, match=r"head\.safetensors: weights: is loaded by from_pretrained as well"):
        load(qwen3.folder)


def test_file_of_weights_that_config_names_can_be_the_source(qwen3: Saved) -> None:
    other_weights("other.safetensors")(qwen3.folder)
    config(transformers_weights="other.safetensors")(qwen3.folder)
    assert_same_weights(load(qwen3.folder / "other.safetensors"), qwen3.load())
    assert_same_weights(load(qwen3.folder), qwen3.load())
    with pytest.raises(
        ftw.CheckpointError, match=r"found 'other\.safetensors', which from_pretrained would load instead"
    ):
        load(qwen3.folder / "model.safetensors")


def test_config_is_the_one_that_was_judged(qwen3: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    read, config_file, expected = (
        AutoConfig.from_pretrained,
        qwen3.folder / "config.json",
        qwen3.load().config.to_dict(),
    )

    def read_later(path: Path, **options: Any) -> Any:
        assert path != qwen3.folder
        assert path.stat().st_mode & 0o777 == 0o700
        config_file.write_text("{}")
        return read(path, **options)

    monkeypatch.setattr(AutoConfig, "from_pretrained", read_later)
    assert load(qwen3.folder).config.to_dict() == expected


def test_config_that_is_a_link_out_of_the_folder_is_not_followed(
    qwen3: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    name = qwen3.folder / "generation_config.json"
    (qwen3.folder.parent / "elsewhere.json").write_text('{"top_k": 7}')
    name.unlink()
    name.symlink_to("../elsewhere.json")
    assert load(qwen3.folder).generation_config.top_k != 7
    assert "generation_config.json: generation config: is not taken: file: is a link that leads out" in caplog.text
    (qwen3.folder / "config.json").rename(qwen3.folder.parent / "config.json")
    (qwen3.folder / "config.json").symlink_to("../config.json")
    with pytest.raises(ftw.CheckpointError, match=r"config\.json: file: is a link that leads out of the folder"):
        load(qwen3.folder, embed="gpu")


def test_configuration_of_another_folder_is_not_opened(qwen3: Saved) -> None:
    (qwen3.folder.parent / "config.4.0.0.json").write_text('{"model_type": "llama"}')
    config(configuration_files=["../config.4.0.0.json", 3])(qwen3.folder)
    assert type(load(qwen3.folder)) is qwen3.kind

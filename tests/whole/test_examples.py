"""The examples run, and what they show is so: an engine's tokens are those of transformers."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf_builder import write_gguf
from places import ROOT

import ftw

EXAMPLES = ROOT / "examples"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [[5, 17, 200], [9], [44, 3, 2, 1, 77, 8, 120], [61, 61, 61, 9], [30, 31]]
NEW_TOKENS = 12


@pytest.fixture
def minimal_engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import minimal_engine

    return minimal_engine


def make_reference(folder: Path, family: str, **options: Any) -> transformers.PreTrainedModel:
    """Write a tiny random model in float32, its norms and biases random too, and return it."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
        "eos_token_id": None, "bos_token_id": None, "pad_token_id": None, **options,
    }  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    for parameter in model.parameters():
        if parameter.ndim == 1:  # zeros and ones would not tell whether they are used
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    return model.eval()


def greedy(model: transformers.PreTrainedModel, device: str) -> list[list[int]]:
    model.to(device)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=device)
        mask = torch.ones_like(ids)
        answer = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
        found.append(answer[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3", {"tie_word_embeddings": False}),
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Llama", {"tie_word_embeddings": False, "rope_theta": 500_000.0}),
        ("Llama", {"tie_word_embeddings": False, "attention_bias": True}),
        ("Qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
        ("Qwen2", {"tie_word_embeddings": False}),
        ("Mistral", {"tie_word_embeddings": False, "sliding_window": None}),
        ("SeedOss", {"tie_word_embeddings": False}),
    ],
    ids=["qwen3", "qwen3-tied", "llama", "llama-biases", "qwen3-biases", "qwen2", "mistral", "seed-oss"],
)
def test_engine_gives_the_tokens_of_transformers(
    tmp_path: Path, minimal_engine: ModuleType, family: str, options: dict[str, Any], device: str
) -> None:
    expected = greedy(make_reference(tmp_path / "model", family, **options), device)
    assert len({token for answer in expected for token in answer}) > NEW_TOKENS
    placements: list[dict[str, Any]] = [{"embed": "auto"}, {"embed": "gpu"}]
    if not options["tie_word_embeddings"]:
        placements += [{"embed": "host"}, {"embed": "host", "hot_bytes": "4KiB"}]
    for placement in placements:
        with minimal_engine.Engine(
            tmp_path / "model", device=device, lanes=2, max_length=32, kv_bytes=1 << 20, **placement
        ) as engine:
            assert engine.generate(PROMPTS, NEW_TOKENS) == expected, placement
            where = "gpu" if placement["embed"] == "gpu" or options["tie_word_embeddings"] else "host"
            assert engine.loaded.memory.placement == where


def test_engine_serves_what_ftw_converted(tmp_path: Path, minimal_engine: ModuleType) -> None:
    expected = greedy(make_reference(tmp_path / "model", "Qwen3", tie_word_embeddings=False), "cpu")
    ftw.convert(tmp_path / "model", tmp_path / "converted", embed="host")
    with minimal_engine.Engine(tmp_path / "converted", embed="host", device="cpu", lanes=3, max_length=32) as engine:
        assert engine.generate(PROMPTS, NEW_TOKENS) == expected


def test_sequences_wait_for_slots_and_end_at_a_stop_token(tmp_path: Path, minimal_engine: ModuleType) -> None:
    expected = greedy(make_reference(tmp_path / "model", "Qwen3", tie_word_embeddings=False), "cpu")
    stop = expected[0][3]
    (tmp_path / "stopping").mkdir()
    make_reference(tmp_path / "stopping", "Qwen3", tie_word_embeddings=False, eos_token_id=stop)
    ends = [answer.index(stop) + 1 if stop in answer else NEW_TOKENS for answer in expected]
    token_bytes = 2 * 3 * 2 * 16 * 4
    with minimal_engine.Engine(
        tmp_path / "stopping", device="cpu", lanes=4, max_length=24, kv_bytes=24 * token_bytes
    ) as engine:
        assert engine.generate(PROMPTS, NEW_TOKENS) == [
            answer[:end] for answer, end in zip(expected, ends, strict=True)
        ]
        assert engine.kv_tokens == len(engine.free_slots) == 23
        with pytest.raises(ValueError, match="allowed are 23"):
            engine.generate([[1] * 12], NEW_TOKENS)


@pytest.mark.parametrize("stops", [7, [7, 9]], ids=["one", "several"])
def test_stop_tokens_come_from_both_configs(tmp_path: Path, minimal_engine: ModuleType, stops: int | list[int]) -> None:
    make_reference(tmp_path / "model", "Qwen3", tie_word_embeddings=False, eos_token_id=3)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    with minimal_engine.Engine(tmp_path / "model", device="cpu", max_length=32) as engine:
        assert engine.sizes.stops == {3, 7, *(stops if isinstance(stops, list) else ())}


def test_engine_is_asked_for_little(tmp_path: Path, minimal_engine: ModuleType) -> None:
    expected = greedy(make_reference(tmp_path / "model", "Qwen3", tie_word_embeddings=False), "cpu")
    with minimal_engine.Engine(tmp_path / "model", device="cpu", max_length=32) as engine:
        assert engine.generate([], NEW_TOKENS) == []
        assert engine.generate(PROMPTS, 0) == [[]] * len(PROMPTS)
        with pytest.raises(ValueError, match="no tokens, at least 1"):
            engine.generate([[1], []], NEW_TOKENS)
        with pytest.raises(ValueError, match="-1 new tokens"):
            engine.generate(PROMPTS, -1)
        assert engine.generate(PROMPTS, 1) == [answer[:1] for answer in expected]
    with pytest.raises(ValueError, match="no room for 2 tokens"):
        minimal_engine.Engine(tmp_path / "model", device="cpu", kv_bytes=1)


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "are not plain"),
        ("Llama", {"hidden_act": "gelu"}, "is not silu"),
        ("Llama", {"mlp_bias": True}, r"mlp\.down_proj\.bias: "),
        ("Mistral", {"sliding_window": 4}, "sliding window"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "sliding window"),
        ("Granite", {"residual_multiplier": 0.2}, "model_type is 'granite', allowed are llama, "),
        ("SmolLM3", {}, "model_type is 'smollm3'"),
        ("Helium", {}, "model_type is 'helium'"),
        ("Ernie4_5", {}, "model_type is 'ernie4_5'"),
    ],
    ids=["rope", "gelu", "mlp-bias", "mistral-window", "qwen2-window", "granite", "smollm3", "helium", "ernie"],
)
def test_engine_refuses_what_it_does_not_compute(
    tmp_path: Path,
    minimal_engine: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    options: dict[str, Any],
    problem: str,
) -> None:
    make_reference(tmp_path / "model", family, tie_word_embeddings=False, **options)
    loaded: list[ftw.LoadedModel] = []
    load = ftw.load
    monkeypatch.setattr(ftw, "load", lambda *args, **named: loaded.append(load(*args, **named)) or loaded[-1])
    with pytest.raises(SystemExit, match=problem):
        minimal_engine.Engine(tmp_path / "model", device="cpu", embed="host")
    for model in loaded:  # only tensors that have no place are found after loading
        with pytest.raises(ftw.ClosedError):
            model.embedding  # noqa: B018 -- it is closed
    assert len(loaded) == ("mlp" in problem)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("model.gguf", "it is a GGUF"), ("quantized", "are quantized")],
    ids=["gguf", "quantized"],
)
def test_engine_refuses_other_encodings(tmp_path: Path, minimal_engine: ModuleType, name: str, problem: str) -> None:
    if name == "model.gguf":
        write_gguf(tmp_path / name, {"token_embd.weight": np.zeros((4, 32), np.float32)})
    else:
        make_reference(tmp_path / name, "Qwen3", tie_word_embeddings=False)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match=problem):
        minimal_engine.Engine(tmp_path / name, device="cpu")


def run_example(*arguments: str) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=EXAMPLES, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_engine_runs_from_the_command_line(tmp_path: Path) -> None:
    model = str(tmp_path / "tiny")
    run_example("minimal_engine.py", "--make-tiny", model)
    served = ["minimal_engine.py", model, "--num-prompts", "3", "--max-new-tokens", "5", "--max-length", "40"]
    outputs = [run_example(*served, "--embed", embed).splitlines() for embed in ("gpu", "host")]
    assert outputs[0][0].startswith("token embedding on the gpu")
    assert outputs[1][0].startswith("token embedding on the host: untied")
    assert outputs[0][2:5] == outputs[1][2:5]
    assert outputs[1][-1].startswith("15 tokens in ")
    assert run_example(*served, "--max-new-tokens", "0").splitlines()[-1].startswith("0 tokens in ")


def test_a_checkpoint_goes_the_whole_way(tmp_path: Path) -> None:
    output = run_example("inspect_and_convert.py")
    assert "may leave the GPU: True" in output
    assert "verified: 0 problems" in output
    assert "token embedding on the host, 2 other tensors" in output
    assert "only zeros: True" in output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("minimal_engine.py {nowhere}", "{nowhere}: path: does not exist"),
        (
            "minimal_engine.py {tied} --embed host",
            "{tied}: model.embed_tokens.weight: refused: the LM head uses this same table",
        ),
        ("minimal_engine.py {untied} --embed host --hot some", "'some'"),
        ("minimal_engine.py {untied} --max-length 20", "allowed are 20"),
        ("inspect_and_convert.py {nowhere} {new}", "{nowhere}: path: does not exist"),
        ("inspect_and_convert.py {untied} {tied}", "{tied}: target: exists and is not empty"),
    ],
    ids=["engine-path", "engine-tied", "engine-size", "engine-prompt", "convert-path", "convert-target"],
)
def test_examples_say_in_one_line_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, problem: str
) -> None:
    places = {name: str(tmp_path / name) for name in ("nowhere", "new", "tied", "untied")}
    for name in ("tied", "untied"):
        make_reference(tmp_path / name, "Qwen3", tie_word_embeddings=name == "tied")
    name, *arguments = words.format(**places).split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    message = str(ended.value)
    assert message.startswith("error: ")
    assert problem.format(**places) in message
    assert "\n" not in message


def test_source_without_a_target_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inspect_and_convert.py", "source"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / "inspect_and_convert.py"), run_name="__main__")
    assert "SOURCE needs DIR" in capsys.readouterr().err


def test_a_loaded_model_computes_the_same_after_offloading() -> None:
    output = run_example("offload_loaded_model.py")
    assert "the model computes the same: True" in output
    assert "of a whole model: embed_tokens left, what stays: {}, it computes the same: True" in output
    assert "is refused: " in output


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 2, 3], ids=["one", "two", "uneven"])
def test_layers_of_an_engine_are_loaded_and_summed(monkeypatch: pytest.MonkeyPatch, size: int, device: str) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import engine_layer

    table = torch.randn(170, 16).bfloat16()
    ids = torch.arange(170, device=device)
    total = torch.zeros(170, 16, dtype=table.dtype, device=device)
    for rank in range(size):
        layer = engine_layer.HostVocabEmbedding(
            170, 16, dtype=table.dtype, device=device, rank=rank, size=size, hot_bytes="1KiB"
        )
        parameter = dict(layer.named_parameters())["weight"]
        parameter.weight_loader(parameter, table)
        layer.finish()
        assert not dict(layer.named_parameters())
        total += layer(ids)
        layer.rows.close()
    assert torch.equal(total, table.to(device))

"""`ftw bench decode` on tiny models: its decoder, what it compares, and the figures that it gives."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftw.bench import decode
from ftw.bench.decode_plan import TINY_MODELS, Placement, Plan
from ftw.bench.decode_session import Session, Subject, load_model, write_model
from ftw.bench.decode_timing import decode_rows
from ftw.bench.decoder import Shape, make_cache
from ftw.bench.ids import Ids
from ftw.bench.sparse_mlp import SparseMlp
from ftw.bench.timing import time_interleaved_ms
from ftw.cli.main import main

DEVICE = torch.device("cpu")
PLAN = Plan(
    steps=5, seeds=2, prompt=4, batches=(1, 3), eager_batches=(3,), eager_seeds=1, captures=2, rounds=4,
    prefills=((8, 4),), hot_bytes="4KiB", vram="64MiB",
)  # fmt: skip
PLACEMENTS = ["gpu", "host", "host, hot 4KiB"]


@pytest.fixture(scope="module")
def result() -> dict[str, list[dict[str, object]]]:
    return decode.run(1, models=TINY_MODELS, plan=PLAN)


def test_tokens_are_equal_wherever_the_table_is(result: dict[str, list[dict[str, object]]]) -> None:
    on_gpu, on_cpu = [(1, "graph"), (3, "graph"), (3, "eager")], [(1, "eager"), (3, "eager")]
    modes = on_gpu if torch.cuda.is_available() else on_cpu
    assert [(row["batch"], row["mode"]) for row in result["tokens"]] == modes * len(TINY_MODELS)
    for row in result["tokens"]:
        assert row["tokens_equal"] is True
        assert row["different"] == ""
        assert row["layers"] == "1 of 2"
        assert row["seeds"] == (1 if row["mode"] == "eager" and torch.cuda.is_available() else 2)
        assert int(str(row["distinct_tokens"])) > 3


@pytest.mark.parametrize(
    ("subject", "sizes"), [("decode", ["batch", "step_ms"]), ("prefill", ["tokens", "prefill_ms"])]
)
def test_every_size_is_timed_with_each_placement(
    result: dict[str, list[dict[str, object]]], subject: str, sizes: list[str]
) -> None:
    rows = result[subject]
    counts = {"decode": len(PLAN.batches), "prefill": len(PLAN.prefills)}
    assert [row["placement"] for row in rows] == [*PLACEMENTS, "gpu, again"] * len(TINY_MODELS) * counts[subject]
    assert all(float(str(row[sizes[1]])) > 0 and sizes[0] in row for row in rows)
    assert all(row["ratio"] == 1 for row in rows if row["placement"] == "gpu")


@pytest.mark.parametrize("subject", ["decode", "prefill"])
def test_noise_and_the_spread_of_ratios_are_told(result: dict[str, list[dict[str, Any]]], subject: str) -> None:
    for row in result[subject]:
        captures = 1 if row.get("mode") == "eager" else PLAN.captures
        assert row["ratio_p20"] <= row["ratio"] <= row["ratio_p80"]
        assert len(row["capture_ratios"]) == captures
        if row["placement"] == "gpu":
            assert row["ratio_p20"] == row["ratio_p80"] == 1
            assert row["capture_ratios"] == [1] * captures
    again = [row for row in result[subject] if row["placement"] == "gpu, again"]
    assert any(row["ratio_p20"] != row["ratio_p80"] for row in again)


def test_steps_are_captured_anew_in_another_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_model(tmp_path / "model", TINY_MODELS[1])
    loaded = load_model(tmp_path / "model", TINY_MODELS[1], DEVICE, Placement("gpu", "gpu"))
    embedding = loaded.model.embedding
    subject = Subject(TINY_MODELS[1], loaded.decoder, dict.fromkeys("abc", embedding), DEVICE)
    captured: list[Session] = []
    monkeypatch.setattr(Session, "capture", lambda self, pool: captured.append(self))
    for first in (0, 1, 5):
        captured.clear()
        sessions = subject.sessions(1, PLAN, first=first)
        assert list(sessions) == list("abc")
        assert [captured.index(session) for session in sessions.values()] == [(place - first) % 3 for place in range(3)]
        assert len({id(session.buffers) for session in captured}) == 1
    captured.clear()
    with torch.inference_mode():
        rows = list(decode_rows(subject, PLAN, Ids(TINY_MODELS[1].vocab, DEVICE)))
    assert len(captured) == len(PLAN.batches) * PLAN.captures * 4
    assert [row["placement"] for row in rows[:4]] == ["a", "b", "c", "gpu, again"]
    loaded.model.close()


def test_memory_is_told_with_each_placement(result: dict[str, list[dict[str, object]]]) -> None:
    assert [row["placement"] for row in result["memory"]] == PLACEMENTS * len(TINY_MODELS)
    for row in result["memory"]:
        assert row["kv_bytes_per_token"] == 2 * 2 * 16 * 2  # keys and values, heads, their size, bytes; one layer
        assert row["pinned_mib"] == (0 if row["placement"] == "gpu" else pytest.approx(1000 * 64 * 2 / 2**20, abs=0.01))


@pytest.mark.parametrize("shape", TINY_MODELS, ids=lambda shape: shape.name)
@torch.inference_mode()
def test_a_step_continues_a_prompt_as_a_longer_prompt_does(tmp_path: Path, shape: Shape) -> None:
    torch.manual_seed(0)
    write_model(tmp_path / "model", shape)
    loaded = load_model(tmp_path / "model", shape, DEVICE, Placement("host", "host"))
    decoder, embedding = loaded.decoder.float(), loaded.model.embedding.table.float()
    look_up = torch.nn.Embedding.from_pretrained(embedding)
    ids = torch.randint(0, shape.vocab, (2, 6))
    cache = make_cache(shape, 2, 64, DEVICE, torch.float32)
    whole = [decoder.prefill(look_up, ids[:, :length], cache) for length in (4, 5, 6)]
    cache = make_cache(shape, 2, 64, DEVICE, torch.float32)
    first = decoder.prefill(look_up, ids[:, :4], cache)
    steps = [decoder.step(look_up, ids[:, place], torch.full((2,), place), cache) for place in (4, 5)]
    assert torch.equal(torch.stack([first, *steps]), torch.stack(whole))
    loaded.model.close()


def test_weights_are_the_same_wherever_the_table_is(tmp_path: Path) -> None:
    write_model(tmp_path / "model", TINY_MODELS[0])
    placements = [Placement("gpu", "gpu"), Placement("host", "host", "4KiB")]
    one, other = (load_model(tmp_path / "model", TINY_MODELS[0], DEVICE, placement) for placement in placements)
    assert torch.equal(one.model.embedding.table, other.model.embedding.table)
    pairs = zip(one.decoder.state_dict().items(), other.decoder.state_dict().items(), strict=True)
    assert all(left[0] == right[0] and torch.equal(left[1], right[1]) for left, right in pairs)
    assert (tmp_path / "model" / "model.safetensors").stat().st_blocks * 512 < 64 << 10
    one.model.close()
    other.model.close()


@pytest.mark.parametrize("tokens", [1, 2, 40, 100], ids=lambda count: f"{count} tokens")
@torch.inference_mode()
def test_experts_agree_with_a_loop_over_tokens(tokens: int) -> None:
    torch.manual_seed(0)
    sparse = SparseMlp(64, 32, 8, 2, is_grouped=False)
    for weight in sparse.experts.parameters():
        weight.normal_(std=0.1)
    sparse = sparse.to(torch.bfloat16)
    hidden = torch.randn(1, tokens, 64, dtype=torch.bfloat16)
    shares, chosen = sparse.gate(hidden[0]).float().softmax(dim=-1).topk(2)
    expected = torch.zeros(tokens, 64)
    for token in range(tokens):
        for share, number in zip(shares[token] / shares[token].sum(), chosen[token], strict=True):
            gate, up = (hidden[0, token].float() @ sparse.experts.gate_up_proj[number].float().mT).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            expected[token] += share * (inner @ sparse.experts.down_proj[number].float().mT)
    torch.testing.assert_close(sparse(hidden)[0].float(), expected, rtol=0.05, atol=0.05)
    if hasattr(torch, "_grouped_mm"):
        sparse.is_grouped = True
        torch.testing.assert_close(sparse(hidden)[0].float(), expected, rtol=0.05, atol=0.05)


def test_calls_take_turns() -> None:
    order: list[str] = []
    prepared: list[int] = []
    ways = {name: lambda name=name: order.append(name) for name in "abc"}
    times = time_interleaved_ms(ways, rounds=3, before=prepared.append)
    assert "".join(order[3:]) == "abcbcacab"
    assert prepared == [0] * 3 + [0] * 3 + [1] * 3 + [2] * 3
    assert {name: len(samples) for name, samples in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_layers_are_passed_on_and_refused_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def run(layers: int) -> dict[str, object]:
        asked.append(layers)
        return {"rows": [{"layers": layers}]}

    monkeypatch.setitem(sys.modules, "ftw.bench.decode", SimpleNamespace(run=run))
    assert main(["bench", "decode", "--layers", "3"]) == 0
    assert asked == [3]
    assert main(["bench", "inspect", "--layers", "3"]) == 2
    assert "builds no layers" in capsys.readouterr().err

"""Gain and budget: routed experts in every form that is stored, how a GPU's memory is spent, and what shows it."""

import json
import os
import pty
import re
import resource
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw
from ftw.cli.main import main

import ftw
from ftw.errors import in_command_words
from ftw.tensors import TensorInfo
from ftw.verdict.gain import BudgetSide, Experts, find_experts
from ftw.verdict.report import Report

GIB = 1 << 30


def info(name: str, *shape: int, width: int = 2, kind: str = "weight") -> TensorInfo:
    """Return a tensor of `width` bytes for each element, as a header describes it."""
    return TensorInfo(name, {1: "U8", 2: "BF16", 4: "F32"}[width], shape, 0, prod(shape) * width, kind=kind)


def bank(name: str, *shape: int) -> TensorInfo:
    return info(name, *shape, kind="experts_bank")


SINGLE = [
    info(f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight", 4, 8)
    for layer in (0, 1)
    for expert in range(4)
    for part in ("gate_proj", "up_proj", "down_proj")
]
STACKED = [
    info(f"model.layers.{layer}.mlp.experts.{part}", 4, 8, size)
    for layer in (0, 1)
    for part, size in (("gate_up_proj", 16), ("down_proj", 8))
]
GGUF = [info(f"blk.{layer}.ffn_{part}_exps.weight", 4, 8, 9, width=1) for layer in (0, 1) for part in ("up", "down")]
DENSE = [
    info("model.layers.0.mlp.up_proj.weight", 8, 8), info("blk.0.ffn_up.weight", 8, 8),
    info("model.layers.0.mlp.gate.weight", 4, 8), info("blk.0.ffn_gate_inp.weight", 4, 8),
    info("model.layers.0.mlp.gate.e_score_correction_bias", 4), info("blk.0.exp_probs_b.bias", 4),
    info("export.weight", 4, 8), info("expert_gate.weight", 4, 8),
]  # fmt: skip
SHARED = [
    info("model.layers.0.mlp.shared_expert.up_proj.weight", 4, 8),
    info("model.layers.0.mlp.shared_experts.up_proj.weight", 4, 8),
    info("model.layers.0.mlp.shared_experts.gate_up_proj", 4, 8, 8),
    info("model.layers.0.mlp.shared_experts.0.up_proj.weight", 4, 8),
    info("shared_experts.0.up_proj.weight", 4, 8), info("shared_experts.gate_up_proj", 4, 8),
    info("blk.0.ffn_up_shexp.weight", 4, 8),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "num_experts", "slot_bytes", "nbytes"),
    [
        ([], 4, None, 0),
        (DENSE, 4, None, 0),
        (DENSE, None, None, 0),
        (SHARED, 4, None, 0),
        (SINGLE, 4, 3 * 64, 2 * 4 * 3 * 64),
        (SINGLE, None, 3 * 64, 2 * 4 * 3 * 64),
        ([*SINGLE, *SHARED, *DENSE], 4, 3 * 64, 2 * 4 * 3 * 64),
        (STACKED, 4, 8 * 24 * 2, 2 * 4 * 8 * 24 * 2),
        ([*STACKED, *SHARED, *DENSE], 4, 8 * 24 * 2, 2 * 4 * 8 * 24 * 2),
        ([info(f"{tensor.name}.weight", *tensor.shape) for tensor in STACKED], 4, 8 * 24 * 2, 2 * 4 * 8 * 24 * 2),
        (STACKED, None, None, 0),
        (STACKED, 8, None, 0),
        (GGUF, 4, 2 * 72, 2 * 4 * 2 * 72),
        ([*GGUF, *SHARED, *DENSE], 4, 2 * 72, 2 * 4 * 2 * 72),
        (GGUF, None, None, 0),
        ([info("blk.0.ffn_gate_up_exps.weight", 4, 8, 9, width=1)], 4, 72, 4 * 72),
        ([bank(f"gate_up#L{layer:05}", 4, 8, 16) for layer in (0, 3)]
         + [bank(f"down#L{layer:05}", 4, 8, 8) for layer in (0, 3)], 4, 8 * 24 * 2, 2 * 4 * 8 * 24 * 2),
        ([bank("gate_up", 8, 8, 16), bank("down", 8, 8, 8)], 4, 8 * 24 * 2, 8 * 8 * 24 * 2),
        ([bank("gate_up", 8, 8, 16), *SHARED, *DENSE], None, 8 * 16 * 2, 8 * 8 * 16 * 2),
        ([*SINGLE, *STACKED], 4, 8 * 24 * 2, 2 * 4 * 3 * 64 + 2 * 4 * 8 * 24 * 2),
    ],
    ids="none dense dense-unknown shared single single-unknown single-mixed stacked stacked-mixed stacked-weight"
    " stacked-unknown stacked-other-count gguf gguf-mixed gguf-unknown gguf-fused bank-per-layer bank-flat bank-mixed"
    " single-and-stacked".split(),
)  # fmt: skip
def test_experts_are_counted_in_every_form(
    tensors: list[TensorInfo], num_experts: int | None, slot_bytes: int | None, nbytes: int
) -> None:
    assert find_experts(tensors, num_experts) == Experts(slot_bytes, nbytes)
    assert find_experts(reversed(tensors), num_experts) == Experts(slot_bytes, nbytes)


# budgets


def moe_tensors(**options: Any) -> dict[str, torch.Tensor]:
    """Return an untied model: 1 KiB of table, 1168 bytes of other weights, 8 experts of 384 bytes."""
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": torch.ones(8, 8, dtype=torch.bfloat16)
        for layer in (0, 1)
        for expert in range(4)
        for part in ("gate", "up", "down")
    }
    return {**llama_tensors(**options), **experts}


TABLE_BYTES, REST_BYTES, SLOT_BYTES, NUM_EXPERTS, TOKEN_BYTES = (
    64 * 8 * 2,
    64 * 16 + 128 + 16,
    3 * 128,
    8,
    2 * 2 * 4 * 2,
)


def inspect_moe(folder: Path, vram_bytes: int, **overrides: Any) -> Report:
    source = write_checkpoint(folder, moe_tensors(), llama_config(num_experts=4, **overrides))
    return ftw.inspect(source, vram_bytes=vram_bytes, reserve_bytes=0)


@pytest.mark.parametrize("left", [0, 1, SLOT_BYTES - 1, SLOT_BYTES, 5000, 10 * GIB], ids=str)
def test_budget_is_spent_on_weights_then_tables_then_experts_or_tokens(tmp_path: Path, left: int) -> None:
    report = inspect_moe(tmp_path, REST_BYTES + TABLE_BYTES + left)
    budget = report.budget
    assert budget is not None
    assert report.nbytes == TABLE_BYTES + REST_BYTES + NUM_EXPERTS * SLOT_BYTES
    assert budget.vram_bytes == REST_BYTES + TABLE_BYTES + left
    assert (budget.weights_bytes, budget.expert_bytes) == (REST_BYTES, NUM_EXPERTS * SLOT_BYTES)
    assert budget.before == BudgetSide(TABLE_BYTES, left, min(left // SLOT_BYTES, NUM_EXPERTS), left // TOKEN_BYTES)
    more = left + TABLE_BYTES
    assert budget.after == BudgetSide(0, more, min(more // SLOT_BYTES, NUM_EXPERTS), more // TOKEN_BYTES)


@pytest.mark.parametrize(
    ("vram", "before", "after"),
    [
        (REST_BYTES + TABLE_BYTES - 1, -1, TABLE_BYTES - 1), (REST_BYTES, -TABLE_BYTES, 0),
        (REST_BYTES - 1, -TABLE_BYTES - 1, -1), (0, -TABLE_BYTES - REST_BYTES, -REST_BYTES),
    ],
    ids=["table-does-not-fit", "only-weights", "weights-do-not-fit", "nothing"],
)  # fmt: skip
def test_budget_that_is_too_small_is_negative(tmp_path: Path, vram: int, before: int, after: int) -> None:
    budget = inspect_moe(tmp_path, vram).budget
    assert budget is not None
    assert (budget.before.left_bytes, budget.after.left_bytes) == (before, after)
    assert (budget.before.expert_slots, budget.before.kv_tokens) == (0, 0)
    assert budget.after.kv_tokens == max(after, 0) // TOKEN_BYTES


def test_budget_of_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    budget = ftw.inspect(
        write_checkpoint(tmp_path, llama_tensors(), llama_config()), vram_bytes=GIB, reserve_bytes=0
    ).budget
    assert budget is not None
    assert (budget.expert_bytes, budget.before.expert_slots, budget.after.expert_slots) == (0, None, None)
    assert budget.after.kv_tokens == (GIB - REST_BYTES) // TOKEN_BYTES


@pytest.mark.parametrize("config", [None, llama_config(num_hidden_layers=...)], ids=["no-config", "no-layers"])
def test_budget_without_kv_facts_has_no_tokens(tmp_path: Path, config: dict[str, Any] | None) -> None:
    report = ftw.inspect(write_checkpoint(tmp_path, moe_tensors(), config), vram_bytes=GIB)
    assert report.budget is not None
    assert (report.budget.before.kv_tokens, report.budget.after.kv_tokens) == (None, None)
    assert report.budget.after.expert_slots == NUM_EXPERTS


def test_budget_of_a_tied_model_is_the_same_before_and_after(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    budget = ftw.inspect(write_checkpoint(tmp_path, llama_tensors(head=False), config), vram_bytes=GIB).budget
    assert budget is not None
    assert budget.before == budget.after
    assert (budget.after.table_bytes, budget.weights_bytes) == (0, TABLE_BYTES + 128 + 16)


def test_budget_counts_every_eligible_table(tmp_path: Path) -> None:
    ngram = {f"model.layers.1.ple.ngram_embedding.shard_{number}.weight": torch.ones(5, 8) for number in range(3)}
    source = write_checkpoint(tmp_path, {**llama_tensors(), **ngram}, llama_config())
    budget = ftw.inspect(source, vram_bytes=GIB).budget
    assert budget is not None
    assert (budget.before.table_bytes, budget.weights_bytes) == (TABLE_BYTES + 15 * 32, REST_BYTES)


def test_budget_of_an_ftw_folder_is_that_of_its_source(tmp_path: Path) -> None:
    plain = inspect_moe(tmp_path / "plain", GIB)
    write_ftw(tmp_path / "ftw", moe_tensors())
    (tmp_path / "ftw" / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    assert ftw.inspect(tmp_path / "ftw", vram_bytes=GIB, reserve_bytes=0).budget == plain.budget


def test_budget_is_in_the_json_only_where_it_was_asked_for(tmp_path: Path) -> None:
    assert "budget" not in ftw.inspect(write_checkpoint(tmp_path, moe_tensors(), llama_config())).to_dict()
    report = inspect_moe(tmp_path, 10_000).to_dict()
    assert report["budget"] == {
        "vram_bytes": 10_000, "weights_bytes": REST_BYTES, "expert_bytes": NUM_EXPERTS * SLOT_BYTES,
        "before": {"table_bytes": 1024, "left_bytes": 7808, "expert_slots": 8, "kv_tokens": 244},
        "after": {"table_bytes": 0, "left_bytes": 8832, "expert_slots": 8, "kv_tokens": 276},
        "num_experts": 8, "reserved_bytes": 0,
    }  # fmt: skip
    assert list(report).index("budget") == list(report).index("gain") + 1
    assert json.loads(json.dumps(report)) == report


# the command line


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "moe", moe_tensors(), llama_config(num_experts=4))


def fails(capsys: Any, status: int, *arguments: object) -> str:
    """Run a command that fails before it prints anything: its one line on stderr is returned."""
    assert main(list(map(str, arguments))) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ftw: error: ")
    assert err.count("\n") == 1
    return err


RESERVED = "  0 B is kept for the CUDA context, activations and others (--reserve)"


def test_vram_in_json_is_the_reports(capsys: Any, moe: Path) -> None:
    assert main(["inspect", str(moe), "--vram", "24GiB", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == ftw.inspect(str(moe), vram_bytes=24 * GIB).to_dict()
    assert err == ""


@pytest.mark.parametrize(
    ("vram", "lines"),
    [
        ("10000", ["of 9.77 KiB of VRAM", RESERVED, "  weights take 1.14 KiB, 3.00 KiB of routed experts left out",
                   "  tables on the GPU: 7.62 KiB left: room for all 8 experts (3.00 KiB), or 244 KV tokens",
                   "  tables in host memory: 8.62 KiB left: room for all 8 experts (3.00 KiB), or 276 KV tokens"]),
        ("2KiB", ["of 2.00 KiB of VRAM", RESERVED, "  weights take 1.14 KiB, 3.00 KiB of routed experts left out",
                  "  tables on the GPU: 144 B too little for weights and tables",
                  "  tables in host memory: 880 B left: room for 2 experts, or 27 KV tokens"]),
    ],
    ids=["fits", "too-small"],
)  # fmt: skip
def test_vram_in_words(capsys: Any, moe: Path, monkeypatch: pytest.MonkeyPatch, vram: str, lines: list[str]) -> None:
    monkeypatch.setattr("ftw.cli.inspect._MIN_VRAM", 1)  # the checkpoint is tiny
    assert main(["inspect", str(moe), "--vram", vram, "--reserve", "0"]) == 0
    out = capsys.readouterr().out.splitlines()
    start = out.index(lines[0])
    assert out[start : start + len(lines)] == lines


@pytest.mark.parametrize("vram", ["much", "", "-1", "24 GB free", "1e9", "GiB", "24GiB,", "9" * 40], ids=ascii)
def test_vram_that_is_no_size_is_wrong_usage(capsys: Any, moe: Path, vram: str) -> None:
    assert "is not a size, such as 8GiB or 512MiB" in fails(capsys, 2, "inspect", moe, f"--vram={vram}")


@pytest.mark.parametrize("vram", ["24", "0", "1023KiB", "0.0000001B"], ids=str)
def test_vram_that_no_gpu_has_is_wrong_usage(capsys: Any, moe: Path, vram: str) -> None:
    assert "at least 1 MiB is needed; write 24GiB" in fails(capsys, 2, "inspect", moe, "--vram", vram)


def test_plot_without_vram_is_wrong_usage(capsys: Any, moe: Path, tmp_path: Path) -> None:
    assert "--vram SIZE is needed" in fails(capsys, 2, "inspect", moe, "--plot", tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("name", ["x.xyz", "x", "x.", ".png", "x.png.gz"], ids=str)
def test_plot_of_another_suffix_fails_on_one_line(capsys: Any, moe: Path, tmp_path: Path, name: str) -> None:
    text = fails(capsys, 1, "inspect", moe, "--vram", "1GiB", "--plot", tmp_path / name)
    assert f"{tmp_path / name}: plot: its suffix is '{Path(name).suffix}', allowed are " in text
    assert "png" in text
    assert [path.name for path in tmp_path.iterdir()] == ["moe"]


def test_plot_without_matplotlib_tells_what_to_install(
    capsys: Any, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    text = fails(capsys, 1, "inspect", moe, "--vram", "1GiB", "--plot", tmp_path / "x.png")
    assert text.rstrip().endswith("x.png: plot: a picture needs matplotlib; pip install matplotlib")


def write_gib(folder: Path) -> Path:
    """Write a model of 3.5 GiB that is one hole: 1 GiB of table, as much of head, 1.5 GiB of one layer."""
    from builders import safetensors_bytes, tensor_entry

    folder.mkdir()
    shapes = {"lm_head.weight": [1 << 18, 2048], TABLE: [1 << 18, 2048], "model.layers.0.x": [3 << 17, 2048]}
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = tensor_entry("BF16", shape, end, end + prod(shape) * 2)
        end += prod(shape) * 2
    file = safetensors_bytes(header, b"\1")  # the head's first byte, which keeps it from equalling the table
    (folder / "model.safetensors").write_bytes(file)
    os.truncate(folder / "model.safetensors", len(file) - 1 + end)
    (folder / "config.json").write_text(json.dumps(llama_config(vocab_size=1 << 18, hidden_size=2048)))
    return folder


TABLE = "model.embed_tokens.weight"
MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF-"}


@pytest.mark.parametrize("suffix", [*MAGIC, "PNG"], ids=str)
def test_plot_is_written_in_the_format_of_its_suffix(capsys: Any, tmp_path: Path, suffix: str) -> None:
    source, picture = write_gib(tmp_path / "model"), tmp_path / f"picture.{suffix}"
    assert main(["inspect", str(source), "--vram", "24GiB", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(MAGIC[suffix.lower()])
    assert picture.stat().st_size > 5000
    out, err = capsys.readouterr()
    assert "of 24.00 GiB of VRAM" in out
    assert err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", picture.name]


@pytest.mark.parametrize(
    ("vram", "labels"),
    [
        ("24GiB", ["2.50 GiB", "1.00 GiB", "1.00 GiB", "19.50 GiB", "2.50 GiB", "1.00 GiB", "20.50 GiB"]),
        ("3.25GiB", ["2.50 GiB", "1.00 GiB", "0.32 GiB", "2.50 GiB", "0.32 GiB", "0.43 GiB"]),
    ],
    ids=["fits", "table-does-not-fit"],
)
def test_plot_has_both_bars_labelled_in_gib(capsys: Any, tmp_path: Path, vram: str, labels: list[str]) -> None:
    source, picture = write_gib(tmp_path / "model"), tmp_path / "picture.svg"
    assert main(["inspect", str(source), "--vram", vram, "--plot", str(picture)]) == 0
    # Letters are drawn as paths; what they say is in a comment before each text.
    texts = [line.strip()[5:-4] for line in picture.read_text().splitlines() if line.strip().startswith("<!-- ")]
    assert [text for text in texts if text.endswith(" GiB")] == labels
    said = ["tables on the GPU", "tables in host memory", "weights", "lookup tables", "left for experts and KV", "GiB",
            "context and activations"]  # fmt: skip
    assert set(said) <= set(texts)
    assert f"{source}: {float(vram[:-3]):.2f} GiB of VRAM" in texts


ODD_NAMES = ["größe", "[red]x", "100%", "under_score^2", "$_$", "$\\frac$", "\u6a21\u578b"]


@pytest.mark.parametrize(
    "name",
    [
        *ODD_NAMES[:4],
        *ODD_NAMES[4:6],
        ODD_NAMES[6],
    ],
    ids=ascii,
)
def test_plot_shows_any_name_as_it_is(capsys: Any, tmp_path: Path, name: str) -> None:
    source, picture = write_gib(tmp_path / name), tmp_path / "picture.svg"
    assert main(["inspect", str(source), "--vram", "24GiB", "--plot", str(picture)]) == 0
    assert capsys.readouterr().err == ""
    assert f"<!-- {source}: 24.00 GiB of VRAM -->" in picture.read_text()


def test_plot_into_no_folder_fails_on_one_line(capsys: Any, moe: Path, tmp_path: Path) -> None:
    assert main(["inspect", str(moe), "--vram", "1GiB", "--plot", str(tmp_path / "no" / "x.png")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("ftw: error: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["moe"]


def test_plot_of_a_broken_checkpoint_leaves_nothing(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"GGUF" + bytes(20))
    fails(capsys, 1, "inspect", tmp_path, "--vram", "1GiB", "--plot", tmp_path / "x.png")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_plot_on_a_full_disk_leaves_what_was_there(moe: Path, tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    picture.write_bytes(b"an older picture")
    done = command(
        "inspect", moe, "--vram", "1GiB", "--plot", picture,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert picture.read_bytes() == b"an older picture"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moe", "x.png"]


# the printed table


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 600, **options}
    return subprocess.run([sys.executable, "-m", "ftw.cli", *map(str, arguments)], **options)


REASONS = {
    "ok": (llama_tensors(), llama_config()),
    "tied": (llama_tensors(head=False), llama_config(tie_word_embeddings=True)),
    "tie_conflict": (llama_tensors(), llama_config(tie_word_embeddings=True)),
    "df11": (
        {"model.embed_tokens.luts": torch.zeros(2, 256), "lm_head.weight": torch.zeros(64, 8)}, llama_config(),
    ),
    "unsupported_encoding": ({**llama_tensors(), "model.embed_tokens.weight_scale": torch.ones(1)}, llama_config()),
}  # fmt: skip
LONG = "paligemma_with_expert.paligemma.model.language_model.model"
NGRAM = "model.language_model.layers.61.ple.ple_embedding.ngram_embedding"


@pytest.mark.parametrize("parent", ["model", LONG], ids=["short", "long"])
@pytest.mark.parametrize("reason", REASONS, ids=str)
def test_narrow_table_becomes_lines_that_keep_every_name_and_number(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, parent: str
) -> None:
    monkeypatch.setattr("ftw.cli.output._WIDTH_OF_FILES", 40)  # as a terminal of so many columns
    stored, config = REASONS[reason]
    tensors = {name.replace("model.embed_tokens", f"{parent}.embed_tokens"): stored[name] for name in stored}
    tensors |= {f"{NGRAM}.shard_{number}.weight": torch.ones(9, 8).to(torch.float8_e4m3fn) for number in range(12)}
    tensors[f"{NGRAM}.weight_scale"] = torch.ones(1)
    source = write_checkpoint(tmp_path, tensors, config)
    assert main(["inspect", str(source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "…" not in "".join(lines)
    for table in ftw.inspect(source).verdict.tables:
        start = lines.index(table.name)
        may_leave = "yes" if table.eligible else f"no: {table.reason}"
        assert lines[start + 1].strip() == table.role
        assert lines[start + 6].strip() == f"may leave: {may_leave}"
        assert max(map(len, lines[start + 1 : start + 7])) <= 40
        assert in_command_words(f"{table.name}: {table.reason}, {table.detail}") in lines


def test_lines_of_a_table_have_its_huge_numbers(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftw.cli.output._WIDTH_OF_FILES", 40)  # as a terminal of so many columns
    from builders import safetensors_bytes, tensor_entry

    rows, columns = 320_001_536, 160
    shapes = {f"{NGRAM}.weight": [rows, columns], f"{LONG}.embed_tokens_per_layer.weight": [262_144, 10_752]}
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = tensor_entry("BF16", shape, end, end + prod(shape) * 2)
        end += prod(shape) * 2
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(header))
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size + end)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    lines = [line.strip() for line in out.splitlines()]
    assert {f"{rows} rows", f"{columns} columns", "262144 rows", "10752 columns", "95.37 GiB"} <= set(lines)
    assert "safetensors, unknown architecture\n2 tensors, 100.62 GiB: BF16 100.62 GiB\n" in out


def on_terminal(*arguments: object, columns: int = 100, **environment: str) -> str:
    """Run the command with a terminal for its stdout, and return what it printed."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    done = command(
        *arguments, stdout=theirs, stderr=subprocess.PIPE, capture_output=False,
        env={**plain, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")
    printed = b""
    while True:
        try:
            printed += os.read(ours, 65536)
        except OSError:  # Linux's end of a terminal whose other side is closed
            break
    os.close(ours)
    return printed.decode().replace("\r\n", "\n")


def test_colours_are_for_terminals_alone(moe: Path) -> None:
    piped = command("inspect", moe, "--vram", "1GiB").stdout
    assert "\x1b" not in piped
    shown = on_terminal("inspect", moe, "--vram", "1GiB")
    assert "\x1b[32myes" in shown
    assert "\x1b" not in on_terminal("inspect", moe, "--json")


@pytest.mark.parametrize("arguments", [["inspect"], ["--help"]], ids=["inspect", "help"])
def test_no_color_means_no_escape_at_all(moe: Path, arguments: list[str]) -> None:
    source = [moe] if arguments == ["inspect"] else []
    assert "\x1b" not in on_terminal(*arguments, *source, NO_COLOR="1")


@pytest.mark.parametrize("columns", [40, 60, 80, 100], ids=str)
def test_report_fits_the_terminal(moe: Path, columns: int) -> None:
    """What does not fit goes on in the next line, at a blank; a path or a command to copy stays in one."""
    shown = on_terminal("inspect", moe, "--vram", "1GiB", NO_COLOR="1", columns=columns)
    lines = shown.splitlines()
    is_whole = ("ftw convert ", "in Python", "ftw.load(")
    long = [line for line in lines if len(line) > columns and not line.startswith(is_whole)]
    assert all(" " not in line.strip() for line in long), long
    assert ("may leave: yes" in shown) == (columns < 100)
    whole = " ".join(shown.split())
    report = ftw.inspect(moe, vram_bytes=GIB)
    assert report.budget is not None
    for number in (64, 8, report.budget.after.kv_tokens, report.budget.before.kv_tokens, "102.40 MiB", "1.00 KiB"):
        assert re.search(rf"\b{number}\b", whole)
    for words in ("model.embed_tokens.weight can leave the GPU", "token_embedding", f"if you like: ftw convert {moe} "):
        assert words in whole

"""DF11: what dfloat11 itself has written, streams of any code, ranges of bytes, and what becomes of the table."""

import hashlib
import json
import random
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import llama_config, write_checkpoint, write_ftw
from df11_builders import (
    BLOCK_BITS,
    DF11_CONFIG,
    MODULE,
    TABLE,
    Parts,
    decode,
    encode,
    read_all,
    read_fixture,
    under,
    uneven_parts,
    write_df11,
)
from ftw.cli.main import main
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ftw

FIXTURES = ["normal", "long-codes", "no-position"]
HEAD = {"lm_head.weight": torch.ones(4, 2, dtype=torch.bfloat16)}

# What dfloat11 wrote


@pytest.mark.parametrize("name", FIXTURES, ids=str)
def test_table_that_dfloat11_wrote_is_decoded(tmp_path: Path, name: str) -> None:
    parts, told = read_fixture(name)
    found = read_all(write_df11(tmp_path, parts, (int(told["rows"]), int(told["columns"]))))
    assert hashlib.sha256(found).hexdigest() == told["sha256"]
    assert found == decode(parts)


@pytest.mark.parametrize("layout", ["file-per-module", "one-file", "ftw"], ids=str)
def test_every_layout_shows_a_plain_table(tmp_path: Path, layout: str) -> None:
    parts, told = read_fixture("normal")
    config = llama_config(vocab_size=600, hidden_size=72, dfloat11_config=DF11_CONFIG)
    if layout == "file-per-module":
        write_df11(tmp_path, parts, (600, 72), HEAD)
    elif layout == "one-file":
        write_checkpoint(tmp_path, {**under(MODULE, parts), **HEAD}, config)
    else:
        write_ftw(tmp_path, {**under(MODULE, parts), **HEAD})
        (tmp_path / "config.json").write_text(json.dumps(config))
    with ftw.open_checkpoint(tmp_path, decode_df11=True) as checkpoint:
        assert set(checkpoint.tensors) == {TABLE, *HEAD}
        tensor = checkpoint.tensors[TABLE]
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("BF16", (600, 72), 2 * 600 * 72)
        assert checkpoint.nbytes == tensor.nbytes + 16
        [(name, sources)] = checkpoint.decoded.items()
        assert (name, set(sources)) == (TABLE, set(under(MODULE, parts)))
        extents = checkpoint.extents(TABLE)
        assert sum(extent.nbytes for extent in extents) == sum(part.nbytes for part in parts.values())
        read = b"".join(bytes(chunk) for chunk in checkpoint.iter_chunks(TABLE, 10_001))
        assert hashlib.sha256(read).hexdigest() == told["sha256"]
        stored = bytearray(parts["gaps"].nbytes)
        checkpoint.read_into(f"{MODULE}.gaps", stored)
        assert stored == parts["gaps"].numpy().tobytes()


def test_without_the_option_tensors_are_as_stored(tmp_path: Path) -> None:
    parts, _ = read_fixture("normal")
    with ftw.open_checkpoint(write_df11(tmp_path, parts, (600, 72), HEAD)) as checkpoint:
        assert set(checkpoint.tensors) == {*under(MODULE, parts), *HEAD}
        assert checkpoint.decoded == {}
        with pytest.raises(ftw.UnknownTensorError):
            checkpoint.extents(TABLE)


def test_file_of_an_old_release_without_split_positions_is_decoded(tmp_path: Path) -> None:
    parts, told = read_fixture("normal")
    del parts["split_positions"]
    assert hashlib.sha256(read_all(write_df11(tmp_path, parts, (600, 72)))).hexdigest() == told["sha256"]


# Streams of any code


def trees() -> st.SearchStrategy[list[str]]:
    """The leaves of binary trees, deep ones too: which leaf is split, again and again."""

    def grow(choices: list[int]) -> list[str]:
        leaves = ["0", "1"]
        for choice in choices:
            bits = leaves.pop(choice % len(leaves))
            leaves += [bits + "0", bits + "1"] if len(bits) < 32 else [bits]
        return leaves

    return st.lists(st.one_of(st.just(-1), st.integers(0, 99)), max_size=60).map(grow)


@settings(max_examples=60)
@given(leaves=trees(), num_symbols=st.integers(1, 9000), seed=st.integers(0, 99), data=st.data())
def test_any_code_decodes_as_the_slow_decoder_does(
    tmp_path_factory: pytest.TempPathFactory, leaves: list[str], num_symbols: int, seed: int, data: st.DataObject
) -> None:
    generator = random.Random(seed)
    generator.shuffle(leaves)
    *bits, end = leaves
    code = dict(zip(generator.sample(range(240), len(bits)), bits, strict=True))
    assume(len({leaf[:place] for leaf in bits for place in range(8, len(leaf), 8)}) <= 16)
    parts = encode(code, generator.choices(list(code), k=num_symbols), end=end, seed=seed)
    plain = decode(parts)
    folder = write_df11(tmp_path_factory.mktemp("code"), parts, (num_symbols, 1))
    with ftw.open_checkpoint(folder, decode_df11=True) as checkpoint:
        buffer = bytearray(len(plain))
        checkpoint.read_into(TABLE, buffer)
        assert buffer == plain
        for _ in range(5):
            low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(plain))] * 2)))
            piece = bytearray(high - low)
            checkpoint.read_into(TABLE, piece, offset=low)
            assert piece == plain[low:high]


def test_every_range_around_a_block_border_is_right(tmp_path: Path) -> None:
    parts, _ = read_fixture("long-codes")
    plain = decode(parts)
    border = 2 * int(parts["output_positions"].numpy().view("<u4")[1])
    with ftw.open_checkpoint(write_df11(tmp_path, parts, (5796, 8)), decode_df11=True) as checkpoint:
        requests = [
            (TABLE, bytearray(high - low), low)
            for low in range(border - 3, border + 4)
            for high in range(low, border + 4)
        ]
        checkpoint.read_many([*requests, ("model.norm.weight", bytearray(32), 0)])
    assert all(bytes(view) == plain[low : low + len(view)] for _, view, low in requests)


@pytest.mark.parametrize("num_bits", [63, 64, 65, BLOCK_BITS - 1, BLOCK_BITS, BLOCK_BITS + 1, 2 * BLOCK_BITS], ids=str)
def test_stream_that_ends_beside_a_border_is_decoded(tmp_path: Path, num_bits: int) -> None:
    parts = encode({7: "0", 9: "10"}, random.Random(0).choices([7], k=num_bits), end="11")
    assert read_all(write_df11(tmp_path, parts, (num_bits, 1))) == decode(parts)


def test_codes_of_every_length_are_decoded(tmp_path: Path) -> None:
    parts = uneven_parts(30_000)
    assert sorted(set(parts["luts"][-1].tolist())) == list(range(33))
    assert read_all(write_df11(tmp_path, parts, (30_000, 1))) == decode(parts)


def test_codes_of_32_bits_alone_are_decoded(tmp_path: Path) -> None:
    parts = encode({5: "0" * 32, 6: "0" * 31 + "1"}, random.Random(0).choices([5, 6], k=5000))
    assert read_all(write_df11(tmp_path, parts, (5000, 1))) == decode(parts)


def test_threads_share_a_table(tmp_path: Path) -> None:
    parts, _ = read_fixture("normal")
    plain, found = decode(parts), {}
    with ftw.open_checkpoint(write_df11(tmp_path, parts, (600, 72)), decode_df11=True) as checkpoint:

        def read(offset: int) -> None:
            found[offset] = bytearray(20_000)
            checkpoint.read_into(TABLE, found[offset], offset=offset)

        threads = [threading.Thread(target=read, args=(offset,)) for offset in range(0, 60_000, 9_999)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(view == plain[offset : offset + 20_000] for offset, view in found.items())


def large_parts(num_blocks: int) -> tuple[Parts, np.ndarray]:
    """Return a table whose codes are single bits, and its elements: any stream is one, and gaps are all zero."""
    stream = np.random.default_rng(0).integers(0, 256, 4096 * num_blocks, np.uint8)
    bits = np.unpackbits(stream)
    positions = np.arange(num_blocks + 1, dtype="<u4") * BLOCK_BITS
    parts = {
        **encode({100: "0", 101: "1"}, [100]),
        "encoded_exponent": torch.from_numpy(stream),
        "sign_mantissa": torch.zeros(len(bits), dtype=torch.uint8),
        "output_positions": torch.from_numpy(positions.view(np.uint8)),
        "gaps": torch.zeros(320 * num_blocks, dtype=torch.uint8),
    }
    return parts, (100 + bits).astype("<u2") << 7


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    parts, plain = large_parts(400)
    folder = write_df11(tmp_path, parts, (400, BLOCK_BITS))
    buffer = bytearray(plain.nbytes)
    with ftw.open_checkpoint(folder, decode_df11=True) as checkpoint:
        checkpoint.read_into(TABLE, buffer[:2], offset=0)  # numpy, and what else is imported once
        tracemalloc.start()
        checkpoint.read_into(TABLE, buffer)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert buffer == plain.tobytes()
    assert peak < 20 << 20 < plain.nbytes


# What becomes of the table


def test_decoded_table_may_leave_the_gpu(tmp_path: Path) -> None:
    parts, _ = read_fixture("normal")
    folder = write_df11(tmp_path, parts, (600, 72), {"lm_head.weight": torch.ones(600, 72, dtype=torch.bfloat16)})
    [table] = ftw.inspect(folder, decode_df11=True).verdict.tables
    assert (table.name, table.rows, table.columns, table.dtype, table.row_bytes) == (TABLE, 600, 72, "BF16", 144)
    assert (table.eligible, table.reason, table.nbytes) == (True, "ok", 600 * 144)
    before = ftw.inspect(folder).verdict.token_embedding
    assert (before.reason, before.eligible) == ("df11", False)
    option = "--decode-df11 (decode_df11=True) makes a plain bf16 table of it"
    assert before.detail == f"DF11 stores Huffman-coded exponents, so single rows cannot be read; {option}"


def test_inspect_takes_the_option(tmp_path: Path, capsys: Any) -> None:
    parts, _ = read_fixture("normal")
    folder = write_df11(tmp_path, parts, (600, 72), {"lm_head.weight": torch.ones(600, 72, dtype=torch.bfloat16)})
    assert main(["inspect", str(folder), "--check"]) == 3
    assert "--decode-df11" in capsys.readouterr().err
    assert main(["inspect", str(folder), "--check", "--decode-df11", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_tensors"], found["tables"][0]["rows"]) == (2, 600)


def test_decoded_table_without_a_head_is_tied(tmp_path: Path) -> None:
    parts, _ = read_fixture("normal")
    folder = write_df11(tmp_path, parts, (600, 72), tie_word_embeddings=True)
    verdict = ftw.inspect(folder, decode_df11=True).verdict
    assert (verdict.tied, verdict.token_embedding.reason) == (True, "tied")


@pytest.mark.parametrize("stored", ["df11", "plain"], ids=str)
@pytest.mark.parametrize("is_copy", [True, False], ids=["copy", "other"])
def test_head_is_compared_with_the_decoded_table(tmp_path: Path, stored: str, is_copy: bool) -> None:
    parts, _ = read_fixture("normal")
    plain = torch.frombuffer(bytearray(decode(parts)), dtype=torch.bfloat16).reshape(600, 72).clone()
    if not is_copy:
        plain[-1, -1] = 3.0
        parts["sign_mantissa"][-1] ^= 1
    head = {"lm_head.weight": plain} if stored == "plain" else under("lm_head", parts)
    folder = write_df11(tmp_path, read_fixture("normal")[0], (600, 72), head, tie_word_embeddings=True)
    verdict = ftw.inspect(folder, decode_df11=True).verdict
    assert (verdict.tied, verdict.token_embedding.reason) == ((True, "tied") if is_copy else (None, "tie_conflict"))


def test_heads_layers_and_small_tables_stay_as_they_are(tmp_path: Path) -> None:
    parts, _ = read_fixture("normal")
    stay = ["lm_head", "model.layers.0", "model.token_type_embeddings"]
    rest = {name: tensor for path in stay for name, tensor in under(path, parts).items()}
    with ftw.open_checkpoint(write_df11(tmp_path, parts, (600, 72), rest), decode_df11=True) as checkpoint:
        assert set(checkpoint.tensors) == {TABLE, *rest}
        tokens, types = ftw.inspect(checkpoint).verdict.tables
    assert (tokens.reason, types.reason) == ("ok", "df11")
    assert "--decode-df11" not in types.detail


@pytest.mark.parametrize("embed", ["host", "gpu"], ids=str)
def test_loaded_rows_are_those_of_the_plain_table(tmp_path: Path, embed: str) -> None:
    parts, _ = read_fixture("normal")
    plain = torch.frombuffer(bytearray(decode(parts)), dtype=torch.bfloat16).reshape(600, 72)
    folder = write_df11(tmp_path, parts, (600, 72), under("lm_head", parts))
    with ftw.load(folder, embed=embed, device="cpu", decode_df11=True) as model:
        assert torch.equal(model.embedding(torch.arange(600)).view(torch.int16), plain.view(torch.int16))
        weights = dict(model.weights())
    assert set(weights) == {*under("lm_head", parts), *([TABLE] if embed == "gpu" else [])}
    with pytest.raises(ftw.NotEligibleError, match="; decode_df11=True makes"):
        ftw.load(folder, embed="host", device="cpu")


def test_shared_table_is_known_by_the_state_of_its_parts(tmp_path: Path) -> None:
    parts, _ = read_fixture("normal")
    folder = write_df11(tmp_path, parts, (600, 72), under("lm_head", parts))
    plain = torch.frombuffer(bytearray(decode(parts)), dtype=torch.bfloat16).reshape(600, 72)
    options = {"embed": "host", "device": "cpu", "decode_df11": True, "share": "node"}
    with ftw.load(folder, **options) as one, ftw.load(folder, **options) as other:
        for model in (one, other):
            assert torch.equal(model.embedding(torch.arange(600)).view(torch.int16), plain.view(torch.int16))


def test_dummy_loading_decodes_nothing(tmp_path: Path) -> None:
    parts, _ = read_fixture("normal")
    parts["luts"].zero_()
    folder = write_df11(tmp_path, parts, (600, 72), under("lm_head", parts))
    with ftw.load(folder, embed="host", device="cpu", decode_df11=True, dummy=True) as model:
        assert model.embedding(torch.arange(3)).shape == (3, 72)


def test_inspecting_loads_no_numpy(tmp_path: Path) -> None:
    parts, _ = read_fixture("normal")
    folder = write_df11(tmp_path, parts, (600, 72), under("lm_head", parts))
    script = f"import sys, ftw\nftw.inspect({str(folder)!r}, decode_df11=True)\nprint('numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


# Shapes

SHAPES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "top": ({"vocab_size": 600, "hidden_size": 72}, (600, 72)),
    "text-part": ({"vocab_size": ..., "text_config": {"vocab_size": 600, "hidden_size": 72}}, (600, 72)),
    "factorised": ({"vocab_size": 600, "hidden_size": 100, "embedding_size": 72}, (600, 72)),
    "projected": ({"vocab_size": 400, "hidden_size": 96, "word_embed_proj_dim": 108}, (400, 108)),
}


@pytest.mark.parametrize("name", SHAPES, ids=str)
def test_shape_comes_from_the_configuration(tmp_path: Path, name: str) -> None:
    config, shape = SHAPES[name]
    folder = write_df11(tmp_path, read_fixture("normal")[0], None, **config)
    with ftw.open_checkpoint(folder, decode_df11=True) as checkpoint:
        assert checkpoint.tensors[TABLE].shape == shape


PER_LAYER = {"vocab_size_per_layer_input": 600, "hidden_size_per_layer_input": 36, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "config",
    [PER_LAYER, {"text_config": PER_LAYER}, {"llm_config": PER_LAYER}, {"thinker_config": {"text_config": PER_LAYER}}],
    ids=["top", "text", "llm", "thinker"],
)
def test_per_layer_table_has_a_slice_for_each_layer(tmp_path: Path, config: dict[str, Any]) -> None:
    parts, _ = read_fixture("normal")
    name = "model.embed_tokens_per_layer"
    config = llama_config(**config)
    tensors = {**under(name, parts), TABLE: torch.ones(64, 8).bfloat16(), "lm_head.weight": torch.zeros(64, 8)}
    report = ftw.inspect(write_checkpoint(tmp_path, tensors, config), decode_df11=True)
    table = report.verdict.tables[1]
    assert (table.name, table.reason, table.columns) == (f"{name}.weight", "ok", 72)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"vocab_size": 601, "hidden_size": 72}, "tells [601, 72]"),
        ({"vocab_size": 600, "hidden_size": 71, "embedding_size": 8}, "tells [600, 71], [600, 8]"),
        ({"vocab_size": ..., "hidden_size": 72}, "tells nothing"),
        ({"vocab_size": 600, "hidden_size": ...}, "tells nothing"),
    ],
    ids=["rows", "columns", "no-rows", "no-columns"],
)
def test_table_of_unknown_shape_is_refused(tmp_path: Path, config: dict[str, Any], found: str) -> None:
    folder = write_df11(tmp_path, read_fixture("normal")[0], None, **config)
    with pytest.raises(ftw.CheckpointError) as caught:
        ftw.open_checkpoint(folder, decode_df11=True)
    needed = "vocab_size and hidden_size are needed"
    start = f"{folder}: {MODULE}: DF11 does not store the shape of its 43200 elements and config.json "
    assert str(caught.value) == f"{start}{found}, {needed}"


def test_table_without_a_configuration_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, under(MODULE, read_fixture("normal")[0]))
    with pytest.raises(ftw.CheckpointError, match=r"config\.json tells nothing, vocab_size and hidden_size are needed"):
        ftw.open_checkpoint(tmp_path, decode_df11=True)

"""Tables that are filled later on a GPU: warm-up, refills under captured graphs, and handles of code stored on disk."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ftw

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
ROWS, COLUMNS = 4096, 512
MOST = 3000
COMPILED = """
import sys, torch, ftw
names = sys.argv[1].split(",")
tables = {}
for number, name in enumerate(sorted(names)):
    table = ftw.HostTable(64, 32, dtype=torch.bfloat16, name=name, device="cuda")
    table.rows.fill_(1 + number)
    tables[name] = table
rows = {name: tables[name].finish(handle=name) for name in names}      # in the order that was asked for
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = rows["one"], rows["two"]
    def forward(self, ids):
        return self.one(ids) * 10 + self.two(ids)
ids = torch.arange(8, device="cuda")
from torch._dynamo.utils import counters
print(torch.compile(Model(), fullgraph=True)(ids).float().mean().item(), counters["inductor"]["fxgraph_cache_hit"])
"""


def make(**options: object) -> ftw.HostEmbedding:
    table = ftw.HostTable(ROWS, COLUMNS, dtype=torch.bfloat16, device=DEVICE)
    table.rows.copy_(torch.randn(ROWS, COLUMNS))
    return table.finish(**options)  # type: ignore[arg-type]


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, or loads from its cache on disk, meanwhile."""
    from triton import knobs

    found: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *args, **facts: found.append(str(facts.get("fn", args)))
    yield found
    knobs.runtime.jit_post_compile_hook = before


@pytest.mark.parametrize("hot_bytes", [None, 64 << 10], ids=["plain", "hot"])
def test_nothing_is_compiled_after_the_warm_up(compilations: list[str], hot_bytes: int | None) -> None:
    embedding = make(hot_bytes=hot_bytes)
    embedding.warm_up(MOST)
    assert compilations
    compilations.clear()
    rows = embedding.table.to(DEVICE)
    for dtype in (torch.int32, torch.int64):
        ids = torch.randint(0, ROWS, (MOST + 1,), dtype=dtype, device=DEVICE)
        for count in (1, 2, 16, 17, 100, 1023, 1024, 1025, 2048, MOST):
            for offset in (0, 1):
                part = ids[offset : offset + count]
                assert torch.equal(embedding(part), rows[part.long()])
    if hot_bytes:
        embedding.update_hot_rows()
    graph = torch.cuda.CUDAGraph()
    static = torch.arange(512, device=DEVICE)
    with torch.cuda.graph(graph):
        found = embedding(static)
    graph.replay()
    assert torch.equal(found, rows[:512])
    assert compilations == []


def test_warm_up_counts_nothing() -> None:
    embedding = make(hot_bytes=64 << 10)
    embedding.warm_up(MOST)
    embedding.update_hot_rows()
    assert embedding.hot_ids().tolist() == []


@pytest.mark.parametrize("hot_bytes", [None, 64 << 10], ids=["plain", "hot"])
def test_captured_graph_gives_the_rows_of_a_refill(hot_bytes: int | None) -> None:
    embedding = make(hot_bytes=hot_bytes)
    ids = torch.arange(64, device=DEVICE)
    if hot_bytes:
        embedding.set_hot_rows(range(0, 64, 2))
    embedding(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = embedding(ids)
    new = torch.randn(ROWS, COLUMNS, device=DEVICE).to(torch.bfloat16)
    with embedding.refill() as rows:
        rows.copy_(new, non_blocking=True)
    graph.replay()
    assert torch.equal(found, new[:64])
    assert embedding.pinned_nbytes >= new.nbytes


def test_stored_code_finds_its_tables_in_whatever_order_they_are_made(tmp_path: Path) -> None:
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    results = []
    for order in ("one,two", "two,one"):
        done = subprocess.run(
            [sys.executable, "-c", COMPILED, order], env=environ, capture_output=True, text=True, check=True
        )
        results.append(done.stdout.split())
    assert [value for value, _ in results] == ["12.0", "12.0"]
    assert int(results[1][1]) > 0

"""Imports only point back along the way of the data, and what starts at once imports neither torch nor triton."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the first to the last; a module may import what stands before it, or beside it in the same group.
LAYERS = [
    {"errors", "_version", "sizes", "numa", "file_lock", "tmpfs", "segment_reaper_program", "threads"},
    {"dtypes", "tensors", "host_memory", "host_limits", "df11_code"},
    {"impostors", "links", "problems"},
    {"pin_budget", "strict_json", "weight_file", "ggml_types", "encodings", "hub_errors", "df11_blocks"},
    {"json_stream"},
    {"segment_layout", "segment_pages", "segment_reaper", "hub_retry"},
    {"segment_file"},
    {"shared_segment", "bulk_read"},
    {"hub_file", "kv_cache"},
    {"hub"},
    {"readers", "hub_fetch"},
    {"families", "config", "names", "source"},
    {"gguf_config", "df11"},
    {"checkpoint", "packing", "tensor_equality"},
    {"tie", "rows"},
    {"verdict"},
    {"placement", "layout", "durable", "per_layer"},
    {"index_file", "shard_files", "part", "metadata_files", "run_reader"},
    {"conversion_plan", "writer"},
    {"table_rows"},
    {"gain"},
    {"report"},
    {"target"},
    {"verify"},
    {"convert"},
    {"kernels"},
    {"gpu_driver", "devices", "live_tensors", "table_modules"},
    {"table_layout", "lookup_op", "prefetch", "kept_launches"},
    {"hot_rows"},
    {"eager_lookup"},
    {"held_table"},
    {"pinned"},
    {"memory"},
    {"embedding", "dummy"},
    {"staging", "offloader", "sharded_embedding"},
    {"host_tables"},
    {"loaded_model"},
    {"loader"},
    {"model_tables"},
    {"integrations"},
    {"model_offloader"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FIRST_WITH_TORCH = "kernels"  # it and all after it


def modules() -> list[Path]:
    return sorted(
        path for path in (ROOT / "ftw").rglob("*.py") if path.name != "__init__.py" or path.parent.name != "ftw"
    )


def room(path: Path) -> str:
    return path.relative_to(ROOT / "ftw").with_suffix("").parts[0]


def imports_of(path: Path) -> set[str]:
    """Return the full names that a module imports, wherever in it, but for those that only type checkers see."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_imports_only_what_stands_before_it(path: Path) -> None:
    own = LEVEL[room(path)]
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "ftw" and len(parts) > 1 and parts[1] in LEVEL:
            assert LEVEL[parts[1]] < own or parts[1] == room(path), f"{path} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_torch_is_imported_only_where_it_belongs(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports_of(path)} & {"torch", "triton"}
    assert not foreign or LEVEL[room(path)] >= LEVEL[FIRST_WITH_TORCH]


def test_triton_is_imported_by_kernels_alone() -> None:
    users = {path.name for path in modules() if any(name.split(".")[0] == "triton" for name in imports_of(path))}
    assert users
    assert all(name.endswith("_triton.py") for name in users)


def test_library_does_not_import_the_command_line() -> None:
    for path in modules():
        assert not any(name.startswith(("ftw.cli", "ftw.bench", "cli", "bench")) for name in imports_of(path))


def test_importing_ftw_and_its_command_line_loads_neither_torch_nor_triton() -> None:
    script = "import sys, ftw, ftw.cli.main\nprint(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

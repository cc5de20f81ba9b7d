"""Rooms import only what the table allows, so that imports point back along the way of the data and never in a circle.

What a room offers to the others is in `__all__` of its `__init__`: names, or a whole module of its own. What starts at
once imports neither torch nor triton.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

# Each room, and the rooms that it may import directly, for types alone too. A room stands after all that it imports.
ROOMS = {
    "ground": set(),
    "host": {"ground"},
    "host.shared": {"ground", "host"},
    "files": {"ground", "host"},
    "hub": {"ground", "files"},
    "readers": {"ground", "files", "hub", "readers.safetensors", "readers.gguf"},
    "readers.safetensors": {"ground", "files", "hub", "readers"},
    "readers.gguf": {"ground", "files", "hub", "readers"},
    "checkpoint": {
        *("ground", "host", "files", "hub", "readers", "readers.safetensors", "readers.gguf", "checkpoint.df11"),
    },
    "checkpoint.df11": {"ground", "files", "checkpoint"},
    "layouts.recipes": {"ground"},
    "layouts.families": {"ground", "files", "checkpoint", "layouts.recipes"},
    "layouts.expected": {"ground", "files", "checkpoint", "layouts.recipes", "layouts.families"},
    "layouts.freetoken": {
        *("ground", "files", "readers", "checkpoint", "layouts.recipes", "layouts.families", "layouts.expected"),
    },
    "layouts": {"ground", "files", "readers", "checkpoint", "layouts.freetoken"},
    "verdict": {"ground", "readers", "readers.safetensors", "checkpoint", "checkpoint.df11", "layouts"},
    "conversion": {
        *("ground", "host", "files", "readers", "checkpoint", "layouts", "verdict", "conversion.writing"),
    },
    "conversion.writing": {"ground", "host", "files", "readers", "checkpoint"},
    "pinned": {"ground", "host"},
    "kernels": {"ground", "kernels.jit"},
    "kernels.jit": set(),
    "lookup": {"ground", "pinned", "kernels"},
    "loading": {"ground", "host", "host.shared", "files", "checkpoint", "verdict", "pinned", "kernels", "lookup"},
    "offloading": {"ground", "host", "checkpoint", "pinned", "kernels", "lookup"},
    "integrations": {"ground", "lookup", "offloading", "integrations.transformers"},
    "integrations.vllm": {"ground", "checkpoint", "verdict", "pinned", "lookup", "loading", "offloading"},
    "integrations.transformers": {
        *("ground", "checkpoint", "verdict", "pinned", "lookup", "loading", "offloading"),
    },
    "face": {
        "ground",
        "checkpoint",
        "verdict",
        "conversion",
        "pinned",
        "lookup",
        "loading",
        "offloading",
        "integrations",
    },
}
GROUND = {"errors", "sizes", "dtypes", "tensors", "ggml_types", "_version"}
WITH_TORCH = {"pinned", "kernels", "kernels.jit", "lookup", "loading", "offloading"}
WITH_TORCH |= {"integrations", "integrations.transformers", "integrations.vllm"}


def modules() -> list[Path]:
    return sorted((ROOT / "ftw").rglob("*.py"))


def room_of(name: str) -> str:
    """Return the room of a module, or of what is imported from one, by its full name."""
    parts = name.split(".")[1:]
    if parts and parts[0] in GROUND:
        return "ground"
    return next((".".join(parts[:n]) for n in (2, 1) if ".".join(parts[:n]) in ROOMS), "face")


def own_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Return the full names that a module imports, wherever in it, those included that only type checkers see."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_imports_only_rooms_that_its_own_may(path: Path) -> None:
    own = room_of(own_name(path))
    for name in imports_of(path):
        if name.split(".")[0] == "ftw":
            assert room_of(name) in {own, *ROOMS[own]}, f"{path} imports {name}"


def family(room: str) -> str:
    """Return the outer room; it and the rooms inside of it import each other's modules."""
    return room.split(".")[0]


def offers() -> dict[str, set[str]]:
    """Return the full names that each room offers, by room."""
    found = {}
    for room in ROOMS.keys() - {"ground", "face"}:
        init = ast.parse((ROOT / "ftw" / room.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
        lists = [node.value for node in init.body if isinstance(node, ast.Assign)]
        found[room] = {f"ftw.{room}.{name}" for names in lists for name in ast.literal_eval(names)}
    return found


def asked_of_rooms(path: Path) -> set[str]:
    """Return the full names that a module imports from rooms of other families."""
    own = family(room_of(own_name(path))) if path.is_relative_to(ROOT / "ftw") else ""
    names = {name for name in imports_of(path) if name.startswith("ftw.")} - {f"ftw.{room}" for room in ROOMS}
    return {name for name in names if room_of(name) not in ("ground", "face") and family(room_of(name)) != own}


def users() -> list[Path]:
    return [
        *modules(),
        *(path for folder in ("cli", "bench", "examples", "fuzz") for path in (ROOT / folder).glob("*.py")),
    ]


@pytest.mark.parametrize("path", users(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_room_is_asked_only_for_what_it_offers(path: Path) -> None:
    offered = set().union(*offers().values())
    for name in asked_of_rooms(path):
        assert name in offered or name.rpartition(".")[0] in offered, f"{path} imports {name}"


def test_room_offers_only_what_others_ask_for() -> None:
    asked = {name for path in users() for name in asked_of_rooms(path)}
    asked |= {name.rpartition(".")[0] for name in asked}
    offered = offers()
    public = offered.pop("integrations.transformers")
    assert public == {f"ftw.integrations.transformers.{name}" for name in ("close", "load", "offload_model")}
    assert offered.pop("integrations.vllm") == {"ftw.integrations.vllm.register"}  # what vLLM asks for
    assert set().union(*offered.values()) - asked == set()


@pytest.mark.parametrize("room", sorted(ROOMS.keys() - {"ground", "face"}))
def test_room_is_of_a_size_to_be_taken_in(room: str) -> None:
    folder = ROOT / "ftw" / room.replace(".", "/")
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 12


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_torch_is_imported_only_where_it_belongs(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports_of(path)} & {"torch", "triton"}
    assert not foreign or room_of(own_name(path)) in WITH_TORCH


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

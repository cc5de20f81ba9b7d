"""What lies at a place that holds no checkpoint, and what to do; known by names, and a file by its beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftw.errors import list_names
from ftw.files import find_impostor
from ftw.hub import Place, open_weight_file
from ftw.readers.ftw_format import INDEX_NAME, JOURNAL_NAME, OWN_NAMES
from ftw.readers.safetensors import describe_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHERS = {
    ".h5": "TensorFlow", ".msgpack": "Flax", ".onnx": "ONNX", ".npz": "numpy", ".tflite": "TensorFlow Lite",
}  # fmt: skip
_SAVE = "save the model as safetensors (save_pretrained of transformers does), or fetch it in that form"
_MAX_NAMED, _MAX_TRIED = 5, 50


class NoCheckpoint(NamedTuple):
    """What lies there instead: a word for programs, and a part of a sentence with what to do."""

    reason: str
    text: str


def describe_no_checkpoint(place: Place, is_checkpoint: Callable[[Place], bool]) -> NoCheckpoint | None:
    """Return what lies at a place, None if that is not known; `is_checkpoint` is asked of folders in it."""
    if not place.is_folder:
        return _describe_file(place)
    names = sorted(entry.name for entry in place.folder.iterdir())
    if not names:
        return NoCheckpoint("empty", "is an empty folder; name one with weights")
    if JOURNAL_NAME in names:
        return NoCheckpoint("unfinished", "is an unfinished conversion; resume=True with its source and target ends it")
    if any(OWN_NAMES.fullmatch(name) for name in names):
        problem = f"holds shards of an FTW without their index, {INDEX_NAME}; copy it beside them, or convert again"
        return NoCheckpoint("ftw_shard", problem)
    inside = [name for name in names[:_MAX_TRIED] if (place.folder / name).is_dir()]
    found = [name for name in inside if is_checkpoint(Place(place.folder / name))]
    if "model_index.json" in names:
        way_out = f"name one of its sub-folders that can be opened: {list_names(found, _MAX_NAMED)}" if found else _SAVE
        return NoCheckpoint("diffusers", f"is a diffusers pipeline, which is several models; {way_out}")
    return next(_describe_names(place, names, found), None)


def _describe_names(place: Place, names: list[str], found: list[str]) -> Iterator[NoCheckpoint]:
    """Yield what the names in a folder say, the first that is right before the others."""
    if found:
        listed = list_names(found, _MAX_NAMED)
        yield NoCheckpoint("folders", f"holds no weights itself; sub-folders that can be opened: {listed}")
    pickles = [name for name in names if name.lower().endswith(_PICKLES)]
    if "adapter_config.json" in names:
        base = (place.read_json("adapter_config.json") or {}).get("base_model_name_or_path")
        adapter = describe_adapter(base if isinstance(base, str) else "")
        yield NoCheckpoint("adapter", f"is {adapter}; name the base model")
    if pickles:
        yield NoCheckpoint(
            "pickle", f"holds PyTorch pickles ({list_names(pickles, _MAX_NAMED)}), which are never opened; {_SAVE}"
        )
    for suffix, library in _OTHERS.items():
        named_so = [name for name in names if name.lower().endswith(suffix)]
        if named_so:
            yield NoCheckpoint(
                "other_format", f"holds weights of {library} ({list_names(named_so, _MAX_NAMED)}); {_SAVE}"
            )
    if "config.json" in names:
        yield NoCheckpoint("no_weights", "holds a config.json and no weights; fetch the weights into it")


def _describe_file(place: Place) -> NoCheckpoint | None:
    name = place.path.name.lower()
    if OWN_NAMES.fullmatch(name) or name.endswith(".ftw"):
        return NoCheckpoint("ftw_shard", f"is a shard of an FTW; name its folder, which holds {INDEX_NAME}")
    first = b""
    if place.roots is not None and place.path.is_file():  # of the hub nothing is fetched for this
        file = open_weight_file(place.path)
        first = file.read(0, min(file.nbytes, 8))
    if impostor := find_impostor(first):
        return NoCheckpoint("pickle" if "pickle" in impostor else "download", f"{impostor}{_way_out(impostor)}")
    if name.endswith(_PICKLES):
        return NoCheckpoint("pickle", f"is named like a PyTorch pickle, which is never opened; {_SAVE}")
    if name.endswith(".json"):
        return NoCheckpoint("no_weights", "is a JSON file that lists no weights; name its folder")
    return None


def _way_out(impostor: str) -> str:
    return f"; {_SAVE}" if "pickle" in impostor else ""

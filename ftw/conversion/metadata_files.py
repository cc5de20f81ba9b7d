"""The files of a checkpoint that are not weights: chooses and copies them.

All files of a folder are taken, except weights in any format and what version control and download tools leave. Beside
a single file only the well-known names are taken, since a folder of downloads may hold anything. A link that
leads out of the source is not followed, unless it leads into the blobs of the same hub cache entry.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.files import is_inside
from ftw.host import OpenFolder, granted_by, open_own
from ftw.readers import INDEX_NAME, OWN_NAMES, LeftOut

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from ftw.checkpoint import Checkpoint

_WEIGHTS = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.ftw",
    "*.gguf", "*.ggml", "*.h5", "*.hdf5", "*.keras", "*.msgpack", "*.msgpack.index.json", "*.h5.index.json",
    "*.onnx", "*.onnx_data", "*.onnx.data", "*.ot", "*.pkl", "*.pickle", "*.npz", "*.npy", "*.tflite",
    "*.mlmodel", "*.llamafile", "*.nemo", "*.engine", "*.distcp",
)  # fmt: skip
_DEBRIS = ("*.incomplete", "*.lock", "*.tmp", "*.part", ".DS_Store")
_DEBRIS_FOLDERS = frozenset({".git", ".cache", "__pycache__", ".ipynb_checkpoints"})
_MAX_DEPTH = 64  # of folders in folders
# What may lie beside a weight file and surely belongs to it.
_WELL_KNOWN = frozenset(
    """
    config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
    added_tokens.json tokenizer.model spiece.model vocab.json vocab.txt merges.txt chat_template.json
    chat_template.jinja preprocessor_config.json processor_config.json hf_quant_config.json
    quantization_config.json
    """.split()
)


def choose(checkpoint: Checkpoint) -> tuple[tuple[Path, ...], tuple[LeftOut, ...]]:
    """Return the metadata files, relative to the checkpoint's folder, and what is left out beside the weights."""
    folder = checkpoint.folder
    taken = {file.path for file in checkpoint.files}
    named = {entry.name for entry in checkpoint.left_out if entry.kind == "file"}
    named |= {file.name for file in checkpoint.derived_files}
    files: list[Path] = []
    left_out: list[LeftOut] = []
    for path in _walk(folder) if checkpoint.path.is_dir() else _well_known(folder):
        relative = path.relative_to(folder)
        if path in taken or relative.as_posix() in named or path.name == INDEX_NAME:
            continue
        reason = _reason_against(path, folder)
        if reason is None:
            files.append(relative)
        elif not path.name.endswith(".safetensors.index.json"):  # its content is in the FTW's own index
            left_out.append(LeftOut("file", relative.as_posix(), reason))
    return tuple(files), tuple(left_out)


def copy(files: tuple[Path, ...], folder: Path, target: OpenFolder) -> None:
    """Copy files, in their folders, from one folder to another, and make them last; no link is written or followed.

    A file lets group and others do no more than its original, and so does a folder.

    Raises:
        CheckpointError: One became a link that leads out of the folder, or is not a regular file any more.
    """
    for inside, group in itertools.groupby(files, key=lambda relative: relative.parent):
        with contextlib.ExitStack() as stack:
            place, path = target, folder
            for name in inside.parts:
                path /= name
                place = stack.enter_context(_enter(place, path))
            for relative in group:
                _copy_file(folder / relative, folder, place)
            place.sync()


def _enter(place: OpenFolder, original: Path) -> OpenFolder:
    """Open the copy of a folder in another one, and make it if it is not there."""
    with contextlib.suppress(FileExistsError):
        place.make_folder(original.name, 0o700 | granted_by(original, place.status().st_gid))
        place.sync()
    return OpenFolder(place.path / original.name, place)


def _copy_file(path: Path, folder: Path, place: OpenFolder) -> None:
    with _open_inside(path, folder) as reading:
        mode = 0o600 | granted_by(reading.fileno(), place.status().st_gid) & 0o066
        descriptor = place.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as writing:
            shutil.copyfileobj(reading, writing)
            writing.flush()
            os.fsync(descriptor)


def _open_inside(path: Path, folder: Path) -> BinaryIO:
    """Open a file of the folder; a link may lead anywhere in it or in its hub cache entry."""
    if not is_inside(path, folder):
        raise CheckpointError(path, "file", "became a link that leads out of the source")
    descriptor = open_own(path.resolve())
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(path, "file", "is not a regular file any more")
    return os.fdopen(descriptor, "rb")


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, in order, and the folders that are links: they are not entered."""
    pending = [(folder, 0)]
    while pending:
        directory, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise CheckpointError(directory, "folder", f"lies {depth} folders deep, at most {_MAX_DEPTH} are allowed")
        with os.scandir(directory) as listed:
            entries = sorted(listed, key=lambda entry: entry.name)
        entries = [entry for entry in entries if entry.name not in _DEBRIS_FOLDERS or not _is_folder(entry)]
        inner = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        yield from (directory / entry.name for entry in entries if not entry.is_dir(follow_symlinks=False))
        pending += [(directory / name, depth + 1) for name in reversed(inner)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _well_known(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(_WELL_KNOWN) if os.path.lexists(folder / name)]


def _reason_against(path: Path, folder: Path) -> str | None:
    name = path.name.lower()
    if OWN_NAMES.fullmatch(path.relative_to(folder).parts[0]):
        return "a name that the FTW itself uses"
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in _WEIGHTS):
        return "weights in another format, or another copy of them"
    if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _DEBRIS):
        return "left by a download"
    if not path.is_file():
        return "not a regular file"
    if path.is_symlink() and not is_inside(path, folder):
        return "a link that leads out of the source"
    return None

"""The files of a checkpoint that are not weights: chooses and copies them.

All files of a folder are taken, except weights in any format and what version control and download tools leave. Weights
of layers in folders of their own are taken too. Beside a single file only the well-known names are taken, since a
folder of downloads may hold anything. A link that leads out of the source is not followed, unless it leads into the
blobs of the same hub cache entry, or the user allows it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.files import DEBRIS_FOLDERS, Roots, is_debris, open_plain_file
from ftw.host import OpenFolder, granted_by, is_link, open_to_read
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
    folder, roots = checkpoint.folder, roots_of(checkpoint)
    layers = frozenset(checkpoint.layer_files)
    taken = {file.path for file in checkpoint.files}
    named = {entry.name for entry in checkpoint.left_out if entry.kind == "file"}
    named |= {file.name for file in checkpoint.derived_files}
    files: list[Path] = []
    left_out: list[LeftOut] = []
    for path in _walk(roots) if checkpoint.path.is_dir() else _well_known(folder):
        relative = path.relative_to(folder)
        if path in taken or relative.as_posix() in named or path.name == INDEX_NAME:
            continue
        reason = _reason_against(path, roots, layers)
        if reason is None:
            files.append(relative)
        elif not path.name.endswith(".safetensors.index.json"):  # its content is in the FTW's own index
            left_out.append(LeftOut("file", relative.as_posix(), reason))
    return tuple(files), tuple(left_out)


def roots_of(checkpoint: Checkpoint) -> Roots:
    """Return where the files of a checkpoint on this machine may lie, as it was when that was opened."""
    return checkpoint.roots or Roots(checkpoint.folder)


def copy(files: tuple[Path, ...], roots: Roots, target: OpenFolder) -> None:
    """Copy files, in their folders, from a checkpoint's folder to another, and make them last; no link is written.

    A file lets group and others do no more than its original, and so does a folder.

    Raises:
        CheckpointError: One became a link that leads out of the folder, or is not a regular file any more.
    """
    for inside, group in itertools.groupby(files, key=lambda relative: relative.parent):
        with contextlib.ExitStack() as stack:
            place, path = target, roots.folder
            for name in inside.parts:
                path /= name
                place = stack.enter_context(_enter(place, path))
            for relative in group:
                _copy_file(relative, roots, place)
            place.sync()


def _enter(place: OpenFolder, original: Path) -> OpenFolder:
    """Open the copy of a folder in another one, and make it if it is not there."""
    with contextlib.suppress(FileExistsError):
        place.make_folder(original.name, 0o700 | granted_by(original, place.status().st_gid))
        place.sync()
    return OpenFolder(place.path / original.name, place)


def _copy_file(relative: Path, roots: Roots, place: OpenFolder) -> None:
    with open_inside(roots, relative) as reading:
        mode = 0o600 | granted_by(reading.fileno(), place.status().st_gid) & 0o066
        descriptor = place.open(relative.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as writing:
            shutil.copyfileobj(reading, writing)
            writing.flush()
            os.fsync(descriptor)


def open_inside(roots: Roots, relative: Path) -> BinaryIO:
    """Open a file of a folder; a link may lead anywhere in it or in its hub cache entry.

    Raises:
        CheckpointError: It became a link that leads out, or is not a regular file any more.
    """
    path, real = roots.folder / relative, roots.locate(relative.as_posix())
    if real is None:
        raise CheckpointError(path, "file", "became a link that leads out of the source")
    return open_plain_file(path, real)


def _walk(roots: Roots) -> Iterator[Path]:
    """Yield the files below a folder, in order, and the folders that are links: they are not entered."""
    pending = [(Path(), 0)]
    while pending:
        relative, depth = pending.pop()
        folder = roots.folder / relative
        if depth > _MAX_DEPTH:
            raise CheckpointError(folder, "folder", f"lies {depth} folders deep, at most {_MAX_DEPTH} are allowed")
        files, folders = _list(folder, roots.join(os.fspath(relative)))
        yield from (folder / name for name in files)
        pending += [(relative / name, depth + 1) for name in reversed(folders)]


def _list(folder: Path, real: str) -> tuple[list[str], list[str]]:
    """Return the names of all but folders in a folder, and those of folders, both in order, without debris.

    A folder is opened first, so that none is listed that a link has put in its place since.
    """
    with contextlib.ExitStack() as stack:
        listed: int | str = real
        if hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
            listed = _open_folder(folder, real)
            stack.callback(os.close, listed)
        entries = stack.enter_context(os.scandir(listed))
        taken = [entry for entry in entries if entry.name.lower() not in DEBRIS_FOLDERS or not _is_folder(entry)]
        folders = {entry.name for entry in taken if entry.is_dir(follow_symlinks=False)}
    return sorted(entry.name for entry in taken if entry.name not in folders), sorted(folders)


def _open_folder(folder: Path, real: str) -> int:
    try:
        return open_to_read(real, follow_links=False)
    except OSError as error:
        if not is_link(error):
            raise
        raise CheckpointError(folder, "folder", "became a link while it was being listed") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _well_known(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(_WELL_KNOWN) if os.path.lexists(folder / name)]


def _reason_against(path: Path, roots: Roots, layers: frozenset[str]) -> str | None:
    name, relative = path.name.lower(), path.relative_to(roots.folder)
    if OWN_NAMES.fullmatch(relative.parts[0]):
        return "a name that the FTW itself uses"
    if relative.as_posix() not in layers and any(fnmatch.fnmatchcase(name, pattern) for pattern in _WEIGHTS):
        return "weights in another format, or another copy of them"
    if is_debris(name):
        return "left by a download or an editor"
    if not path.is_file():
        return "not a regular file"
    if path.is_symlink() and roots.locate(relative.as_posix()) is None:
        return "a link that leads out of the source"
    return None

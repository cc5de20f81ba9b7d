"""Verification: does an FTW folder still hold what was written, and is that what the source holds?"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from ftw.checkpoint import CHUNK_NBYTES, Checkpoint, open_checkpoint, open_damaged
from ftw.errors import CheckpointError, printable
from ftw.files import Roots, is_name_inside
from ftw.host import HostMemory
from ftw.layouts import arrange, layout_of
from ftw.readers import ALIGNMENT, Problems, read_ftw_key
from ftw.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ftw.layouts import Arrangement
    from ftw.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a verification found.

    Attributes:
        path: The checkpoint.
        against: The source it was compared with.
        num_tensors: Tensors that were read.
        num_checksums: Those whose checksum the index holds; an FTW of another writer has none.
        num_sha256: Those whose SHA-256 it holds.
        num_compared: Those that were compared with the source byte by byte.
        nbytes: Bytes that were read of the checkpoint.
        problems: One printable line each, the first 10,000 and how many more; empty if all is right.
    """

    path: str
    against: str | None
    num_tensors: int
    num_checksums: int
    num_sha256: int
    num_compared: int
    nbytes: int
    problems: tuple[str, ...]

    @property
    def is_content_checked(self) -> bool:
        """Whether the content of every tensor was compared with anything: a checksum, or the source."""
        return max(self.num_checksums, self.num_compared) == self.num_tensors

    @property
    def is_ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `ftw verify --json` prints."""
        keys = ("path", "against", "num_tensors", "num_checksums", "num_sha256", "num_compared", "nbytes")
        checked = {"content_checked": self.is_content_checked}
        return {**{key: getattr(self, key) for key in keys}, **checked, "ok": self.is_ok, "problems": [*self.problems]}


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | Checkpoint | None = None,
    follow_links: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyResult:
    """Read every tensor of a checkpoint and check it.

    Opening checks the header. Then checksums are compared, and SHA-256s where the index has them; of an FTW also the
    zeros that fill up each tensor's last block, and the presence of files that the index says were copied. `against`
    adds names, dtypes, shapes and bytes of the source; where the FTW has FreeToken's layout, those that the source has
    in that layout. If shards of an FTW are missing, or too long or short, every tensor that is broken by it is named.
    Memory is two buffers of 16 MiB.

    All that finds accidents. Who changes a tensor on purpose changes the index as well, or with no SHA-256 there just
    chooses bytes of the same checksum: against intent compare the index's own SHA-256 with one that you know.

    Args:
        path: An FTW folder, or any checkpoint; other formats have no checksums and no padding to check.
        against: The source that it was made from; one that is open already is used as it is, and left open.
        follow_links: Follow links that lead out of either's folder, as `open_checkpoint` does.
        progress: Called with the bytes done and all bytes, after each chunk of at most 16 MiB.

    Raises:
        SourceNotFoundError: There is no checkpoint of that name.
        CheckpointError: The index of an FTW, or any part of another format, is broken.
    """
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(open_damaged(path, follow_links=follow_links))
        problems = Problems(str(path))
        problems.add_all(map(str, checkpoint.problems))
        opened = (
            against
            if against is None or isinstance(against, Checkpoint)
            else _open_source(against, checkpoint, follow_links)
        )
        if opened is not None and opened is not against:
            stack.enter_context(opened)
        source = None if opened is None else _arrange_alike(opened, layout_of(checkpoint))
        originals = {} if source is None else {**source.beside, **source.tensors}
        total, done, checksums, sha256s, compared = checkpoint.nbytes, 0, 0, 0, 0
        problems.add_all(_problems_of_index(checkpoint))
        problems.add_all(() if source is None else _differences_of_names(checkpoint, originals))
        for tensor in checkpoint.tensors.values():
            original = originals.get(tensor.name)
            is_alike = original is not None and tensor.is_alike(original)
            if original is not None and not is_alike:
                problem = f"is {tensor.describe()}, the source has {original.describe()}"
                problems.add(_problem(checkpoint, tensor.name, problem))
            try:
                for step in _check_tensor(checkpoint, tensor, source if is_alike else None, problems):
                    done += step
                    if progress:
                        progress(done, total)
            except CheckpointError as error:
                problems.add(_problem(checkpoint, tensor.name, f"cannot be read: {error}"))
            checksums += tensor.xxh3_64 is not None
            sha256s += tensor.sha256 is not None
            compared += is_alike
    name = None if source is None else source.source
    return VerifyResult(str(path), name, len(checkpoint.tensors), checksums, sha256s, compared, done, problems.lines())


def _problems_of_index(checkpoint: Checkpoint) -> Iterator[str]:
    """Find files that an index names and the folder lacks, and bytes of the region that no tensor owns."""
    if checkpoint.format != "ftw":
        return
    copied = checkpoint.metadata.get("copied_metadata")
    names = [name for name in copied if isinstance(name, str)] if isinstance(copied, list) else []
    for name in names:
        problem = "" if "\\" in name else _problem_of_copied(checkpoint, name)  # a name that is no Unicode
        if problem:
            yield _problem(checkpoint, name, problem)
    position = 0
    for tensor in checkpoint.tensors.values() if "ftw" in checkpoint.metadata else ():
        if not tensor.shard and tensor.offset > position:
            problem = f"bytes {position} to {tensor.offset} belong to no tensor"
            yield _problem(checkpoint, "region", problem)
        position = max(position, tensor.offset + align_up(tensor.nbytes, ALIGNMENT))


def _problem_of_copied(checkpoint: Checkpoint, name: str) -> str:
    """Return what is wrong with a file that an index says was copied, or "" if it is there; look nowhere else."""
    if not is_name_inside(name, is_printable=False):
        return "is said to have been copied, the path of a file inside the checkpoint's folder is needed"
    path = checkpoint.folder / name
    try:
        if ("/" in name or path.is_symlink()) and not (checkpoint.roots or Roots(checkpoint.folder)).has(path):
            return "is a link that leads out of the folder, the index says that it was copied"
        return "" if path.is_file() else "is missing, the index says that it was copied"
    except OSError as error:
        return f"cannot be looked for, the index says that it was copied: {error.strerror}"
    except RuntimeError:  # of pathlib before Python 3.13
        return "is a link to itself, the index says that it was copied"


def _open_source(source: str | os.PathLike[str], checkpoint: Checkpoint, follow_links: bool) -> Checkpoint:
    """Open what a checkpoint is to be compared with; where its index says that tensors were decoded, decode them."""
    decode_df11 = bool(read_ftw_key(checkpoint.metadata, "decoded"))
    return open_checkpoint(source, decode_df11=decode_df11, follow_links=follow_links)


def _arrange_alike(source: Checkpoint, layout: str) -> Arrangement:
    """Return a source's tensors in a layout; those of a source that has it already are as they are."""
    return arrange(source, "plain" if layout_of(source) == layout else layout)


def _differences_of_names(checkpoint: Checkpoint, originals: Mapping[str, TensorInfo]) -> Iterator[str]:
    for name in originals:
        if name not in checkpoint.tensors:
            yield _problem(checkpoint, name, "is missing, the source holds it")
    for name in checkpoint.tensors:
        if name not in originals:
            yield _problem(checkpoint, name, "is not in the source")


def _check_tensor(
    checkpoint: Checkpoint, tensor: TensorInfo, source: Arrangement | None, problems: Problems
) -> Iterator[int]:
    """Check one tensor, compare it with the source's if there is one; yield the bytes of each step."""
    hasher, sha256 = xxhash.xxh3_64(), hashlib.sha256()
    memory = HostMemory(min(CHUNK_NBYTES, tensor.nbytes) if source is not None else 0)
    offset = 0
    for chunk in checkpoint.iter_chunks(tensor.name):
        hasher.update(chunk)
        if tensor.sha256 is not None:
            sha256.update(chunk)
        if source is not None:
            other = memory.view()[: len(chunk)]
            source.read_into(tensor.name, other, offset=offset)
            if bytes(chunk) != bytes(other):
                first = next(place for place, pair in enumerate(zip(chunk, other, strict=True)) if pair[0] != pair[1])
                problems.add(_problem(checkpoint, tensor.name, f"differs from the source at byte {offset + first}"))
                source = None
        offset += len(chunk)
        yield len(chunk)
    if tensor.xxh3_64 is not None and tensor.xxh3_64 != hasher.hexdigest():
        found = f"checksum is {hasher.hexdigest()}, the index says {tensor.xxh3_64}"
        problems.add(_problem(checkpoint, tensor.name, found))
    if tensor.sha256 is not None and tensor.sha256 != sha256.hexdigest():
        found = f"SHA-256 is {sha256.hexdigest()}, the index says {tensor.sha256}"
        problems.add(_problem(checkpoint, tensor.name, found))
    if checkpoint.format == "ftw" and not tensor.shard and not _is_padding_zero(checkpoint, tensor):
        problems.add(_problem(checkpoint, tensor.name, "padding after the tensor is not zero"))


def _is_padding_zero(checkpoint: Checkpoint, tensor: TensorInfo) -> bool:
    nbytes = align_up(tensor.nbytes, ALIGNMENT) - tensor.nbytes
    if not nbytes:
        return True
    last = checkpoint.extents(tensor.name)[-1]
    padding = checkpoint.files[last.file].read(last.offset + last.nbytes, nbytes)
    return padding.count(0) == nbytes


def _problem(checkpoint: Checkpoint, name: str, text: str) -> str:
    return str(CheckpointError(checkpoint.source, name, printable(text)))

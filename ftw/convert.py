"""Conversion to FTW: bytes move unchanged, a checksum is taken on the way, and the folder appears when it is complete.

A conversion that fails or is killed leaves the target as it was (`ftw.target`). Memory is three buffers of 16 MiB and
the headers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ftw import metadata_files
from ftw._version import __version__
from ftw.checkpoint import open_checkpoint
from ftw.dtypes import DTYPES
from ftw.errors import CheckpointError, OutputError
from ftw.placement import Placement, plan_placement
from ftw.readers.ftw import ALIGNMENT
from ftw.strict_json import MAX_NBYTES
from ftw.target import check_free_space, check_target, publish, staging_folder
from ftw.verdict import judge
from ftw.writer import DEFAULT_SHARD_LIMIT, FtwWriter, Layout, index_nbytes, plan_layout, write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftw.checkpoint import Checkpoint
    from ftw.readers.base import DerivedFile, LeftOut
    from ftw.tensors import TensorInfo

# Index keys that the writer sets itself; a source FTW's other keys are carried over.
_OWN_INDEX_KEYS = frozenset(
    {"format", "version", "align", "shard_limit", "total_bytes", "source_model_path", "side_files", "ftw"}
)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """What a conversion will write, decided before the first byte.

    Attributes:
        layout: Where each tensor goes.
        placement: Which tables are laid out for the host.
        metadata_files: Files that are copied beside the weights, relative to the source's folder.
        derived_files: Files that are written beside them, of what the source keeps among its weights.
        left_out: Files and stale tensors of the source that are not taken, with the reason.
    """

    layout: Layout
    placement: Placement
    metadata_files: tuple[Path, ...]
    derived_files: tuple[DerivedFile, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def metadata_names(self) -> list[str]:
        """Names of the files beside the weights, relative to the folder."""
        return [path.as_posix() for path in self.metadata_files] + [file.name for file in self.derived_files]


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """What a conversion wrote, or with `dry_run` would write."""

    source: str
    target: str
    format: str
    plan: ConversionPlan

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `ftw convert --json` prints."""
        layout, placement = self.plan.layout, self.plan.placement
        return {
            "source": self.source,
            "target": self.target,
            "format": self.format,
            "num_tensors": len(layout.tensors),
            "nbytes": sum(tensor.nbytes for tensor in layout.tensors),
            "total_bytes": layout.total_bytes,
            "shards": [{"file": shard.name, "nbytes": shard.nbytes} for shard in layout.shards],
            "embed": {
                "placement": placement.placement,
                "tables": [table.name for table in placement.host_tables],
                "reason": placement.reason,
            },
            "metadata_files": self.plan.metadata_names,
            "left_out": [{"name": name, "reason": reason} for name, reason in self.plan.left_out],
        }


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    embed: str = "gpu",
    shard_limit: int = DEFAULT_SHARD_LIMIT,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionResult:
    """Convert a checkpoint to an FTW folder.

    Args:
        source: A path or a hub id.
        target: The folder to make.
        embed: "host" lays the lookup tables out for host memory, "auto" does so where it is allowed, "gpu" does not.
        shard_limit: The most bytes of one shard, a multiple of 4096.
        overwrite: Replace an existing FTW folder; it stays as it is until the new one is complete.
        dry_run: Plan and check, write nothing.
        progress: Called with the bytes done and all bytes, after each piece of at most 16 MiB.

    Raises:
        NotEligibleError: `embed` is "host" and the token embedding may not leave the GPU.
        CheckpointError: The source is broken.
        OutputError: The target exists, is a mount point, lies in the source, is being written already, or would not
            fit on its disk.
        ValueError: `embed` or `shard_limit` is not allowed.
    """
    if not os.fspath(target):  # which would be the current folder
        raise OutputError("'': target: is empty, the name of a folder is needed")
    if not isinstance(shard_limit, int) or shard_limit < ALIGNMENT or shard_limit % ALIGNMENT:
        raise ValueError(f"shard_limit is {shard_limit}, a positive multiple of {ALIGNMENT} is needed")
    destination = Path(os.path.realpath(target))  # of a link: what it points to is made or replaced
    with open_checkpoint(source) as checkpoint:
        plan = _plan(checkpoint, embed, shard_limit)
        may_write = partial(
            check_target,
            destination,
            source=checkpoint.folder.resolve(),
            is_whole_folder=checkpoint.path.is_dir(),
            overwrite=overwrite,
        )
        may_write()
        needed = _needed_nbytes(plan, checkpoint.folder)
        result = ConversionResult(str(source), str(target), checkpoint.format, plan)
        if dry_run:
            check_free_space(destination, needed)
            return result
        destination.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(destination) as staging:
            check_free_space(destination, needed)
            _write(checkpoint, plan, staging, progress or _ignore)
            may_write()  # once more: writing may have taken an hour
            publish(staging, destination)
    return result


def _plan(checkpoint: Checkpoint, embed: str, shard_limit: int) -> ConversionPlan:
    placement = plan_placement(judge(checkpoint), embed, checkpoint.source)
    roles = {name: table.role for table in placement.host_tables for name in table.tensors}
    tensors = [_target_tensor(tensor, roles, checkpoint.source) for tensor in checkpoint.tensors.values()]
    tensors.sort(key=lambda tensor: tensor.placement != "host")  # host tables first; the sort is stable
    files, left_out = metadata_files.choose(checkpoint)
    derived = checkpoint.derived_files
    left_out = (*checkpoint.left_out, *left_out)
    return ConversionPlan(plan_layout(tensors, shard_limit), placement, files, derived, left_out)


def _target_tensor(tensor: TensorInfo, roles: dict[str, str], source: str) -> TensorInfo:
    """Return a tensor as it goes into the FTW; what the source says of its placement is not carried over."""
    if DTYPES[tensor.dtype].torch_name is None:
        raise CheckpointError(source, tensor.name, f"dtype is {tensor.dtype}, which FTW has no name for")
    role = roles.get(tensor.name)
    return tensor._replace(role=role or tensor.role, placement="host" if role else None, xxh3_64=None)


def _needed_nbytes(plan: ConversionPlan, folder: Path) -> int:
    """Return the bytes that a conversion will write.

    Raises:
        CheckpointError: The index would be larger than a reader takes.
    """
    index = index_nbytes(plan.layout)
    if index > MAX_NBYTES:
        found = f"{len(plan.layout.tensors)} of them would take an index of {index} bytes"
        raise CheckpointError(folder, "tensors", f"{found}, at most {MAX_NBYTES} are allowed")
    copied = sum((folder / path).stat().st_size for path in plan.metadata_files)
    return plan.layout.total_bytes + index + copied + sum(file.nbytes for file in plan.derived_files)


def _write(checkpoint: Checkpoint, plan: ConversionPlan, staging: Path, progress: Callable[[int, int], None]) -> None:
    metadata_files.copy(plan.metadata_files, checkpoint.folder, staging)
    derived = [_write_derived(file, staging) for file in plan.derived_files]
    total = sum(tensor.nbytes for tensor in plan.layout.tensors)
    done = 0
    with FtwWriter(staging, plan.layout) as writer:
        for tensor in plan.layout.tensors:

            def read_into(view: memoryview, offset: int, name: str = tensor.name) -> None:
                nonlocal done
                checkpoint.read_into(name, view, offset=offset)
                done += len(view)
                progress(done, total)

            writer.write(tensor, read_into)
        writer.finish(_index_extra(checkpoint, plan, derived))


def _write_derived(file: DerivedFile, staging: Path) -> dict[str, Any]:
    """Write a derived file, and return what the index records of it: a verdict may rest on its content."""
    hasher = xxhash.xxh3_64()

    def pieces() -> Iterator[bytes]:
        for piece in file.read():
            hasher.update(piece)
            yield piece

    write_atomically(staging / file.name, pieces())
    return {"name": file.name, "bytes": file.nbytes, "xxh3_64": hasher.hexdigest()}


def _index_extra(checkpoint: Checkpoint, plan: ConversionPlan, derived: list[dict[str, Any]]) -> dict[str, Any]:
    carried: dict[str, Any] = {}
    if checkpoint.format == "ftw":
        carried = {key: value for key, value in checkpoint.metadata.items() if key not in _OWN_INDEX_KEYS}
    name = checkpoint.folder.resolve().name if os.path.exists(checkpoint.source) else checkpoint.source
    return {
        **carried,
        "source_model_path": _unicode(name),
        "copied_metadata": [_unicode(name) for name in plan.metadata_names],
        "ftw": {
            "producer": f"ftw {__version__}",
            "source": {
                "format": checkpoint.format,
                "files": [{"name": _unicode(file.path.name), "bytes": file.nbytes} for file in checkpoint.files],
            },
            **({"derived": derived} if derived else {}),
            "embed": {
                "placement": plan.placement.placement,
                "tables": [name for table in plan.placement.host_tables for name in table.tensors],
            },
        },
    }


def _unicode(name: str) -> str:
    """Return a file name as JSON can hold it: bytes that are no UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _ignore(done: int, total: int) -> None:
    """Take no notice of progress."""

"""ConversionPlan: what a conversion will write, decided before the first byte."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

from ftw._version import __version__
from ftw.checkpoint import CONFIG_NAME, TOKEN_EMBEDDING, find_not_a_model
from ftw.conversion import metadata_files
from ftw.conversion.writing.index_file import iter_index_without_checksums
from ftw.conversion.writing.shard_plan import ShardPlan, count_shards, plan_shards
from ftw.dtypes import DTYPES, torch_shape
from ftw.errors import CheckpointError, OutputError, printable
from ftw.files import MAX_NBYTES
from ftw.layouts import LAYOUT_KEY, arrange, layout_of
from ftw.readers import MAX_OTHERS, check_gguf_metadata_size, read_ftw_key
from ftw.verdict import Placement, judge, plan_placement, refuse

if TYPE_CHECKING:
    from pathlib import Path

    from ftw.checkpoint import Checkpoint
    from ftw.layouts import Arrangement
    from ftw.readers import DerivedFile, LeftOut
    from ftw.tensors import TensorInfo
    from ftw.verdict import TableVerdict, Verdict

_MAX_SHARDS = 10_000  # each costs a reader memory
_MAX_LEFT_OUT = 1000  # entries of the index, which a reader takes up to a bound
_SIDE_FILES = "the tensors of its side files go into the region, where FreeToken's own server does not look for them"
# Index keys that the writer sets itself, or that describe the source; a source FTW's other keys are carried over.
_OWN_INDEX_KEYS = frozenset(
    {"format", "version", "align", "shard_limit", "total_bytes", "counts", "source_model_path", "side_files", "ftw"}
)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """What a conversion will write.

    Attributes:
        layout: "plain" or "freetoken".
        arrangement: The tensors that are written, and how they are read.
        num_source_tensors: Tensors of the source, of which each is written, goes into one that is made of it, or is
            left out for a reason.
        shard_plan: Where each tensor goes.
        placement: Which tables are placed for host memory.
        tables: All lookup tables of the source, with their verdicts.
        host_tables: Those of them that are placed for host memory.
        decoded: Tensors that are decoded, and the source's tensors that they come from.
        metadata_files: Files that are copied beside the weights, relative to the source's folder.
        derived_files: Files that are made of what the source keeps among its weights.
        left_out: Files and stale tensors of the source that are not taken, with the reason.
        warnings: What a user should know besides.
        index_extra: Keys of the index beside its lists of tensors and shards.
        index_nbytes: Size of the index.
        digest: Of all that, and of the state of the source's files.
    """

    layout: str
    arrangement: Arrangement
    num_source_tensors: int
    shard_plan: ShardPlan
    placement: Placement
    tables: tuple[TableVerdict, ...]
    host_tables: frozenset[TableVerdict]
    decoded: dict[str, tuple[str, ...]]
    metadata_files: tuple[Path, ...]
    derived_files: tuple[DerivedFile, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]
    index_extra: dict[str, Any]
    index_nbytes: int
    digest: str

    @property
    def metadata_names(self) -> list[str]:
        """Names of the files beside the weights, relative to the folder."""
        return _metadata_names(self.metadata_files, self.derived_files)

    def is_on_host(self, table: TableVerdict) -> bool:
        """Tell whether a table is placed for host memory."""
        return table in self.host_tables


def plan_conversion(
    checkpoint: Checkpoint, embed: str, shard_limit: int, layout: str = "plain", *, sha256: bool = False
) -> ConversionPlan:
    """Decide what a conversion of a checkpoint will write.

    Raises:
        NotEligibleError: `embed` is "host", and the token embedding may not leave the GPU.
        CheckpointError: A dtype has no name in FTW, the index would be larger than a reader takes, or FreeToken's
            layout cannot be made of the checkpoint.
        OutputError: There would be more shards than a reader takes.
    """
    verdict = judge(checkpoint)
    arrangement = arrange(checkpoint, layout)
    placement = _place_tables(verdict, plan_placement(verdict, embed, checkpoint.source), arrangement, embed)
    roles = {
        copy: table.role
        for table in placement.host_tables
        for name in table.tensors
        if (copy := arrangement.find_copy(name)) is not None
    }
    tensors = [_target_tensor(tensor, roles, checkpoint.source, arrangement) for tensor in arrangement.tensors.values()]
    tensors.sort(key=lambda tensor: tensor.placement != "host")  # host tables first; the sort is stable
    num_shards = count_shards(tensors, shard_limit)
    if num_shards > _MAX_SHARDS:
        found = f"{num_shards} of at most {shard_limit} bytes would be needed"
        raise OutputError(f"{printable(checkpoint.source)}: shards: {found}, at most {_MAX_SHARDS} are allowed")
    shard_plan = plan_shards(tensors, shard_limit, has_sha256=sha256)
    files, beside = metadata_files.choose(checkpoint)
    derived = checkpoint.derived_files
    for file in derived:
        check_gguf_metadata_size(checkpoint.folder, file.nbytes)
    left_out = (*checkpoint.left_out, *arrangement.left_out, *beside)
    extra = _index_extra(checkpoint, arrangement, placement, _metadata_names(files, derived), derived, left_out)
    hasher, nbytes = xxhash.xxh3_128(), 0
    for piece in iter_index_without_checksums(shard_plan, extra):
        hasher.update(piece)
        nbytes += len(piece)
    if nbytes > MAX_NBYTES:
        found = f"{len(shard_plan.tensors)} of them would take an index of {nbytes} bytes"
        raise CheckpointError(checkpoint.folder, "tensors", f"{found}, at most {MAX_NBYTES} are allowed")
    for weights in checkpoint.files:
        hasher.update(_state_of(weights.path))
    return ConversionPlan(
        layout=layout,
        arrangement=arrangement,
        num_source_tensors=len(checkpoint.tensors) + sum(len(parts) - 1 for parts in checkpoint.decoded.values()),
        shard_plan=shard_plan,
        placement=placement,
        tables=verdict.tables,
        host_tables=frozenset(placement.host_tables),
        decoded=dict(checkpoint.decoded),
        metadata_files=files,
        derived_files=derived,
        left_out=left_out,
        warnings=(*verdict.warnings, *_warnings(checkpoint, shard_plan, left_out)),
        index_extra=extra,
        index_nbytes=nbytes,
        digest=hasher.hexdigest(),
    )


def _place_tables(verdict: Verdict, placement: Placement, arrangement: Arrangement, embed: str) -> Placement:
    """Return a placement without the tables that a layout stores otherwise, as FreeToken does with DF11.

    Raises:
        NotEligibleError: `embed` is "host", and the token embedding is one of them.
    """
    kept = [
        table
        for table in placement.host_tables
        if all(arrangement.find_copy(name) is not None for name in table.tensors)
    ]
    others = [table for table in placement.host_tables if table not in kept and table.role == TOKEN_EMBEDDING]
    if not others:
        return replace(placement, host_tables=tuple(kept))
    why = "is no plain table in FreeToken's layout, which its server reads on the GPU alone"
    if embed == "host":
        raise refuse(verdict, arrangement.source, why)
    return Placement("gpu", tuple(kept), why)


def _state_of(path: Path) -> bytes:
    """Return what changes with a file's content, as far as the file system says.

    Equal times alone prove nothing: archives and package managers set them.
    """
    status = path.stat()
    return repr((path.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)).encode()


def needed_nbytes(plan: ConversionPlan, folder: Path) -> int:
    """Return the bytes that a conversion of the checkpoint in a folder will write."""
    copied = sum((folder / path).stat().st_size for path in plan.metadata_files)
    derived = sum(file.nbytes for file in plan.derived_files)
    beside = sum(file.nbytes for file in plan.arrangement.side_files)
    return plan.shard_plan.total_bytes + plan.index_nbytes + copied + derived + beside


def _warnings(checkpoint: Checkpoint, shard_plan: ShardPlan, left_out: tuple[LeftOut, ...]) -> list[str]:
    """Return what a user might not expect of the conversion; the verdict has warnings of its own."""
    found: list[str] = []
    if checkpoint.format == "ftw" and checkpoint.metadata.get("side_files"):
        found.append(_SIDE_FILES)
    on_host = {tensor.name for tensor in shard_plan.tensors if tensor.placement == "host"}
    dropped = [
        name for name, tensor in checkpoint.tensors.items() if tensor.placement == "host" and name not in on_host
    ]
    if dropped:
        problem = "the source stores these tables for host memory, the result will not; embed='host' keeps it"
        found.append(f"{', '.join(dropped)}: {problem}")
    if any((entry.kind, entry.name) == ("file", CONFIG_NAME) for entry in left_out):
        found.append(f"its {CONFIG_NAME} is left out, so the FTW has none")
    not_a_model = find_not_a_model(checkpoint)
    if not_a_model is not None:
        found.append(f"an FTW of this is no model: {not_a_model.text}")
    return found


def _metadata_names(files: tuple[Path, ...], derived: tuple[DerivedFile, ...]) -> list[str]:
    return [path.as_posix() for path in files] + [file.name for file in derived]


def _target_tensor(tensor: TensorInfo, roles: dict[str, str], source: str, arrangement: Arrangement) -> TensorInfo:
    """Return a tensor as it goes into the FTW, with the checksums that the source has of it, but not its placement."""
    known = DTYPES[tensor.dtype]
    if known.torch_name is None or (known.torch_elements > 1 and arrangement.layout != "plain"):
        allowed = ", ".join(name for name, dtype in DTYPES.items() if dtype.torch_name is not None)
        problem = f"dtype is {tensor.dtype}, which FTW has no name for; {allowed} are allowed"
        raise CheckpointError(source, tensor.name, problem)
    if torch_shape(known, tensor.shape) is None:
        problem = f"is {tensor.describe()}, rows of a multiple of {known.torch_elements} elements are needed"
        raise CheckpointError(source, tensor.name, problem)
    role = roles.get(tensor.name)
    return tensor._replace(role=role or tensor.role, placement="host" if role else None)


def _index_extra(
    checkpoint: Checkpoint,
    arrangement: Arrangement,
    placement: Placement,
    metadata_names: list[str],
    derived: tuple[DerivedFile, ...],
    left_out: tuple[LeftOut, ...],
) -> dict[str, Any]:
    carried: dict[str, Any] = {}
    if checkpoint.format == "ftw":
        carried = {key: value for key, value in checkpoint.metadata.items() if key not in _OWN_INDEX_KEYS}
    name = checkpoint.folder.resolve().name if os.path.exists(checkpoint.source) else checkpoint.source
    layout = arrangement.layout if arrangement.layout != "plain" else layout_of(checkpoint)  # which a copy keeps
    decoded_before = read_ftw_key(checkpoint.metadata, "decoded")
    decoded = [{"name": name, "from": list(parts)} for name, parts in checkpoint.decoded.items()]
    optional = {
        "derived": [_derived_entry(file) for file in derived],
        "decoded": [*(decoded_before if isinstance(decoded_before, list) else []), *decoded],
        "left_out": [
            {key: _unicode(text) for key, text in entry._asdict().items()} for entry in left_out[:_MAX_LEFT_OUT]
        ],
        "num_left_out": len(left_out),
    }
    extra = {
        **carried,
        "source_model_path": _unicode(name),
        "copied_metadata": [_unicode(name) for name in metadata_names],
        **arrangement.index_entries,
        "ftw": {
            "producer": f"ftw {__version__}",
            "source": {
                "format": checkpoint.format,
                "files": [{"name": _unicode(file.path.name), "bytes": file.nbytes} for file in checkpoint.files],
            },
            **{key: value for key, value in optional.items() if value},
            **({} if layout == "plain" else {LAYOUT_KEY: layout}),
            "embed": {
                "placement": placement.placement,
                "tables": [name for table in placement.host_tables for name in table.tensors],
            },
        },
    }
    if len(json.dumps(extra)) > MAX_OTHERS:
        problem = f"what it would say beside its lists takes more than {MAX_OTHERS} characters, which no reader takes"
        raise CheckpointError(checkpoint.source, "index", problem)
    return extra


def _derived_entry(file: DerivedFile) -> dict[str, Any]:
    """Return what the index records of a derived file: a verdict may rest on its content."""
    hasher = xxhash.xxh3_64()
    for piece in file.read():
        hasher.update(piece)
    return {"name": file.name, "bytes": file.nbytes, "xxh3_64": hasher.hexdigest()}


def _unicode(name: str) -> str:
    """Return a file name as JSON can hold it: bytes that are not UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()

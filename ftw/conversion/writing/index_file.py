"""The index of an FTW, `freetoken_weight.json`, as it is written; `ftw.readers.ftw` reads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ftw.conversion.writing.checksums import Checksums
from ftw.dtypes import DTYPES, torch_shape
from ftw.readers import ALIGNMENT, FORMAT_NAME, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ftw.conversion.writing.shard_plan import ShardPlan
    from ftw.tensors import TensorInfo

_NO_CHECKSUMS = Checksums("0" * 16, "0" * 64)


def iter_index(shard_plan: ShardPlan, checksums: Sequence[Checksums], extra: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the index piece by piece: built whole, that of 100,000 tensors would take 100 MB.

    Args:
        shard_plan: Tensors and shards.
        checksums: Of the tensors, in their order.
        extra: Further keys.
    """
    head = {
        "format": FORMAT_NAME,
        "version": VERSION,
        "align": ALIGNMENT,
        "shard_limit": shard_plan.shard_limit,
        "total_bytes": shard_plan.total_bytes,
        **extra,
    }
    yield json.dumps(head)[:-1].encode() + b', "tensors": ['
    for number, (tensor, checksum) in enumerate(zip(shard_plan.tensors, checksums, strict=True)):
        sha256 = checksum.sha256 if shard_plan.wants_sha256(tensor) else None
        entry = json.dumps(_tensor_entry(tensor, Checksums(checksum.xxh3_64, sha256)))
        yield (f",\n{entry}" if number else f"\n{entry}").encode()
    shards = [{"file": shard.name, "global_off": shard.offset, "nbytes": shard.nbytes} for shard in shard_plan.shards]
    yield f'],\n"shards": {json.dumps(shards)}}}\n'.encode()


def iter_index_without_checksums(shard_plan: ShardPlan, extra: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield an index of the same length before the first tensor has been read."""
    return iter_index(shard_plan, [_NO_CHECKSUMS] * len(shard_plan.tensors), extra)


def _tensor_entry(tensor: TensorInfo, checksums: Checksums) -> dict[str, Any]:
    optional = {
        "ggml_type": tensor.ggml_type,
        "logical_shape": tensor.logical_shape,
        "role": tensor.role,
        "placement": tensor.placement,
        **checksums._asdict(),
    }
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "dtype": DTYPES[tensor.dtype].torch_name,
        "shape": torch_shape(DTYPES[tensor.dtype], tensor.shape),
        "global_off": tensor.offset,
        "nbytes": tensor.nbytes,
        **{key: value for key, value in optional.items() if value is not None},
    }

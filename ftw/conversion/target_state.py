"""TargetState: what a conversion finds at its target. A dry run and a real one take the same decisions from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftw.conversion.metadata_files import open_inside, roots_of
from ftw.conversion.publication import aside_of, is_put_aside
from ftw.conversion.strangers import find_stranger
from ftw.conversion.target import Standing, find_standing, free_nbytes
from ftw.conversion.writing.checksums import Checksums
from ftw.conversion.writing.index_file import iter_index
from ftw.errors import FtwError, printable
from ftw.files import Roots
from ftw.readers import INDEX_NAME, open_reader
from ftw.sizes import count_of, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftw.checkpoint import Checkpoint
    from ftw.conversion.plan import ConversionPlan
    from ftw.conversion.staging import StagingFolder
    from ftw.conversion.writing.shard_plan import ShardPlan
    from ftw.readers import Reader
    from ftw.tensors import TensorInfo

_COMPARED_NBYTES = 256 << 10  # at a time
_OWN_KEY = "ftw"


@dataclass(frozen=True, slots=True)
class TargetState:
    """What a conversion finds at its target and beside it, by reading alone.

    Attributes:
        standing: What stands at the target, or was put aside from there.
        is_put_aside: Whether a killed conversion has put it aside.
        is_complete: Whether it is what this conversion would make, by all but the bytes of its tensors; nothing that
            another user can change is.
        difference: How an FTW folder differs from that, None without `resume`.
        stranger: Which other user can change it, in words.
        num_begun: Tensors that an earlier conversion has written, as its journal says.
        held_nbytes: What an earlier conversion has left takes so much of the disk.
        free_nbytes: So much is free beside that.
    """

    standing: Standing
    is_put_aside: bool
    is_complete: bool
    difference: str | None
    stranger: str | None
    num_begun: int
    held_nbytes: int
    free_nbytes: int


def read_target_state(
    staging: StagingFolder, plan: ConversionPlan, checkpoint: Checkpoint, *, resume: bool
) -> TargetState:
    """Look at the target of a staging folder; without `resume` nothing is taken for complete or begun.

    Nothing is written or locked: another conversion may start at any time.

    Raises:
        OutputError: Another conversion is writing the target.
        NotResumableError: What an earlier conversion has left cannot be resumed.
    """
    target, free, num_begun, held = staging.target, free_nbytes(staging.target), 0, 0
    was_put_aside = is_put_aside(target)
    folder = aside_of(target) if was_put_aside else target
    standing = find_standing(folder)
    stranger = find_stranger(folder, _names(plan)) if standing is Standing.FTW else None
    can_differ = resume and stranger is None and standing is Standing.FTW
    difference = _find_difference(folder, plan, checkpoint) if can_differ else None
    is_complete = can_differ and difference is None
    with staging.left() as left:
        if left is not None:
            held = staging.held_nbytes()
            try:
                num_begun = len(staging.read_journal(left, plan)) if resume and not is_complete else 0
            except FileNotFoundError:  # another conversion has cleared or published it meanwhile
                held = 0
    return TargetState(standing, was_put_aside, is_complete, difference, stranger, num_begun, held, free)


def _names(plan: ConversionPlan) -> list[str]:
    """Return the names of all files that a conversion makes."""
    return [INDEX_NAME, *(shard.name for shard in plan.shard_plan.shards), *plan.metadata_names]


def _find_difference(folder: Path, plan: ConversionPlan, checkpoint: Checkpoint) -> str | None:
    """Return how a folder differs from what a plan would make of a checkpoint, in words; None if it does not."""
    try:
        reader = open_reader(folder)
    except FtwError as error:
        return f"it is broken ({error})"
    told = _index_difference(reader, plan) if not _has_index(folder / INDEX_NAME, reader, plan) else None
    return told or _metadata_difference(folder, plan, checkpoint)


def _has_index(path: Path, reader: Reader, plan: ConversionPlan) -> bool:
    """Tell whether an index is that of a plan, with whatever checksums."""
    if path.stat().st_size != plan.index_nbytes:
        return False
    try:
        found = [reader.tensors[tensor.name] for tensor in plan.shard_plan.tensors]
    except KeyError:
        return False
    checksums = [Checksums(tensor.xxh3_64 or "", tensor.sha256 or "") for tensor in found]
    with open_inside(Roots(path.parent), Path(path.name)) as file:
        return all(file.read(len(text)) == text for text in iter_index(plan.shard_plan, checksums, plan.index_extra))


def _index_difference(reader: Reader, plan: ConversionPlan) -> str:
    """Say what is different in an index that is not that of a plan; the first that a person would name."""
    planned = {tensor.name: tensor for tensor in plan.shard_plan.tensors}
    missing = [name for name in planned if name not in reader.tensors]
    if missing:
        return f"it lacks {count_of(len(missing), 'tensor')}, the first is {printable(missing[0])}"
    added = [name for name in reader.tensors if name not in planned]
    if added:
        what = count_of(len(added), "tensor")
        return f"it holds {what} that this conversion would not write, the first is {printable(added[0])}"
    pairs = ((reader.tensors[name], tensor) for name, tensor in planned.items())
    named = next(filter(None, (_tensor_difference(*pair, plan.shard_plan) for pair in pairs)), "")
    found = reader.metadata
    if not named and found.get("shard_limit") != plan.shard_plan.shard_limit:
        limit = found.get("shard_limit")
        shown = format_size(limit) if isinstance(limit, int) else "another size"
        return f"its shards take at most {shown}, those of this conversion {format_size(plan.shard_plan.shard_limit)}"
    return named or _key_difference(found, plan.index_extra)


def _tensor_difference(found: TensorInfo, planned: TensorInfo, shard_plan: ShardPlan) -> str:
    name = printable(found.name)
    if not found.is_alike(planned):
        return f"{name} is {found.describe()}, this conversion would write {planned.describe()}"
    if found.placement != planned.placement:
        places = ("host memory" if tensor.placement == "host" else "the GPU" for tensor in (found, planned))
        return "{} is placed for {}, by this conversion for {}".format(name, *places)
    if (found.sha256 is not None) != shard_plan.wants_sha256(planned):
        found_one, recorded = ("no", "one") if found.sha256 is None else ("a", "none")
        return f"{name} has {found_one} SHA-256, this conversion records {recorded}"
    return ""


def _key_difference(found: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    """Name the keys of an index that say something else than a plan's; those of ours one by one."""
    keys = [key for key in planned if key != _OWN_KEY and found.get(key) != planned[key]]
    theirs, ours = found.get(_OWN_KEY), planned[_OWN_KEY]
    if not isinstance(theirs, dict):
        return "another program has written it"
    if theirs.get("producer") != ours["producer"]:
        return f"{printable(str(theirs.get('producer')))} has written it, this is {ours['producer']}"
    if theirs.get("source") != ours["source"]:
        return "it was made of other files"
    keys += [f"{_OWN_KEY}.{key}" for key in sorted(ours | theirs) if theirs.get(key) != ours.get(key)]
    return f"its index says something else of {', '.join(map(printable, keys)) or 'its tensors'}"


def _metadata_difference(folder: Path, plan: ConversionPlan, checkpoint: Checkpoint) -> str | None:
    """Say which file beside the weights is not the source's; derived files have checksums."""
    own, source = Roots(folder), roots_of(checkpoint)
    for name in plan.metadata_files:
        if not (folder / name).is_file():
            return f"it lacks {printable(str(name))}"
        if not _is_copy(own, source, name):
            return f"{printable(str(name))} is not that of the source"
    return None


def _is_copy(own: Roots, source: Roots, name: Path) -> bool:
    with open_inside(own, name) as one, open_inside(source, name) as other:
        while content := one.read(_COMPARED_NBYTES):
            if content != other.read(_COMPARED_NBYTES):
                return False
        return not other.read(1)

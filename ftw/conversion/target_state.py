"""TargetState: what a conversion finds at its target. A dry run and a real one take the same decisions from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftw.conversion.metadata_files import open_inside, roots_of
from ftw.conversion.publication import aside_of, is_put_aside
from ftw.conversion.strangers import find_stranger
from ftw.conversion.target import Standing, find_standing, free_nbytes
from ftw.conversion.writing.checksums import Checksums
from ftw.conversion.writing.index_file import iter_index
from ftw.errors import FtwError
from ftw.files import Roots
from ftw.readers import INDEX_NAME, open_reader

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.conversion.plan import ConversionPlan
    from ftw.conversion.staging import StagingFolder

_COMPARED_NBYTES = 256 << 10  # at a time


@dataclass(frozen=True, slots=True)
class TargetState:
    """What a conversion finds at its target and beside it, by reading alone.

    Attributes:
        standing: What stands at the target, or was put aside from there.
        is_put_aside: Whether a killed conversion has put it aside.
        is_complete: Whether it is what this conversion would make, by all but the bytes of its tensors; nothing that
            another user can change is.
        stranger: Which other user can change it, in words.
        num_begun: Tensors that an earlier conversion has written, as its journal says.
        held_nbytes: What an earlier conversion has left takes so much of the disk.
        free_nbytes: So much is free beside that.
    """

    standing: Standing
    is_put_aside: bool
    is_complete: bool
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
    is_complete = resume and stranger is None and _is_made_by(folder, plan, checkpoint)
    with staging.left() as left:
        if left is not None:
            held = staging.held_nbytes()
            try:
                num_begun = len(staging.read_journal(left, plan)) if resume and not is_complete else 0
            except FileNotFoundError:  # another conversion has cleared or published it meanwhile
                held = 0
    return TargetState(standing, was_put_aside, is_complete, stranger, num_begun, held, free)


def _names(plan: ConversionPlan) -> list[str]:
    """Return the names of all files that a conversion makes."""
    return [INDEX_NAME, *(shard.name for shard in plan.shard_plan.shards), *plan.metadata_names]


def _is_made_by(folder: Path, plan: ConversionPlan, checkpoint: Checkpoint) -> bool:
    return _has_index(folder / INDEX_NAME, plan) and _has_metadata(folder, plan, checkpoint)


def _has_index(path: Path, plan: ConversionPlan) -> bool:
    """Tell whether an index is that of a plan, with whatever checksums."""
    if not path.is_file() or path.stat().st_size != plan.index_nbytes:
        return False
    try:
        tensors = open_reader(path.parent).tensors
        found = (tensors[tensor.name] for tensor in plan.shard_plan.tensors)
        checksums = [Checksums(tensor.xxh3_64 or "", tensor.sha256 or "") for tensor in found]
    except (FtwError, KeyError):
        return False
    with open_inside(Roots(path.parent), Path(path.name)) as file:
        return all(file.read(len(text)) == text for text in iter_index(plan.shard_plan, checksums, plan.index_extra))


def _has_metadata(folder: Path, plan: ConversionPlan, checkpoint: Checkpoint) -> bool:
    """Tell whether the files beside the weights equal the source's; derived files have checksums."""
    own, source = Roots(folder), roots_of(checkpoint)
    return all((folder / name).is_file() and _is_copy(own, source, name) for name in plan.metadata_files)


def _is_copy(own: Roots, source: Roots, name: Path) -> bool:
    with open_inside(own, name) as one, open_inside(source, name) as other:
        while content := one.read(_COMPARED_NBYTES):
            if content != other.read(_COMPARED_NBYTES):
                return False
        return not other.read(1)

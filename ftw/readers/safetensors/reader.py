"""SafetensorsReader: a Hugging Face checkpoint, in one file or in shards.

Which files these are `ftw.readers.safetensors.files` says.
"""

from __future__ import annotations

from functools import partial
from sys import getsizeof
from typing import TYPE_CHECKING, ClassVar

from ftw.errors import CheckpointError, printable
from ftw.files import MAX_NBYTES
from ftw.readers.base import DerivedFile, Found, LeftOut
from ftw.readers.safetensors.files import WHOLE, choose_files
from ftw.readers.safetensors.header import read_safetensors_header
from ftw.readers.tensor_budget import KEY_NBYTES, TensorBudget
from ftw.tensors import Extent

if TYPE_CHECKING:
    from ftw.files import WeightFile
    from ftw.hub import Place
    from ftw.readers.base import FileHead
    from ftw.readers.safetensors.files import Index
    from ftw.tensors import TensorInfo

_LENGTH_NBYTES = 8
_MAX_MISPLACED = 16
_MAX_SAMPLES = 256  # tensors of two copies of a model whose bytes are compared, at one place each
_SAMPLE_NBYTES = 4096


class SafetensorsReader:
    """A safetensors checkpoint; see `ftw.readers.base.Reader` for its attributes."""

    format: ClassVar[str] = "safetensors"

    def __init__(self, place: Place, found: Found, *, index: Index | None = None, rival: Index | None = None) -> None:
        self.place = place
        self.files = place.open_files(found.files, is_named=index is None and len(found.files) == 1)
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._file_of_shard = {name: number for number, name in enumerate(found.files)}
        left_out: list[LeftOut] = []
        placed = index.weight_map if index else {}
        counted = index or rival
        budget = counted.budget if counted else TensorBudget()
        reasons: dict[str, str] = {}  # one text for all stale copies that have the same
        for name, file in zip(found.files, self.files, strict=True):
            header = read_safetensors_header(file, name, budget)
            self.metadata.update(header.metadata)
            for tensor in header.tensors.values():
                if tensor.name not in self.tensors and placed.get(tensor.name, name) == name:
                    self.tensors[tensor.name] = tensor
                else:
                    left_out.append(self._stale_copy(tensor, placed, reasons, budget))
        self.problems = self._misplaced(index) if index else ()
        self.left_out = (*left_out, *found.left_out)
        self.warnings = (*found.warnings, *((self._compare(rival),) if rival else ()))

    @staticmethod
    def find(place: Place) -> Found | None:
        """Return the files that make up a checkpoint, by their names, an index and config.json.

        Raises:
            CheckpointError: The index is broken, there are several, or numbered shards are missing.
        """
        choice = choose_files(place)
        if choice is None:
            return None
        reader = partial(SafetensorsReader, index=choice.listed_by, rival=choice.rival)
        names, left_out = tuple(choice.files), choice.left_out
        return Found(SafetensorsReader.format, reader, names, choice.is_listed, left_out, choice.warnings)

    @staticmethod
    def recognise(file: FileHead) -> Found | None:
        """Return a file by its first bytes: a header's length that fits into it, and the header's brace."""
        length = int.from_bytes(file.first[:_LENGTH_NBYTES], "little")
        is_one = file.first[_LENGTH_NBYTES:].startswith(b"{") and length <= min(
            MAX_NBYTES, file.nbytes - _LENGTH_NBYTES
        )
        return Found(SafetensorsReader.format, SafetensorsReader, (file.name,), is_listed=True) if is_one else None

    def extents(self, tensor: TensorInfo) -> tuple[Extent, ...]:
        """Return where the bytes of one of `tensors` lie: always one run."""
        return (Extent(self._file_of_shard[tensor.shard], tensor.offset, tensor.nbytes),)

    def block_order(self, tensor: TensorInfo) -> None:
        """Return None: the format is little-endian."""

    def gguf_metadata(self) -> None:
        """Return None: it has nothing of a GGUF's."""

    def derived_files(self) -> tuple[DerivedFile, ...]:
        """Return nothing: all that is not a weight lies in files of its own."""
        return ()

    def _stale_copy(
        self, tensor: TensorInfo, weight_map: dict[str, str], reasons: dict[str, str], budget: TensorBudget
    ) -> LeftOut:
        """Return why a tensor is not taken: the index names another file for it."""
        if weight_map.get(tensor.name, tensor.shard) == tensor.shard:
            other = self.tensors[tensor.name].shard
            problem = f"lies in {printable(other)} too, and no index says which one counts"
            raise CheckpointError(self.place.folder / tensor.shard, tensor.name, problem)
        reason = f"a copy in {printable(tensor.shard)}, the index names {printable(weight_map[tensor.name])}"
        if reason not in reasons:
            budget.take(getsizeof(reason) + KEY_NBYTES, self.place.folder / tensor.shard, "header")
        return LeftOut("tensor", tensor.name, reasons.setdefault(reason, reason))

    def _misplaced(self, index: Index) -> tuple[CheckpointError, ...]:
        """Return what the index places in files that do not hold it; whoever opens the checkpoint judges a few of them.

        Raises:
            CheckpointError: There are many.
        """
        names = [name for name in index.weight_map if name not in self.tensors]
        problems = tuple(
            CheckpointError(
                index.path, name, f"the index places it in '{index.weight_map[name]}', which has no such tensor"
            )
            for name in names[:_MAX_MISPLACED]
        )
        if len(names) > _MAX_MISPLACED:
            raise problems[0]
        return problems

    def _compare(self, rival: Index) -> str:
        """Return what is to be said of an index whose files are not taken, though all are there."""
        others = sorted(set(rival.weight_map.values()))
        what = f"{len(others)} file{'s' * (len(others) > 1)} of {printable(rival.path.name)}"
        try:
            difference = self._difference(rival, others)
        except CheckpointError as error:
            difference = f"they cannot be compared: {self.place.describe(error)}"
        found = difference or "their headers say the same, and no difference was found where bytes were compared"
        return f"{WHOLE} is taken, as transformers does, and not the {what}, which vLLM and SGLang take; {found}"

    def _difference(self, rival: Index, others: list[str]) -> str:
        """Return where the tensors of another index's files differ; "" if they do not, as far as was looked."""
        for name in sorted(self.tensors.keys() ^ rival.weight_map.keys()):
            lacking = WHOLE if name in rival.weight_map else "the index"
            return f"they differ: {lacking} has no {printable(name)}"
        if self.place.roots is None or not all(map(self.place.has, others)):  # on the hub, or fetched from there
            return "their bytes were not compared"
        files = self.place.open_files(others, is_named=False)
        samples: list[tuple[TensorInfo, WeightFile, TensorInfo]] = []
        for shard, file in zip(others, files, strict=True):
            for other in read_safetensors_header(file, shard, rival.budget).tensors.values():
                mine = self.tensors.get(other.name)
                if mine is None or rival.weight_map[other.name] != shard:
                    continue
                if not mine.is_alike(other):
                    found = f"{printable(other.name)} is {mine.describe()} and {other.describe()}"
                    return f"they differ: {found}"
                samples.append((mine, file, other))
        for mine, file, other in samples[:: len(samples) // _MAX_SAMPLES + 1]:
            nbytes = min(_SAMPLE_NBYTES, mine.nbytes)
            offset = (mine.nbytes - nbytes) // 2
            if self.files[0].read(mine.offset + offset, nbytes) != file.read(other.offset + offset, nbytes):
                return f"they differ: {printable(mine.name)} has other bytes"
        return ""

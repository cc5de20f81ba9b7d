"""Arrangement: the tensors of a checkpoint as FreeToken stores them, which can be read like those of a checkpoint.

Nothing is made until it is read, and then just the bytes that are asked for.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ftw.errors import CheckpointError, printable
from ftw.layouts.expected.config_check import check_config
from ftw.layouts.expected.needs_check import check_needs, find_layers, has_tied_head
from ftw.layouts.expected.sizes import Sizes
from ftw.layouts.families.table import FAMILIES, NOT_SERVED, find_family
from ftw.layouts.freetoken.banks import Banks, make_banks, parse_expert_name
from ftw.layouts.freetoken.declared_schemes import read_declared_schemes
from ftw.layouts.freetoken.dense import arrange_dense, rename
from ftw.layouts.freetoken.experts_check import check_banks, check_experts, find_bank_problem
from ftw.layouts.freetoken.side_files import plan_copied_shards, plan_side_files
from ftw.layouts.recipes.dense_tensor import as_stored
from ftw.layouts.recipes.recipe import Run, find_run
from ftw.readers import LeftOut
from ftw.tensors import EXPERTS_BANK, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ftw.checkpoint import Checkpoint
    from ftw.files import WeightFile
    from ftw.layouts.families.family import Family
    from ftw.layouts.freetoken.banks import ExpertName
    from ftw.layouts.freetoken.declared_schemes import DeclaredSchemes
    from ftw.layouts.freetoken.side_files import CopiedShard, SideFile
    from ftw.layouts.recipes.dense_tensor import DenseTensor
    from ftw.layouts.recipes.recipe import Recipe

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_MAX_NAME = 256  # characters of a name: what expressions take grows with its square
_NO_PLACE = "FreeToken's model has no place for it"
_TIED = "the model's head is its embedding"
_NOT_USED = "FreeToken's kernels for experts do not use it"


class FreetokenArrangement:
    """The tensors of a checkpoint as FreeToken stores them.

    Attributes:
        source: The checkpoint's name, for messages.
        left_out: Tensors of the checkpoint that nothing is made of, with the reason.
        index_entries: Keys of the index of an FTW that holds them.
        side_files: Files beside it, with tensors that its server reads from there.
        beside: The tensors in those files, by name, as the checkpoint has them.
    """

    layout = "freetoken"

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Plan all.

        Raises:
            CheckpointError: FreeToken serves no such model, or a tensor that its model needs is missing or has a form
                that it does not take.
        """
        family = _find_family(checkpoint)
        self.source = checkpoint.source
        self._checkpoint = checkpoint
        layers, sizes = find_layers(checkpoint, family), Sizes(checkpoint, family.needs)
        check_config(checkpoint, family.needs.rules, sizes)
        sorted_tensors = _Sorted(checkpoint, family, len(layers))
        schemes = read_declared_schemes(checkpoint)
        self.side_files: tuple[SideFile | CopiedShard, ...] = (
            *plan_side_files(sorted_tensors.side, self._read),
            *plan_copied_shards(checkpoint, sorted_tensors.in_side_shards),
        )
        held = {name for file in self.side_files for name in file.tensors}
        self.beside = {name: tensor for name, tensor in checkpoint.tensors.items() if name in held}
        banks = _plan_banks(checkpoint, family, sorted_tensors.experts, schemes, sizes)
        prepared = sorted_tensors.dense if family.prepare is None else family.prepare(checkpoint, sorted_tensors.dense)
        dense, undeclared = arrange_dense(self.source, family, prepared, schemes)
        if family.finish is not None:
            dense = family.finish(checkpoint, dense)
        kept = check_needs(checkpoint, family, dense, layers, sizes)
        check_experts(checkpoint, family, {name.layer: tensor for name, tensor in sorted_tensors.experts}, layers)
        self._recipes: dict[str, Recipe] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for tensor in kept:
            self._add(tensor.name, tensor.dtype, tensor.shape, tensor.recipe, "weight")
        for bank in banks.tensors:
            self._add(bank.name, bank.dtype, bank.shape, bank.recipe, EXPERTS_BANK)
        names = {tensor.name for tensor in kept}
        others = [origin for tensor in dense if tensor.name not in names for origin in tensor.recipe.iter_sources()]
        self.left_out = (
            *sorted_tensors.left_out,
            *undeclared,
            *(LeftOut("tensor", name, _NO_PLACE) for name in dict.fromkeys(others)),
            *(LeftOut("tensor", name, _NOT_USED) for name in banks.unused),
        )
        self.index_entries: dict[str, Any] = {
            **banks.index_entries(),
            "side_files": [file.name for file in self.side_files],
        }
        self._copies = {
            recipe.name: name
            for name, recipe in self._recipes.items()
            if isinstance(recipe, Run) and recipe.nbytes == checkpoint.tensors[recipe.name].nbytes
        }
        self._check_ledger()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By name, in the order in which they are written; `offset` and `shard` say nothing."""
        return MappingProxyType(self._tensors)

    def find_copy(self, name: str) -> str | None:
        """Return the name of the tensor that holds one of the checkpoint's as it is, None if none does."""
        return self._copies.get(name)

    def find_bytes(self, name: str, offset: int, nbytes: int) -> tuple[WeightFile, int] | None:
        """Return which file holds bytes of a tensor, and from where on; None if they must be made."""
        run = find_run(self._recipes[name], offset, nbytes)
        return None if run is None else self._checkpoint.find_bytes(run.name, run.offset, nbytes)

    def read_into(self, name: str, buffer: Any, *, offset: int = 0) -> None:
        """Fill a buffer with bytes of a tensor, also of one in a side file, from its byte `offset` on.

        Memory: 64 MiB at most, whatever the tensor is made of.

        Raises:
            CheckpointError: A file of the checkpoint has changed.
            OSError: The disk fails; it names the file.
        """
        view = memoryview(buffer).cast("B")
        if name in self._recipes:
            self._recipes[name].read_into(view, offset, self._read)
        else:
            self._read(name, view, offset)

    def read_many(self, requests: Iterable[tuple[str, Any, int]], *, num_threads: int | None = None) -> None:  # noqa: ARG002
        """Fill several buffers, as `read_into` does, in this thread."""
        for name, buffer, offset in requests:
            self.read_into(name, buffer, offset=offset)

    def _read(self, name: str, view: memoryview, offset: int) -> None:
        self._checkpoint.read_into(name, view, offset=offset, num_threads=1)

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], recipe: Recipe, kind: str) -> None:
        if name in self._tensors:
            first = next(iter(self._recipes[name].iter_sources()))
            problem = f"and {next(iter(recipe.iter_sources()))} both become {name}"
            raise CheckpointError(self.source, first, problem)
        self._recipes[name] = recipe
        self._tensors[name] = TensorInfo(name, dtype, shape, 0, recipe.nbytes, kind=kind)

    def _check_ledger(self) -> None:
        """Check that each tensor of the checkpoint goes somewhere or is left out for a reason."""
        used = {source for recipe in self._recipes.values() for source in recipe.iter_sources()}
        named = {entry.name for entry in self.left_out} | self.beside.keys()
        for name in self._checkpoint.tensors:
            if name not in used and name not in named:
                raise CheckpointError(self.source, name, "would be lost: no tensor of FreeToken's layout is made of it")


class _Sorted:
    """A checkpoint's tensors by what becomes of them, in FreeToken's order: by file, and in a file by name."""

    def __init__(self, checkpoint: Checkpoint, family: Family, num_layers: int) -> None:
        self.dense: list[DenseTensor] = []
        self.experts: list[tuple[ExpertName, TensorInfo]] = []
        self.left_out: list[LeftOut] = []
        self.side: list[TensorInfo] = []
        is_without_head = not family.keeps_tied_head and has_tied_head(checkpoint, family)
        self.in_side_shards: list[str] = []
        tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: (tensor.shard, tensor.name.encode()))
        for position, tensor in enumerate(tensors):
            if len(tensor.name) > _MAX_NAME or not tensor.name.isprintable():
                problem = f"has {len(tensor.name)} characters, {_MAX_NAME} printable ones are allowed at most"
                raise CheckpointError(checkpoint.source, tensor.name, problem)
            name = rename(family, tensor.name)
            reason = next((why for pattern, why in family.left_out if re.search(pattern, tensor.name)), None)
            if not family.refuses_others and _is_past(name, num_layers):
                reason = f"FreeToken serves the {num_layers} layers before it"
            expert = parse_expert_name(tensor.name)
            if reason is not None:
                self.left_out.append(LeftOut("tensor", tensor.name, reason))
            elif is_without_head and tensor.name.startswith("lm_head."):
                self.left_out.append(LeftOut("tensor", tensor.name, _TIED))
            elif family.side_files and re.search(family.side_files, tensor.name):
                self.side.append(tensor)
            elif family.side_shards and re.search(family.side_shards, tensor.name):
                self.in_side_shards.append(tensor.name)
            elif expert is not None:
                self.experts.append((expert, tensor))
            else:
                self.dense.append(as_stored(tensor, name, position))


def _plan_banks(
    checkpoint: Checkpoint,
    family: Family,
    experts: list[tuple[ExpertName, TensorInfo]],
    schemes: DeclaredSchemes,
    sizes: Sizes,
) -> Banks:
    if not experts:
        return Banks()
    num_experts, hidden = (sizes.find(name) for name in ("experts", "hidden"))
    numbers = {"num_experts": num_experts.value if num_experts else 0, "hidden_size": hidden.value if hidden else 0}
    banks = make_banks(checkpoint.source, family.banks, experts, **numbers)
    check_banks(checkpoint.source, schemes, banks)
    made = {bank.name: bank for bank in banks.tensors}
    found = find_bank_problem(banks.tags, {name: (bank.dtype, bank.shape) for name, bank in made.items()}, sizes)
    if found is not None:
        name, problem = found
        raise CheckpointError(
            checkpoint.source, next(made[name].recipe.iter_sources()), f"{name}, made of it, {problem}"
        )
    return banks


def _is_past(name: str, num_layers: int) -> bool:
    """Tell whether a tensor belongs to a layer behind the last one of the model proper."""
    found = _LAYER.match(name)
    return found is not None and int(found[1]) >= num_layers


def _find_family(checkpoint: Checkpoint) -> Family:
    if checkpoint.format == "gguf":
        problem = "is a GGUF, layout='freetoken' is made of safetensors; FreeToken reads a GGUF as it is"
        raise CheckpointError(checkpoint.source, "layout", problem)
    if any(tensor.kind == EXPERTS_BANK for tensor in checkpoint.tensors.values()):
        raise CheckpointError(checkpoint.source, "layout", "is FreeToken's already; layout='plain' copies it")
    family = find_family(checkpoint)
    not_served = NOT_SERVED.get(checkpoint.config.architecture or "")
    if not_served is not None:
        problem = f"architecture is {checkpoint.config.architecture}, which its server cannot load: {not_served}"
        raise CheckpointError(checkpoint.source, "config.json", problem)
    if family is None:
        names = [name for family in FAMILIES for name in family.architectures]
        found = printable(str(checkpoint.config.architecture))
        nearest = " and ".join(get_close_matches(found, names, n=2, cutoff=0))
        problem = f"architecture is {found}, layout='freetoken' knows {len(names)} others, such as {nearest}"
        problem = f"{problem}; docs/ftw.md lists them"
        raise CheckpointError(checkpoint.source, "config.json", problem)
    return family

"""DenseTensor: a tensor of the target that is no expert bank, and the steps that make one of others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.layouts.recipes.recipe import Cast, Made, Run, Zeros, join

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftw.layouts.recipes.recipe import Bytes, Recipe
    from ftw.tensors import TensorInfo

FLOATS = frozenset({"F32", "F16", "BF16"})  # types whose elements are numbers without a scale


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A tensor of the target.

    Attributes:
        name: Its name there.
        dtype: Its element type.
        shape: Its shape.
        recipe: How its bytes are made.
        position: Where the last of what it is made of comes among the source's tensors.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    recipe: Recipe
    position: int

    @property
    def module(self) -> str:
        """Its name without the last part."""
        return self.name.rpartition(".")[0]

    @property
    def role(self) -> str:
        """The last part of its name, such as "weight"."""
        return self.name.rpartition(".")[2]

    @property
    def origin(self) -> str:
        """The first tensor of the source that it is made of, for messages."""
        return next(iter(self.recipe.iter_sources()), self.name)


def as_stored(tensor: TensorInfo, name: str, position: int) -> DenseTensor:
    """Return a stored tensor under another name."""
    return DenseTensor(name, tensor.dtype, tensor.shape, Run(tensor.name, 0, tensor.nbytes), position)


def renamed(tensor: DenseTensor, name: str) -> DenseTensor:
    """Return a tensor under another name."""
    return replace(tensor, name=name)


def cast_to(tensor: DenseTensor, dtype: str) -> DenseTensor:
    """Return a tensor in another type."""
    if tensor.dtype == dtype:
        return tensor
    return replace(tensor, dtype=dtype, recipe=Cast(tensor.recipe, tensor.dtype, dtype))


def concatenate(source: str, name: str, parts: Sequence[DenseTensor], rows_multiple: int = 1) -> DenseTensor:
    """Return tensors of one type one after another on axis 0, with rows of zeros up to a multiple.

    Raises:
        CheckpointError: Their types or their other axes differ.
    """
    first = parts[0]
    for part in parts:
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:] or not part.shape:
            found = f"is {part.dtype} {list(part.shape)}, {first.origin} is {first.dtype} {list(first.shape)}"
            raise CheckpointError(source, part.origin, f"{found}; they must fit, since they become {name}")
    rows = sum(part.shape[0] for part in parts)
    shape = (rows + -rows % rows_multiple, *first.shape[1:])
    recipes = [part.recipe for part in parts]
    if shape[0] > rows:
        recipes.append(Zeros((shape[0] - rows) * (first.recipe.nbytes // first.shape[0])))
    return DenseTensor(name, first.dtype, shape, join(recipes), max(part.position for part in parts))


def largest(name: str, parts: Sequence[DenseTensor]) -> DenseTensor:
    """Return the largest of some F32 numbers."""
    recipe = Made(tuple(part.recipe for part in parts), 4, _largest)
    return DenseTensor(name, "F32", (), recipe, max(part.position for part in parts))


def _largest(numbers: list[Bytes]) -> Bytes:
    return max(numbers, key=lambda number: float(number.view("<f4")[0]))

"""Expert banks: the routed experts of a layer, gathered as FreeToken's kernels take them (`bank_formats`).

A bank is one tensor for each layer with experts, `NAME#L` and the number of the layer among those, five digits. In
"gate_up" the rows of an expert's gate are followed by those of its up projection. Where layers have several formats,
all banks have the names of the most common one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ftw.errors import CheckpointError
from ftw.layouts.freetoken.bank_formats import ExpertSlice, bank_name, find_format, most_common, swap
from ftw.layouts.recipes.recipe import Run, join

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ftw.layouts.freetoken.bank_formats import BankFormat, BankSpec
    from ftw.layouts.recipes.recipe import Recipe
    from ftw.tensors import TensorInfo

# A routed expert's tensor, or one of all experts of a layer, stacked.
_EXPERT = re.compile(
    r"layers\.(?P<layer>\d+)\.(?:.*\.)?experts\.(?:(?P<expert>\d+)\.)?"
    r"(?P<projection>gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)(?:[._](?P<role>\w+))?$"
)
_PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_MAX_DIGITS = 6  # of the number of a layer or an expert
_MAX_EXPERTS = 10_000  # twenty times what a layer has
_MAX_SLICES = 1_000_000  # parts of stacked tensors, some hundred bytes each while a plan is made
PARTS = {"gate_up": (("gate_up",), ("gate", "up")), "down": (("down",),)}  # what each bank can be made of


class ExpertName(NamedTuple):
    """What the name of a routed expert's tensor says; `expert` is None for one of all experts of the layer."""

    layer: int
    expert: int | None
    projection: str
    role: str


class BankTensor(NamedTuple):
    """A bank of one layer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Banks:
    """The banks of a model, in the order in which they are written.

    Attributes:
        tensors: One for each bank and layer.
        tags: The format of each layer with experts.
        layers: The numbers of these layers.
        experts: The name of a tensor of an expert of each, for messages and for what config.json says of it.
        unused: Tensors of experts that no bank is made of.
    """

    tensors: tuple[BankTensor, ...] = ()
    tags: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    experts: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def index_entries(self) -> dict[str, object]:
        """Return the keys of the index that tell of banks."""
        return {
            "quant_format": most_common(self.tags) if self.tags else None,
            "layer_quant_formats": list(self.tags) if len(set(self.tags)) > 1 else None,
            "expert_bank_num_layers": len(self.tags) or None,
        }


def parse_expert_name(name: str) -> ExpertName | None:
    """Return what a name says if it is that of a routed expert's tensor."""
    found = _EXPERT.search(name)
    if found is None or any(len(found[key] or "") > _MAX_DIGITS for key in ("layer", "expert")):
        return None
    expert = None if found["expert"] is None else int(found["expert"])
    projection = _PROJECTIONS.get(found["projection"], found["projection"].removesuffix("_proj"))
    return ExpertName(int(found["layer"]), expert, projection, found["role"] or "weight")


def make_banks(
    source: str,
    allowed: frozenset[str],
    tensors: Sequence[tuple[ExpertName, TensorInfo]],
    *,
    num_experts: int,
    hidden_size: int,
) -> Banks:
    """Plan the banks of a model.

    Args:
        source: The checkpoint's name, for messages.
        allowed: Tags of the formats that the family's kernels take.
        tensors: All tensors of routed experts.
        num_experts: Experts of a layer.
        hidden_size: Width of the model: tells which axis of a stacked tensor is which.

    Raises:
        CheckpointError: A tensor of an expert is missing or differs from those of the others, or no allowed format
            fits.
    """
    stacked = sum(name.expert is None for name, _ in tensors)
    if num_experts > _MAX_EXPERTS or stacked * num_experts > _MAX_SLICES:
        found = f"are {num_experts} in a layer, {stacked} tensors are of all of these"
        problem = f"{found}; {_MAX_EXPERTS} are allowed at most, and {_MAX_SLICES} parts of such tensors"
        raise CheckpointError(source, "experts", problem)
    layers: dict[int, list[tuple[ExpertName, TensorInfo]]] = {}
    for name, tensor in tensors:
        layers.setdefault(name.layer, []).append((name, tensor))
    made = [_Layer(source, layers[number], num_experts, hidden_size) for number in sorted(layers)]
    for layer in made:
        if layer.format.tag not in allowed:
            problem = f"experts are {layer.format.tag}, FreeToken's kernels for them take {', '.join(sorted(allowed))}"
            raise CheckpointError(source, layer.first_name, problem)
    tags = tuple(layer.format.tag for layer in made)
    names = made[tags.index(most_common(tags))].format
    numbered = sorted(enumerate(made), key=lambda pair: pair[1].format.tag != names.tag)
    banks = [bank for number, layer in numbered for bank in layer.iter_banks(number, names)]
    unused = tuple(name for layer in made for name in layer.unused)
    return Banks(tuple(banks), tags, tuple(sorted(layers)), tuple(layer.first_name for layer in made), unused)


class _Layer:
    """The experts of one layer, whose tensors are all alike."""

    def __init__(
        self, source: str, tensors: Sequence[tuple[ExpertName, TensorInfo]], num_experts: int, hidden_size: int
    ) -> None:
        self._source = source
        self.first_name = tensors[0][1].name
        self._num_experts = num_experts
        self._slices: dict[str, dict[str, list[ExpertSlice]]] = {}  # by projection and role, of each expert
        self._gather(tensors)
        first = next(iter(self._slices.values()))
        found = find_format({role: slices[0] for role, slices in first.items()})
        if found is None:
            stored = ", ".join(f"{role} {slices[0].dtype}" for role, slices in first.items())
            problem = f"experts hold {stored}, which is no format of experts that FreeToken has"
            raise CheckpointError(source, self.first_name, problem)
        self.format: BankFormat = found
        self._check_shapes()
        self.unused = [
            part.name
            for roles in self._slices.values()
            for role in sorted(found.unused & roles.keys())
            for part in roles[role]
        ]
        if {"gate_up", "down"} <= self._slices.keys() and found.tag == "bf16":
            self._turn(hidden_size)

    def iter_banks(self, number: int, names: BankFormat) -> Iterator[BankTensor]:
        """Yield the banks of the layer, which is number `number` of those with experts."""
        for part, choices in PARTS.items():
            projections = next((choice for choice in choices if all(name in self._slices for name in choice)), None)
            if projections is None:
                wanted = " or ".join(" and ".join(choice) for choice in choices)
                found = ", ".join(sorted(self._slices))
                problem = f"experts of its layer have {found}, the bank {part} needs {wanted}"
                raise CheckpointError(self._source, self.first_name, problem)
            for place, spec in enumerate(self.format.banks):
                yield self._make_bank(bank_name(part, names.banks[place], number), projections, spec)

    def _make_bank(self, name: str, projections: Sequence[str], spec: BankSpec) -> BankTensor:
        weights = [self._find(projection, self.format.banks[0]) for projection in projections]
        parts = [self._find(projection, spec) for projection in projections]
        heights = [slices[0].shape[0] for _, slices in weights]
        all_rows = sum(slices[0].shape[0] for _, slices in parts if slices[0].shape)
        made = [
            [
                spec.make(slices[expert], role, height, all_rows)
                for (role, slices), height in zip(parts, heights, strict=True)
            ]
            for expert in range(self._num_experts)
        ]
        first = made[0]
        if any(part.shape != first[0].shape for part in first):
            problem = f"gate and up must be alike, they are {' and '.join(str(list(part.shape)) for part in first)}"
            raise CheckpointError(self._source, first[0].name, problem)
        shape = (self._num_experts, sum(part.shape[0] for part in first), *first[0].shape[1:])
        return BankTensor(name, first[0].dtype, shape, join([part.recipe for expert in made for part in expert]))

    def _find(self, projection: str, spec: BankSpec) -> tuple[str, list[ExpertSlice]]:
        roles = self._slices[projection]
        role = next((role for role in spec.roles if role in roles), None)
        if role is None:
            problem = f"{projection} has no {' or '.join(spec.roles)}, which {self.format.tag} experts need"
            raise CheckpointError(self._source, self.first_name, problem)
        stored = roles[role][0]
        if stored.dtype not in spec.dtypes:
            problem = (
                f"is {stored.dtype}, {self.format.tag} experts of FreeToken need {' or '.join(sorted(spec.dtypes))}"
            )
            raise CheckpointError(self._source, stored.name, problem)
        return role, roles[role]

    def _gather(self, tensors: Sequence[tuple[ExpertName, TensorInfo]]) -> None:
        found: dict[tuple[str, str], dict[int, ExpertSlice]] = {}
        for name, tensor in tensors:
            slices = found.setdefault((name.projection, name.role), {})
            if name.expert is None:
                slices.update(enumerate(self._cut(tensor)))
            else:
                whole = Run(tensor.name, 0, tensor.nbytes)
                slices[name.expert] = ExpertSlice(tensor.name, tensor.dtype, tensor.shape, whole)
        for (projection, role), slices in found.items():
            self._check(projection, role, slices)
            in_order = [slices[expert] for expert in range(self._num_experts)]
            self._slices.setdefault(projection, {})[role] = in_order

    def _check(self, projection: str, role: str, slices: Mapping[int, ExpertSlice]) -> None:
        first = next(iter(slices.values()))
        if len(slices) != self._num_experts or any(number not in slices for number in range(self._num_experts)):
            missing = next((number for number in range(self._num_experts) if number not in slices), None)
            which = f"expert {missing} has none" if missing is not None else f"there are {len(slices)}"
            problem = f"{projection} {role}: {which}, each of the {self._num_experts} experts of a layer needs one"
            raise CheckpointError(self._source, first.name, problem)
        for part in slices.values():
            if (part.dtype, part.shape) != (first.dtype, first.shape):
                found = f"is {part.dtype} {list(part.shape)}, {first.name} is {first.dtype} {list(first.shape)}"
                raise CheckpointError(self._source, part.name, f"{found}; the experts of a layer must be alike")

    def _check_shapes(self) -> None:
        """Check that the tensors that banks are made of have the axes that their format has, and elements."""
        for roles in self._slices.values():
            for spec in self.format.banks:
                for first in (slices[0] for role, slices in roles.items() if role in spec.roles):
                    is_number = 0 in spec.axes
                    if len(first.shape) not in spec.axes or 0 in first.shape or (is_number and prod(first.shape) != 1):
                        axes = (
                            "one number is" if is_number else f"{' or '.join(map(str, spec.axes))} axes, none of 0, are"
                        )
                        problem = f"is {list(first.shape)} for each expert, {axes} needed for {self.format.tag}"
                        raise CheckpointError(self._source, first.name, problem)

    def _cut(self, tensor: TensorInfo) -> Iterator[ExpertSlice]:
        """Yield the part of each expert of a tensor of all experts."""
        if not tensor.shape or tensor.shape[0] != self._num_experts:
            problem = f"is {tensor.describe()}, its first axis must be that of the {self._num_experts} experts"
            raise CheckpointError(self._source, tensor.name, problem)
        nbytes = tensor.nbytes // self._num_experts
        for expert in range(self._num_experts):
            yield ExpertSlice(tensor.name, tensor.dtype, tensor.shape[1:], Run(tensor.name, expert * nbytes, nbytes))

    def _turn(self, hidden_size: int) -> None:
        """Bring stacked matrices into the order [rows, columns]: some checkpoints have [H, 2I] and [I, H]."""
        gate_up, down = (self._slices[part]["weight"] for part in ("gate_up", "down"))
        if gate_up[0].shape[1] == hidden_size == down[0].shape[0]:
            return
        if gate_up[0].shape[0] != hidden_size or down[0].shape[1] != hidden_size:
            found = f"is {list(gate_up[0].shape)} for each expert, down_proj {list(down[0].shape)}"
            problem = f"{found}; one axis of both must be the model's width, {hidden_size}"
            raise CheckpointError(self._source, gate_up[0].name, problem)
        for slices in (gate_up, down):
            slices[:] = [swap(part) for part in slices]

"""Family: what one row of the table of families says, `ftw.conversion.families`.

A source's tensor goes through a row from the top down: it is left out, or goes into a side file, or is an expert's, or
is renamed and then fused with others, or cast, or both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from ftw.checkpoint import Checkpoint
    from ftw.conversion.recipes.dense_tensor import DenseTensor

MOE = "moe"  # the kind of a layer that has routed experts


@dataclass(frozen=True, slots=True)
class Fuse:
    """Modules that lie side by side, whose tensors become those of one module, one after another on axis 0.

    Attributes:
        parts: The last parts of their names, in the order in which they are joined.
        into: That of the module that they become.
        where: A regular expression; the new name above must begin with what it matches.
        rows_multiple: Rows of zeros are added up to a multiple of so many.
    """

    parts: tuple[str, ...]
    into: str
    where: str = ""
    rows_multiple: int = 1


@dataclass(frozen=True, slots=True)
class Needs:
    """What FreeToken's model of a family loads, apart from expert banks: all of this, and nothing else.

    Each text holds names with spaces between them. One that ends with "." is a module: a weight, a bias where the
    source has one, and what belongs to its encoding. The others are tensors. What ends with "?" may be missing.

    Attributes:
        model: What there is once.
        layers: What there is below "model.layers.N.", in groups: a layer has one of a group's texts, and all of that.
        kinds: Tells from the configuration what each layer is, from the first one on: kinds of `of_kind`, and `MOE`
            where it has routed experts. Without it there are as many layers as config.json says.
        of_kind: Kinds, and what a layer of one has beside `layers`.
        vision: The same as `model`, where config.json has a part for images.
        vision_part: The key of that part; empty if its keys stand at the top.
        blocks: The same as `layers`, for the blocks of the vision tower.
        block_prefix: What stands before the number of a block.
        block_count: The key of the vision part that says how many blocks there are.
    """

    model: str
    layers: tuple[tuple[str, ...], ...]
    kinds: Callable[[Checkpoint], Sequence[AbstractSet[str]]] | None = None
    of_kind: tuple[tuple[str, str], ...] = ()
    vision: str = ""
    vision_part: str = "vision_config"
    blocks: tuple[tuple[str, ...], ...] = ()
    block_prefix: str = "visual.blocks."
    block_count: str = "depth"


@dataclass(frozen=True, slots=True)
class Family:
    """How checkpoints of some architectures become what FreeToken's models load.

    Attributes:
        architectures: As config.json names them.
        needs: What the result must hold.
        left_out: Regular expressions of names that are left out, each with the reason.
        side_files: A regular expression of names that go into side files as they are.
        side_shards: A regular expression of names that FreeToken's server reads from whole shards of the source, which
            lie beside the FTW under their own names.
        renames: Regular expressions, and what stands in place of what they match; the first that matches counts.
        fuses: Modules that become one.
        casts: Regular expressions of new names, and the type that F32, F16 and BF16 elements are cast to; the first
            that matches counts, of a fused tensor's parts as well.
        scaled: A regular expression of new names of modules, whose NVFP4 and FP8 tensors get FreeToken's names.
        banks: Tags of the formats of experts that its kernels take (`ftw.conversion.freetoken.bank_formats`).
        refuses_others: Whether a name that it does not need is an error; otherwise that is left out, and so are layers
            past the last one, which predict several tokens.
        finish: Does what the table cannot say: takes the dense tensors, and returns those that are written.
    """

    architectures: tuple[str, ...]
    needs: Needs
    left_out: tuple[tuple[str, str], ...] = ()
    side_files: str = ""
    side_shards: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    fuses: tuple[Fuse, ...] = ()
    casts: tuple[tuple[str, str], ...] = ()
    scaled: str = ""
    banks: frozenset[str] = frozenset()
    refuses_others: bool = True
    finish: Callable[[Checkpoint, list[DenseTensor]], list[DenseTensor]] | None = None


QKV = Fuse(("q_proj", "k_proj", "v_proj"), "qkv_proj")
GATE_UP = Fuse(("gate_proj", "up_proj"), "gate_up_proj")

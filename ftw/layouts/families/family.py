"""Family: what one row of the table of families says, `ftw.layouts.families`.

A source's tensor goes through a row from the top down: it is left out, or goes into a side file, or is an expert's, or
is renamed and then fused with others, or cast, or both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from ftw.checkpoint import Checkpoint
    from ftw.layouts.recipes.dense_tensor import DenseTensor

MOE = "moe"  # the kind of a layer that has routed experts


@dataclass(frozen=True, slots=True)
class Fuse:
    """Modules that lie side by side, whose tensors become those of one module, one after another on axis 0.

    Attributes:
        parts: The last parts of their names, in the order in which they are joined.
        into: That of the module that they become.
        where: A regular expression; the new name above must begin with what it matches.
        rows_multiple: Rows of zeros are added up to a multiple of so many.
        if_packed: The last part of the name of a module beside them; they are joined if its weight is quantised.
    """

    parts: tuple[str, ...]
    into: str
    where: str = ""
    rows_multiple: int = 1
    if_packed: str = ""


@dataclass(frozen=True, slots=True)
class Needs:
    """What FreeToken's model of a family loads, apart from expert banks: all of this, and nothing else.

    Each text holds names with spaces between them. One that ends with "." is a module: a weight, and what belongs to
    its encoding; one that ends with ".+" has a bias too. The others are tensors. What ends with "?" may be missing.

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
        by_config: Returns what else config.json switches on, with whole names.
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
    by_config: Callable[[Checkpoint], Iterable[str]] | None = None


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
        scaled: A regular expression of new names of modules: those that FreeToken builds as config.json declares them,
            quantised or not. Their NVFP4 and FP8 tensors get its names.
        unpacked: Those of them that it holds as bf16 in any case.
        is_written_by_module: Whether all tensors of a scaled module are written where its weight is; otherwise each
            comes in its own turn. It is a matter of order alone.
        banks: Tags of the formats of experts that its kernels take (`ftw.layouts.freetoken.bank_formats`).
        refuses_others: Whether a name that it does not need is an error; otherwise that is left out, and so are layers
            past the last one, which predict several tokens.
        keeps_tied_head: Whether an LM head that a tied model stores goes into the FTW, where nothing reads it.
        is_tied_by_default: Whether the LM head is tied if config.json does not say.
        asks_top_for_tie: Whether the flag at the top of config.json counts, and not the text model's own.
        prepare: Does what the table cannot say before modules are joined: takes the dense tensors under their new
            names, and returns those that are.
        finish: The same with the dense tensors that come out.
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
    unpacked: str = ""
    is_written_by_module: bool = False
    banks: frozenset[str] = frozenset()
    refuses_others: bool = True
    keeps_tied_head: bool = True
    is_tied_by_default: bool = False
    asks_top_for_tie: bool = False
    prepare: Callable[[Checkpoint, list[DenseTensor]], list[DenseTensor]] | None = None
    finish: Callable[[Checkpoint, list[DenseTensor]], list[DenseTensor]] | None = None


QKV = Fuse(("q_proj", "k_proj", "v_proj"), "qkv_proj")
GATE_UP = Fuse(("gate_proj", "up_proj"), "gate_up_proj")
LAYER_LINEARS = r"\.(?:[qkvo]_proj|gate_proj|up_proj|down_proj)$"
LINEARS = rf"{LAYER_LINEARS}|^lm_head$"  # those of a text model with dense layers
# Scales of KV caches, which calibration leaves beside the layers.
KV_SCALES = (r"\.(?:k|v|q|prob)_scale$", "FreeToken's KV cache is not quantised")
NO_VISION = (
    r"^(?:model\.)?(?:visual|vision_tower|embed_vision|vision_embedder)\.",
    "FreeToken's model of that architecture takes text alone",
)

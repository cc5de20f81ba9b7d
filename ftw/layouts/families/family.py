"""Family: what one row of the table of families says, `ftw.layouts.families`.

Its sizes are expressions of config.json's keys, which `ftw.layouts.expected` works out.

A source's tensor goes through a row from the top down: it is left out, or goes into a side file, or is an expert's, or
is renamed and then fused with others, or cast, or both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from typing import Any

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
class Rules:
    """What FreeToken asks of a configuration, beside tensors that agree with it.

    Attributes:
        rope_heads: Sizes of heads that it rotates, for which its kernels are made.
        ropes: Names of rotary embeddings that it has; empty if it does not look.
        equal: Pairs of sizes that must be equal.
        one_of: Keys, and the values that they may have; a key that is missing or null is not looked at.
        required: Keys in parts that must be there, if the part is there.
        not_null: Keys that may be missing, but not null.
        layer_types: What may stand in `layer_types`, which has an entry for each layer, if it is there; empty for
            anything, None if their number does not matter either.
    """

    rope_heads: tuple[str, ...] = ()
    ropes: tuple[str, ...] = ("default", "llama3", "proportional", "yarn")
    equal: tuple[tuple[str, str], ...] = ()
    one_of: tuple[tuple[str, tuple[object, ...]], ...] = ()
    required: tuple[str, ...] = ()
    not_null: tuple[str, ...] = ("max_position_embeddings", "num_experts_per_tok")
    layer_types: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What FreeToken's model of a family loads, apart from expert banks: all of this, and nothing else.

    Each text holds names with spaces between them. One that ends with "." is a module: a weight, and what belongs to
    its encoding; one that ends with ".+" has a bias too. The others are tensors. What ends with "?" may be missing.
    Behind a "=" stands the shape, of a module that of its weight in elements: sizes with commas between them, "*" for
    any. Elements are floating-point numbers, or integers where the shape begins with "int:"; "any:" stands for either.
    Texts with "|" between them are choices, of which there is one, and all of that.

    Attributes:
        model: What there is once.
        layers: What there is below "model.layers.N.".
        kinds: Tells from the configuration what each layer is, from the first one on: kinds of `of_kind`, and `MOE`
            where it has routed experts. Without it there are as many layers as config.json says.
        of_kind: Kinds, and what a layer of one has beside `layers`.
        vision: The same as `model`, where config.json has a part for images.
        vision_part: The key of that part; empty if its keys stand at the top.
        blocks: The same as `layers`, for the blocks of the vision tower.
        block_prefix: What stands before the number of a block.
        block_count: The key of the vision part that says how many blocks there are.
        by_config: Returns what else config.json switches on, with whole names.
        sizes: Names of sizes, and what they are (`ftw.layouts.expected.sizes`). A family with experts defines
            "experts" of a layer, "hidden", their width, and "expert_inner", their inner width.
        config: Returns another file than config.json in which the sizes stand, by name, and what it says; takes what
            config.json says, with the text model's keys at the top.
        rules: What FreeToken asks of the configuration.
        hints: Regular expressions of names, and the key that says whether they are needed, for messages.
    """

    model: str
    layers: str
    kinds: Callable[[Checkpoint], Sequence[AbstractSet[str]]] | None = None
    of_kind: tuple[tuple[str, str], ...] = ()
    vision: str = ""
    vision_part: str = "vision_config"
    blocks: str = ""
    block_prefix: str = "visual.blocks."
    block_count: str = "depth"
    by_config: Callable[[Checkpoint], Iterable[str]] | None = None
    sizes: Mapping[str, str] = field(default_factory=dict)
    config: Callable[[Checkpoint, Mapping[str, Any]], tuple[str, Mapping[str, Any]]] | None = None
    rules: Rules = Rules()
    hints: tuple[tuple[str, str], ...] = ()


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
# What mixes the streams of residuals, in DeepSeek-V4 and GLM-5.3.
HYPER_CONNECTIONS = (
    "hc_attn_fn=mix,wide hc_ffn_fn=mix,wide hc_attn_base=mix hc_ffn_base=mix hc_attn_scale=3 hc_ffn_scale=3"
)
HYPER_SIZES = {"mix": "hc_mult*hc_mult+2*hc_mult", "wide": "hc_mult*hidden"}
# Scales of KV caches, which calibration leaves beside the layers.
KV_SCALES = (r"\.(?:k|v|q|prob)_scale$", "FreeToken's KV cache is not quantised")
NO_VISION = (
    r"^(?:model\.)?(?:visual|vision_tower|embed_vision|vision_embedder)\.",
    "FreeToken's model of that architecture takes text alone",
)

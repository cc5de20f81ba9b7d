"""Operation: one kind of lookup, and LookupOptions: what is asked of a lookup besides the rows of ids.

check        the arguments of any caller, once; then nothing is checked again
plan         the launches that a lookup on a device takes
reference    what a lookup on the CPU takes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ftw.kernels.arguments import check_columns, check_distinct, check_scale, make_out, on_device
from ftw.kernels.hot import check_hot
from ftw.kernels.launching import Launch, Launcher, launch_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftw.kernels.hot import HotRowBuffers


class LookupOptions(NamedTuple):
    """Options of a lookup, which `ftw.kernels.lookup.lookup` and `ftw.kernels.packed_lookup.packed_lookup` describe.

    `ggml_type` and `dtype`, that of decoded values, are given for packed rows, and for no others.
    """

    first_id: int = 0
    columns: tuple[int, int] | None = None
    scale: float | None = None
    hot: HotRowBuffers | None = None
    is_distinct: bool = False
    ggml_type: str = ""
    dtype: torch.dtype | None = None

    def check(
        self,
        op: str,
        table: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor | None,
        *,
        columns: int,
        dtype: torch.dtype,
        block_size: int = 1,
    ) -> tuple[LookupOptions, torch.Tensor]:
        """Return the options, their scale rounded to the values' `dtype`, and the output; `columns` is a row's length.

        Raises:
            LookupArgumentError: An option or the output is not allowed.
        """
        length = columns if self.columns is None else check_columns(op, self.columns, columns, block_size)
        scale = None if self.scale is None else check_scale(op, self.scale, dtype)
        if self.hot is not None:
            check_hot(op, self.hot, table, ids)
        if self.is_distinct:
            check_distinct(op, ids)
        return self._replace(scale=scale), make_out(op, ids, length, dtype, out)


class Operation(NamedTuple):
    """One kind of lookup; each part takes table, ids, output and options."""

    check: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor | None, LookupOptions], tuple[LookupOptions, torch.Tensor]
    ]
    plan: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LookupOptions], list[Launch]]
    reference: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LookupOptions], None]

    def run(
        self,
        table: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor | None,
        options: LookupOptions,
        launcher: Launcher | None,
    ) -> tuple[torch.Tensor, list[Launch]]:
        """Look rows up; return them and the launches that did it, of which there are none on a CPU.

        Raises:
            LookupArgumentError: An argument is not allowed.
        """
        options, out = self.check(table, ids, out, options)
        launches: list[Launch] = []
        if not out.numel() or not table.shape[0]:
            out.view(torch.uint8).zero_()
        elif ids.device.type == "cpu":
            self.reference(table, ids, out, options)
        else:
            with on_device(ids):
                launches = self.plan(table, ids, out, options)
                launch_all(launches, launcher, ids.device.index)
        return out, launches

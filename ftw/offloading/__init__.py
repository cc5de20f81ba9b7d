"""Offloading: tables that are on a GPU already move to page-locked memory, and their VRAM is given back.

Imports: `ftw.lookup`, `ftw.kernels`, `ftw.pinned`, `ftw.host`, names from `ftw.checkpoint`.
"""

from ftw.offloading.model_tables import ModelTable, OffloadedModel, find_model_tables, offload_tables, replace_module
from ftw.offloading.offloader import check_room, copy_to_host, plan_offload, run_offload
from ftw.offloading.table_modules import find_table, is_table_module

__all__ = [
    "ModelTable", "OffloadedModel", "check_room", "copy_to_host", "find_model_tables", "find_table", "is_table_module",
    "offload_tables", "plan_offload", "replace_module", "run_offload",
]  # fmt: skip

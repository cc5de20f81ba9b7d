"""Operations on the device: `lookup` and `packed_lookup`. An op has one name everywhere.

    <op>.py               checks and launches
    jit/<op>_triton.py    its kernel, without checks
    reference.py          <op>_reference, slow and obvious

Imports: the ground files.
"""

from ftw.kernels import lookup, packed_lookup
from ftw.kernels.arguments import check_dense, check_scale, is_dense, make_out
from ftw.kernels.distinct import prefers_distinct
from ftw.kernels.hot import HotRowBuffers
from ftw.kernels.launching import LaunchCache
from ftw.kernels.lookup import LOOKUP
from ftw.kernels.operation import LookupOptions
from ftw.kernels.packed_lookup import OUT_DTYPES, PACKED_LOOKUP, packed_columns, prepare

__all__ = [
    "LOOKUP", "OUT_DTYPES", "PACKED_LOOKUP", "HotRowBuffers", "LaunchCache", "LookupOptions", "check_dense",
    "check_scale", "is_dense", "lookup", "make_out", "packed_columns", "packed_lookup", "prefers_distinct", "prepare",
]  # fmt: skip

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
from ftw.kernels.launching import Launch, LaunchCache
from ftw.kernels.packed_lookup import OUT_DTYPES, packed_columns, prepare

__all__ = [
    "OUT_DTYPES",
    "HotRowBuffers",
    "Launch",
    "LaunchCache",
    "check_dense",
    "check_scale",
    "is_dense",
    "lookup",
    "make_out",
    "packed_columns",
    "packed_lookup",
    "prefers_distinct",
    "prepare",
]

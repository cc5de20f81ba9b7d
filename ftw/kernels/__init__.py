"""Operations on the device. An op is a module, which checks and launches: `lookup` and `packed_lookup`.

Its kernel alone is in `ftw.kernels.jit`; its reference is slow and obvious. Imports: the ground files.
"""

from ftw.kernels import lookup, packed_lookup
from ftw.kernels.arguments import check_dense, check_scale, is_dense, make_out
from ftw.kernels.distinct import prefers_distinct
from ftw.kernels.hot import HotRowBuffers
from ftw.kernels.launch_cache import LaunchCache
from ftw.kernels.launching import Launch
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

"""DF11: lookup tables that dfloat11 has compressed, shown as the plain tables that they decode to.

Imports: `ftw.files`. No torch; numpy where a table is read.
"""

from ftw.checkpoint.df11.tables import DECODED_ROLES

__all__ = ["DECODED_ROLES"]

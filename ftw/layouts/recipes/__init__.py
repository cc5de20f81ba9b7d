"""How the bytes of a tensor are made of those of a checkpoint's tensors, range by range.

Imports: `ftw.dtypes`, `ftw.errors`, `ftw.tensors`. No torch; numpy where bytes are made.
"""

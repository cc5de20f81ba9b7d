"""An FTW onto the disk: where each tensor lies, in which chunks it is written, the shards and the index.

Imports: `ftw.checkpoint`, `ftw.readers` for the format, `ftw.host`, `ftw.files`. No torch.
"""

"""An FTW onto the disk: where everything lies, the buffers, the shards, the index."""

"""A lookup table as a module: rows for ids, from wherever the table lies."""

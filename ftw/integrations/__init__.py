"""Bindings to other libraries, each imported by name: none is imported with ftw, and none is needed by it."""

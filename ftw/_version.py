"""The release, in the one place that code reads it from."""

__version__ = "0.1.0"

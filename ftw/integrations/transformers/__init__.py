"""Models of transformers with their lookup tables in host memory."""

from ftw.integrations.transformers.models import close, load, offload_model

__all__ = ["close", "load", "offload_model"]

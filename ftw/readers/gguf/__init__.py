"""GGUF files: which make up a model, their headers, metadata and byte order."""

"""Folders as tools leave them, as data: names of files, and as little content as tells them apart."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builders import llama_config, safetensors_bytes, tensor_entry
from gguf_builder import entry, gguf_bytes, kv

INDEX = "model.safetensors.index.json"
FOLDER = None  # in place of a file's content

Content = bytes | str | dict[str, Any] | list[Any] | None


def weights(*names: str, fill: int = 0) -> bytes:
    """Return a safetensors file of one byte for each name."""
    header = {name: tensor_entry("U8", [1], at, at + 1) for at, name in enumerate(names)}
    return safetensors_bytes(header, bytes([fill] * len(names)))


def index(**files: str | list[str]) -> dict[str, Any]:
    """Return an index that places tensors in files; the keyword is a tensor's name."""
    return {"metadata": {"total_size": len(files)}, "weight_map": files}


def index_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the index of safetensors files."""
    places: dict[str, str] = {}
    for file, content in files.items():
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        places |= dict.fromkeys(header, file)
    return index(**places)


def shards(count: int, stem: str = "model", fill: int = 0) -> dict[str, bytes]:
    """Return numbered shards, of one tensor each: t1, t2, …"""
    return {
        f"{stem}-{number:05}-of-{count:05}.safetensors": weights(f"t{number}", fill=fill)
        for number in range(1, count + 1)
    }


def gguf(architecture: str = "llama", kind: str | None = None, tensor: str = "token_embd.weight") -> bytes:
    """Return a GGUF of one tensor."""
    kinds = [] if kind is None else [kv("general.type", "str", kind)]
    return gguf_bytes([entry(tensor)], bytes(32), kvs=[kv("general.architecture", "str", architecture), *kinds])


def write_layout(folder: Path, files: Mapping[str, Content]) -> Path:
    """Write a folder; objects and lists become JSON, None a folder."""
    for name, content in files.items():
        path = folder / name
        (path if content is FOLDER else path.parent).mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not FOLDER:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


CONFIG = {"config.json": llama_config()}

"""What reader tests look at: the bytes of tensors, and the shape of refusals."""

from pathlib import Path

import torch

from ftw import Checkpoint, CheckpointError, FtwError, inspect, open_checkpoint


def stored_bytes(checkpoint: Checkpoint, name: str) -> bytes:
    """Return the bytes of one tensor as the checkpoint reads them."""
    buffer = bytearray(checkpoint.tensors[name].nbytes)
    checkpoint.read_into(name, buffer)
    return bytes(buffer)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a torch tensor, row by row."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def opened_path(source: str | Path, **options: bool) -> Path:
    """Open a checkpoint, of a hub id what that fetches, and return where it lies."""
    with open_checkpoint(source, **options) as checkpoint:
        return checkpoint.path


def open_unless_refused(path: Path) -> Checkpoint | None:
    """Open a checkpoint; return None where ftw refuses it with an error of its own, on one line."""
    try:
        return open_checkpoint(path)
    except FtwError as error:
        message = str(error)
    assert message.isprintable()
    return None


def assert_names_file(error: CheckpointError, path: Path) -> None:
    """Check that a message is one printable line that begins with the file's path and a subject."""
    message = str(error)
    assert message.isprintable()
    assert message.startswith(f"{path}: ")
    assert error.subject
    assert len(message) < 1000


def assert_same_report(source: str, folder: Path) -> None:
    """Check that a source on the hub and a folder have the same report, but for their names."""
    remote, local = inspect(source).to_dict(), inspect(folder).to_dict()
    assert (remote.pop("source"), local.pop("source")) == (source, str(folder))
    assert remote == local

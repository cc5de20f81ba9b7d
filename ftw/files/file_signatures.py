"""What a download, or a slip, leaves in place of a checkpoint, known by its first eight bytes."""

from __future__ import annotations

# Letters in lower case.
_IMPOSTORS: tuple[tuple[bytes, str], ...] = (
    (b"version ", "is a Git LFS pointer, not the file that it stands for; fetch it with 'git lfs pull'"),
    (b"<!doctyp", "is an HTML page, not a checkpoint; download it again"),
    (b"<html", "is an HTML page, not a checkpoint; download it again"),
    (b"pk\x03\x04", "is a zip archive or a PyTorch pickle, which is never opened"),
    (b"\x80\x02", "is a pickle, which is never opened"),
    (b"\x80\x03", "is a pickle, which is never opened"),
    (b"\x80\x04", "is a pickle, which is never opened"),
    (b"\x80\x05", "is a pickle, which is never opened"),
)


def find_impostor(first: bytes, others: tuple[tuple[bytes, str], ...] = ()) -> str | None:
    """Return what a file that begins with `first` is instead of a checkpoint, or None; `others` are known besides."""
    return next((problem for magic, problem in (*_IMPOSTORS, *others) if first.lower().startswith(magic)), None)

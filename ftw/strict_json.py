"""JSON objects as checkpoints hold them: one object, no duplicate keys, no NaN, no byte-order mark, bounded size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from ftw.errors import CheckpointError, printable

if TYPE_CHECKING:
    from pathlib import Path

MAX_NBYTES = 100_000_000  # the safetensors library's bound on a header, used for every JSON text


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: The file is too large, or `parse_json_object` refuses its text.
    """
    with path.open("rb") as file:
        text = file.read(MAX_NBYTES + 1)
    if len(text) > MAX_NBYTES:
        raise CheckpointError(path, "json", f"is larger than {MAX_NBYTES} bytes")
    return parse_json_object(text, path, "json")


def parse_json_object(text: bytes | memoryview, path: Path, subject: str) -> dict[str, Any]:
    """Parse UTF-8 text that holds one JSON object.

    Raises:
        CheckpointError: The text is not UTF-8, not JSON, not an object, or holds a key twice, NaN or an infinity.
    """

    def pairs_to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(path, subject, f"key '{printable(duplicate)}' occurs twice, keys must be unique")
        return result

    def refuse_constant(constant: str) -> NoReturn:
        raise CheckpointError(path, subject, f"holds {constant}, which JSON does not allow")

    try:
        decoded = str(text, "utf-8")
        value = json.loads(decoded, object_pairs_hook=pairs_to_dict, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise CheckpointError(path, subject, f"is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(path, subject, f"is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise CheckpointError(path, subject, "is nested too deeply") from error
    except CheckpointError:
        raise
    except ValueError as error:  # an integer of more than 4300 digits
        raise CheckpointError(path, subject, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, subject, f"holds a {type(value).__name__}, an object is needed")
    return value


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether a JSON value is a non-negative integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

"""A checkpoint's folder as `from_pretrained` sees it: what it would take besides, and JSON that it opens by its path.

    adapter_config.json         an adapter, which it applies if PEFT is installed
    shard-00001-model-….…       weights that ranks saved, which it takes instead of all others
    transformers_weights        of config.json: a file of weights, where another one was named as the source
    extra_files                 of the configuration's class: further files of weights

None of these is loaded here, so each is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils.import_utils import is_peft_available

from ftw.errors import CheckpointError, printable

try:
    from transformers.distributed.checkpoint import is_sharded_checkpoint
except ImportError:  # older releases load no such folder
    is_sharded_checkpoint = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.checkpoint import Checkpoint

_log = logging.getLogger("ftw")

CONFIG_NAME = "config.json"
_ADAPTER_NAME = "adapter_config.json"
_INDEX_SUFFIX = ".safetensors.index.json"
_OTHER_CONFIGS = "configuration_files"  # of config.json: names of those for certain releases of transformers


def check_adapter(checkpoint: Checkpoint) -> None:
    """Check that `from_pretrained` would apply no adapter of the folder; without PEFT it leaves one out, too.

    Raises:
        CheckpointError: It would.
    """
    path = checkpoint.folder / _ADAPTER_NAME
    if not path.exists():
        return
    if is_peft_available():
        problem = "found an adapter, which from_pretrained applies and load cannot; keep it in a folder of its own, and"
        raise CheckpointError(path, "adapter", f"{problem} give that to the model's load_adapter")
    _log.warning("%s: adapter: is left out, as from_pretrained does while peft is not installed", printable(str(path)))


def check_weight_files(checkpoint: Checkpoint, config: Any) -> None:
    """Check that `from_pretrained` would take the files that were opened, and no others.

    Raises:
        CheckpointError: It would take others.
    """
    folder = checkpoint.folder
    if checkpoint.format == "ftw":  # which has none of its own
        return
    opened = [file.path.relative_to(folder).as_posix() for file in checkpoint.files]
    named = getattr(config, "transformers_weights", None)
    is_taken = isinstance(named, str) and (named in opened or named.endswith(_INDEX_SUFFIX))
    if named is not None and not is_taken:
        problem = f"found {printable(repr(named))}, which from_pretrained would load instead of {printable(opened[0])}"
        raise CheckpointError(folder / CONFIG_NAME, "transformers_weights", f"{problem}; name that file as the source")
    if is_sharded_checkpoint is not None and is_sharded_checkpoint(folder):
        problem = "found weights that ranks saved (shard-…-model-…), which from_pretrained would load instead"
        raise CheckpointError(folder, "weights", f"{problem} of {printable(opened[0])}; put one of them elsewhere")
    for name in getattr(type(config), "extra_files", ()):
        if name not in opened and (folder / name).exists():
            problem = f"is loaded by from_pretrained as well, as {type(config).__name__} says, but not by load"
            raise CheckpointError(folder / name, "weights", problem)


@contextlib.contextmanager
def copied_json(checkpoint: Checkpoint, name: str) -> Iterator[Path | None]:
    """Give a folder that is this user's alone, with a JSON file as it was read here; None if there is no such file.

    So what transformers opens is what was judged, whatever others do with the path meanwhile; and links that lead out
    of the checkpoint's folder are not followed.

    Raises:
        CheckpointError: It is not a JSON object, or leads out of the folder.
    """
    content = checkpoint.read_json(name)
    if content is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ftw-config-") as folder:
        others = content.get(_OTHER_CONFIGS)
        if isinstance(others, list):
            found = {other: checkpoint.read_json(other) for other in others if _is_plain_name(other)}
            for other, value in found.items():
                _write_json(Path(folder) / other, value)
            content = {**content, _OTHER_CONFIGS: list(found)}
        _write_json(Path(folder) / name, content)
        yield Path(folder)


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name.startswith("config.") and name.endswith(".json") and "/" not in name


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")

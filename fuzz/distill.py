"""Distils the inputs of a guided run into the recipes that the test suite replays: one for each way to be judged.

    PYTHONPATH=tests/support python -m fuzz.distill FORMAT [FOLDER]

Of the recipes that end as none in tests/corpus/FORMAT.jsonl does, by outcome and by the words of the message, the
shortest for each such end is added there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import atheris

from fuzz import oracle
from fuzz.choosing import choose
from fuzz.seeds import FORMATS

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
_MAX_LENGTH = 1000  # of a recipe, in characters


def main() -> None:
    """Distil the inputs of one format."""
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in FORMATS:
        sys.exit(f"usage: python -m fuzz.distill {'|'.join(FORMATS)} [FOLDER]")
    checkpoint_format = sys.argv[1]
    folder = Path(sys.argv[2] if len(sys.argv) == 3 else "fuzz/work")
    path = CORPUS / f"{checkpoint_format}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    known = {oracle.run(json.loads(line), level=0) for line in lines}
    found: dict[oracle.Outcome, str] = {}
    for file in sorted((folder / f"inputs-{checkpoint_format}").iterdir()):
        recipe = _recipe(file.read_bytes(), checkpoint_format)
        outcome = oracle.run(recipe, level=0)
        line = json.dumps({"outcome": outcome.kind, **recipe})
        if outcome not in known and len(line) <= min(len(found.get(outcome, line)), _MAX_LENGTH):
            found[outcome] = line
    CORPUS.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in (*lines, *sorted(found.values()))))
    print(f"{path}: {len(lines)} recipes, {len(found)} more")


def _recipe(data: bytes, checkpoint_format: str) -> dict[str, Any]:
    provider = atheris.FuzzedDataProvider(data)
    return choose(lambda count: provider.ConsumeIntInRange(0, count - 1), checkpoint_format)


if __name__ == "__main__":
    main()

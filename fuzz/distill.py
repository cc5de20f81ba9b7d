"""Distils the inputs of a guided run into the recipes that the test suite replays: one for each way to be judged.

    PYTHONPATH=tests python -m fuzz.distill FORMAT [FOLDER]

Of all recipes that end alike, by outcome and by the words of the message, the shortest is kept, in
tests/corpus/FORMAT.jsonl, with those that are there already.
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


def main() -> None:
    """Distil the inputs of one format."""
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in FORMATS:
        sys.exit(f"usage: python -m fuzz.distill {'|'.join(FORMATS)} [FOLDER]")
    checkpoint_format = sys.argv[1]
    folder = Path(sys.argv[2] if len(sys.argv) == 3 else "fuzz/work")
    path = CORPUS / f"{checkpoint_format}.jsonl"
    kept: dict[tuple[str, str], str] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        _keep(kept, json.loads(line), is_old=True)
    for file in sorted((folder / f"inputs-{checkpoint_format}").iterdir()):
        _keep(kept, _recipe(file.read_bytes(), checkpoint_format))
    CORPUS.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in sorted(kept.values())))
    print(f"{path}: {len(kept)} recipes")


def _recipe(data: bytes, checkpoint_format: str) -> dict[str, Any]:
    provider = atheris.FuzzedDataProvider(data)
    return choose(lambda count: provider.ConsumeIntInRange(0, count - 1), checkpoint_format)


def _keep(kept: dict[tuple[str, str], str], recipe: dict[str, Any], *, is_old: bool = False) -> None:
    outcome = oracle.run(recipe, level=0)
    line = json.dumps({"outcome": outcome.kind, "seed": recipe["seed"], "steps": recipe["steps"]})
    old = kept.get(outcome)
    if old is None or (len(line) < len(old) and not is_old):
        kept[outcome] = line


if __name__ == "__main__":
    main()

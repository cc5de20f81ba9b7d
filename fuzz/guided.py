"""Coverage-guided fuzzing with atheris: its bytes are the choices that make a recipe.

    PYTHONPATH=tests/support python -m fuzz.guided FORMAT SECONDS [FOLDER]

FORMAT is "safetensors", "ftw" or "gguf". Inputs that reach new code are kept in FOLDER/inputs-FORMAT and are where the
next run begins; the recipe of each finding is written into FOLDER/findings, once for each kind of finding. Ends with
status 1 where there was one.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import atheris
import torch

with atheris.instrument_imports(include=["ftw"]):
    import ftw.cli.main

    import ftw
    import ftw.conversion
    import ftw.loading
    import ftw.verdict  # noqa: F401 - rooms that the oracle uses are instrumented here

from fuzz import oracle
from fuzz.choosing import choose
from fuzz.seeds import FORMATS, make_seed, seed_names

_MAX_NBYTES = 512  # of an input; some six steps take fewer choices
_PER_LOAD, _PER_COMMAND = 4, 32  # of so many inputs one is loaded, and one goes through the command line too
_MAX_STALL = 60  # seconds after which a hang outside of Python ends the process
_REPORT_SECONDS = 60


class Driver:
    """Runs inputs, counts what became of them, and keeps what should not have happened."""

    def __init__(self, checkpoint_format: str, seconds: float, folder: Path) -> None:
        self._format = checkpoint_format
        self._seconds = seconds
        self._findings_folder = folder / "findings"
        self._start = self._reported = time.monotonic()
        self._outcomes: Counter[str] = Counter()
        self._findings: set[str] = set()

    def run(self, data: bytes) -> None:
        """Run one input; ends the process when the time is over."""
        provider = atheris.FuzzedDataProvider(data)
        recipe = choose(lambda count: provider.ConsumeIntInRange(0, count - 1), self._format)
        choice = zlib.crc32(data)
        level = 3 if choice % _PER_COMMAND == 0 else 2 if choice % _PER_LOAD == 0 else 0
        signal.setitimer(signal.ITIMER_REAL, 0)  # libFuzzer's own alarm would end the process; the oracle has one
        faulthandler.dump_traceback_later(_MAX_STALL, exit=True)
        try:
            self._outcomes[oracle.run(recipe, level=level).kind] += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # whatever comes is a finding, a MemoryError too
            self._keep(recipe, error)
        now = time.monotonic()
        if now - self._reported > _REPORT_SECONDS:
            self._report(now)
        if now - self._start > self._seconds:
            self._report(now)
            sys.stdout.flush()
            os._exit(1 if self._findings else 0)

    def _keep(self, recipe: dict[str, object], error: BaseException) -> None:
        self._outcomes["finding"] += 1
        kind = oracle.describe(error)
        if kind in self._findings:
            return
        self._findings.add(kind)
        self._findings_folder.mkdir(parents=True, exist_ok=True)
        path = self._findings_folder / f"{self._format}-{zlib.crc32(kind.encode()):08x}.json"
        path.write_text(json.dumps(recipe))
        print(f"finding: {kind}: {path}\n{''.join(traceback.format_exception(error))[-3000:]}", flush=True)

    def _report(self, now: float) -> None:
        self._reported = now
        count, seconds = self._outcomes.total(), now - self._start
        rate = f"{count} executions in {seconds:.0f} s, {count / seconds:.0f} a second"
        print(f"{self._format}: {rate}: {dict(self._outcomes)}; findings: {len(self._findings)}", flush=True)


def main() -> None:
    """Fuzz one format for so many seconds."""
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in FORMATS:
        sys.exit(f"usage: python -m fuzz.guided {'|'.join(FORMATS)} SECONDS [FOLDER]")
    checkpoint_format, seconds = sys.argv[1], float(sys.argv[2])
    folder = Path(sys.argv[3] if len(sys.argv) == 4 else "fuzz/work")
    inputs = folder / f"inputs-{checkpoint_format}"
    inputs.mkdir(parents=True, exist_ok=True)
    logging.getLogger("ftw").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    for name in seed_names(checkpoint_format):
        oracle.run({"seed": make_seed(name).name, "steps": []})  # what is imported late is imported now
    driver = Driver(checkpoint_format, seconds, folder)
    # Its alarm would take the place of the oracle's.
    options = [
        "-timeout=0",
        "-handle_alrm=0",
        "-rss_limit_mb=6000",
        f"-max_len={_MAX_NBYTES}",
        "-len_control=0",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, f"-max_len={_MAX_NBYTES}", str(inputs)], driver.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

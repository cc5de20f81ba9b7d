"""Draws files and compares: `python -m fuzz.headers safetensors|gguf [SECONDS [SEED]]`, without a seed by a new one."""

from __future__ import annotations

import sys

from fuzz.headers.run import new_seed, run


def main(arguments: list[str]) -> int:
    """Run, say what was found, and return the exit status."""
    checkpoint_format = arguments[0]
    seconds = float(arguments[1]) if len(arguments) > 1 else 60
    seed = int(arguments[2]) if len(arguments) > 2 else new_seed()
    count, findings = run(checkpoint_format, seed, seconds=seconds)
    print(f"{count} {checkpoint_format} files drawn from seed {seed} on, {len(findings)} findings")
    for finding in findings:
        print(finding)
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Draws files and compares: `python -m fuzz.headers safetensors|gguf [SECONDS [SEED]]`, without a seed by a new one."""

from __future__ import annotations

import sys

from fuzz.headers.run import new_seed, run


def main(arguments: list[str]) -> int:
    """Run, say what was found, and return the exit status."""
    checkpoint_format, seconds, seed = (*arguments, "60", "")[:3] if len(arguments) == 1 else (*arguments, "")[:3]
    count, findings = run(checkpoint_format, int(seed) if seed else new_seed(), seconds=float(seconds))
    print(f"{count} {checkpoint_format} files drawn, {len(findings)} findings")
    for finding in findings:
        print(finding)
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The lowest releases that pyproject.toml allows, as requirements for pip; `make test-lowest` installs them."""

import re

from places import ROOT


def lowest_requirements() -> list[str]:
    """Return what the package and its extra `plot` need, each at the lower end of its range."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:dependencies|plot) = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    return [found.replace(">=", "==") for found in re.findall(r'"(.*?)"', "".join(lists))]


if __name__ == "__main__":
    print(*lowest_requirements(), sep="\n")

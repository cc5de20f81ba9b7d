"""The mappings of this process, as /proc/self/smaps tells them."""

import re


def read_mappings() -> dict[int, dict[str, str]]:
    """Return each mapping's values, such as "Rss" and "VmFlags", by the address that it begins at."""
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", file.read())[1:]
    return {int(entry.partition("-")[0], 16): dict(re.findall(r"(?m)^(\w+): +(.*)$", entry)) for entry in entries}


def kib(value: str) -> int:
    """Return the number of a value such as "1028 kB"."""
    return int(value.removesuffix(" kB"))

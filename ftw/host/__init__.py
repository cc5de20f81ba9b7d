"""The operating system: memory by the page, locks, limits, NUMA, threads. No torch."""

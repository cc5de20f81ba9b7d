"""Benchmarks behind `ftw bench`: each measures ratios in one run, on the same bytes, beside a limit or a peer."""

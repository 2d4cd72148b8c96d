"""Benchmarks: `python -m tests.bench <name> [--json]`. They print what they measured; no test depends on a time."""

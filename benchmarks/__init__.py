"""Timings of the package's ops beside other implementations, each checked against float64 before it is timed.

`triton-mla bench`, or `python -m benchmarks`, measures suites of workloads, and `python -m benchmarks.search_split` split sizes and schedules.
Both need a CUDA device; the package imports nothing of this but for its command.
"""

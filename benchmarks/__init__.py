"""Timings of the package's ops beside other implementations, each checked against float64 before it is timed.

`python -m benchmarks.run` measures the named rows, `python -m benchmarks.search_split` the split sizes and schedules.
Both need a CUDA device; nothing here is imported by the package.
"""

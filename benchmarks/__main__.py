"""`python -m benchmarks` is `triton-mla bench`."""

import sys

from triton_mla.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))

"""`python -m triton_mla`: the same as `triton-mla`."""

import sys

from triton_mla.cli import main

sys.exit(main())

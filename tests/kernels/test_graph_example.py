"""The example of docs/performance.md: a decode step of several layers in a CUDA graph, replayed for another step."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


@pytest.mark.gpu
def test_the_example_runs():
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert "torch.cuda.graph(" in code and "assert_bitwise_equal" in code
    exec(compile(code, str(DOCUMENT), "exec"), {"__name__": "example"})

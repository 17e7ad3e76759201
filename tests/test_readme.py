"""The documents say what is so: their code runs, their tables are those of the code, and what they name exists."""

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from triton_mla.backends import backend_named
from triton_mla.config import VARIABLES
from triton_mla.tuning import ARCHITECTURES, ReductionOrder

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text, language):
    """(number of the first line, code) of each fenced block in a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def rows(text, head):
    """Cells of each row of the table with this head, the head left out."""
    lines = text.partition(head + "\n")[2].splitlines()[1:]
    table = [line.strip("|").split("|") for line in lines[: next(i for i, line in enumerate(lines) if not line)]]
    return [[cell.strip() for cell in cells] for cells in table]


def named(document):
    return document.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("name", ["README.md", "docs/api.md"])
def test_code_runs(name):
    """All blocks of a document in order, in one namespace."""
    document = ROOT / name
    namespace = {"__name__": name}
    code = blocks(document.read_text(encoding="utf-8"), "python")
    assert code
    for line, source in code:
        # Empty lines before it, so that a traceback shows the line of the document.
        exec(compile("\n" * line + source, str(document), "exec"), namespace)


def test_the_two_commands_are_at_the_top():
    (line, first), *_ = blocks(README, "")
    assert line < 5
    main, tests = (command.partition("  #")[0].strip() for command in first.splitlines())
    assert main == "pip install '.[cpu]' && triton-mla verify"
    assert tests == "pip install '.[test]' && python -m pytest -n 2"


def test_ci_runs_the_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (extract,) = re.findall(r"^command=.*", script, re.MULTILINE)
    assert script.splitlines()[-1] == 'bash -euo pipefail -c "$command"'
    done = subprocess.run(["bash", "-c", f'{extract}\necho "$command"'], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == blocks(README, "")[0][1].splitlines()[1]


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_named_files_exist(document):
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (document.parent / link).exists(), link
    for path in re.findall(r"`((?:docs|tests|determinism|benchmarks|triton_mla)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_named_tests_exist(document):
    for path, name in re.findall(r"`(tests/[\w/.]*)::(\w+)`", document.read_text(encoding="utf-8")):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


def test_table_of_parts():
    """Every module and folder of the package has one row, and every row is of one that exists."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = [name for part, *_ in rows(text, "| part | what it owns | may import |") for name in part.split(", ")]
    modules = {path.name for path in (ROOT / "triton_mla").glob("[!_]*.py")}
    folders = {f"{path.parent.name}/" for path in (ROOT / "triton_mla").glob("*/__init__.py")}
    assert sorted(listed) == sorted(f"`{name}`" for name in modules | folders)


def test_table_of_variables():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    expected = [[f"`{item.name}`", item.type, item.default, item.meaning] for item in VARIABLES]
    assert rows(text, "| variable | value | default | meaning |") == expected


def test_support_matrix():
    table = dict(rows(README, "| | |"))
    names = [name for name in ARCHITECTURES if name != "interpreter"]
    assert table["schedules for"] == f"{', '.join(names)}; the interpreter on a CPU"
    backend = backend_named("triton_mla")
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    assert set(table["dtypes of query and cache"].partition(" (")[0].split(", ")) == {short[d] for d in backend.dtypes}
    assert table["query heads of a call"] == f"1 to {backend.num_heads.limit}"
    assert table["latent dim (`kv_lora_rank`)"] == f"multiples of 16 up to {backend.kv_lora_rank.limit}"
    assert table["rope dim (`qk_rope_head_dim`)"] == f"0, and multiples of 16 up to {backend.qk_rope_head_dim.limit}"


def test_numerics_name_every_field_of_the_order():
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(ReductionOrder):
        assert f"`{field.name}`" in text, field.name


def test_line_lengths():
    for document in DOCUMENTS:
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
            # Rows of tables and headings cannot be wrapped.
            assert len(line) <= 120 or line.startswith(("|", "#")), f"{named(document)}:{number}"

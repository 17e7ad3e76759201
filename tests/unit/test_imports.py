"""What importing the package does, which part may import which, and what no file may hold."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import triton_mla

PACKAGE = Path(triton_mla.__file__).parent
ROOT = Path(__file__).resolve().parents[2]


def modules(folder):
    """(path from the package's folder, tree) of each Python file under a folder of the package."""
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files, folder
    return [(file.relative_to(PACKAGE).as_posix(), ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def imported(name, tree):
    """Dotted names of all modules that a file of the package imports, wherever in it."""
    place = ["triton_mla", *name.split("/")[:-1]]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = place[: len(place) - node.level + 1] if node.level else []
            module = ".".join([*origin, *([node.module] if node.module else [])])
            # `from triton_mla import config` imports a module too.
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def within(name, *packages):
    """Whether a dotted name is one of the packages or lies in it."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def fresh(script, **variables):
    """Output of a script in a process of its own, without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**env, **variables}, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT_EVERYTHING = """
import importlib, os, pkgutil, sys
import torch, triton

class Recorder(dict):
    read = set()
    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)
    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)
    def __contains__(self, name):
        self.read.add(name)
        return super().__contains__(name)
    def __iter__(self):
        self.read.add("TRITON_MLA_*")
        return super().__iter__()

before = set(sys.modules)
os.environ = Recorder(os.environ)
import triton_mla
names = [module.name for module in pkgutil.walk_packages(triton_mla.__path__, "triton_mla.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
optional = new & {"transformers", "vllm", "sglang", "matplotlib", "pytest", "hypothesis", "flash_mla"}
assert not optional, f"imports {optional}"
assert not torch.cuda.is_initialized(), "touches the GPU"
ours = {name for name in Recorder.read if name.startswith(("TRITON_MLA_", "VLLM_"))}
assert not ours, f"reads {ours}"
assert not any(name.startswith("triton_mla.verification") for name in before)
print(len(names))
"""


def test_importing_every_module_touches_no_gpu_no_variable_and_no_optional_package():
    variables = {"TRITON_MLA_KV_SPLIT": "nonsense", "TRITON_MLA_BATCH_INVARIANT": "nonsense"}
    assert int(fresh(IMPORT_EVERYTHING, **variables)) > 20


def test_importing_the_package_leaves_the_command_and_the_proofs_alone():
    script = "import sys, triton_mla; print([n for n in sys.modules if n.startswith('triton_mla.')])"
    loaded = ast.literal_eval(fresh(script))
    assert not [name for name in loaded if within(name, "triton_mla.cli", "triton_mla.verification")]


def test_the_package_says_its_types():
    assert (PACKAGE / "py.typed").is_file()


def test_every_public_name_exists():
    for name in triton_mla.__all__:
        assert hasattr(triton_mla, name), name


RULES = {
    # folder or file: what it may not import
    "reference": ("triton", "triton_mla.kernels", "triton_mla.attention", "triton_mla.config"),
    "kernels": ("os", "triton_mla.config", "triton_mla.reference", "triton_mla.attention", "triton_mla.backends"),
    "plan.py": ("os", "triton_mla.config", "triton_mla.kernels"),
    "tuning.py": ("os", "triton_mla.config", "triton_mla.plan"),
    "attention.py": ("os", "triton_mla.config", "triton_mla.backends", "triton_mla.policy"),
    "backends.py": ("triton", "triton_mla.policy", "triton_mla.attention"),
}


@pytest.mark.parametrize("part", RULES)
def test_a_part_does_not_import(part):
    files = modules(part) if (PACKAGE / part).is_dir() else [(part, ast.parse((PACKAGE / part).read_text()))]
    for name, tree in files:
        bad = {module for module in imported(name, tree) if within(module, *RULES[part])}
        assert not bad, f"{name} imports {sorted(bad)}"


def test_nothing_but_the_command_imports_the_command():
    for name, tree in modules("."):
        if not name.startswith("cli/") and name != "__main__.py":
            bad = {module for module in imported(name, tree) if within(module, "triton_mla.cli")}
            assert not bad, f"{name} imports {sorted(bad)}"


def test_only_the_config_layer_reads_the_environment():
    for name, tree in modules("."):
        reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
        assert not reads or name == "config.py", f"{name}:{reads[0].lineno}"


def test_no_atomics_on_values_and_no_choice_by_timing():
    """Atomics count items of work, whose programs cannot change a bit."""
    counts = {"kernels/hopper/copies.py": 1, "kernels/hopper/decode_copies.py": 1}
    for name, tree in modules("."):
        atomics = [n for n in ast.walk(tree) if getattr(n, "attr", getattr(n, "id", "")).startswith("atomic_")]
        assert len(atomics) == counts.get(name, 0), f"{name}:{[n.lineno for n in atomics]}"
        for node in ast.walk(tree):
            word = getattr(node, "attr", getattr(node, "id", ""))
            assert word not in ("autotune", "heuristics", "Autotuner"), f"{name}:{node.lineno}: {word}"


def test_only_the_command_prints():
    for name, tree in modules("."):
        if not name.startswith("cli/"):
            prints = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"]
            assert not prints, f"{name}:{prints[0].lineno}"


def test_plain_pytest_finds_what_is_not_installed():
    """The command `pytest`, unlike `python -m pytest`, does not put the current folder first."""
    tests = ["tests/benchmarks", "tests/cli/test_record.py"]
    collected = fresh(f"import sys, pytest; sys.path.remove(''); pytest.main(['--collect-only', '-q', *{tests}])")
    assert "test_record.py::" in collected and "test_benchmarks.py::" in collected and "error" not in collected, collected


@pytest.mark.parametrize("folder, limit", [("triton_mla/kernels", 250), ("triton_mla", 400), (".", 500)])
def test_files_are_small(folder, limit):
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert lines <= limit, f"{name} has {lines} lines"

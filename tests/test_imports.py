"""The arrow config -> data -> train -> store -> analysis -> report never goes back, and light things stay light."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "qkpipe"

RANKS = {
    "config": 0,
    "data": 1,
    "numerics": 2,
    "model": 2,
    "faults": 2,
    "interventions": 2,
    "probes": 2,
    "telemetry": 2,
    "hooks": 2,
    "guard": 2,
    "rivals": 2,
    "train": 3,
    "store": 4,
    "analysis": 5,
    "report": 6,
    "bench": 7,
}
# Plain data that every room may name: where files lie, the columns in them, the quantities of the recurrence.
SHARED = {
    "qkpipe",
    "qkpipe.errors",
    "qkpipe.lazy",
    "qkpipe.paths",
    "qkpipe.telemetry.schema",
    "qkpipe.numerics.precision",
}
ENDS = {"cli", "__main__", "__init__"}
HEAVY = {"torch", "pandas", "scipy", "mlflow", "duckdb", "snakemake", "matplotlib", "seaborn"}


def imports(path):
    """(line, module) of every import in a file, those inside functions too, those for type checkers alone not."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, resolve(node.module, alias.name)) for alias in node.names)


def resolve(module, name):
    """`from qkpipe.numerics import precision` names a module, `from qkpipe.numerics import quantize_mx` does not."""
    inner = SOURCE.joinpath(*module.split(".")[1:], name)
    is_module = module.split(".")[0] == "qkpipe" and (inner.is_dir() or inner.with_suffix(".py").exists())
    return f"{module}.{name}" if is_module else module


def room(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@pytest.mark.parametrize("name", sorted({room(path) for path in SOURCE.rglob("*.py")} - ENDS))
def test_no_room_imports_from_a_later_one(name):
    if f"qkpipe.{name}" in SHARED:
        rank = -1
    else:
        assert name in RANKS, f"src/qkpipe/{name} has no place in the order: add it to RANKS"
        rank = RANKS[name]
    place = SOURCE / name
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in (place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")])
        for line, module in imports(path)
        if module.startswith("qkpipe.") and module not in SHARED and RANKS[module.split(".")[1]] > rank
    ]
    assert not wrong, "\n".join(wrong)


def loaded_by(statement, blocked=()):
    """Top-level modules loaded by a statement in a fresh interpreter where some cannot be imported."""
    program = (
        "import sys\n"
        f"for name in {sorted(blocked)!r}: sys.modules[name] = None\n"
        f"{statement}\n"
        "print(*sorted({name.split('.')[0] for name, module in sys.modules.items() if module}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_config_and_the_command_line_load_nothing_heavy():
    assert not loaded_by("import qkpipe.config, qkpipe.store.progress, qkpipe.train.supersede") & HEAVY
    assert not loaded_by("from qkpipe.cli import _parser; _parser([])") & (
        HEAVY | {"pydantic", "pyarrow", "yaml"}
    )


def test_training_needs_none_of_the_study_packages():
    modules = [
        "qkpipe." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for room_name in (
            "numerics",
            "model",
            "rivals",
            "faults",
            "interventions",
            "probes",
            "telemetry",
            "train",
        )
        for path in sorted((SOURCE / room_name).glob("*.py"))
        if path.stem != "__init__"
    ]
    blocked = {"snakemake", "mlflow", "duckdb", "datasets", "pandas", "scipy"}
    assert "torch" in loaded_by(f"import {', '.join([*modules, 'qkpipe.guard'])}", blocked)


def test_every_package_is_declared_and_both_trees_are_installed():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {".".join(init.parent.relative_to(ROOT / "src").parts) for init in SOURCE.rglob("__init__.py")}
    assert sorted(declared) == sorted(on_disk | {"qkpipe_kernels"})
    import qkpipe_kernels

    assert Path(qkpipe_kernels.__file__).parent.name == "kernels"

"""The layout's rules: names that shadow nothing, imports in one direction, light loops, one package in the wheel."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import setuptools

import samrag

ROOT = Path(samrag.__file__).parent.parent
STAGES = ("data_gen", "train", "inference", "scripts")
LIBRARY = sorted((ROOT / "samrag").rglob("*.py"))
ENTRIES = sorted(path for stage in STAGES for path in (ROOT / stage).glob("*.py") if path.name != "__init__.py")
HEAVY = {"torch", "transformers", "openai", "wandb", "peft", "trl", "datasets", "FlagEmbedding"}
HEAVY |= {"accelerate", "sentence_transformers", "faiss", "matplotlib"}
PURE = (
    "errors.py", "schema.py", "calls.py", "replies.py", "schedule.py", "prompts/*.py", "programs/*.py", "metrics/*.py",
    "interleaved/*.py",
    "miniworld/world.py", "miniworld/language.py", "miniworld/oracle.py", "miniworld/pretraining.py",
    "arguments.py", "training/*_arguments.py", "report/arguments.py",
)  # fmt: skip


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, anywhere in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


@functools.cache
def installed() -> frozenset[str]:
    """Top-level names of what is installed."""
    return frozenset(metadata.packages_distributions())


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- names ---


def test_no_file_of_a_stage_folder_shadows_a_module() -> None:
    """In script mode Python looks for every module in the script's own folder first."""
    taken = set(sys.stdlib_module_names) | installed() | HEAVY
    modules = [path for stage in STAGES for path in (ROOT / stage).iterdir() if path.suffix == ".py" or path.is_dir()]
    assert not {relative(path) for path in modules if path.stem in taken}


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_folders_resolve_inside_the_checkout(stage: str) -> None:
    found = importlib.util.find_spec(stage)
    assert found is not None
    assert found.origin == str(ROOT / stage / "__init__.py")


# --- imports ---


@pytest.mark.parametrize("path", ENTRIES, ids=relative)
def test_an_entry_script_imports_the_library_and_no_other_script(path: Path) -> None:
    assert not any(name.startswith(".") for name in imported(path))
    own = {*STAGES, "tests", *(entry.stem for entry in ENTRIES)}
    assert not tops(path) & own
    assert tops(path) <= {"samrag", "__future__"} | set(sys.stdlib_module_names) | installed()


@pytest.mark.parametrize("path", ENTRIES, ids=relative)
def test_an_entry_script_does_nothing_when_imported(path: Path) -> None:
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    docstring, *body = tree(path).body
    assert isinstance(docstring, ast.Expr)
    *statements, guard = body
    assert isinstance(guard, ast.If)
    assert "__main__" in ast.unparse(guard.test)
    assert all(isinstance(node, (*quiet, ast.If)) for node in statements)
    assert all(ast.unparse(node.test) == "TYPE_CHECKING" for node in statements if isinstance(node, ast.If))


def test_the_library_imports_no_script_and_no_test() -> None:
    assert not [relative(path) for path in LIBRARY if tops(path) & {*STAGES, "tests"}]


@pytest.mark.parametrize("pattern", PURE)
def test_pure_modules_import_no_model_stack(pattern: str) -> None:
    paths = sorted((ROOT / "samrag").glob(pattern))
    assert paths
    for path in paths:
        assert not tops(path) & HEAVY, relative(path)


def test_the_records_import_nothing_of_ours_and_the_loops_only_pure_modules() -> None:
    assert tops(ROOT / "samrag/schema.py") <= set(sys.stdlib_module_names)
    pure = {p for pattern in PURE for p in (ROOT / "samrag").glob(pattern)} | {ROOT / "samrag/__init__.py"}
    loops = ("calls.py", "replies.py", "schedule.py", "programs/*.py", "miniworld/oracle.py", "metrics/*.py")
    for path in (path for pattern in loops for path in (ROOT / "samrag").glob(pattern)):
        for name in (name for name in imported(path) if name.split(".")[0] == "samrag"):
            place = ROOT / name.replace(".", "/")
            assert {place.with_suffix(".py"), place / "__init__.py"} & pure, f"{relative(path)} imports {name}"


def modules_after(*names: str) -> set[str]:
    code = f"import json, sys, {', '.join(names)}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


def test_the_loops_load_no_model_stack_in_a_fresh_process() -> None:
    loaded = modules_after(
        "samrag.programs.sam_rag", "samrag.programs.rag", "samrag.programs.climb", "samrag.programs.distill",
        "samrag.schedule", "samrag.prompts", "samrag.arguments", "samrag.miniworld.oracle",
    )  # fmt: skip
    assert "samrag.programs.sam_rag" in loaded
    assert not loaded & HEAVY


def test_importing_the_library_defines_names_and_does_nothing_else() -> None:
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign)
    for path in LIBRARY:
        for node in tree(path).body:
            where = f"{relative(path)}: {ast.unparse(node)[:80]}"
            if isinstance(node, ast.Expr):
                assert isinstance(node.value, ast.Constant), where
            elif isinstance(node, ast.If):
                assert ast.unparse(node.test) == "TYPE_CHECKING", where
            else:
                assert isinstance(node, (*allowed, ast.AnnAssign, ast.AugAssign)), where


# --- the wheel ---


def test_the_wheel_holds_one_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    include = settings["packages"]["find"]["include"]
    for find in (setuptools.find_packages, setuptools.find_namespace_packages):
        found = find(str(ROOT), include=include)
        assert {name.split(".")[0] for name in found} == {"samrag"}
    needed = {".".join(path.parent.relative_to(ROOT).parts) for path in LIBRARY}
    assert needed <= set(setuptools.find_packages(str(ROOT), include=include))


def test_every_file_that_the_library_reads_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = settings["package-data"]["samrag"]
    packaged = {path for pattern in patterns for path in (ROOT / "samrag").glob(pattern)}
    for suffix in (".jinja", ".json", ".typed", ".safetensors"):
        assert set((ROOT / "samrag").rglob(f"*{suffix}")) <= packaged


# --- what may not be in it ---


def test_no_pickle_is_read() -> None:
    pickles = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    assert not [relative(path) for path in (*LIBRARY, *ENTRIES) if tops(path) & pickles]


def test_no_text_is_run_as_code() -> None:
    for path in (*LIBRARY, *ENTRIES):
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            where = f"{relative(path)}: {ast.unparse(node)[:80]}"
            assert ast.unparse(node.func) not in ("eval", "exec", "compile", "__import__", "yaml.load"), where
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                assert keyword.arg not in ("trust_remote_code", "allow_pickle", "shell") or value is False, where
                assert keyword.arg != "weights_only" or value is True, where


def test_the_code_is_ascii() -> None:
    assert not [relative(path) for path in (*LIBRARY, *ENTRIES) if not path.read_text(encoding="utf-8").isascii()]

"""Every configuration is parsed by its own script's argument types, and its header is a command that works."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import typing
from pathlib import Path
from typing import Any

import pytest

import samrag
from samrag.config import parse
from samrag.errors import UserError

ROOT = Path(samrag.__file__).parent.parent
STAGES = ("data_gen", "train", "inference", "scripts")
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "accelerate")
ON_CPU = ["--use_cpu", "true", "--bf16", "false"]
"""The trainers' own arguments refuse bfloat16 where there is no GPU."""


def types_of(script: Path) -> list[type]:
    """The argument types that a script gives to `parse`, found in its source; () when it does not use it."""
    nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    origin = {a.asname or a.name: (n.module, a.name) for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("parse", "config.parse"):
            found = [origin[ast.unparse(argument)] for argument in node.args]
            return [getattr(importlib.import_module(str(module)), name) for module, name in found]
    return []


SCRIPTS = sorted(
    path
    for stage in STAGES
    for path in (ROOT / stage).glob("*.py")
    if re.search(r"\bparse\(\w", path.read_text(encoding="utf-8"))
)


def header(path: Path) -> tuple[Path, list[str]]:
    """The script that a configuration's first line names, and the arguments it gives it."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# "), f"{path} must begin with its command"
    words = shlex.split(first[2:])
    (at,) = [i for i, word in enumerate(words) if word.endswith(".py")]
    launcher = ["accelerate", "launch"] if words[at].startswith("train/") else ["python"]
    assert [word for word in words[:at] if not word.startswith("--")] == launcher
    return ROOT / words[at], words[at + 1 :]


def arguments_for(script: Path, config: Path, *extra: str) -> tuple[Any, ...]:
    on_cpu = ON_CPU if script.parent.name == "train" else []
    return parse(*types_of(script), args=["--config", str(config), *extra, *on_cpu])


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_a_configuration_parses_by_the_command_in_its_header(path: Path) -> None:
    script, arguments = header(path)
    assert script in SCRIPTS
    assert script.stem == path.stem
    assert arguments[:2] == ["--config", name(path)]
    parsed = arguments_for(script, path, *arguments[2:])
    assert [type(group) for group in parsed] == types_of(script)


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_every_script_has_a_configuration_of_its_own_and_one_for_the_quickstart(script: Path) -> None:
    configs = [path for path in CONFIGS if header(path)[0] == script]
    assert ROOT / "configs" / f"{script.stem}.yaml" in configs
    assert ROOT / "configs" / "quickstart" / f"{script.stem}.yaml" in configs


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_an_unknown_key_is_refused_by_name(script: Path, tmp_path: Path) -> None:
    config = next(path for path in CONFIGS if header(path)[0] == script)
    changed = tmp_path / "changed.yaml"
    changed.write_text(config.read_text(encoding="utf-8") + "\nlearning_rat: 1\n", encoding="utf-8")
    with pytest.raises(UserError, match="learning_rat"):
        arguments_for(script, changed, *header(config)[1][2:])


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_value_of_a_wrong_type_in_the_file_is_refused_by_name(script: Path, tmp_path: Path) -> None:
    config = next(path for path in CONFIGS if header(path)[0] == script)
    own = [group for group in types_of(script) if group.__module__.startswith("samrag.")]
    hints = {field: hint for group in own for field, hint in typing.get_type_hints(group).items()}
    flags = header(config)[1][2:]
    kinds = (int, float, bool, str)
    wrong = next(f for kind in kinds for f, hint in hints.items() if hint is kind and f"--{f}" not in flags)
    lines = [line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith(f"{wrong}:")]
    changed = tmp_path / "changed.yaml"
    changed.write_text("\n".join([*lines, f"{wrong}: [a, b]"]), encoding="utf-8")
    with pytest.raises(UserError, match=wrong):
        arguments_for(script, changed, *flags)


def test_flags_override_the_file_and_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    script, config = ROOT / "inference/build_index.py", ROOT / "configs/quickstart/build_index.yaml"
    assert arguments_for(script, config, "--shard_size", "3")[0].shard_size == 3
    with pytest.raises(UserError, match="--shard_siz"):
        arguments_for(script, config, "--shard_siz", "3")
    with pytest.raises(SystemExit):
        arguments_for(script, config, "--shard_size", "many")
    assert "--shard_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "does not exist"), ("a: [1", "not valid YAML"), ("documents_file: x\n", "required|missing")],
)
def test_a_missing_broken_or_partial_file_is_refused_in_a_sentence(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises((UserError, SystemExit)) as refused:
        arguments_for(ROOT / "inference/build_index.py", path)
    assert re.search(message, f"{refused.value} {capsys.readouterr().err}")


def argument_classes() -> list[tuple[Path, ast.ClassDef]]:
    return [
        (path, node)
        for path in sorted((ROOT / "samrag").rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Arguments", "Options"))
    ]


def test_every_field_of_every_argument_group_is_documented() -> None:
    found = argument_classes()
    assert len(found) > 12
    for path, group in found:
        assert ast.get_docstring(group), group.name
        for node, after in zip(group.body, [*group.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert documented, f"{path.name}: {group.name}.{ast.unparse(node.target)}"


ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", ACCELERATE, ids=name)
def test_a_hardware_configuration_is_accelerates_own_and_says_how_it_is_used(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))
    assert config.mixed_precision == "bf16"
    first = path.read_text(encoding="utf-8").splitlines()[0]
    words = shlex.split(first.removeprefix("# "))
    assert words[:4] == ["accelerate", "launch", "--config_file", name(path)]
    given = launch_command_parser().parse_args(words[2:])
    assert given.config_file == name(path)
    assert (ROOT / given.training_script).is_file()
    known = set(vars(given))
    for section in (config.fsdp_config, config.deepspeed_config):
        assert set(section or {}) <= known, "accelerate launch has no such option"


def test_no_key_holds_a_secret() -> None:
    for path in CONFIGS:
        for key in re.findall(r"(?m)^\s*(\w+)\s*:", path.read_text(encoding="utf-8")):
            secret = {"key", "token", "secret", "password"} & set(key.split("_"))
            assert not secret or key.endswith("_env"), f"{name(path)}: {key}"


def test_every_configuration_that_a_text_names_is_there() -> None:
    texts = [ROOT / "README.md", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *CONFIGS]
    texts += [path for stage in STAGES for path in (ROOT / stage).iterdir() if path.suffix in (".py", ".sh")]
    missing = {
        f"{name(text)}: {config}"
        for text in texts
        if text.is_file()
        for config in re.findall(r"configs/[\w/.-]+\.yaml", text.read_text(encoding="utf-8"))
        if not (ROOT / config).is_file()
    }
    assert not missing

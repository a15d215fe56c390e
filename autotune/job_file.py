"""Job files: found, read, overridden and resolved into the models of job.py; every error says where and what to do."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from autotune.errors import UserError, nearest
from autotune.hf_config import read_hf_config
from autotune.job import Job
from autotune.job_space import ABSENT_KNOBS
from autotune.trainer.handed import handed
from autotune.trainer.section import Trainer
from autotune.yaml12 import load_yaml
from trials.record import PYTHON_STDLIB, SYNTHETIC

UNPARSABLE = (yaml.YAMLError, ValueError, RecursionError)
"""What the YAML parser raises: also for a 13th month, a number of thousands of digits, lists in lists in lists."""


def shipped(kind: Literal["jobs", "spaces"]) -> dict[str, str]:
    """Shipped YAML texts by name."""
    root = importlib.resources.files("search_spaces")
    folder = root / "jobs" if kind == "jobs" else root
    return {
        entry.name.removesuffix(".yaml"): entry.read_text()
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    }


def load_job(name: str, overrides: tuple[str, ...] = ()) -> Job:
    """The job at path `name`, or shipped under that name, with `a.b=value` overrides applied.

    Raises:
        UserError: no such job; not YAML; every bad key and value, several at once.
    """
    path, text = _find(name, "jobs", "job")
    where = str(path) if path else f"{name} (shipped)"
    values = _parse_mapping(text, where)
    folder = path.parent.resolve() if path else Path.cwd()
    if path is None and "trainer" in values:
        folder = Path(str(importlib.resources.files("search_spaces") / "trainers"))
    # The space's name first: it becomes a mapping, whose knobs can then be overridden one by one.
    names = [override for override in overrides if override.startswith("space=")]
    for override in names:
        _apply_override(values, override)
    _resolve_space(values, folder, where)
    for override in overrides:
        if override not in names:
            _apply_override(values, override)
    _resolve_paths(values, folder, where)
    return validate(Job, values, " ".join([where, *(f"--set {override}" for override in overrides)]))


def _find(name: str, kind: Literal["jobs", "spaces"], what: str) -> tuple[Path | None, str]:
    path = Path(name)
    try:
        if path.suffix in (".yaml", ".yml") or path.is_file():
            return path, path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{name}: no such file", nearest(path.stem, shipped(kind))) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: {error}", f"a {what} is a UTF-8 YAML file") from error
    known = shipped(kind)
    if name not in known:
        raise UserError(f"{name}: neither a file nor a shipped {what}", nearest(name, known))
    return None, known[name]


def _parse_mapping(text: str, where: str) -> dict[str, Any]:
    try:
        values = load_yaml(text)
    except UNPARSABLE as error:
        raise UserError(f"{where}: not YAML: {error}", "indent with spaces; quote strings with : or #") from error
    if not isinstance(values, dict):
        raise UserError(
            f"{where}: expected a mapping of sections, found {type(values).__name__}",
            "`autotune init` writes a job to start from",
        )
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set {override}: expected section.key=value", "e.g. --set budget.trials=8")
    try:
        value = load_yaml(text)
    except UNPARSABLE as error:
        raise UserError(f"--set {override}: the value is not YAML: {error}") from error
    *sections, last = key.split(".")
    target = values
    for section in sections:
        inner = target.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {override}: {section} is {inner!r}, which has no keys of its own")
        target = inner
    target[last] = value


def _resolve_space(values: dict[str, Any], folder: Path, where: str) -> None:
    """A space given by name or path becomes its content, so that the resolved job stands alone."""
    if "space" not in values and "trainer" in values:
        values["space"] = _space_of(values["trainer"])
    space = values.get("space", "default")
    if not isinstance(space, str):
        return
    beside = folder / space
    path, text = _find(str(beside) if beside.suffix in (".yaml", ".yml") else space, "spaces", "space")
    values["space"] = _parse_mapping(text, f"{where}: space {path or space}")


def _space_of(trainer: Any) -> dict[str, Any]:
    """The default space's candidates of those knobs that a trainer's command is handed."""
    try:
        taken = handed(Trainer.model_validate_json(json.dumps(trainer)))
    except (TypeError, ValueError):
        return {}  # the job's own validation says what is wrong
    return {
        name: values for name, values in _parse_mapping(shipped("spaces")["default"], "space").items() if name in taken
    }


def _resolve_paths(values: dict[str, Any], folder: Path, where: str) -> None:
    """Paths are relative to the job file; absolute in the resolved job, so that it runs again from anywhere."""
    data, model, measure = values.get("data"), values.get("model"), values.get("measure")
    if isinstance(measure, dict) and isinstance(measure.get("checkpoint_dir"), str):
        measure["checkpoint_dir"] = _resolved(measure["checkpoint_dir"], folder)
    if isinstance(data, dict):
        for key, names in (("source", (PYTHON_STDLIB, SYNTHETIC)), ("tokenizer", ("byte",))):
            if isinstance(data.get(key), str) and data[key] not in names:
                data[key] = _resolved(data[key], folder)
    trainer, cluster = values.get("trainer"), values.get("cluster")
    if isinstance(trainer, dict) and isinstance(trainer.get("folder", "."), str):
        trainer["folder"] = str(Path(_resolved(trainer.get("folder", "."), folder)).absolute())
    if isinstance(cluster, dict) and "/" in str(cluster.get("python") or "") and not cluster.get("command_prefix"):
        cluster["python"] = _resolved(str(cluster["python"]), folder)
    if isinstance(model, dict):
        workload = model.get("workload", "decoder")
        if workload == "hf" and isinstance(model.get("config"), str):
            model["config"] = read_hf_config(model["config"], folder, where)
        elif workload not in ("decoder", "hf"):
            import_path = model.get("import_path") or "."
            model["import_path"] = _resolved(import_path, folder) if isinstance(import_path, str) else import_path


def _resolved(path: str, folder: Path) -> str:
    try:
        return str(folder / Path(path).expanduser())
    except RuntimeError as error:  # ~nobody
        raise UserError(f"{path}: {error}", "give a whole path") from error


def validate(model: type[Job], values: dict[str, Any], where: str) -> Job:
    """`values` as a job.

    Raises:
        UserError: each problem on a line of its own, with file, key path, value and hint.
    """
    try:
        # YAML has lists where the models have tuples; JSON mode takes both, strictly otherwise.
        return model.model_validate_json(json.dumps(values))
    except (TypeError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise UserError(f"{where}: {error}", "only strings, numbers, booleans, lists and mappings") from error
        problems = [_describe(details) for details in error.errors()]
        unique = list(dict.fromkeys(problems))
        head = f"{where}: {len(unique)} problem{'s' if len(unique) > 1 else ''}"
        raise UserError("\n".join([head, *(f"  {problem}" for problem in unique)])) from None


def _describe(details: ErrorDetails) -> str:
    *inner, last = details["loc"] or (None,)
    is_unknown = details["type"] == "extra_forbidden"  # then the last part is the user's own word, whatever it is
    keys = [str(part) for part in inner if not _is_union_branch(part)]
    keys += [str(last)] if last is not None and (is_unknown or not _is_union_branch(last)) else []
    path, value = ".".join(keys), details["input"]
    if is_unknown:
        if keys[-1] in ABSENT_KNOBS:
            return f"{path}: {ABSENT_KNOBS[keys[-1]]}\n    hint: remove it"
        parent = _section(keys[:-1])
        known = parent.model_fields if parent else {}
        return f"{path}: unknown key\n    hint: {nearest(keys[-1], known)}"
    if details["type"] == "missing":
        return f"{path}: missing, and has no default\n    hint: `autotune init` shows every key"
    if details["type"] == "value_error":
        return f"{path + ': ' if path else ''}{details['ctx']['error']}"
    message = details["msg"].replace("Input should be", "should be")
    parent = _section([key for key in keys[:-1] if not key.isdigit()])
    field = parent.model_fields.get(keys[-1]) if parent else None
    hint = f"\n    hint: {field.description}" if field is not None and field.description else ""
    return f"{path} = {value!r}: {message}{hint}"


def _is_union_branch(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("int", "float", "str", "bool", "tuple"))


def _section(keys: list[str]) -> type[BaseModel] | None:
    model: type[BaseModel] = Job
    for key in keys:
        field = model.model_fields.get(key)
        if field is None:
            return None
        # `Model | None` is the section, too.
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        sections = [kind for kind in kinds if issubclass(kind, BaseModel)]
        if not sections:
            return None
        model = sections[0]
    return model

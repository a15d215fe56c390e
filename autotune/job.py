"""The job file: what to tune, on what, for how long. Frozen models; reading files is `load_job`'s alone."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from autotune.errors import UserError, nearest
from trials.formats import inapplicable
from trials.record import FSDP1_KNOBS, PYTHON_STDLIB, SYNTHETIC, checkpoint_stride
from trials.shapes import PRESETS, DecoderConfig

Positive = Annotated[int, Field(gt=0)]
Engine = Literal["fsdp2", "fsdp1"]
BackwardPrefetch = Literal["pre", "post", "none"]

ABSENT_KNOBS = {
    "grad_accum_steps": "accumulation is derived, so that the global batch stays exact: search micro_batch_size",
    "pin_memory": "always on for CUDA, absent on CPU",
}
"""Knobs that people ask for and that cannot be searched, with the reason."""


class Section(BaseModel):
    # A field's docstring is also the hint of an error in it.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Model(Section):
    workload: str = "decoder"
    """`decoder`, or `package.module:factory` for your own."""
    import_path: str | None = None
    """The folder where `package.module` is looked for, after everything else; default: the job file's."""
    preset: str | None = None
    """A built-in shape of `decoder`."""
    config: dict[str, Any] | None = None
    """Or the decoder's fields one by one; for your own factory, its keyword arguments."""
    seq_len: Positive
    """Tokens per sequence."""

    def factory_arguments(self) -> dict[str, Any]:
        if self.workload != "decoder":
            return dict(self.config or {})
        return {"config": self.config} if self.config else {"preset": self.preset}

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.workload == "decoder":
            if (self.preset is None) == (self.config is None):
                raise ValueError("give either preset or config")
            if self.preset is not None and self.preset not in PRESETS:
                raise ValueError(f"preset = {self.preset!r}: no such preset; {nearest(self.preset, PRESETS)}")
            self._check_decoder_config()
        if self.workload != "decoder" and self.preset is not None:
            raise ValueError("preset belongs to the built-in decoder; give your factory's arguments as config")
        return self

    def _check_decoder_config(self) -> None:
        known = {field.name: field for field in dataclasses.fields(DecoderConfig)}
        given = self.config or {}
        problems = [f"config.{key}: unknown key; {nearest(key, known)}" for key in given if key not in known]
        if self.config is not None:
            needed = [name for name, field in known.items() if field.default is dataclasses.MISSING]
            problems += [f"config.{name}: missing" for name in needed if name not in given]
        problems += [
            f"config.{key} = {given[key]!r}: should be a positive whole number"
            for key, field in known.items()
            if key in given and field.type == "int" and (type(given[key]) is not int or given[key] < 1)
        ]
        if problems:
            raise ValueError("; ".join(problems))


class Data(Section):
    source: str
    """A folder or a file, relative to the job file; or `python-stdlib`, the text every machine has; or `synthetic`:
    random tokens, and the loader is not measured."""
    format: Literal["auto", "text", "jsonl", "parquet", "bin", "npy"] = "auto"
    """Of the files; auto goes by their suffixes. bin: raw little-endian token ids, as nanoGPT, Megatron and llm.c write
    them; npy: token ids, one dimension."""
    text_field: str | None = None
    """JSONL: the key, Parquet: the column, whose text is trained on; default: text."""
    tokenizer: str | None = None
    """Of text: `byte` (the default; ids 0 to 255), or a tokenizer.json, or a folder that holds one."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """Of a .bin file's token ids: uint16 (2 bytes, the default) or uint32 (4 bytes)."""
    max_mib: Annotated[float, Field(gt=0)] | None = None
    """MiB of text that are used, from the start of the source in the order of file names; default: 64."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, values: Any) -> Any:
        return {"source": values} if values == SYNTHETIC else values

    @model_validator(mode="after")
    def _keys_of_the_format(self) -> Self:
        given, format_ = self.model_dump(), self.format
        if self.source == PYTHON_STDLIB and format_ not in ("auto", "text"):
            raise ValueError(f"format = {format_}: {PYTHON_STDLIB} is text: remove it")
        if self.source == SYNTHETIC and format_ != "auto":
            raise ValueError(f"format = {format_}: {SYNTHETIC} data has none: remove it")
        known = {SYNTHETIC: SYNTHETIC, PYTHON_STDLIB: "text"}.get(self.source, format_)
        complaint = inapplicable(known, given) if known != "auto" else None
        if complaint:
            raise ValueError(complaint)
        return self

    @property
    def is_synthetic(self) -> bool:
        return self.source == SYNTHETIC


class Batch(Section):
    global_batch_size: Positive | None = None
    """Sequences per optimizer step over all ranks."""
    global_batch_tokens: Positive | None = None
    """Or the same in tokens."""
    target_world_size: Positive
    """Ranks of the real run; micro-batch x accumulation x this = global batch, exactly."""

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.global_batch_size is None) == (self.global_batch_tokens is None):
            raise ValueError("give either global_batch_size (sequences) or global_batch_tokens")
        return self


class Optimizer(Section):
    name: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(ge=0)] = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.1


class Training(Section):
    engines: Annotated[tuple[Engine, ...], Field(min_length=1)] = ("fsdp2",)
    """The engines to try: fsdp2 (torch's fully_shard), fsdp1 (FullyShardedDataParallel), or both."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16: compute and gathers in bf16, master weights in fp32."""
    reduce_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the gradient reduction. auto: what export_for's trainer does, else fp32."""
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _each_engine_once(self) -> Self:
        if len(set(self.engines)) != len(self.engines):
            raise ValueError(f"engines = {list(self.engines)}: the same engine twice")
        return self


class Cluster(Section):
    address: str = "local"
    """`local` starts Ray on this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks_per_node: Positive
    memory_limit_gib: Annotated[float, Field(gt=0)] | None = None
    """Per rank. On CUDA the caching allocator's cap (default: all memory); on CPU the data segment's growth."""
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the limit that a config must leave free to count as fitting."""
    launcher: Literal["auto", "fork", "exec"] = "auto"
    """`fork`: CPU ranks from a process that has torch loaded; `exec`: a fresh interpreter a rank. auto: by device."""
    peak_tflops_per_s: Annotated[float, Field(gt=0)] | None = None
    """Dense peak of one rank in the training dtype; default: the device table, on CPU a probe."""

    @model_validator(mode="after")
    def _cpu_launcher(self) -> Self:
        if self.launcher == "fork" and self.device == "cuda":
            raise ValueError("launcher fork is for CPU ranks: a fork cannot carry CUDA")
        return self


class Space(Section):
    """Candidates per knob; a knob that is absent keeps the baseline's value. `auto` derives them (README, "Knobs")."""

    micro_batch_size: tuple[Positive, ...] | Literal["auto"] | None = None
    sync_each_micro_batch: tuple[bool, ...] | None = None
    reshard_after_forward: tuple[bool, ...] | None = None
    bucket_cap_mb: tuple[Annotated[float, Field(gt=0)], ...] | Literal["auto"] | None = None
    activation_checkpointing: tuple[str, ...] | None = None
    num_workers: tuple[Annotated[int, Field(ge=0)], ...] | Literal["auto"] | None = None
    prefetch_factor: tuple[Positive, ...] | None = None
    limit_all_gathers: tuple[bool, ...] | None = None
    """FSDP1 alone."""
    backward_prefetch: tuple[BackwardPrefetch, ...] | None = None
    """FSDP1 alone: pre, post or none."""
    forward_prefetch: tuple[bool, ...] | None = None
    """FSDP1 alone."""

    @model_validator(mode="after")
    def _modes_and_duplicates(self) -> Self:
        for mode in self.activation_checkpointing or ():
            checkpoint_stride(mode)
        for name, values in self:
            if isinstance(values, tuple) and not values:
                raise ValueError(f"{name} = []: give at least one candidate, or leave the knob out")
            if isinstance(values, tuple) and len(set(values)) != len(values):
                raise ValueError(f"{name} = {list(values)}: the same candidate twice")
        return self


class Baseline(Section):
    """Your present settings. What you leave out is what a careful person would start with."""

    micro_batch_size: Positive = 1
    sync_each_micro_batch: bool = True
    reshard_after_forward: bool = True
    bucket_cap_mb: Annotated[float, Field(gt=0)] | None = None
    """None: the size of the largest block, which is one block a unit where blocks are alike."""
    activation_checkpointing: str = "full"
    num_workers: Annotated[int, Field(ge=0)] | None = None
    """None: the CPUs this process may use / ranks per node, one of them kept for the rank itself."""
    prefetch_factor: Positive = 2
    engine: Engine | None = None
    """None: the first of training.engines. It need not be one of them."""
    limit_all_gathers: bool | None = None
    """FSDP1 alone; None: torch's default, true."""
    backward_prefetch: BackwardPrefetch | None = None
    """FSDP1 alone: pre, post or none; None: torch's default, pre."""
    forward_prefetch: bool | None = None
    """FSDP1 alone; None: torch's default, false."""

    @model_validator(mode="after")
    def _mode(self) -> Self:
        checkpoint_stride(self.activation_checkpointing)
        return self


class Budget(Section):
    """The first limit reached ends the search; finalists are measured all the same."""

    trials: Positive = 24
    minutes: Annotated[float, Field(gt=0)] | None = None


class MeasureSettings(Section):
    warmup_steps: Positive = 3
    min_steps: Positive = 8
    max_steps: Positive = 40
    rel_ci: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """A trial ends once the 95 % interval of its mean block time is within +- this fraction."""
    trial_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    rounds: Annotated[int, Field(ge=3)] = 7
    """Fresh interleaved runs of the chosen config and of the baseline; the reported gain comes from these alone."""
    num_finalists: Positive = 3

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps = {self.min_steps} is more than max_steps = {self.max_steps}")
        return self


class Job(Section):
    """A whole job, as `autotune init` writes it."""

    model: Model
    data: Data
    batch: Batch
    cluster: Cluster
    training: Training = Training()
    space: Space
    baseline: Baseline = Baseline()
    budget: Budget = Budget()
    measure: MeasureSettings = MeasureSettings()
    sampler: Literal["tpe", "random"] = "tpe"
    export_for: Literal["accelerate", "transformers"] | None = None
    """Pins, before the search, the knobs that this trainer decides itself."""
    seed: Annotated[int, Field(ge=0)] = 0
    output: str = "runs/latest"

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks of the real run."""
        if self.batch.global_batch_size is not None:
            return self.batch.global_batch_size
        assert self.batch.global_batch_tokens is not None
        return self.batch.global_batch_tokens // self.model.seq_len

    @property
    def reduce_dtype(self) -> Literal["fp32", "bf16"]:
        """Of the gradient reduction: as asked, or as the trainer that is exported for does it."""
        if self.training.reduce_dtype != "auto":
            return self.training.reduce_dtype
        # Both trainers that can be named let accelerate set the dtypes.
        return "bf16" if self.training.precision == "bf16" and self.export_for is not None else "fp32"

    @model_validator(mode="after")
    def _knobs_of_fsdp1(self) -> Self:
        engines, baseline_engine = self.training.engines, self.baseline.engine or self.training.engines[0]
        wrong = [f"space.{name}" for name in FSDP1_KNOBS if getattr(self.space, name) and "fsdp1" not in engines]
        wrong += [
            f"baseline.{name}"
            for name in FSDP1_KNOBS
            if getattr(self.baseline, name) is not None and "fsdp1" not in (baseline_engine, *engines)
        ]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)}: FSDP2 has no such knob. FSDP1's limit_all_gathers is a rate limiter of in-flight "
                "all-gathers, and FSDP2 prefetches by itself\n    hint: remove it, or add fsdp1 to training.engines"
            )
        return self

    @model_validator(mode="after")
    def _reduction(self) -> Self:
        asked, precision = self.training.reduce_dtype, self.training.precision
        if asked == "bf16" and precision == "fp32":
            raise ValueError("training.reduce_dtype = bf16 needs training.precision = bf16")
        if asked == "fp32" and precision == "bf16" and self.export_for is not None:
            raise ValueError(
                f"training.reduce_dtype = fp32: {self.export_for}'s bf16 reduces gradients in bf16 "
                f"(export_for = {self.export_for}); leave it at auto"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        tokens, seq_len, ranks = (
            self.batch.global_batch_tokens,
            self.model.seq_len,
            self.batch.target_world_size,
        )
        if tokens is not None and tokens % seq_len:
            raise ValueError(
                f"batch.global_batch_tokens = {tokens} is no multiple of model.seq_len = {seq_len}; "
                f"nearest: {tokens // seq_len * seq_len} or {(tokens // seq_len + 1) * seq_len}"
            )
        if self.global_batch_size % ranks:
            raise ValueError(
                f"batch.global_batch_size = {self.global_batch_size} is no multiple of "
                f"batch.target_world_size = {ranks}; nothing is rounded"
            )
        return self

    @model_validator(mode="after")
    def _micro_batches_divide(self) -> Self:
        per_rank = self.global_batch_size // self.batch.target_world_size
        searched = self.space.micro_batch_size
        asked: dict[str, tuple[int, ...]] = {
            "baseline.micro_batch_size": (self.baseline.micro_batch_size,),
            "space.micro_batch_size": searched if isinstance(searched, tuple) else (),
        }
        wrong = [f"{key} = {size}" for key, sizes in asked.items() for size in sizes if per_rank % size]
        if wrong:
            divisors = ", ".join(str(size) for size in range(1, per_rank + 1) if per_rank % size == 0)
            raise ValueError(
                f"{' and '.join(wrong)}: the per-rank batch is {per_rank} sequences (global batch / ranks), and "
                f"accumulation is whole; divisors: {divisors}"
            )
        return self

    def to_yaml(self) -> str:
        text: str = yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False)
        return text


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
    # The space's name first: it becomes a mapping, whose knobs can then be overridden one by one.
    names = [override for override in overrides if override.startswith("space=")]
    for override in names:
        _apply_override(values, override)
    _resolve_space(values, folder, where)
    for override in overrides:
        if override not in names:
            _apply_override(values, override)
    _resolve_paths(values, folder)
    return validate(Job, values, " ".join([where, *(f"--set {override}" for override in overrides)]))


def _find(name: str, kind: Literal["jobs", "spaces"], what: str) -> tuple[Path | None, str]:
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        try:
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
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
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
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
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
    space = values.get("space", "default")
    if not isinstance(space, str):
        return
    beside = folder / space
    path, text = _find(str(beside) if beside.suffix in (".yaml", ".yml") else space, "spaces", "space")
    values["space"] = _parse_mapping(text, f"{where}: space {path or space}")


def _resolve_paths(values: dict[str, Any], folder: Path) -> None:
    """Paths are relative to the job file; absolute in the resolved job, so that it runs again from anywhere."""
    data, model = values.get("data"), values.get("model")
    if isinstance(data, dict):
        for key, names in (("source", (PYTHON_STDLIB, SYNTHETIC)), ("tokenizer", ("byte",))):
            if isinstance(data.get(key), str) and data[key] not in names:
                data[key] = str(folder / Path(data[key]).expanduser())
    if isinstance(model, dict) and model.get("workload", "decoder") != "decoder":
        model["import_path"] = str(folder / Path(model.get("import_path") or ".").expanduser())


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
    keys = [str(part) for part in details["loc"] if not _is_union_branch(part)]
    path, value = ".".join(keys), details["input"]
    if details["type"] == "extra_forbidden":
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
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return None
        model = field.annotation
    return model

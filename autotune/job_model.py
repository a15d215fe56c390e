"""The model and data sections of a job: what the built-in ranks train."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from autotune.errors import nearest
from autotune.section import Positive, Section
from trials.formats import inapplicable
from trials.record import PYTHON_STDLIB, SYNTHETIC
from trials.shapes import PRESETS, DecoderConfig


class Model(Section):
    workload: str = "decoder"
    """`decoder`, `hf` (Hugging Face's transformers), or `package.module:factory` for your own."""
    import_path: str | None = None
    """The folder where `package.module` is looked for, after everything else; default: the job file's."""
    preset: str | None = None
    """A built-in shape of `decoder`."""
    config: dict[str, Any] | None = None
    """Or the decoder's fields one by one; for `hf`, a config.json, its folder, or what it holds (model_type, ...); for
    your own factory, its keyword arguments."""
    seq_len: Positive
    """Tokens per sequence."""

    def factory_arguments(self) -> dict[str, Any]:
        if self.workload == "hf":
            return {"config": self.config}
        if self.workload != "decoder":
            return dict(self.config or {})
        return {"config": self.config} if self.config else {"preset": self.preset}

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if ":" not in self.workload and self.workload not in ("decoder", "hf"):
            raise ValueError(f"workload = {self.workload!r}: decoder, hf, or package.module:factory")
        if self.workload == "decoder":
            if (self.preset is None) == (self.config is None):
                raise ValueError("give either preset or config")
            if self.preset is not None and self.preset not in PRESETS:
                raise ValueError(f"preset = {self.preset!r}: no such preset; {nearest(self.preset, PRESETS)}")
            self._check_decoder_config()
        if self.workload != "decoder" and self.preset is not None:
            raise ValueError("preset belongs to the built-in decoder; describe your model by config")
        if self.workload == "hf" and not isinstance((self.config or {}).get("model_type"), str):
            raise ValueError(
                "config of workload hf: give a config.json, its folder, or what it holds; at least model_type, "
                "which names the architecture (llama, qwen3, mixtral, ...)"
            )
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
            if key in given
            and (field.type == "int" or (field.type == "int | None" and given[key] is not None))
            and (type(given[key]) is not int or given[key] < 1)
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

"""The `trainer` section of a job: the user's own command, and how knobs get into it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from autotune.errors import nearest
from autotune.export import EXPORTERS
from autotune.section import Positive, Section
from autotune.trainer.placeholders import BATCH, LAUNCH, check_names, names_in
from trials.record import KNOB_NAMES, MODEL_PARALLEL

KNOBS = tuple(name for name in KNOB_NAMES if name != "custom")
_BATCH_FINDER = re.compile(
    r"auto_find_batch_size|auto_scale_batch_size|find_executable_batch_size|microbatch_size=auto"
)
_OFF = ("false", "0", "no", "off", "none", "null")


class Trainer(Section):
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments, one item each, with placeholders: [python, "{probe}", train.py, --mbs,
    "{micro_batch_size}"]. `python` is cluster.python; a relative file is looked for in the job file's folder."""
    launcher: Literal["rank", "self"] = "rank"
    """`rank`: started once a rank, with RANK and the like set; `self`: once a node, and it starts its own ranks
    (torchrun, accelerate launch)."""
    render: dict[str, str] = Field(default_factory=dict)
    """Placeholder to exporter: {accelerate_config: accelerate} puts the path of that exporter's file in the place of
    {accelerate_config}."""
    via: dict[str, Literal["env"]] = Field(default_factory=dict)
    """Knobs that the script reads itself, by `trials.probe.knob(name, default)`: {compile: env}."""
    attach: Literal["auto", "explicit", "callback"] = "auto"
    """`auto`: `python {probe} train.py` finds model and optimizer itself; `explicit`: the script calls probe.watch and
    probe.step; `callback`: it hands the probe's callback to transformers or Lightning."""
    tokens: Literal["auto"] | Positive = "auto"
    """Of a sequence: `auto` counts them by the shapes of the batches; or a number."""
    custom: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Your own knobs, each with its values, as the command is given them; the first is the baseline's. tp, cp and pp
    part the ranks: data-parallel ranks = world / (tp x cp x pp)."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables, with placeholders."""
    folder: str | None = None
    """The folder of the command's relative files; default: the job file's."""

    @field_validator("custom", mode="before")
    @classmethod
    def _as_text(cls, custom: Any) -> Any:
        if not isinstance(custom, dict):
            return custom
        return {name: cls._texts(name, values) for name, values in custom.items()}

    @staticmethod
    def _texts(name: str, values: Any) -> Any:
        if not isinstance(values, list | tuple):
            return values
        for value in values:
            if isinstance(value, bool):
                raise ValueError(
                    f'{name} = {value}: quote what your command is given: "true" or "True", since a boolean has no '
                    "one spelling"
                )
        texts = [str(value) if isinstance(value, int | float) else value for value in values]
        if len({str(text) for text in texts}) != len(texts):
            raise ValueError(f"{name} = {texts}: the same value twice")
        return tuple(texts)

    @model_validator(mode="after")
    def _names(self) -> Self:
        for name in self.custom:
            if not name.isidentifier():
                raise ValueError(f"custom.{name}: expected a name of letters, digits and _")
            if name in (*KNOBS, *LAUNCH, *BATCH, *self.render):
                raise ValueError(f"custom.{name}: that name is taken: {self.known_names().get(name, 'a knob')}")
        for name in MODEL_PARALLEL:
            wrong = [value for value in self.custom.get(name, ()) if not value.isdecimal() or int(value) < 1]
            if wrong:
                raise ValueError(f"custom.{name} = {wrong[0]!r}: expected a number of ranks")
        for name, exporter in self.render.items():
            if exporter not in EXPORTERS:
                raise ValueError(f"render.{name} = {exporter!r}: no such exporter; {nearest(exporter, EXPORTERS)}")
            if name not in self.placeholders():
                raise ValueError(f"render.{name}: nothing takes that file; write {{{name}}} in the command")
        for name in self.via:
            if name not in (*KNOBS, *self.custom):
                raise ValueError(f"via.{name}: no such knob; {nearest(name, (*KNOBS, *self.custom))}")
        check_names(self._texts_with_placeholders(), self.known_names())
        unused = [name for name in self.custom if name not in self.handed_by_name()]
        if unused:
            raise ValueError(
                f"custom.{unused[0]}: nothing takes it; write {{{unused[0]}}} in the command, or declare "
                f"via: {{{unused[0]}: env}}"
            )
        return self

    @model_validator(mode="after")
    def _probe_is_attached_once(self) -> Self:
        places = self.placeholders().count("probe")
        if self.attach == "auto" and not places:
            raise ValueError(
                'command: nothing measures it; put "{probe}" before your script ([python, "{probe}", train.py]), or '
                "call the probe in the script and say attach: explicit (or callback)"
            )
        if self.attach == "auto" and places > 1:
            raise ValueError('command: "{probe}" more than once; it is attached once, before your script')
        if self.attach != "auto" and places:
            raise ValueError(
                f'command: "{{probe}}" and attach: {self.attach} would attach the probe twice; remove one of them'
            )
        return self

    @model_validator(mode="after")
    def _batch_size_is_not_sought(self) -> Self:
        arguments = [*self.command, *(f"{name}={value}" for name, value in self.env.items())]
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
            value = argument.partition("=")[2] or following
            if _BATCH_FINDER.search(argument) and value.lower() not in _OFF:
                raise ValueError(
                    f"command: {argument}: a trainer that looks for a batch size itself hides what runs out of "
                    "memory; remove it: finding it is what autotune does"
                )
        return self

    def _texts_with_placeholders(self) -> Iterable[str]:
        return (*self.command, *self.env.values())

    def placeholders(self) -> list[str]:
        """Of command and environment, in order, as often as they stand there."""
        return [name for text in self._texts_with_placeholders() for name in names_in(text)]

    def known_names(self) -> dict[str, str]:
        """Every placeholder that may be written, with what it stands for."""
        return {
            **dict.fromkeys(KNOBS, "a knob"),
            **dict.fromkeys(self.custom, "a knob of your own"),
            **LAUNCH,
            **BATCH,
            **{name: f"the file of the {exporter} exporter" for name, exporter in self.render.items()},
        }

    def handed_by_name(self) -> set[str]:
        """Knobs, the user's own among them, that a placeholder or the environment hands over."""
        return {name for name in (*self.placeholders(), *self.via) if name in KNOBS or name in self.custom}

"""A model's config.json on this machine -> a part of the job: ranks elsewhere need no file, and resume sees changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune.errors import UserError

FILE_NAME = "config.json"


def read_hf_config(name: str, folder: Path, where: str) -> dict[str, Any]:
    """What the config.json `name`, or the one in the folder `name`, holds.

    Args:
        folder: where a relative path starts: the job file's.
        where: the job, for messages.

    Raises:
        UserError: no such file, or not a model's config.
    """
    path = folder / Path(name).expanduser()
    if path.is_dir():
        path /= FILE_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{where}: model.config = {name!r}: no such file or folder ({path})",
            f"models are not looked up or downloaded by name: fetch the model's {FILE_NAME} yourself (the weights are "
            "not needed) and give its path, or write what it holds as config: {model_type: ..., ...}",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: model.config = {name!r}: {path}: {error}", f"a {FILE_NAME} is UTF-8 JSON") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UserError(
            f"{where}: model.config = {name!r}: {path} names no model_type: not a model's {FILE_NAME}",
            "give the file, or its folder, that transformers' save_pretrained writes",
        )
    return values

"""YAML as people mean it: `off`, `on`, `yes` and `no` are words, as in YAML 1.2; booleans are true and false."""

from __future__ import annotations

import re
from typing import Any

import yaml

_BOOLEAN = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 (as PyYAML has it)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOLEAN]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(_BOOLEAN, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def load_yaml(text: str) -> Any:
    """The content of a YAML document.

    Raises:
        yaml.YAMLError, ValueError, RecursionError: it is none.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()

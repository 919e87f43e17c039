"""YAML as the config files use it: safe, no key twice, and `1e-5` is a number (YAML 1.1 makes it text)."""

from __future__ import annotations

import re
from typing import Any

import yaml

from mrl.errors import ConfigError

MAX_LENGTH = 100_000
"""Characters of a config, which PyYAML reads in about a second and a half; a file of rows has more."""

_FLOAT_TAG = "tag:yaml.org,2002:float"
_EXPONENT_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """SafeLoader with numbers such as `1e-5`, and without a key that is given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Looks at the keys of a mapping before those of `<<` join them, which may be overridden."""
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                problem = f"the key {key.value!r} is given twice, in lines {lines[key.value]} and {line}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[key.value if isinstance(key, yaml.ScalarNode) else id(key)] = line
        return node


class _Dumper(yaml.SafeDumper):
    """The inverse: quotes text that `_Loader` would read as a number."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Writes text with line breaks and controls with escapes. PyYAML's other styles lose some of them."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))


def parse(text: str, source: str, path: str = "") -> Any:
    """Returns the value of one YAML document.

    source: the name of the file, "" of an override. path: the dotted key that the value is for. ConfigErrors name them.
    """
    what = "" if source else "the override "
    if len(text) > MAX_LENGTH:
        why = f"{what}has more than {MAX_LENGTH} characters, which is no config"
        raise ConfigError(source or path, why=why, fix="give a YAML file of keys")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if source and mark is not None else source or path
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(place, why=f"{what}is not valid YAML: {problem}", fix="correct it there") from None


def dump(data: Any) -> str:
    """Returns YAML of plain data, in its order; `parse` gives the same data back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000)

"""YAML as the config files use it: safe, no key twice, and `1e-5` is a number (YAML 1.1 makes it text)."""

from __future__ import annotations

import re
from typing import Any

import yaml

from mrl.errors import ConfigError

_FLOAT_TAG = "tag:yaml.org,2002:float"
_EXPONENT_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_MERGE_TAG = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """SafeLoader with numbers such as `1e-5`."""


class _Dumper(yaml.SafeDumper):
    """The inverse: quotes text that `_Loader` would read as a number."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Text with line breaks and controls is written with escapes: PyYAML's other styles lose some of them."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))


def parse(text: str, source: str, path: str = "") -> Any:
    """The value of one YAML document.

    source: a file name or an override, and path: the dotted key that the value is for, in a ConfigError's message.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicates(node, source, path, seen=set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        marks = (error.problem_mark, error.context_mark)  # at the end of the text, what it began with says more
        at = next((m for m in marks if m is not None and m.line < len(text.splitlines())), None)
        line = f":{at.line + 1}" if at else ""
        problem = " ".join((error.problem or error.context or "cannot be read").split())
        raise ConfigError(f"{source}{line}: is not valid YAML: {problem}; correct it there") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: is not valid YAML: {' '.join(str(error).split())}; correct it there") from None
    finally:
        loader.dispose()


def _refuse_duplicates(node: yaml.Node, source: str, path: str, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_duplicates(child, source, path, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if isinstance(key_node, yaml.ScalarNode) and key_node.tag != _MERGE_TAG:
            dotted = f"{path}.{key_node.value}" if path else key_node.value
            if key_node.value in lines:
                first = lines[key_node.value]
                raise ConfigError(
                    f"{dotted}: is given twice, in lines {first} and {line} of {source}; keep one of them"
                )
            lines[key_node.value] = line
            _refuse_duplicates(value_node, source, dotted, seen)


def dump(data: Any) -> str:
    """YAML of plain data, in its order; `parse` gives the same data back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000)

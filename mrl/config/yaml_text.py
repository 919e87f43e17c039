"""YAML as the config files use it: safe, no key twice, and `1e-5` is a number (YAML 1.1 makes it text)."""

from __future__ import annotations

import re
from typing import Any

import yaml

from mrl.config.keys import join_key
from mrl.errors import ConfigError

MAX_LENGTH = 100_000
"""Characters of a config, which PyYAML reads in about a second and a half; a file of rows has more."""

_FLOAT_TAG = "tag:yaml.org,2002:float"
_EXPONENT_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_MERGE_TAG = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """SafeLoader with numbers such as `1e-5`."""


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

    source: a file name or an override, and path: the dotted key that the value is for, in a ConfigError's message.
    """
    if len(text) > MAX_LENGTH:
        raise ConfigError(
            source, why=f"has more than {MAX_LENGTH} characters, which is no config", fix="give a YAML file of keys"
        )
    try:
        loader = _Loader(text)  # reads the first characters already
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_duplicates(node, source, path, seen=set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{source}:{line}",
            why=f"is not valid YAML: it holds the character U+{error.character:04X}",
            fix=f'remove it, or write it with an escape, as in "\\x{error.character:02x}"',
        ) from None
    except yaml.MarkedYAMLError as error:
        marks = (error.problem_mark, error.context_mark)  # at the end of the text, what it began with says more
        at = next((m for m in marks if m is not None and m.line < len(text.splitlines())), None)
        place = f":{at.line + 1}" if at else ""
        problem = " ".join((error.problem or error.context or "cannot be read").split())
        raise ConfigError(f"{source}{place}", why=f"is not valid YAML: {problem}", fix="correct it there") from None
    except RecursionError:
        why = "has too many lists or mappings inside one another, which is no config"
        raise ConfigError(source, why=why, fix="write it flatter") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OverflowError) as error:
        # the last ones come from SafeLoader, for a text that does not fit its tag, as in `!!bool x`
        why = f"is not valid YAML: a value does not fit its type ({error})"
        raise ConfigError(source, why=why, fix="correct it there") from None


# YAML 1.1 gives a lone "=" a meaning of its own, which nothing here reads: it is text.
_Loader.add_constructor("tag:yaml.org,2002:value", yaml.SafeLoader.construct_yaml_str)


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
            dotted = join_key(path, key_node.value)
            if key_node.value in lines:
                first = lines[key_node.value]
                raise ConfigError(
                    dotted, why=f"is given twice, in lines {first} and {line} of {source}", fix="keep one of them"
                )
            lines[key_node.value] = line
            _refuse_duplicates(value_node, source, dotted, seen)


def dump(data: Any) -> str:
    """Returns YAML of plain data, in its order; `parse` gives the same data back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000)

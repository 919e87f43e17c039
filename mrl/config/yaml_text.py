"""YAML as the config files use it: safe, no key twice, and `1e-5` is a number (YAML 1.1 makes it text)."""

from __future__ import annotations

import re
from typing import Any

import yaml

from mrl.config.keys import join_key
from mrl.errors import ConfigError, quoted

MAX_LENGTH = 100_000
"""Characters of a config, which PyYAML reads in about a second and a half; a file of rows has more."""

_FLOAT_TAG = "tag:yaml.org,2002:float"
_EXPONENT_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_MERGE_TAG = "tag:yaml.org,2002:merge"


_MAX_DEPTH = 100
"""Levels of lists and mappings in a config. The schema has fewer than ten."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with numbers such as `1e-5`. Its errors name the line and the value."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Constructs `node`. SafeLoader raises whatever comes for a text that does not fit its tag, as in `!!int x`."""
        try:
            value = super().construct_object(node, deep)
            fits = not isinstance(value, int) or value.bit_length() <= 1000  # Python does not write far longer ones
        except (ValueError, LookupError, AttributeError, OverflowError):
            fits = False
        if not fits:
            kind = node.tag.rpartition(":")[2]
            problem = f"{quoted(str(node.value))} cannot be read as {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value


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
    if len(text) > MAX_LENGTH:
        raise ConfigError(
            _place(source, path),
            why=f"has more than {MAX_LENGTH} characters, which is no config",
            fix="give a YAML file of keys",
        )
    try:
        loader = _Loader(text)  # reads the first characters already
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_node(node, source, path, sizes={})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"it holds the character U+{error.character:04X}"
        fix = f'remove it, or write it with an escape, as in "\\x{error.character:02x}"'
        raise _not_yaml(what, source, path, line, fix=fix) from None
    except yaml.MarkedYAMLError as error:
        marks = (error.problem_mark, error.context_mark)  # at the end of the text, what it began with says more
        at = next((m for m in marks if m is not None and m.line < len(text.splitlines())), None)
        problem = " ".join((error.problem or error.context or "cannot be read").split())
        raise _not_yaml(problem, source, path, at and at.line + 1) from None
    except RecursionError:
        why = "has too many lists or mappings inside one another, which is no config"
        raise ConfigError(_place(source, path), why=why, fix="write it flatter") from None
    except yaml.YAMLError as error:
        raise _not_yaml(str(error), source, path) from None


# YAML 1.1 gives a lone "=" a meaning of its own, which nothing here reads: it is text.
_Loader.add_constructor("tag:yaml.org,2002:value", yaml.SafeLoader.construct_yaml_str)


def _not_yaml(
    what: str, source: str, path: str, line: int | None = None, *, fix: str = "correct it there"
) -> ConfigError:
    """Returns the error of a text that is no YAML, by a file's line or an override's key."""
    why = f"{'' if source else 'the override '}is not valid YAML: {what}"
    return ConfigError(_place(source, path, line), why=why, fix=fix)


def _place(source: str, path: str, line: int | None = None) -> str:
    """Returns a file's name, with the line if there is one, or an override's key."""
    if not source:
        return path
    return source if line is None else f"{source}:{line}"


def _check_node(node: yaml.Node, source: str, path: str, sizes: dict[int, int], above: tuple[int, ...] = ()) -> int:
    """Returns how many values `node` stands for, each as often as an alias names it.

    Refuses a key that is given twice, a value that holds itself, lists in lists without end, and aliases of aliases for
    millions of values. sizes: of the nodes that were checked. above: the nodes that `node` is in.
    """
    line = node.start_mark.line + 1
    if id(node) in above or len(above) > _MAX_DEPTH:
        why = "the value holds itself by an alias" if id(node) in above else "lists or mappings are too deep"
        raise _not_yaml(why, source, path, line, fix="write it out, and flatter")
    if id(node) in sizes:
        return sizes[id(node)]
    size, above = 1, (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            size += _check_node(child, source, path, sizes, above)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            dotted = path
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != _MERGE_TAG:
                dotted = join_key(path, key_node.value)
                _refuse_second(key_node, lines, source, dotted)
            size += _check_node(value_node, source, dotted, sizes, above)
    if size > MAX_LENGTH:
        why = f"its aliases stand for more than {MAX_LENGTH} values, which is no config"
        raise ConfigError(_place(source, path, line), why=why, fix="write fewer")
    sizes[id(node)] = size
    return size


def _refuse_second(key: yaml.ScalarNode, lines: dict[str, int], source: str, dotted: str) -> None:
    """Raises ConfigError if a mapping has the key already. lines: of the keys before it; this one joins them."""
    line = key.start_mark.line + 1
    if key.value in lines:
        where = f", in lines {lines[key.value]} and {line} of {source}" if source else " in the override"
        raise ConfigError(dotted, why=f"is given twice{where}", fix="keep one of them")
    lines[key.value] = line


def dump(data: Any) -> str:
    """Returns YAML of plain data, in its order; `parse` gives the same data back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000)

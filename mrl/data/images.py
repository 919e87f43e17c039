"""Images in the content of a message: what a row says of them, and the picture that it means.

A message's content is a string, or a list of parts: `{"type": "text", "text": ...}` and images. An image part has one
of

    image, path, url   a file: an absolute path, one relative to the folder of the data file, or a file:// or data: URL
    bytes, base64      the file itself, in base64; bytes may also be bytes (Parquet)
    image, image_url   an object of these, as `datasets` saves images ({bytes, path}) and OpenAI sends them ({url})

or none of them: then it stands for the next image in the row's own list `images` (or for the one of `image`).
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import io
import os
import urllib.parse
from typing import Any

from mrl.data.files import BadRow, kind_of

SOURCES = ("image", "path", "url", "bytes", "base64", "image_url")


@dataclasses.dataclass(frozen=True)
class Image:
    """An image that a row names, by one of path and data."""

    where: str  # in the row
    path: str | None = None  # as the row has it
    data: bytes | None = None  # the bytes of a file

    def open(self, folder: str) -> Any:
        """Returns the picture, upright and in RGB. folder: of the data file. Raises BadRow."""
        pillow = importlib.import_module("PIL.Image")
        of_transformers = importlib.import_module("transformers.image_utils")
        file: io.BytesIO | str = io.BytesIO(self.data or b"")
        if self.path is not None:
            file = os.path.join(folder, os.path.expanduser(self.path))
        try:
            with pillow.open(file) as picture:
                return of_transformers.load_image(picture)
        except Exception as e:  # pillow's decoders have no common error for what a file can have wrong
            raise BadRow(f"{self.where}: no image can be read ({e}); paths are relative to the data file") from e


def check_parts(content: list[Any], name: str) -> list[dict[str, Any]]:
    """Returns the parts of `content`: {"type": "text", "text": str}, or {"type": "image"} with an `Image` where the
    part has one.

    name: of the content in the row. Raises BadRow.
    """
    if not content:
        raise BadRow(f"{name} is an empty list; give at least one part")
    return [_part(part, f"{name}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, name: str) -> dict[str, Any]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRow(f'{name} has no type; give {{"type": "text", "text": ...}} or {{"type": "image", "path": ...}}')
    match part["type"]:
        case "text":
            if not isinstance(part.get("text"), str):
                raise BadRow(f"{name} has no text; give a string")
            return {"type": "text", "text": part["text"]}
        case "image" | "image_url":
            given = [source for source in SOURCES if part.get(source) is not None]
            if len(given) > 1:
                raise BadRow(f"{name} has {' and '.join(given)}; keep the one that has the image")
            (key,) = given or (None,)
            return {"type": "image"} | ({"image": image_of(part[key], f"{name}.{key}", key)} if key else {})
    raise BadRow(f"{name}.type is {part['type']!r}; parts of text and image train, leave out what is another")


def image_of(value: Any, where: str, key: str = "image") -> Image:
    """Returns the image that a value of a row means. key: its field. Raises BadRow."""
    match value:
        case bytes():
            return Image(where, data=value)
        case {"bytes": bytes() | str() as data}:  # first: beside bytes, path is a name that need not exist
            return image_of(data, where, "bytes")
        case {"path": str() as path}:
            return image_of(path, where, "path")
        case {"url": str() as url}:
            return image_of(url, where, "url")
        case str() if key in ("bytes", "base64"):
            return Image(where, data=_decoded(value, where))
        case str() if value:
            return _from_url(value, where)
    raise BadRow(f"{where} is {kind_of(value)}; give the path of a file, or its bytes in base64 as {{bytes: ...}}")


def _from_url(value: str, where: str) -> Image:
    scheme, _, rest = value.partition(":")
    match scheme.lower():
        case "data":
            return Image(where, data=_decoded(rest.partition(",")[2], where))
        case "file":
            return Image(where, path=urllib.parse.unquote(urllib.parse.urlsplit(value).path))
    return Image(where, path=value)


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as e:
        raise BadRow(f"{where} is not base64 ({e}); encode the bytes of the image's file") from None

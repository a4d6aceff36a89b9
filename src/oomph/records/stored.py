"""Any record <-> JSON, in the format that --json prints.

Field names are kept, tuples become lists, unknown stays null. `schema` counts the changes that
would break a reader. Reading back is strict: a record that is not fully understood is refused,
because otherwise only a part of it would be followed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from oomph.errors import Unreadable

SCHEMA = 1
# A record has tens of kilobytes; a file near this size is not one.
LARGEST_FILE_BYTES = 16 << 20

Record = TypeVar("Record")


def to_jsonable(value: Any) -> Any:
    """Convert a record, or records in tuples and mappings, to what `json` can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: to_jsonable(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_jsonable(item) for item in value]
    return value


def as_json(value: Any) -> str:
    """Return the text that --json prints for one record (or mapping of records)."""
    import json

    return json.dumps({"schema": SCHEMA, **to_jsonable(value)}, indent=2, ensure_ascii=False)


def from_json_file(kind: type[Record], path: str | os.PathLike[str], *, what: str) -> Record:
    """Read a record that `as_json` wrote; `what` names it in errors. Raises Unreadable."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise Unreadable(
            f"{os.fspath(path)} cannot be read",
            because=error.strerror or str(error),
            attempt="checking the path",
        ) from None
    if len(content) > LARGEST_FILE_BYTES:
        raise no_record(what, path, f"it is larger than {LARGEST_FILE_BYTES} bytes")
    try:
        return from_json(kind, content.decode("utf-8"))
    except ValueError as error:
        raise no_record(what, path, str(error)) from None
    except RecursionError:
        raise no_record(what, path, "it is nested too deeply") from None


def from_json(kind: type[Record], text: str) -> Record:
    """Read a record from text. Raises ValueError, which says what is wrong and where."""
    import json

    content = json.loads(text, parse_constant=_refuse)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    schema = content.pop("schema", None)
    if schema != SCHEMA or isinstance(schema, bool):
        raise ValueError(f"its schema is {schema!r:.40}, and this oomph reads {SCHEMA}")
    record: Record = _read(kind, content, "")
    return record


def from_jsonable(kind: type[Record], value: Any) -> Record:
    """Convert the output of `to_jsonable` back to a record. Raises ValueError."""
    record: Record = _read(kind, value, "")
    return record


def no_record(what: str, path: str | os.PathLike[str], because: str) -> Unreadable:
    """Return the error for a file that does not hold the expected record."""
    return Unreadable(
        f"{os.fspath(path)} is not a {what} that this version of oomph can read",
        because=because,
        attempt="writing it again with this version of oomph",
    )


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def _read(kind: Any, value: Any, where: str) -> Any:
    """Convert a value to its field's type. `where` is its path: "variant.micro_batch"."""
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, value, where)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_optional(kind, value, where)
    if origin is tuple:
        return _read_tuple(kind, value, where)
    if origin is Literal:
        options = typing.get_args(kind)
        is_one = isinstance(value, str) and value in options
        return _check(is_one, value, f"one of {', '.join(options)}", where)
    if origin is Mapping:
        of_key, of_value = typing.get_args(kind)
        _check(isinstance(value, dict), value, "object", where)
        return {
            _read(of_key, key, where): _read(of_value, item, f"{where}.{key:.60}")
            for key, item in value.items()
        }
    if kind is float and type(value) is int:
        return float(value)
    return _check(type(value) is kind, value, kind.__name__, where)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return a record's types, cached because finding them takes longer than reading it."""
    return typing.get_type_hints(kind)


def _read_record(kind: Any, value: Any, where: str) -> Any:
    _check(isinstance(value, dict), value, "object", where)
    names = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in value:
            raise ValueError(f"{_path(where, name)} is missing")
    for name in value:
        if name not in names:
            raise ValueError(f"{_path(where, name):.80} is unknown")
    hints = _hints(kind)
    return kind(**{name: _read(hints[name], value[name], _path(where, name)) for name in names})


def _read_optional(kind: Any, value: Any, where: str) -> Any:
    """Read a type or None; the records have no other unions."""
    if value is None:
        return None
    (inner,) = (option for option in typing.get_args(kind) if option is not type(None))
    return _read(inner, value, where)


def _read_tuple(kind: Any, value: Any, where: str) -> Any:
    """Read a tuple of any length of one type, or of exactly these types."""
    _check(isinstance(value, list), value, "list", where)
    kinds = typing.get_args(kind)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    _check(len(kinds) == len(value), value, f"list of {len(kinds)}", where)
    return tuple(
        _read(each, item, f"{where}[{place}]")
        for place, (each, item) in enumerate(zip(kinds, value, strict=True))
    )


def _check(is_right: bool, value: Any, expected: object, where: str) -> Any:
    if not is_right:
        raise ValueError(f"{where} is {value!r:.60}, and should be {expected}")
    return value


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name

"""JSON that the standard, PostgreSQL and every reader of Kafka accept alike.

`json.loads` accepts more: NaN and Infinity, which jsonb refuses; a key twice, of which it keeps the
last; NUL and lone surrogates, which PostgreSQL's text refuses.
"""

import json
import math
import re
from typing import Any

MAX_DEPTH = 32
_MAX_INTEGER = 2**63 - 1
_LEAST_FRACTION = 1e-15
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class InvalidJSON(ValueError):
    """Names what is wrong with a document, and never quotes it."""


def loads(document: bytes) -> Any:
    """Decode one JSON document in UTF-8.

    Raises:
        InvalidJSON: it is not UTF-8 or not JSON; has NaN, Infinity, a number beyond 64 bits or
            nearer to zero than 1e-15; has a key twice in one object, NUL or a lone surrogate; or
            is nested deeper than 32.
    """
    try:
        value = _DECODER.decode(document.decode())
    except InvalidJSON:
        raise
    except UnicodeDecodeError:
        raise InvalidJSON("Must be UTF-8.") from None
    except RecursionError:
        raise InvalidJSON("Is nested too deep.") from None
    except ValueError:
        raise InvalidJSON("Is not valid JSON.") from None
    # The decoder refuses a bare NUL, and UTF-8 has no surrogates, so both can come only as escapes.
    # Every level has a bracket, so few brackets cannot be too deep.
    if b"\\u" in document or document.count(b"{") + document.count(b"[") > MAX_DEPTH:
        _walk(value, 0)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise InvalidJSON("Has a key twice in one object.")
    return result


def _refuse_constant(_: str) -> float:
    raise InvalidJSON("Has a number that is not finite.")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidJSON("Has a number that is not finite.")
    # jsonb writes numbers out in full: 1e20 becomes a whole number, 1e-300 three hundred digits.
    if value and not _LEAST_FRACTION <= abs(value) <= _MAX_INTEGER:
        raise InvalidJSON("Has a number beyond 64 bits, or nearer to zero than 1e-15.")
    return value


def _integer(text: str) -> int:
    # The length is checked first, because int() of a long text takes quadratic time.
    if len(text) > 20 or abs(int(text)) > _MAX_INTEGER:
        raise InvalidJSON("Has a whole number beyond 64 bits.")
    return int(text)


def _walk(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidJSON("Is nested too deep.")
    if isinstance(value, str):
        if _UNSTORABLE.search(value):
            raise InvalidJSON("Has a NUL or a lone surrogate in a string.")
    elif isinstance(value, dict):
        for key, part in value.items():
            _walk(key, depth)
            _walk(part, depth + 1)
    elif isinstance(value, list):
        for part in value:
            _walk(part, depth + 1)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_constant=_refuse_constant,
    parse_float=_float,
    parse_int=_integer,
)

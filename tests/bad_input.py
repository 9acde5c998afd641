"""Input that a service meets sooner or later: ids, JSON and text that break careless readers."""

import base64
import json

from pinactivity.core.ids import new_id
from tests.api import NIL

BAD_IDS = {
    "nil": NIL,
    "undefined": "undefined",
    "null": "null",
    "an object": "[object Object]",
    "a megabyte": "a" * 1_000_000,
    "empty": "",
    "blank": "   ",
    "too short": "0190a0b0-0000-7000-8000-00000000000",
    "too long": "0190a0b0-0000-7000-8000-0000000000000",
    "not hexadecimal": "0190a0b0-0000-7000-8000-00000000000g",
    "two of them": "0190a0b0-0000-7000-8000-000000000001, 0190a0b0-0000-7000-8000-000000000002",
    "NUL": "0190a0b0-0000-7000-8000-00000000000\x00",
    "other digits": "\u0660190a0b0-0000-7000-8000-000000000001",
}


def object_with(snapshot: str) -> bytes:
    """An otherwise valid opening whose FilterSnapshot is spelled so."""
    ids = f'"SessionId":"{new_id()}","PropertyObjectId":"{new_id()}","ViewSource":"Map"'
    return f'{{{ids},"FilterSnapshot":{snapshot}}}'.encode()


BAD_JSON = {
    "C32 NUL in a string": object_with(r'{"A":"\u0000"}'),
    "C32 NUL in a nested key": object_with(r'{"A":{"B\u0000":1}}'),
    "C33 high surrogate alone": object_with(r'{"A":"\ud83d"}'),
    "C33 low surrogate alone": object_with(r'{"A":"\ude00"}'),
    "C33 surrogates in the wrong order": object_with(r'{"A":"\ude00\ud83d"}'),
    "C33 surrogate in a key": object_with(r'{"\ud83d":1}'),
    "C34 NaN": object_with('{"A":NaN}'),
    "C34 Infinity": object_with('{"A":-Infinity}'),
    "C34 1e999": object_with('{"A":1e999}'),
    "C34 400 digits": object_with('{"A":' + "9" * 400 + "}"),
    "C34 10,000 digits": object_with('{"A":' + "9" * 10_000 + "}"),
    "C34 10,000 levels": object_with('{"A":' + "[" * 10_000 + "]" * 10_000 + "}"),
    "C34 10,000 objects": object_with('{"A":' * 10_000 + "1" + "}" * 10_000),
    "C34 10,000 levels unclosed": b"[" * 10_000,
    "C34 duplicate keys": object_with('{"A":1,"A":2}'),
    "C34 duplicate fields": b'{"SessionId":"a","SessionId":"b"}',
    "bad UTF-8": object_with('{"A":1}').replace(b'"A"', b'"\xff\xfe"'),
    "UTF-16": '{"SessionId":1}'.encode("utf-16"),
    "UTF-8 with a mark": b"\xef\xbb\xbf{}",
    "an overlong NUL": object_with('{"A":1}').replace(b'"A"', b'"\xc0\x80"'),
    "a raw surrogate": object_with('{"A":1}').replace(b'"A"', b'"\xed\xa0\xbd"'),
    "a raw control character": object_with('{"A":"\x01"}'),
    "not JSON": b"SessionId=1",
    "half": b'{"SessionId":',
    "two documents": b"{}{}",
    "a trailing comma": b'{"SessionId":1,}',
    "a comment": b"{}//",
    "white space": b"  \n",
    "a list": b"[]",
    "a string": b'"text"',
    "a number": b"1",
    "null": b"null",
    "true": b"true",
}

STRANGE_TEXTS = {
    "empty": "",
    "a blank": " ",
    "NUL": "\x00",
    "line breaks": "a\r\nSet-Cookie: b=c",
    "control characters": "".join(map(chr, range(1, 32))),
    "every byte": "".join(map(chr, range(256))),
    "UTF-8 read as Latin-1": "😀ж".encode().decode("latin-1"),
    "beyond Latin-1": "😀ж",
    "a lone surrogate": "\ud83d",
    "a format string": "%s%n{0}{}${jndi:ldap://x}",
    "SQL": "'; DROP TABLE sessions; --",
    "markup": "<script>alert(1)</script>",
    "100 KB": "x" * 100_000,
    "a negative number": "-1",
    "a huge number": "9" * 400,
    "a comma list": "," * 1_000,
    "quotes": "\"'`",
    "braces": "{" * 5_000,
    "a real id": "0190a0b0-0000-7000-8000-000000000001",
}

STRANGE_BODIES = [
    *BAD_JSON.values(),
    *(text.encode("utf-8", "surrogatepass") for text in STRANGE_TEXTS.values()),
    *(json.dumps({"SessionId": text}).encode() for text in STRANGE_TEXTS.values()),
    *(
        json.dumps(
            {"SessionId": str(new_id()), "PropertyObjectId": text, "ViewSource": text, text: text}
        ).encode()
        for text in STRANGE_TEXTS.values()
    ),
    *(object_with(json.dumps({text: [text, {text: None}]})) for text in STRANGE_TEXTS.values()),
    object_with('{"A":1e308,"B":-1e308,"C":1e-400,"D":-0,"E":-0.0,"F":0.1e1}'),
    object_with('{"A":9223372036854775807,"B":-9223372036854775807}'),
    object_with('{"":""}'),
    object_with("{" + ",".join(f'"{n}":{n}' for n in range(700)) + "}"),
    object_with("[" * 31 + "]" * 31),
    object_with('{"A":' + "[" * 29 + "]" * 29 + "}"),
    object_with("null"),
]

BAD_LIMITS = ["0", "-1", "201", "1000000", "", " ", "1.0", "1e2", "+1", "0x10", "ten", "٣", "\x00"]


def encode_cursor(document: object) -> str:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return base64.urlsafe_b64encode(text).decode()


MOMENT, ROW = "2026-03-01T12:00:00.123456Z", "0190a0b0-0000-7000-8000-000000000001"
BAD_CURSORS = {
    "empty": "",
    "a blank": " ",
    "text": "undefined",
    "an id": ROW,
    "a time": MOMENT,
    "NUL": "\x00",
    "not ASCII": "ж😀",
    "not base64": "****",
    "half": encode_cursor([MOMENT, ROW])[:-5],
    "without its padding": encode_cursor([MOMENT, ROW]).rstrip("="),
    "with more padding": encode_cursor([MOMENT, ROW]) + "====",
    "with a line break": encode_cursor([MOMENT, ROW]) + "\n",
    "twice": encode_cursor([MOMENT, ROW]) * 2,
    "nothing inside": encode_cursor(b""),
    "not JSON inside": encode_cursor(b"[1,"),
    "not UTF-8 inside": encode_cursor(b"\xff\xfe\xfd"),
    "UTF-16 inside": encode_cursor(json.dumps([MOMENT, ROW]).encode("utf-16")),
    "NaN inside": encode_cursor(b"[NaN, NaN]"),
    "a huge number inside": encode_cursor(b"[" + b"9" * 5_000 + b",1]"),
    "deep nesting inside": encode_cursor(b"[" * 100_000),
    "null": encode_cursor(None),
    "a number": encode_cursor(12),
    "one part": encode_cursor([MOMENT]),
    "three parts": encode_cursor([MOMENT, ROW, 1]),
    "parts in another order": encode_cursor([ROW, MOMENT]),
    "an object": encode_cursor({MOMENT: 1, ROW: 2}),
    "other types": encode_cursor([1, 2]),
    "nulls": encode_cursor([None, None]),
    "objects": encode_cursor([{}, []]),
    "the nil id": encode_cursor([MOMENT, NIL]),
    "an id in upper case": encode_cursor([MOMENT, ROW.upper()]),
    "an id without dashes": encode_cursor([MOMENT, ROW.replace("-", "")]),
    "a time without a zone": encode_cursor(["2026-03-01T12:00:00.123456", ROW]),
    "a time with an offset": encode_cursor(["2026-03-01T15:00:00.123456+03:00", ROW]),
    "a time before year 1": encode_cursor(["0001-01-01T00:00:00.000000+14:00", ROW]),
    "a time after year 9999": encode_cursor(["9999-12-31T23:59:59.999999-14:00", ROW]),
    "a date": encode_cursor(["2026-03-01", ROW]),
    "a leap second": encode_cursor(["2026-03-01T12:00:60.000000Z", ROW]),
    "other white space": encode_cursor(f'["{MOMENT}","{ROW}"]'.encode()),
    "SQL": encode_cursor(["'; DROP TABLE sessions; --", ROW]),
    "100 KB": "A" * 100_000,
}

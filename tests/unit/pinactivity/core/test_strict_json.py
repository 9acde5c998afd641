"""Strict JSON: what PostgreSQL, Kafka's readers and the standard all accept, and no more."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinactivity.core.strict_json import MAX_DEPTH, InvalidJSON, loads

MARKER = "do-not-quote-me"


@pytest.mark.parametrize(
    ("document", "value"),
    [
        (b"{}", {}),
        (b"[]", []),
        (b"null", None),
        (
            b' {"A" : [1, -1, 1.5, 1e3, true, false, null, "x"]}\n',
            {"A": [1, -1, 1.5, 1000.0, True, False, None, "x"]},
        ),
        (b'"\\ud83d\\ude00"', "😀"),
        ('"Ж😀"'.encode(), "Ж😀"),
        (b'{"A":{"B":1},"B":{"B":2}}', {"A": {"B": 1}, "B": {"B": 2}}),
        (b"9223372036854775807", 2**63 - 1),
        (b"-9223372036854775807", -(2**63) + 1),
        (b"1e18", 1e18),
        (b"-9.2e18", -9.2e18),
        (b"1e-15", 1e-15),
        (b"1e-400", 0.0),
        (b"-0", 0),
        (b'"\\u0001\\u007f"', "\x01\x7f"),
    ],
)
def test_sound_document_is_read(document: bytes, value: object) -> None:
    assert loads(document) == value


@pytest.mark.parametrize(
    "document",
    [
        rb'"\u0000"',
        rb'{"A":"\u0000"}',
        rb'{"A":{"B\u0000":1}}',
        rb'[["\u0000"]]',
    ],
)
def test_nul_is_refused_in_strings_and_keys_c32(document: bytes) -> None:
    with pytest.raises(InvalidJSON, match="NUL"):
        loads(document)


@pytest.mark.parametrize(
    "document",
    [
        rb'"\ud83d"',
        rb'"\ude00"',
        rb'"\ude00\ud83d"',
        rb'"\ud83d\ud83d\ude00"',
        rb'{"A":"x\ud800y"}',
        rb'{"\udfff":1}',
        rb'[{"A":["\ud83d"]}]',
    ],
)
def test_lone_surrogate_is_refused_in_strings_and_keys_c33(document: bytes) -> None:
    with pytest.raises(InvalidJSON, match="surrogate"):
        loads(document)


@pytest.mark.parametrize(
    "document",
    [
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"-1e999",
        b"1" + b"0" * 400 + b".0",
        b'{"A":[NaN]}',
    ],
)
def test_number_that_is_not_finite_is_refused_c34(document: bytes) -> None:
    with pytest.raises(InvalidJSON, match="finite"):
        loads(document)


@pytest.mark.parametrize(
    "document",
    [
        b"9" * 400,
        b"-" + b"9" * 400,
        b"9" * 1_000_000,
        b"9223372036854775808",
        b"-9223372036854775809",
        b'{"A":[99999999999999999999]}',
    ],
)
def test_whole_number_beyond_64_bits_is_refused_c34(document: bytes) -> None:
    with pytest.raises(InvalidJSON, match="64 bits"):
        loads(document)


def nested(levels: int, opening: str, closing: str, core: str = "1") -> bytes:
    return (opening * levels + core + closing * levels).encode()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"A":', "}"), ('[{"A":', "}]")])
@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 1_000, 10_000, 100_000])
def test_deep_nesting_is_refused_c34(levels: int, opening: str, closing: str) -> None:
    with pytest.raises(InvalidJSON, match="deep"):
        loads(nested(levels, opening, closing))


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"A":', "}")])
def test_nesting_to_the_limit_is_read(opening: str, closing: str) -> None:
    assert loads(nested(MAX_DEPTH, opening, closing))


def test_10_000_unclosed_levels_are_refused_c34() -> None:
    with pytest.raises(InvalidJSON):
        loads(b"[" * 10_000)


@pytest.mark.parametrize(
    "document",
    [
        b'{"A":1,"A":1}',
        b'{"A":1,"B":2,"A":null}',
        b'[{"B":{"A":1,"A":2}}]',
        rb'{"A":1,"\u0041":2}',
        b'{"":1,"":2}',
    ],
)
def test_key_twice_in_an_object_is_refused_c34(document: bytes) -> None:
    with pytest.raises(InvalidJSON, match="twice"):
        loads(document)


@pytest.mark.parametrize(
    "document",
    [
        b"\xff\xfe",
        b'"\xc0\x80"',
        b'"\xed\xa0\xbd"',
        b'"\xf5\x80\x80\x80"',
        b'"\xe2\x82"',
        "{}".encode("utf-16"),
        "{}".encode("utf-32-le") + b"\xff",
        b'{"A":"\x80"}',
    ],
)
def test_bad_utf_8_is_refused(document: bytes) -> None:
    with pytest.raises(InvalidJSON):
        loads(document)


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b" ",
        b"{",
        b"}",
        b"{}{}",
        b"{},",
        b'{"A":1,}',
        b"[1,]",
        b"{'A':1}",
        b"{A:1}",
        b'{"A":1} // x',
        b"\xef\xbb\xbf{}",
        b"01",
        b"+1",
        b".5",
        b"1.",
        b"0x1",
        b"True",
        b"undefined",
        b'"\x01"',
        b'"\n"',
        rb'"\x41"',
        rb'"\u12"',
        b"\x00",
        b"{}\x00",
    ],
)
def test_what_the_standard_does_not_know_is_refused(document: bytes) -> None:
    with pytest.raises(InvalidJSON):
        loads(document)


@pytest.mark.parametrize(
    "document",
    [
        f'{{"{MARKER}":1,"{MARKER}":2}}'.encode(),
        f'"{MARKER}\\u0000"'.encode(),
        f'{{"{MARKER}": nonsense}}'.encode(),
        MARKER.encode(),
        f'"{MARKER}'.encode() + b"\xff",
    ],
)
def test_reason_quotes_nothing_of_the_document(document: bytes) -> None:
    with pytest.raises(InvalidJSON) as refused:
        loads(document)
    assert MARKER not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(document: bytes) -> None:
    try:
        value = loads(document)
    except InvalidJSON:
        return
    assert json.loads(document) == value


@settings(deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63) + 1, 2**63 - 1)
        | st.floats(-9e18, 9e18).filter(lambda value: value == 0 or abs(value) >= 1e-15)
        | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_whatever_strict_json_can_say_is_read_as_it_was_written(value: object) -> None:
    assert loads(json.dumps(value, ensure_ascii=False).encode()) == value
    assert loads(json.dumps(value).encode()) == value

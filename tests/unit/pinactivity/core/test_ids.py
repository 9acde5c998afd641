"""Ids: one canonical value for every legal spelling (C31), nothing for the rest."""

import re
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinactivity.core.ids import NIL, new_id, parse_id

TEXT = "0190a0b0-1c2d-7e3f-8a4b-5c6d7e8f9a0b"


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.upper(),
        TEXT.replace("-", ""),
        TEXT.replace("-", "").upper(),
        f"{{{TEXT}}}",
        f"{{{TEXT.upper()}}}",
        f"urn:uuid:{TEXT}",
        f"URN:UUID:{TEXT.upper()}",
        f"urn:UUID:{TEXT}",
    ],
)
def test_every_legal_spelling_is_one_id_c31(text: str) -> None:
    assert str(parse_id(text)) == TEXT


@pytest.mark.parametrize("version", [1, 3, 4, 5, 6, 7, 8])
def test_ids_of_every_version_are_ids(version: int) -> None:
    text = f"{TEXT[:14]}{version}{TEXT[15:]}"
    assert str(parse_id(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        str(NIL),
        NIL.hex,
        f"{{{NIL}}}",
        f"urn:uuid:{NIL}",
    ],
)
def test_nil_is_no_id_in_any_spelling_c30(text: str) -> None:
    with pytest.raises(ValueError, match=r"^Must not be the nil UUID\.$"):
        parse_id(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "undefined",
        "null",
        "[object Object]",
        "x" * 1_000_000,
        TEXT[:-1],
        f"{TEXT}0",
        f" {TEXT}",
        f"{TEXT}\n",
        f"{TEXT}\x00",
        f"{{{TEXT}",
        f"{TEXT}}}",
        f"({TEXT})",
        f"{{urn:uuid:{TEXT}}}",
        f"urn:uuid:{TEXT.replace('-', '')}",
        f"uuid:{TEXT}",
        TEXT.replace("-", "_"),
        TEXT.replace("-", "\u2010"),
        f"{TEXT[:4]}-{TEXT[4:8]}{TEXT[9:]}",
        "-".join(TEXT.replace("-", "")),
        f"{TEXT[:-1]}g",
        f"{TEXT[:-1]}\uff10",  # a full-width digit
        f"{TEXT[:-1]}\u0660",  # an Arabic digit
        f"urn:uu\u0131d:{TEXT}",  # a dotless i, which is an i to a careless comparison
        f"0x{TEXT.replace('-', '')}",
    ],
)
def test_junk_is_no_id_and_is_not_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=r"^Must be a UUID\.$"):
        parse_id(text)


_DASHED = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_LEGAL = re.compile(
    rf"[0-9a-f]{{32}}|{_DASHED}|\{{{_DASHED}\}}|urn:uuid:{_DASHED}", re.IGNORECASE | re.ASCII
)


@given(
    st.tuples(
        st.sampled_from([TEXT, TEXT.replace("-", ""), f"{{{TEXT}}}", f"urn:uuid:{TEXT.upper()}"]),
        st.lists(st.tuples(st.integers(0, 45), st.text(max_size=2) | st.sampled_from("-0fG"))),
    )
)
def test_what_is_legal_is_read_as_python_does_and_nothing_else(
    given: tuple[str, list[tuple[int, str]]],
) -> None:
    text, changes = given
    for place, other in changes:
        text = text[:place] + other + text[place + 1 :]
    if _LEGAL.fullmatch(text):
        assert parse_id(text) == UUID(text.lower())
    else:
        with pytest.raises(ValueError, match=r"^Must be a UUID\.$"):
            parse_id(text)


@pytest.mark.parametrize("value", [None, 0, 1.5, True, b"x", [], {}, UUID(TEXT)])
def test_only_text_spells_an_id(value: object) -> None:
    with pytest.raises(ValueError, match=r"^Must be a UUID\.$"):
        parse_id(value)


def test_new_ids_are_v7_in_the_order_they_were_made() -> None:
    ids = [new_id() for _ in range(1_000)]
    assert {each.version for each in ids} == {7}
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)


def test_new_id_is_pythons_own_uuid() -> None:
    assert type(new_id()) is UUID

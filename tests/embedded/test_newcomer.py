"""`make up` is ready, and one visit goes through the whole chain, wherever a newcomer is."""

import os

import pytest

from tests.embedded.places import Place, make_place

pytestmark = pytest.mark.timeout(600)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def try_out(place: Place, **options: float) -> None:
    with place.up(**options) as running:
        place.visit(running)
        print(f"ready after {running.seconds:.0f} s")


@needs_root
def test_in_the_closed_home_of_root() -> None:
    with make_place() as place:
        try_out(place)


@needs_root
def test_as_root_who_shares_nothing_with_others() -> None:
    with make_place(umask=0o077) as place:
        try_out(place)


def test_in_a_path_with_spaces_quotes_and_umlauts_without_a_locale() -> None:
    with make_place('it\'s "fünf" $HOME & more') as place:
        place.environment["LANG"] = "C"
        try_out(place)

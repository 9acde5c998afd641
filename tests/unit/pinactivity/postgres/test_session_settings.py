"""What connections to PostgreSQL begin with."""

from datetime import timedelta

from pinactivity.postgres.session_settings import add_session_settings


def test_session_settings_are_added_to_the_urls_own() -> None:
    database = add_session_settings(
        {"NAME": "name", "OPTIONS": {"sslmode": "require"}},
        {"search_path": "a,b", "lock_timeout": timedelta(seconds=1.5)},
    )

    assert database["NAME"] == "name"
    assert database["CONN_MAX_AGE"] is None
    assert database["OPTIONS"]["sslmode"] == "require"
    assert database["OPTIONS"]["options"].startswith(
        "-c search_path=a,b -c lock_timeout=1500 -c tcp_keepalives_idle=30 "
    )

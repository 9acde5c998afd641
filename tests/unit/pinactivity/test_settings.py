"""The settings' own rules: which sources of keys may be set together."""

import os
import subprocess
import sys

import pytest
from django.conf import settings as django_settings

from tests.tokens import SECRET


def settings_errors(**variables: str) -> str:
    """Read the settings in a process of its own; return its message when it refuses, or ""."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JWT_")}
    production = {
        "PINACTIVITY_DEVELOPMENT": "false",
        "SECRET_KEY": "0123456789" * 6,
        "ALLOWED_HOSTS": "api.example",
        "JWT_ISSUER": "pin-identity",
        "JWT_AUDIENCE": "pinactivity",
    }
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import pinactivity.settings"],
        cwd=django_settings.BASE_DIR,
        env={**kept, **production, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode == 0) == (found.stderr == "")
    return found.stderr


URL = "https://identity.example/keys"


@pytest.mark.parametrize(
    "variables",
    [
        {"JWT_JWKS_URL": URL},
        {"JWT_PUBLIC_KEY": "a key"},
        {"PINACTIVITY_DEVELOPMENT": "true"},
        {"PINACTIVITY_DEVELOPMENT": "true", "JWT_DEVELOPMENT_SECRET": SECRET},
        {"PINACTIVITY_DEVELOPMENT": "true", "JWT_JWKS_URL": "http://127.0.0.1:1/keys"},
    ],
)
def test_one_source_of_keys_is_sound(variables: dict[str, str]) -> None:
    assert settings_errors(**variables) == ""


@pytest.mark.parametrize(
    ("named", "variables"),
    [
        ("JWT_JWKS_URL", {}),
        ("JWT_JWKS_URL", {"JWT_JWKS_URL": URL, "JWT_PUBLIC_KEY": "a key"}),
        ("JWT_JWKS_URL", {"JWT_JWKS_URL": "http://identity.example/keys"}),
        ("JWT_JWKS_URL", {"JWT_JWKS_URL": "file:///etc/passwd"}),
        ("JWT_DEVELOPMENT_SECRET", {"JWT_DEVELOPMENT_SECRET": SECRET}),
        ("JWT_DEVELOPMENT_SECRET", {"JWT_DEVELOPMENT_SECRET": SECRET, "JWT_JWKS_URL": URL}),
        (
            "JWT_DEVELOPMENT_SECRET",
            {"JWT_DEVELOPMENT_SECRET": "short", "PINACTIVITY_DEVELOPMENT": "true"},
        ),
        (
            "JWT_JWKS_URL",
            {
                "JWT_DEVELOPMENT_SECRET": SECRET,
                "PINACTIVITY_DEVELOPMENT": "true",
                "JWT_PUBLIC_KEY": "a key",
            },
        ),
    ],
    ids=[
        "no source",
        "two sources",
        "keys without TLS",
        "keys of a file",
        "a secret in production",
        "a secret beside a URL in production",
        "a short secret",
        "a secret beside a key",
    ],
)
def test_unsound_sources_of_keys_refuse_the_start_and_are_named(
    named: str, variables: dict[str, str]
) -> None:
    report = settings_errors(**variables)
    assert "The environment is not valid:" in report
    assert f"  {named}: " in report
    assert SECRET not in report

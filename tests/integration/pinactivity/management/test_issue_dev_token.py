"""The command issue_dev_token: tokens for development."""

import io
from typing import Any

import jwt
import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from pinactivity.core.ids import new_id
from sessions.models import Session
from tests.api import NIL
from tests.identity import USER, link
from tests.tokens import SECRET

pytestmark = pytest.mark.django_db


def issue(*arguments: str) -> str:
    output = io.StringIO()
    call_command("issue_dev_token", *arguments, stdout=output)
    return output.getvalue().strip()


def test_issued_token_is_valid_and_carries_its_claims(api: Client, secret: None) -> None:
    developer = new_id()
    token = issue(str(USER).upper(), "--developer-id", str(developer), "--minutes", "5")

    assert link(api, token).status_code == 200
    assert Session.objects.get().user_id == USER
    payload = jwt.decode(token, options={"verify_signature": False})
    assert payload["developer_id"] == str(developer)
    assert payload["exp"] - payload["iat"] == 300


@pytest.mark.parametrize("minutes", ["0", "-5", "99999999999", "x"])
def test_lifetime_that_is_no_date_is_refused(secret: None, minutes: str) -> None:
    with pytest.raises(CommandError, match="--minutes"):
        issue(str(USER), "--minutes", minutes)


@pytest.mark.parametrize("user_id", ["", "somebody", NIL])
def test_token_for_nobody_is_not_issued(secret: None, user_id: str) -> None:
    with pytest.raises(CommandError, match="not valid"):
        issue(user_id)


@pytest.mark.parametrize(("development", "key"), [(False, SECRET), (True, ""), (False, "")])
def test_token_is_not_issued_outside_development_or_without_the_secret(
    settings: Any, development: bool, key: str
) -> None:
    settings.DEVELOPMENT, settings.JWT_DEVELOPMENT_SECRET = development, key
    with pytest.raises(CommandError, match="JWT_DEVELOPMENT_SECRET"):
        issue(str(USER))

"""manage.py issue_dev_token USER_ID"""

from argparse import ArgumentParser, ArgumentTypeError
from datetime import UTC, datetime, timedelta
from typing import Any

import jwt
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from pinactivity.core.ids import parse_id


def _minutes(text: str) -> int:
    """Read minutes, at most the longest lifetime of a token that the API accepts."""
    minutes = int(text)
    most = settings.JWT_MAX_LIFETIME // timedelta(minutes=1)
    if not 1 <= minutes <= most:
        raise ArgumentTypeError(f"must be from 1 to {most} (JWT_MAX_LIFETIME)")
    return minutes


class Command(BaseCommand):
    help = "Print a token for a user, signed with the development secret; never in production."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("user_id")
        parser.add_argument("--developer-id", help="The claim developer_id.")
        parser.add_argument(
            "--minutes", type=_minutes, default=60, help="For how long it is valid (60)."
        )

    def handle(
        self,
        *args: Any,
        user_id: str,
        developer_id: str | None,
        minutes: int,
        **options: Any,
    ) -> None:
        if not settings.DEVELOPMENT or not settings.JWT_DEVELOPMENT_SECRET:
            raise CommandError(
                "Tokens are made only with PINACTIVITY_DEVELOPMENT=true and JWT_DEVELOPMENT_SECRET."
            )
        try:
            claims: dict[str, Any] = {"sub": str(parse_id(user_id))}
            if developer_id is not None:
                claims["developer_id"] = str(parse_id(developer_id))
        except ValueError as exc:
            raise CommandError(f"An id is not valid: {exc}") from None
        now = datetime.now(UTC)
        claims |= {
            "iss": settings.JWT_ISSUER,
            "aud": settings.JWT_AUDIENCE,
            "iat": now,
            "exp": now + timedelta(minutes=minutes),
        }
        self.stdout.write(jwt.encode(claims, settings.JWT_DEVELOPMENT_SECRET, algorithm="HS256"))

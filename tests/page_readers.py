"""Users of the page of dev-stats."""

from uuid import UUID

from django.contrib.auth.models import User
from django.test import Client

from devstats.models import DeveloperAccess

PAGE, LOGIN, LOGOUT = "/dev-stats/", "/dev-stats/login/", "/dev-stats/logout/"
PASSWORD = "right horse, wrong stable"


def make_reader(*developers: UUID, name: str = "builder") -> User:
    """A user who is no staff and may read these developers."""
    user = User.objects.create_user(name, password=PASSWORD)
    for developer in developers:
        DeveloperAccess.objects.create(user=user, developer_id=developer)
    return user


def reader(*developers: UUID, name: str = "builder") -> Client:
    """Return their browser, logged in."""
    client = Client()
    client.force_login(make_reader(*developers, name=name))
    return client

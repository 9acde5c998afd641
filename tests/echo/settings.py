"""The service's settings with the app in them."""

from pinactivity.settings import *  # noqa: F403 - all of them
from pinactivity.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.echo"]

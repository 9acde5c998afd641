"""The service's own WSGI application with one endpoint more, which does nothing."""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "pinactivity.settings")

from django.conf import settings

settings.ROOT_URLCONF = "bench.urls"

from pinactivity.wsgi import application  # noqa: E402, F401 - after the line above

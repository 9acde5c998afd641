"""The WSGI application; refuses to start where the checks find a fault."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "pinactivity.settings")

application = get_wsgi_application()

from pinactivity.checks import enforce  # noqa: E402 - needs the apps

enforce()

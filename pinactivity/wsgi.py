"""The WSGI application; it refuses to start when a check finds an error."""

import os
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "pinactivity.settings")

try:
    application = get_wsgi_application()
except ImproperlyConfigured as exc:
    sys.exit(str(exc))

from pinactivity.conf.checks import enforce

enforce()

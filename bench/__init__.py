"""Benches: what the service does, measured against its limit in the same run.

`make bench NAME=closer` runs one on embedded servers. Progress goes to stderr; the last line of
stdout is one JSON object.
"""

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "pinactivity.settings")
# Hundreds of lines "batch processed" would bury the progress.
os.environ.setdefault("LOG_LEVEL", "WARNING")
django.setup()

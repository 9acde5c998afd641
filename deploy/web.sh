#!/bin/sh
# Serve the web. One process a container, so that /metrics is the whole container's; more come
# by more containers.
#
# Besides ALLOWED_HOSTS the process answers to its own address. That is how each of several web
# containers is asked by Prometheus, which cannot send another Host, and by its health check.
set -eu
own=$(hostname -i | tr ' ' ',')
ALLOWED_HOSTS="${ALLOWED_HOSTS:?},$own"
export ALLOWED_HOSTS
exec granian --interface wsgi --host 0.0.0.0 --port 8000 --no-ws --workers 1 \
    --blocking-threads 4 --workers-kill-timeout 10 pinactivity.wsgi:application

#!/bin/sh
# Serve the web. One process a container, so that /metrics is the whole container's; more come
# by more containers.
#
# Besides ALLOWED_HOSTS the process answers to its own address. That is how each of several web
# containers is asked by Prometheus, which cannot send another Host, and by its health check.
#
# WEB_CPU ties the process to one core, where its cores are its own: threads that hand over the
# interpreter to each other do it faster there (docs/adr/0001-web-server.md).
set -eu
own=$(hostname -i | tr ' ' ',')
ALLOWED_HOSTS="${ALLOWED_HOSTS:?},$own"
export ALLOWED_HOSTS
exec ${WEB_CPU:+taskset --cpu-list "$WEB_CPU"} granian --interface wsgi --host 0.0.0.0 --port 8000 --no-ws --workers 1 \
    --blocking-threads 4 --workers-kill-timeout 10 pinactivity.wsgi:application

#!/bin/sh
# Serve the web by one process a container, so that /metrics is of the whole container. More processes
# are more containers.
#
# Besides ALLOWED_HOSTS the process answers to its own address. Prometheus and the health check reach
# each of several web containers by it, and Prometheus cannot send another Host.
#
# WEB_CPU ties the process to one core. Its threads pass the interpreter to each other faster there, if
# the core is its own (docs/adr/0001-web-server.md).
set -eu
own=$(hostname -i | tr ' ' ',')
ALLOWED_HOSTS="${ALLOWED_HOSTS:?},$own"
export ALLOWED_HOSTS
exec ${WEB_CPU:+taskset --cpu-list "$WEB_CPU"} granian --interface wsgi --host 0.0.0.0 --port 8000 --no-ws --workers 1 \
    --blocking-threads 4 --workers-kill-timeout 10 pinactivity.wsgi:application

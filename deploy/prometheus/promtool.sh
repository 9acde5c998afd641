#!/bin/sh
# Check Prometheus' files and run the alerts' tests: `make alerts`.
#
# promtool is the one on the PATH, else that of Debian's package, unpacked under .data.
set -eu
cd "$(dirname "$0")"
unpacked=../../.data/promtool
promtool=$(command -v promtool || echo "$unpacked/usr/bin/promtool")
if ! [ -x "$promtool" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "promtool is not installed; Prometheus brings it, and Debian's package prometheus." >&2
        exit 1
    fi
    mkdir -p "$unpacked"
    (
        cd "$unpacked"
        apt-get download --quiet prometheus || { apt-get update --quiet && apt-get download --quiet prometheus; }
        dpkg --extract prometheus_*.deb .
        rm prometheus_*.deb
    )
fi
"$promtool" check config prometheus.yml
"$promtool" test rules alerts_test.yml

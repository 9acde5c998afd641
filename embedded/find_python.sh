#!/bin/sh
# Print the first Python that can run this: the Makefile's own way to make a virtual environment.
#
# A candidate is run, not only found: a version manager's stand-in may be there for a Python that
# is not. Arguments are candidates to try instead.
set -u
[ $# -gt 0 ] || set -- python3.11 python3.12 python3.13 python3.14 python3
without_venv=
for candidate in "$@"; do
    if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        continue
    fi
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        command -v "$candidate"
        exit 0
    fi
    : "${without_venv:=$candidate}"
done
if [ -n "$without_venv" ]; then
    package=$("$without_venv" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')
    echo "$without_venv has no module venv; on Debian or Ubuntu: apt install $package" >&2
else
    echo "No Python 3.11 or newer among: $*. Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python" >&2
fi
exit 1

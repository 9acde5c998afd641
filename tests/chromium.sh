#!/bin/sh
# Get a Chromium for the tests of pages: `make test` calls it, and goes on without one.
#
# It is the one on the PATH, else that of Debian's packages, unpacked under .data with the libraries
# that this machine lacks; nothing is installed. .data/chromium/run starts it.
set -eu
cd "$(dirname "$0")/.."
for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
unpacked=.data/chromium
if [ -x "$unpacked/run" ]; then exit 0; fi
if ! command -v apt-get >/dev/null; then
    echo "No Chromium: tests of pages in a browser are skipped." >&2
    exit 0
fi
rm -rf "$unpacked"
mkdir -p "$unpacked/partial" "$unpacked/files"
fetch() {
    # To plan and download needs no right to install.
    apt-get install --quiet --quiet --yes --no-install-recommends --download-only \
        -o Debug::NoLocking=1 -o Dir::Cache::archives="$PWD/$unpacked" chromium-headless-shell
}
if ! { fetch || { apt-get update --quiet --quiet && fetch; }; } >"$unpacked/log" 2>&1; then
    echo "No Chromium from Debian's packages, tests of pages in a browser are skipped:" >&2
    tail -n 3 "$unpacked/log" >&2
    exit 0
fi
for package in "$unpacked"/*.deb; do
    dpkg --extract "$package" "$unpacked/files"
    rm "$package"
done
cat >"$unpacked/run" <<'END'
#!/bin/sh
files=$(dirname "$(readlink -f "$0")")/files/usr/lib
for folder in "$files"/*-linux-gnu "$files"/*-linux-gnu/pulseaudio; do
    LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
done
export LD_LIBRARY_PATH
exec "$files/chromium/chromium-headless-shell" "$@"
END
chmod +x "$unpacked/run"

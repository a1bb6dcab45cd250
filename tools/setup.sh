#!/usr/bin/env bash
# Installs what a make target needs: Debian packages by name (as root, else a message that names them) and the pinned Python environment .venv.
# Usage: tools/setup.sh [core] [python] [demo] [lint] [sanitize] [wheel] [peer]
set -euo pipefail
cd "$(dirname "$0")/.."

apt_core=(g++ cmake ninja-build libhwy-dev nlohmann-json3-dev libcli11-dev libgtest-dev zlib1g-dev)
apt_python=(python3 python3-venv)
apt_lint=(clang-format git)
apt_sanitize=(clang libclang-rt-dev)

need_apt() {
  command -v dpkg-query >/dev/null || { echo "setup: not a Debian system, taking these as installed: $*"; return; }
  local missing=()
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" -ne 0 ]; then
    echo "setup: missing packages. Run: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  echo "setup: apt-get install ${missing[*]}"
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } >build/apt.log 2>&1 ||
    { tail -20 build/apt.log >&2; exit 1; }
}

have_nvcc() { command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || [ -n "${CUDACXX:-}" ]; }

# pip_install NAME FILE [uv options]: installs FILE into .venv once per content.
pip_install() {
  local name=$1 file=$2
  shift 2
  local stamp=".venv/.stamp-$name-$(sha256sum "$file" | cut -c1-16)"
  [ -e "$stamp" ] && return
  echo "setup: .venv <- $file"
  .venv/bin/python -m uv pip install -q --python .venv/bin/python "$@" -r "$file"
  rm -f .venv/.stamp-"$name"-*
  touch "$stamp"
}

need_venv() {
  if [ ! -x .venv/bin/python ]; then
    local python=${NYBBLE_BASE_PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
      { echo "setup: $("$python" --version) found, Python 3.10 to 3.13 expected; name one in NYBBLE_BASE_PYTHON" >&2; exit 1; }
    "$python" -m venv .venv
    .venv/bin/python -m pip install -q --disable-pip-version-check uv==0.13.9
  fi
  pip_install dev requirements/dev.txt
  if [ "${NYBBLE_CUDA:-AUTO}" != OFF ] && ! have_nvcc; then
    pip_install nvcc requirements/nvcc.txt
  fi
}

# An environment of its own: build/peer.
need_peer() {
  local stamp="build/peer/.stamp-$(sha256sum requirements/peer-soup.txt | cut -c1-16)"
  [ -e "$stamp" ] && return
  echo "setup: build/peer <- requirements/peer-soup.txt"
  rm -rf build/peer
  .venv/bin/python -m uv venv -q --python .venv/bin/python build/peer
  .venv/bin/python -m uv pip install -q --python build/peer/bin/python -r requirements/peer-soup.txt
  touch "$stamp"
}

mkdir -p build
for part in "$@"; do
  case $part in
    core) need_apt "${apt_core[@]}" ;;
    python) need_apt "${apt_python[@]}"; need_venv ;;
    demo) pip_install demo requirements/demo.txt --no-deps ;;
    lint) need_apt "${apt_lint[@]}" ;;
    sanitize) need_apt "${apt_sanitize[@]}" ;;
    peer) need_peer ;;
    wheel) pip_install wheel requirements/wheel.txt ;;
    *) echo "setup: unknown part '$part', expected core, python, demo, lint, sanitize, wheel or peer" >&2; exit 1 ;;
  esac
done

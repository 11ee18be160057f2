#!/usr/bin/env bash
# Make the harness: envs/harness/.venv with exactly what the locks say, and kvladder itself from this tree.
# Doing it again installs nothing. With --dev also what tests and linters need.
set -euo pipefail
export LC_ALL=C.UTF-8 PYTHONUTF8=1
cd "$(dirname "$0")/../.."
home=envs/harness/.venv
locks=(envs/harness/requirements.lock)
[ "${1:-}" != --dev ] || locks+=(envs/harness/requirements-dev.lock)

give_up() {
  echo "kvladder: $*" >&2
  exit 1
}

# WeasyPrint draws with Pango; fonts, so that reports look alike everywhere.
packages=(libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0 fonts-dejavu-core)
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  give_up "Python 3.11 or newer is needed, and 3.11 itself for the cpu stack (make demo); name one with PYTHON=..., e.g. make demo PYTHON=python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)

missing=()
if command -v dpkg-query >/dev/null; then
  for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
fi
if [ ${#missing[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] ||
    give_up "Debian packages are missing, and only root can install them: apt-get install ${missing[*]}"
  echo "apt-get install ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq || true
  apt-get install -y -qq "${missing[@]}" >/dev/null ||
    give_up "Debian packages could not be installed; without a network, provide them: ${missing[*]}"
fi

# The stamp says what was installed, and in which folder: environments don't survive a move.
stamp_of() { printf '%s\n' "$PWD" "$@" && cat "$@" pyproject.toml envs/harness/install.sh; }
have=$(cat "$home/kvladder-stamp" 2>/dev/null || true)
[ "$have" != "$(stamp_of "${locks[@]}")" ] || exit 0
# What tests need as well is more than enough.
[ "$have" != "$(stamp_of envs/harness/requirements.lock envs/harness/requirements-dev.lock)" ] || exit 0

if ! { [ "${have%%$'\n'*}" = "$PWD" ] && "$home/bin/python" -m pip --version >/dev/null 2>&1; }; then
  echo "harness: $home with $("$python" --version)"
  "$python" -m venv --clear "$home" || give_up "$python can't make a virtual environment: apt-get install python3-venv"
fi
rm -f "$home/kvladder-stamp"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_PROGRESS_BAR=off PYTHONUNBUFFERED=1
total=$(cat "${locks[@]}" | grep -c '==')
requirements=()
for lock in "${locks[@]}"; do requirements+=(-r "$lock"); done
"$home/bin/python" -m pip install --no-deps "${requirements[@]}" |
  awk -v total="$total" '/^(Collecting|Processing|Requirement already)/ {n++; if (n % 10 == 0) print "harness: " n "/" total}' ||
  give_up "the harness can't be installed from the package index that pip is configured for; provide one (PIP_INDEX_URL, PIP_FIND_LINKS) and run again"
# kvladder itself is used from this tree. A relative path, because Python reads such files in the locale's encoding, and
# the folder's name may have letters that a POSIX locale doesn't.
rm -f "$home"/lib/python3.*/site-packages/__editable__*kvladder*
for site in "$home"/lib/python3.*/site-packages; do echo ../../../../../../workflow >"$site/kvladder.pth"; done
stamp_of "${locks[@]}" >"$home/kvladder-stamp"

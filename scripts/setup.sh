#!/usr/bin/env bash
# Makes the virtual environment that the Makefile works in: pinned dependencies, then this package, editable.
# usage: scripts/setup.sh .venv
set -euo pipefail

venv=${1:?usage: scripts/setup.sh VENV}
started=$SECONDS

supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if supported "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  local tried=${PYTHON:-python3}
  echo "epinorm needs Python 3.11 or newer; $tried is $("$tried" --version 2>/dev/null || echo not there)." \
       "Name another one with: make PYTHON=/path/to/python3.12 ..." >&2
  return 1
}

step() { printf '[%s] %s\n' "$1" "$2"; }

# pip draws a progress bar on a terminal and writes a line for each package elsewhere;
# what is already there is not worth a line.
install() {
  local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@")
  if [ -t 1 ]; then
    "${pip[@]}"
  else
    "${pip[@]}" | { grep --line-buffered -v '^Requirement already satisfied' || true; }
  fi
}

python=$(find_python)
if ! supported "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  step 1/4 "making $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv" || {
    echo "Python cannot make virtual environments here; on Debian and Ubuntu: apt install python3-venv" >&2
    rm -rf "$venv"
    exit 1
  }
else
  step 1/4 "$venv is there"
fi

if command -v nvidia-smi >/dev/null 2>&1; then
  step 2/4 "installing PyTorch and what it needs (a CUDA build: several GB)"
else
  step 2/4 "installing PyTorch and what it needs (the large one: allow a minute)"
fi
install -c constraints.txt "$(grep '^torch==' requirements.txt)"

step 3/4 "installing the CUDA compiler library, command line, plots and tools"
install -r requirements-dev.txt

step 4/4 "installing epinorm itself, editable"
install --quiet --no-deps --no-build-isolation --editable .

echo "$venv is ready after $((SECONDS - started)) s"

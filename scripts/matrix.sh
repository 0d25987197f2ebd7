#!/usr/bin/env bash
# Runs the tests that need no GPU against other versions of PyTorch, each in an environment of its own.
# usage: scripts/matrix.sh VERSION... [-- pytest's arguments]
# TORCH_INDEX names an index of CPU builds (https://download.pytorch.org/whl/cpu); without it pip takes what
# PyPI has, on Linux the CUDA build of several GB. MATRIX_DIR keeps the environments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do versions+=("$1"); shift; done
[ $# -eq 0 ] || shift
folder=${MATRIX_DIR:-.matrix}
index=()
[ -z "${TORCH_INDEX:-}" ] || index=(--index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple)

results=()
for version in "${versions[@]}"; do
  venv=$folder/$version
  if [ ! -e "$venv/.ready" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input)
    "${pip[@]}" "${index[@]}" "torch==$version"
    # The tools' pins but for PyTorch's own.
    cat requirements.txt requirements-dev.txt | grep -vE '^(torch==|-|#)' >"$venv/requirements.txt"
    "${pip[@]}" -r "$venv/requirements.txt"
    "${pip[@]}" --no-deps --no-build-isolation --editable .
    touch "$venv/.ready"
  fi
  echo "PyTorch $version"
  if PYTHONPATH=src "$venv/bin/python" -m pytest -q -m "not gpu and not models" --timeout 300 \
      --junitxml="$venv/report.xml" "$@"; then
    results+=("$version passed")
  else
    results+=("$version FAILED")
  fi
done
# A part of the tests says nothing about the version. Rows last: tests hold the pages against them.
if [ $# -eq 0 ]; then
  for version in "${versions[@]}"; do
    PYTHONPATH=src "$folder/$version/bin/python" scripts/matrix_row.py "$folder/$version/report.xml"
  done
fi
printf 'PyTorch %s\n' "${results[@]}"
[[ "${results[*]}" != *FAILED* ]]

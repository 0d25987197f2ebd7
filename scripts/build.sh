#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel. Their links are the address that this repository was cloned from,
# where that is on the web; PROJECT_URL names another one, and without either there are none.
# usage: scripts/build.sh PYTHON FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:?usage: scripts/build.sh PYTHON FOLDER}
folder=$(mkdir -p "${2:?usage: scripts/build.sh PYTHON FOLDER}" && cd "$2" && pwd)

# A copy of what belongs to the source: a build leaves files behind, and the links are written into it.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
list() {
  if [ -e .git ]; then
    git ls-files -z --cached --others --exclude-standard
  else
    find . -type f -not -path './.venv/*' -not -path './build/*' -not -path './dist/*' -not -path './site/*' \
      -not -path '*/__pycache__/*' -not -path '*.egg-info/*' -print0
  fi
}
list | tar --null --files-from - --create | tar --extract --directory "$tree"

url=${PROJECT_URL:-$(git remote get-url origin 2>/dev/null || true)}
case $url in
  git@*:*) url=https://$(tr : / <<<"${url#git@}") ;;
  ssh://git@*) url=https://${url#ssh://git@} ;;
esac
url=${url%.git}
case $url in
  https://*)
    cat >>"$tree/pyproject.toml" <<END

[project.urls]
Source = "$url"
Documentation = "$url/tree/HEAD/docs"
Changelog = "$url/blob/HEAD/CHANGELOG.md"
Issues = "$url/issues"
END
    ;;
  *) echo "built without links: this clone has no address on the web; PROJECT_URL names one" >&2 ;;
esac

"$python" -m build --no-isolation --outdir "$folder" "$tree" >"$tree/.log" 2>&1 || { cat "$tree/.log" >&2; exit 1; }
ls "$folder"

#!/usr/bin/env bash
# Installs, on a machine without a package index, what pack_offline.py has put beside this file.
usage="usage: bash unpack_offline.sh FOLDER     (PYTHON=… chooses the interpreter; default: python3)"
set -euo pipefail
case "${1:-}" in ''|-*) echo "$usage" >&2; exit 2 ;; esac
parts=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"; site=$(cd "$1" && pwd)
python=$(command -v "${PYTHON:-python3}")

echo "checking the parts"
(cd "$parts" && sha256sum --quiet --strict -c SHA256SUMS) || {
  echo "$parts: a part is missing or damaged (above): carry it once more" >&2; exit 1; }

unpacked=$(mktemp -d "$site/.unpacked-XXXXXX"); trap 'rm -rf "$unpacked"' EXIT
(cd "$parts" && awk '{print $2}' SHA256SUMS | xargs cat) | tar -xf - -C "$unpacked"
echo "installing into $site"
"$python" -m pip install --disable-pip-version-check --quiet --root-user-action=ignore --no-index --no-deps --upgrade \
  --no-compile --target "$site" "$unpacked"/wheels/*.whl
if [ -d "$unpacked/also" ]; then cp -r "$unpacked/also/." "$site/also"; fi
"$python" -W ignore -m compileall -q -j 0 "$site" >/dev/null || true  # some packages carry templates that are no Python

{
  echo "export PYTHONPATH=$site\${PYTHONPATH:+:\$PYTHONPATH} PATH=$site/bin:\$PATH"
  echo "export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1"
  sed -n 's/^[A-Z]/export &/p' "$unpacked/environment"
} > "$site/environment.sh"

echo "done; in every new shell:  . $site/environment.sh"
. "$site/environment.sh"
rm -rf "$unpacked"
"$python" -P -m grpo_tui doctor ${PROFILE:+--profile "$PROFILE"}

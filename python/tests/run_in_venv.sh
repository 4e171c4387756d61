#!/usr/bin/env bash
# Runs a Python test with the Python that has torch: the one of .venv (tools/setup), else that of $TORCH_DIR. The package is the one
# that was built.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
python=$root/.venv/bin/python
if [[ ! -x "$python" && -n "${TORCH_DIR:-}" ]]; then
  python=${TORCH_DIR%/lib/python*}/bin/python
fi
if [[ ! -x "$python" ]]; then
  echo "there is no Python with torch: run ./tools/setup" >&2
  exit 1
fi
export PYTHONPATH="$PWD/python:$PWD/python/tests" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" "$@"

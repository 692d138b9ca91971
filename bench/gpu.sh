#!/usr/bin/env bash
# Measures the engine on a GPU and compares it with the device's own limits; needs no network.
#
#   bench/gpu.sh [--tiny] [--out DIRECTORY] [--wheels DIRECTORY]
#
# --tiny    use a tiny model, on any device: shows that this script works
# --out     directory of the results (default: bench/results)
# --wheels  wheels of packages that PYTHON lacks; all are installed under build/gpu first
#
# PYTHON names the interpreter (default: .venv's, else python3), which has torch with CUDA, or its
# wheel is in --wheels. If a test under CUDA fails, it still measures, and then ends with an error.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi
words=()
tests=(tests/gpu tests/engine/paged/test_triton_decode_attention.py)
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels)
      "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu "$2"/*.whl
      shift 2 ;;
    --tiny)
      tests=(tests/gpu)  # the other is in the normal suite
      words+=("$1"); shift ;;
    *) words+=("$1"); shift ;;
  esac
done
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD:build/gpu:${PYTHONPATH:-}"

failed=0
"$PYTHON" -m pytest -c /dev/null --rootdir . -p no:asyncio -p no:cacheprovider -q -rs "${tests[@]}" || failed=$?
"$PYTHON" -m bench.gpu ${words[@]+"${words[@]}"}
exit "$failed"

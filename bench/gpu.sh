#!/usr/bin/env bash
# The engine on a GPU, held against what the device can do; needs no network.
#
#   bench/gpu.sh [--tiny] [--out DIRECTORY] [--wheels DIRECTORY]
#
# --tiny    a tiny model, on whatever device there is: shows that this script works
# --out     where results go (bench/results)
# --wheels  wheels of what PYTHON lacks, all of which are installed under build/gpu first
#
# PYTHON names the interpreter (.venv's, else python3); it has torch with CUDA, or finds its wheel
# in --wheels. Ends with an error if a test under CUDA fails, after measuring all the same.
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

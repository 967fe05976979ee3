#!/bin/sh
# Which build of jax this machine's devices need, and whether jax uses it.
#   accelerator.sh           prints cpu, cuda12, cuda13 or tpu
#   accelerator.sh check X   warns in a box if the jax of .venv does not use X
set -eu

# The driver and not the device decides: CUDA 13 needs driver 580 (and compute
# capability 7.5), CUDA 12 driver 525.
nvidia_driver() {
  nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null ||
    grep -o 'Module  *[0-9.]*' /proc/driver/nvidia/version 2>/dev/null | grep -o '[0-9.]*'
}

older_than_turing() {
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    awk -F. '$1 * 10 + $2 < 75 { old = 1 } END { exit !old }'
}

any_exists() { # "$@" is a glob that the caller left to the shell
  [ -e "$1" ]
}

has_tpu() {
  [ -n "${TPU_NAME:-}${TPU_WORKER_ID:-}${TPU_ACCELERATOR_TYPE:-}" ] && return
  # Other makers' devices carry the same names: one on the PCI bus must be Google's.
  { any_exists /dev/accel[0-9]* || any_exists /dev/vfio/[0-9]*; } &&
    grep -qs 0x1ae0 /sys/bus/pci/devices/*/vendor
}

detect() {
  driver=$(nvidia_driver | head -n 1) || true
  major=${driver%%.*}
  case $major in '' | *[!0-9]*) major= ;; esac
  if [ -n "$major" ] && [ "$major" -ge 580 ] && ! older_than_turing; then
    echo cuda13
  elif [ -n "$major" ] || any_exists /dev/nvidia[0-9]*; then
    echo cuda12
  elif has_tpu; then
    echo tpu
  else
    echo cpu
  fi
}

box() { # each argument a line
  rule='+------------------------------------------------------------------------------+'
  printf '\n%s\n' "$rule"
  printf '%s\n' "$@" | fold -s -w 76 | while IFS= read -r line; do
    printf '| %-76s |\n' "$line"
  done
  printf '%s\n\n' "$rule"
}

check() {
  case $1 in cuda*) expected=gpu ;; *) expected=$1 ;; esac
  [ "$expected" = cpu ] || [ "${JAX_PLATFORMS:-}" = cpu ] && return
  log=$(mktemp)
  found=$(XLA_PYTHON_CLIENT_PREALLOCATE=false .venv/bin/python -c \
    'import jax; print(jax.default_backend())' 2>"$log" | tail -n 1)
  if [ "$found" != "$expected" ]; then
    box "WARNING: this machine has a $1 device, but jax does not use it." \
      "What runs now runs on: ${found:-nothing, jax fails}." \
      "jax says: $(tail -n 3 "$log" | grep . || echo nothing)" \
      "To install again: rm -rf .venv, then make. For another build of jax:" \
      "make ACCELERATOR=cuda12 (or cuda13, tpu; cpu if this is what you want)." >&2
  fi
  rm -f "$log"
}

case ${1:-detect} in
  detect) detect ;;
  check) check "$2" ;;
  *) echo "usage: $0 [check cpu|cuda12|cuda13|tpu]" >&2 && exit 2 ;;
esac

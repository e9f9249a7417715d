#!/usr/bin/env bash
# The kernel tests on the oldest and the newest supported Triton, each in an environment of its own, which is laid over
# .venv: only triton (and, beside 3.6, an older numpy) is installed in it. --newest: there alone. Other arguments go to
# pytest, after the folder (or, if they name some, files) of tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
status=0
# Triton 3.6's interpreter turns one-element arrays into sizes, which numpy refuses from 2.4 on.
supported=('36 triton==3.6.* numpy<2.4' '39 triton==3.9.*')
if [ "${1:-}" = --newest ]; then
  supported=("${supported[-1]}")
  shift
fi
case "$*" in *tests/kernels*) tests=() ;; *) tests=(tests/kernels) ;; esac
for wanted in "${supported[@]}"; do
  read -r name packages <<<"$wanted"
  env=.venv-triton$name
  if [ ! -e "$env/.installed" ]; then
    .venv/bin/python -m venv "$env"
    # shellcheck disable=SC2086
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps $packages
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    # addsitedir, so that the editable install of qkpipe works from here too.
    echo "import site; site.addsitedir('$base')" >"$site/qkpipe_base.pth"
    touch "$env/.installed"
  fi
  echo "== Triton $("$env/bin/python" -c 'import triton; print(triton.__version__)')"
  OMP_NUM_THREADS=1 "$env/bin/python" -m pytest "${tests[@]}" "$@" || status=1
done
exit $status

#!/bin/sh
# What the tests need beyond Python: a browser for the report, and the real Fashion-MNIST. As root on Debian or Ubuntu
# they are installed; elsewhere the tests that need them are skipped, with the reason.
set -eu
missing=""
command -v chromium >/dev/null 2>&1 || missing="$missing chromium fonts-dejavu-core"
[ -d /usr/share/datasets/fashion-mnist ] || missing="$missing dataset-fashion-mnist"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  apt-get update -qq
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
  echo "not installed, tests that need them are skipped:$missing"
fi

#!/bin/sh
# What the tests need beyond Python: a browser for the report, the real Fashion-MNIST, and with --full Slurm. As root on
# Debian or Ubuntu they are installed; elsewhere the tests that need them are skipped, with the reason.
set -eu
missing=""
# The headless shell needs a third of Chromium's processor time for a page; not every release has it.
command -v chromium-headless-shell >/dev/null 2>&1 || missing="$missing chromium-headless-shell fonts-dejavu-core"
[ -d /usr/share/datasets/fashion-mnist ] || missing="$missing dataset-fashion-mnist"
[ "${1:-}" != --full ] || command -v slurmctld >/dev/null 2>&1 || missing="$missing slurmctld slurmd slurm-client munge"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  apt-get update -qq
  apt-cache show chromium-headless-shell >/dev/null 2>&1 ||
    missing=$(echo "$missing" | sed s/chromium-headless-shell/chromium/)
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
elif [ "$missing" != " chromium-headless-shell fonts-dejavu-core" ] || ! command -v chromium >/dev/null 2>&1; then
  echo "not installed, tests that need them are skipped:$missing"
fi

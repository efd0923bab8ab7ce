#!/bin/sh
# The engine against DDP on shaped links (CPU, four emulated nodes, VGG-11): writes two files under benchmarks/results.
# Run it on a quiet machine: sh scripts/bench-engine.sh
set -eu
cd "$(dirname "$0")/.."
for bandwidth in 200Mbit 1Gbit; do
  out=runs/bench-engine-$bandwidth
  rm -rf "$out"
  .venv/bin/syncline compare --model vgg11 --nodes 4 --bandwidth "$bandwidth" --batch 64 --steps "${STEPS:-24}" \
    --set train.test_samples=0 --out "$out" --strategies \
    "ddp,syncline,ddp(bucket_mb=5),ddp-bf16,syncline(bf16),ddp-powersgd(rank=4),syncline(powersgd(rank=4))"
  cp "$out/results.json" "benchmarks/results/engine-vgg11-4nodes-$(echo $bandwidth | tr A-Z a-z).json"
done

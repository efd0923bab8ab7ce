"""Loss curves of one model with several codecs and seeds, trained as in `bench convergence`, several at a time.

    python scripts/convergence_seeds.py --model vgg19 --data "fashion-mnist(channels=3)" --device cuda \
        --codecs "none,powersgd(rank=32) | bf16,powersgd(rank=64) | bf16,acpsgd(rank=64) | bf16" \
        --optimizer "adam(lr=0.0001)" --seeds 3 --at-once 8 --out benchmarks/results/convergence-vgg19-h200.json
"""

import argparse
import json
import multiprocessing
from pathlib import Path

import torch

from syncline.bench.convergence.run import Options, train
from syncline.bench.output import environment
from syncline.files import write_text
from syncline.spec import split


def one(job: tuple[str, int, argparse.Namespace]) -> dict:
    """One training: a row of `bench convergence`, with its seed."""
    codec, seed, given = job
    torch.set_num_threads(2)
    options = Options(
        model=given.model, data=given.data, optimizer=given.optimizer, workers=given.workers, batch=given.batch,
        steps=given.steps, seed=seed, evaluate_every=200, device=given.device,
    )  # fmt: skip
    return train(codec, options, data=given.data) | {"seed": seed}


def main() -> None:
    """Train all combinations, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vgg11(width=0.125)")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--codecs", default="none,powersgd(rank=32) | bf16")
    parser.add_argument("--optimizer", default="adam(lr=0.0001)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    jobs = [(codec, seed, given) for seed in range(given.seeds) for codec in split(given.codecs)]
    setting = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
    rows: list[dict] = []
    with multiprocessing.get_context("spawn").Pool(given.at_once) as pool:
        for row in pool.imap_unordered(one, jobs):
            rows.append(row)
            print(f"{row['codec']}, seed {row['seed']}: accuracy {row['accuracy']:.1%}, loss {row['final_loss']:.4f}")
            content = {"environment": environment(torch.device(given.device)), "setting": setting, "rows": rows}
            write_text(json.dumps(content, indent=1) + "\n", given.out)


if __name__ == "__main__":
    main()

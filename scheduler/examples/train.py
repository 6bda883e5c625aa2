"""Example of a training script: uses the CPU for some seconds and prints a loss."""

import argparse
import os
import random
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--llm", default="none")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="per epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cuda", default="")
    args = parser.parse_args()
    share = os.environ.get("GPUJOB_SHARE")
    print(f"training {args.llm} with {share} of GPU {args.cuda} (sees {os.environ.get('CUDA_VISIBLE_DEVICES')})")
    dice = random.Random(args.seed)
    loss = 3.0
    for epoch in range(1, args.epochs + 1):
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            loss *= 1 - 1e-6 * dice.random()
        loss *= 0.7 + 0.1 * dice.random()
        print(f"epoch {epoch}/{args.epochs}  loss {loss:.3f}")
    print("nothing was saved: this is an example")


if __name__ == "__main__":
    main()

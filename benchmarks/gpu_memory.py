"""Highest memory of the GPU in a step with 1 to 8 shards of the trainer, against as many micro-batches elsewhere.

Counted is what tensors hold (`torch.cuda.max_memory_allocated`), model, optimizer and batch included, in steady steps
of one worker. k shards should need at most ceil(log2 k) + 1 gradients at a time.

Exit code 3: more than torch's DistributedDataParallel needs. Of the trainer only one shard is compared so: several may
need more by rights.
"""

import argparse
import gc
import math
import sys

import torch
from gpu_device import MIB, empty_cache, name, peak_bytes, reset_peak, synchronize
from gpu_models import Case, cases
from gpu_sides import DDP, SIDES, TORCH, TRAINER, make_step
from gpu_workers import join_alone
from tables import print_row

WARM_UP_STEPS = 3
MISSED = 3
"""Exit code where everything ran and a goal was missed."""
SLACK = 1.005


def measure(side: str, case: Case, num_shards: int) -> int:
    """Return the highest memory of a side in some steps."""
    step = make_step(side, case, num_shards=num_shards)
    for _ in range(WARM_UP_STEPS):
        step()
    synchronize()
    reset_peak()
    for _ in range(2):
        step()
    synchronize()
    return peak_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["gpt", "resnet"])
    parser.add_argument("--shards", type=lambda text: list(map(int, text.split(","))), default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--small", action="store_true", help="a dry run on the CPU")
    options = parser.parse_args()
    shards = [1, 8] if options.small else options.shards
    join_alone()
    known = cases(is_small=options.small)
    missed = []
    print(f"{name()}, torch {torch.__version__}, MiB\n")
    for model in options.models:
        case = known[model]
        gradient = sum(parameter.nbytes for parameter in case.build().parameters()) / MIB
        print(f"{case.title}, a gradient is {gradient:.0f} MiB\n")
        print_row("shards", *SIDES, "ls DDP / torch DDP", "ls Trainer / torch DDP", "gradients of the trainer, at most")
        print_row(*["---"] * (4 + len(SIDES)))
        for num_shards in shards:
            found = {}
            for side in SIDES:
                found[side] = measure(side, case, num_shards)
                gc.collect()
                empty_cache()
            ratios = {side: found[side] / found[TORCH] if found[TORCH] else 0.0 for side in (DDP, TRAINER)}
            print_row(
                str(num_shards),
                *(f"{found[side] / MIB:.0f}" for side in SIDES),
                *(f"{ratio:.3f}" for ratio in ratios.values()),
                str(math.ceil(math.log2(num_shards)) + 1),
            )
            if ratios[DDP] > SLACK or (num_shards == 1 and ratios[TRAINER] > SLACK):
                missed.append(f"{case.title}, {num_shards} shards: {ratios}")
        print()
    print("\n".join(missed), flush=True)
    sys.exit(MISSED if missed else 0)


if __name__ == "__main__":
    main()

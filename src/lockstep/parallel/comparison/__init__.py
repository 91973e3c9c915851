"""What the ranks of a `DistributedDataParallel` compare in each backward, without a message of their own.

A *record* is what one rank has done since the last reduction: steps, options of optimizers, parameters, forwards. Each
rank sums it up in one number that travels with the status, behind the last bucket. Where the numbers differ, all ranks
see that, exchange their records and come to the same *finding*, which all raise before any of them goes on.

Invariants:

- Nothing is computed per gradient, and parameters are read as a whole only where there is a reason.
- A difference in the numbers alone is no error: records decide, by what they hold.
- What is found on all ranks alike (a step with gradients of one rank alone) is raised at once, where it is.
"""

from lockstep.parallel.comparison.rank_comparison import ComparisonOptions, RankComparison, compare_at_start

__all__ = ["ComparisonOptions", "RankComparison", "compare_at_start"]

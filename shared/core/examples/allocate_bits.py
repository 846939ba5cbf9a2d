"""Give every matrix of a model a bit width, so that the total error is least within an average of 4.2 bits per weight.

Runs with numpy alone. The error of rounding a weight to b bits falls about fourfold with each bit.
"""

from collections import Counter

import numpy as np

from shared_core import solve_mckp

rng = np.random.default_rng(0)
bits = np.arange(2, 9)
size = rng.choice([1, 3, 4, 11], (400, 1)) * 2**20  # weights of each matrix
sensitivity = rng.lognormal(0, 1.5, (400, 1))
cost = size * bits
error = size * sensitivity * 4.0**-bits
budget = int(4.2 * size.sum())

best = solve_mckp(cost, -error, budget)
uniform = error[:, 2].sum()  # four bits everywhere
print(f"{best.cost / size.sum():.4f} bits per weight on average, proven optimal: {best.optimal}")
print(f"error {-best.value / uniform:.3f} of that of four bits everywhere")
for width, count in sorted(Counter(bits[best.choice].tolist()).items()):
    print(f"{width} bits: {count:3d} matrices")

"""An out-of-sample map between two large unpaired samples, on plain arrays.

Fits ten components to 20 000 samples on each side, transports, maps new samples, and compares with the true map.
"""

import numpy as np

import omt


def main() -> None:
    problem = omt.datasets.known_map(random_state=1)
    rng = np.random.default_rng(1)
    X, _ = problem.sample_source(20_000, rng)
    Y, _ = problem.sample_target(20_000, rng)  # other samples: nothing is paired
    plan = omt.transport(omt.fit_mixture(X, 10), omt.fit_mixture(Y, 10))

    new, component = problem.sample_source(5000, rng)
    error = omt.metrics.l2_uvp(plan.map(new), problem.map(new, component))
    print(f"unexplained variance of the map on new samples: {error:.2f} %")
    drawn = plan.map(new, kind="sample", rng=0)
    print(f"energy distance of drawn images to the target: {omt.metrics.energy_distance(drawn, Y[:5000]):.3f}")
    print(f"energy distance of the new samples themselves: {omt.metrics.energy_distance(new, Y[:5000]):.3f}")


if __name__ == "__main__":
    main()

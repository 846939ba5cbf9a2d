"""A time course from cells to fates and pictures.

Run it with a folder for the pictures: `python time_course.py out/`. It generates a branching differentiation, so it
needs
no download; replace the first line of `main` by `anndata.read_h5ad(...)` for your own data.
"""

import sys
from pathlib import Path

import omt


def main(out: Path) -> None:
    adata, truth = omt.datasets.branching_process()
    omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    omt.tl.transport(adata, time_key="time")

    print("Where the cells of time 0 are at time 4 (rows sum to 1):")
    print(omt.tl.transition_matrix(adata, source=0, target=4).round(2))

    omt.tl.fates(adata, terminal=["A1", "A2", "B1"])
    first = (adata.obs["time"] == 0).to_numpy() & (adata.obs["cell_type"] == "stem").to_numpy()
    mean = adata.obsm["omt_fates"][first].mean(axis=0)
    print("\nFates of the stem cells of time 0:", dict(zip(["A1", "A2", "B1"], mean.round(2).tolist(), strict=True)))
    print("A1 and A2 are of one branch, B1 of the other; the types were", ", ".join(truth.types))

    omt.pl.sankey(adata, save=out / "sankey.png")
    omt.pl.flow(adata, basis="tree", save=out / "flow.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))

"""What is stored in AnnData and on disk comes back as it was; what is damaged is refused with a sentence."""

from __future__ import annotations

import json

import anndata
import numpy as np
import pandas as pd
import pytest

import omt
from omt import io
from omt.grouped import GroupedMixtures
from omt.prepare import bin_times, prepare, project


@pytest.fixture(scope="module")
def course():
    """A fitted and transported time course; tests do not change it."""
    adata, _ = omt.datasets.branching_process(80, random_state=0)
    # names with a slash, as cell types have them, must survive every file format
    adata.obs["cell_type"] = adata.obs["cell_type"].cat.rename_categories({"A1": "CD4+/CD25 A1"})
    omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    omt.tl.transport(adata, time_key="time", tau=0.95)
    return adata


def same(first: GroupedMixtures, second: GroupedMixtures) -> bool:
    return (
        first.groups == second.groups
        and first.order == second.order
        and [m.names for m in first.mixtures] == [m.names for m in second.mixtures]
        and all(
            np.array_equal(a.coupling, b.coupling) for a, b in zip(first.transports, second.transports, strict=True)
        )
    )


def test_verbs_continue_after_h5ad_without_refitting(course, tmp_path):
    adata = course.copy()
    omt.tl.transition_matrix(adata, 0, 4)
    adata.write_h5ad(tmp_path / "course.h5ad")
    again = anndata.read_h5ad(tmp_path / "course.h5ad")
    for verb in ("push", "pull"):
        getattr(omt.tl, verb)(again, 0, 4, data="cell_type", subset="stem")
        getattr(omt.tl, verb)(adata, 0, 4, data="cell_type", subset="stem")
        assert np.array_equal(again.obs[f"omt_{verb}"], adata.obs[f"omt_{verb}"], equal_nan=True)
    omt.tl.fates(again)
    omt.tl.map_to(again, 0, 1)
    omt.tl.transport(again, time_key="time")
    assert "CD4+/CD25 A1" in omt.tl.transition_matrix(again, 0, 4).columns


def test_verbs_continue_after_zarr(course, tmp_path):
    pytest.importorskip("zarr")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zarr's formats
        course.write_zarr(tmp_path / "course.zarr")
        again = anndata.read_zarr(tmp_path / "course.zarr")
    assert same(io.read_uns(again), io.read_uns(course))


def test_uns_holds_arrays_strings_and_numbers_only(course):
    def leaves(value):
        if isinstance(value, dict):
            assert all(isinstance(key, str) and "/" not in key for key in value)
            for inner in value.values():
                yield from leaves(inner)
        else:
            yield value

    allowed = (np.ndarray, str, int, float, bool, np.number, np.bool_, list)
    assert all(isinstance(value, allowed) for value in leaves(course.uns["omt"]))
    assert course.uns["omt"]["format"] == 1


def test_an_unknown_format_is_refused_by_its_number(course):
    adata = course.copy()
    adata.uns["omt"]["format"] = 7
    with pytest.raises(ValueError, match="omt results are stored in format 7; this version of omt reads format 1"):
        omt.tl.transport(adata, time_key="time")


def test_a_missing_part_is_named(course):
    stored = dict(course.uns["omt"])
    del stored["mixtures"]
    with pytest.raises(ValueError, match="the stored omt results have no 'mixtures'"):
        io.from_dict(stored)


def test_a_model_folder_comes_back_as_it_was(course, tmp_path):
    model = io.read_uns(course)
    io.save_model(model, tmp_path / "chain")
    again = io.load_model(tmp_path / "chain", need="transport")
    assert same(model, again)
    assert again.settings == model.settings
    assert sorted(file.name for file in (tmp_path / "chain").iterdir()) == ["meta.json", "model.npz"]


def test_a_model_folder_of_another_format_is_refused(course, tmp_path):
    io.save_model(io.read_uns(course), tmp_path / "chain")
    arrays = dict(np.load(tmp_path / "chain" / "model.npz", allow_pickle=False))
    meta = json.loads(str(arrays["meta"]))
    np.savez(tmp_path / "chain" / "model.npz", **{**arrays, "meta": np.array(json.dumps({**meta, "format": 9}))})
    with pytest.raises(ValueError, match="format 9"):
        io.load_model(tmp_path / "chain")


def test_a_truncated_model_is_refused(course, tmp_path):
    io.save_model(io.read_uns(course), tmp_path / "chain")
    file = tmp_path / "chain" / "model.npz"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"model\.npz is not a readable npz file"):
        io.load_model(tmp_path / "chain")


def test_a_model_without_plans_says_what_to_run(course, tmp_path):
    model = io.read_uns(course)
    io.save_model(GroupedMixtures(model.groupby, model.groups, model.mixtures, model.use_rep), tmp_path / "model")
    with pytest.raises(ValueError, match="holds mixtures but no plans; run: omt transport"):
        io.load_model(tmp_path / "model", need="transport")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, "cells.h5ad does not exist"),
        (b"", ValueError, "cells.h5ad is empty; it should be an h5ad file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), ValueError, "cannot be read as an h5ad file"),
        (b"cell,gene\n1,2\n", ValueError, "cannot be read as an h5ad file"),
    ],
)
def test_a_file_that_is_no_h5ad_is_refused(tmp_path, content, error, message):
    if content is not None:
        (tmp_path / "cells.h5ad").write_bytes(content)
    with pytest.raises(error, match=message):
        io.read_h5ad(tmp_path / "cells.h5ad")


def test_a_failed_write_leaves_the_old_file(course, tmp_path):
    file = tmp_path / "cells.h5ad"
    io.write_h5ad(course, file)
    before = file.read_bytes()
    broken = course.copy()
    broken.uns["bad"] = object()
    with pytest.raises(Exception, match="object"):
        io.write_h5ad(broken, file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["cells.h5ad"]


# ---------------------------------------------------------------------------------------------------------------
# prepare
@pytest.fixture
def counts():
    rng = np.random.default_rng(0)
    X = rng.poisson(rng.gamma(0.5, 2.0, size=(3, 60))[rng.integers(0, 3, 120)]).astype(np.float32)
    return anndata.AnnData(X, var=pd.DataFrame(index=[f"gene{g}" for g in range(60)]))


def test_projecting_the_prepared_cells_gives_their_components(counts):
    X, record = prepare(counts, n_top_genes=40, n_pcs=5)
    assert X.shape == (120, 5)
    assert np.allclose(project(counts, record), X, atol=1e-4)


def test_projection_does_not_depend_on_the_order_of_genes_or_on_sparsity(counts):
    from scipy import sparse

    _, record = prepare(counts, n_top_genes=40, n_pcs=5)
    expected = project(counts, record)
    other = counts[:, ::-1].copy()
    other.X = sparse.csr_matrix(other.X)
    assert np.allclose(project(other, record), expected)


def test_a_missing_gene_is_named(counts):
    _, record = prepare(counts, n_top_genes=40, n_pcs=5)
    missing = str(record["genes"][3])
    with pytest.raises(ValueError, match=f"lacks 1 of the 40 genes .* the first is '{missing}'"):
        project(counts[:, counts.var_names != missing].copy(), record)


@pytest.mark.parametrize("value", [-1.0, 0.5, np.nan])
def test_what_is_not_raw_counts_is_refused(counts, value):
    counts.X[3, 4] = value
    with pytest.raises(ValueError, match=f"adata.X holds {value:g}, so it is not raw counts"):
        prepare(counts)


def test_times_are_cut_at_the_lower_edge_and_named_by_the_middle():
    adata = anndata.AnnData(obs=pd.DataFrame({"t": [0.0, 9.9, 10.0, 19.0, 20.0, -1.0, np.nan]}, index=list("abcdefg")))
    assert bin_times(adata, "t", "0,10,20") == "t_stage"
    assert np.array_equal(adata.obs["t_stage"], [5, 5, 15, 15, np.nan, np.nan, np.nan], equal_nan=True)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ("0,ten", "must be numbers separated by commas"),
        ("5", "at least two rising, finite numbers"),
        ("5,4", "at least two rising, finite numbers"),
    ],
)
def test_bad_edges_are_refused(edges, message):
    adata = anndata.AnnData(obs=pd.DataFrame({"t": [0.0]}, index=["a"]))
    with pytest.raises(ValueError, match=message):
        bin_times(adata, "t", edges)

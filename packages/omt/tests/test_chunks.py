"""Every kind of source yields the same rows."""

from __future__ import annotations

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from omt.chunks import as_source, require_finite

N, D = 1000, 5


@pytest.fixture
def X():
    values = np.random.default_rng(0).normal(size=(N, D))
    values[values < 0.3] = 0.0
    return values


def dense(block):
    return block.toarray() if sparse.issparse(block) else block


@pytest.fixture(
    params=[
        "array",
        "float32",
        "list",
        "frame",
        "csr",
        "csc",
        "hdf5",
        "h5ad",
        "h5ad sparse",
        "callable",
        "sparse callable",
    ]
)
def source(request, X, tmp_path):
    kind = request.param
    if kind == "array":
        yield as_source(X)
    elif kind == "float32":
        yield as_source(X.astype(np.float32))
    elif kind == "list":
        yield as_source(X.tolist())
    elif kind == "frame":
        yield as_source(pd.DataFrame(X))
    elif kind == "csr":
        yield as_source(sparse.csr_matrix(X))
    elif kind == "csc":
        yield as_source(sparse.csc_array(X))
    elif kind == "hdf5":
        with h5py.File(tmp_path / "x.h5", "w") as file:
            yield as_source(file.create_dataset("X", data=X))
    elif kind.startswith("h5ad"):
        ad.AnnData(sparse.csr_matrix(X) if "sparse" in kind else X).write_h5ad(tmp_path / "x.h5ad")
        backed = ad.read_h5ad(tmp_path / "x.h5ad", backed="r")
        yield as_source(backed.X)
        backed.file.close()
    else:
        rows = sparse.csr_array(X) if "sparse" in kind else X
        yield as_source(lambda: (rows[i : i + 170] for i in range(0, N, 170)))


def test_chunks_give_all_rows_in_order(source, X):
    blocks = list(source.chunks(64))
    assert [start for start, _ in blocks] == np.cumsum([0] + [b.shape[0] for _, b in blocks[:-1]]).tolist()
    assert max(block.shape[0] for _, block in blocks) <= 64
    np.testing.assert_allclose(np.concatenate([dense(block) for _, block in blocks]), X, rtol=1e-6)


def test_shuffled_batches_give_every_row_once(source, X):
    batches = list(source.shuffled(128, np.random.default_rng(0)))
    rows = np.concatenate([index for index, _ in batches])
    assert np.array_equal(np.sort(rows), np.arange(N))
    assert max(index.size for index, _ in batches) <= 128
    np.testing.assert_allclose(np.concatenate([dense(block) for _, block in batches]), X[rows], rtol=1e-6)


def test_shuffled_batches_are_not_in_file_order(source):
    index, _ = next(iter(source.shuffled(128, np.random.default_rng(0))))
    assert not np.array_equal(np.sort(index), np.arange(index.size))


def test_take_gathers_rows(source, X):
    rows = np.array([0, 3, 4, 500, 998, 999])
    np.testing.assert_allclose(dense(source.take(rows)), X[rows], rtol=1e-6)


def test_sparse_blocks_stay_sparse(X):
    assert all(sparse.issparse(block) for _, block in as_source(sparse.csr_array(X)).chunks(100))


def test_float64_chunks_of_an_array_are_views(X):
    assert all(np.shares_memory(block, X) for _, block in as_source(X).chunks(100))


def test_first_bad_value_is_named_by_row_and_column():
    block = np.zeros((4, 3))
    block[2, 1], block[3, 0] = np.inf, np.nan
    with pytest.raises(ValueError, match="X has inf in row 12, column 1;"):
        require_finite(block, 10)
    with pytest.raises(ValueError, match="X has inf in row 12, column 1;"):
        require_finite(sparse.csr_array(block), 10)


def test_a_backed_matrix_stored_by_columns_is_refused(tmp_path, X):
    ad.AnnData(sparse.csc_matrix(X)).write_h5ad(tmp_path / "x.h5ad")
    backed = ad.read_h5ad(tmp_path / "x.h5ad", backed="r")
    with pytest.raises(ValueError, match="stored by columns"):
        as_source(backed.X)
    backed.file.close()


def test_an_anndata_is_refused_with_the_way_to_its_matrix(X):
    with pytest.raises(TypeError, match=r"give one of its matrices \(adata.obsm\['X_pca'\]"):
        as_source(ad.AnnData(X))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros(3), r"X has shape \(3,\); it must be two-dimensional"),
        (np.zeros((0, 3)), "at least one sample and one feature"),
        (np.array([["a"]]), "it must hold real numbers"),
        (lambda: iter(()), "the callable X yielded no rows"),
        (lambda: iter([np.zeros(3)]), "must yield two-dimensional blocks"),
        (
            lambda: iter([np.zeros((2, 3)), np.zeros((2, 4))]),
            r"block of shape \(2, 4\) at row 2; it must be \[rows, 3\]",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(bad, message):
    with pytest.raises(ValueError, match=message):
        as_source(bad)


def test_a_callable_that_gives_other_rows_the_second_time_is_refused():
    blocks = [np.zeros((5, 2)), np.zeros((5, 2))]
    source = as_source(lambda: iter([blocks.pop()] if blocks else []))
    blocks.clear()
    with pytest.raises(ValueError, match="gave 0 rows in this pass and 5 in the first one"):
        list(source.chunks(2))

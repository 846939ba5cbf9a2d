"""Routing traces: round trip, and refusal of what is not one."""

from __future__ import annotations

import io
import os
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_core import RoutingTrace


@pytest.fixture
def trace():
    return RoutingTrace(
        indices=np.array([[0, 2], [3, 4], [4, 4]]),
        weights=np.array([[0.7, 0.3], [1.0, 0.0], [0.0, 0.0]]),
        num_experts=4,
        meta={"layer": 3, "model": "tiny", "shape": [3, 2]},
    )


@pytest.fixture
def members(trace):
    """What the file of a valid trace holds, to be spoilt by a test."""
    return {
        "format": np.int64(1),
        "indices": trace.indices,
        "weights": trace.weights,
        "num_experts": np.int64(4),
        "meta": np.str_("{}"),
    }


def npy(array):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=True)
    return buffer.getvalue()


def write_zip(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def test_loading_gives_what_was_saved(trace, tmp_path):
    trace.save(tmp_path / "t.npz")
    loaded = RoutingTrace.load(tmp_path / "t.npz")
    np.testing.assert_array_equal(loaded.indices, trace.indices)
    np.testing.assert_array_equal(loaded.weights, trace.weights)
    assert (loaded.num_experts, loaded.meta) == (trace.num_experts, trace.meta)


def test_arrays_are_int32_and_float32(trace):
    assert (trace.indices.dtype, trace.weights.dtype) == (np.int32, np.float32)


def test_a_trace_without_rows_survives_saving(tmp_path):
    RoutingTrace(np.empty((0, 2), int), np.empty((0, 2)), 4).save(tmp_path / "t.npz")
    assert RoutingTrace.load(tmp_path / "t.npz").indices.shape == (0, 2)


def test_numpy_alone_reads_the_file_without_unpickling(trace, tmp_path):
    trace.save(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz", allow_pickle=False) as file:
        np.testing.assert_array_equal(file["indices"], trace.indices)


def test_the_file_has_exactly_the_name_given(trace, tmp_path):
    trace.save(tmp_path / "layer.trace")
    assert [file.name for file in tmp_path.iterdir()] == ["layer.trace"]


def test_counts_leave_sentinels_out(trace):
    assert trace.counts().tolist() == [1, 0, 1, 1]


def test_dense_puts_every_weight_at_its_expert(trace):
    np.testing.assert_allclose(trace.dense(), [[0.7, 0, 0.3, 0], [0, 0, 0, 1], [0, 0, 0, 0]])


def test_failed_saving_leaves_the_old_file_and_nothing_else(trace, tmp_path, monkeypatch):
    trace.save(tmp_path / "t.npz")
    before = (tmp_path / "t.npz").read_bytes()

    def full_disk(file, **arrays):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(OSError, match="no space left"):
        trace.save(tmp_path / "t.npz")
    assert (tmp_path / "t.npz").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["t.npz"]


def test_saving_into_a_missing_folder_says_so(trace, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cannot write .*: the folder .*nowhere does not exist"):
        trace.save(tmp_path / "nowhere" / "t.npz")


def test_meta_that_json_cannot_hold_is_refused_before_anything_is_written(trace, tmp_path):
    spoilt = RoutingTrace(trace.indices, trace.weights, 4, {"model": object()})
    with pytest.raises(TypeError, match="meta must hold only what JSON can: Object of type object"):
        spoilt.save(tmp_path / "t.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"indices": [[0, 5]], "weights": [[1, 0]]},
            ValueError,
            r"indices must lie in 0..4 \(4 means no expert\).*0..5",
        ),
        ({"indices": [[-1, 0]], "weights": [[1, 0]]}, ValueError, "they span -1..0"),
        ({"indices": [[0.0, 1.0]], "weights": [[1, 0]]}, TypeError, "indices must be integers, not float64"),
        ({"weights": [[1, 0]]}, ValueError, r"must both have shape \[R, k\], not \[3, 2\] and \[1, 2\]"),
        ({"weights": np.full((3, 2), "a")}, TypeError, "weights must be real numbers"),
        ({"num_experts": 0}, ValueError, r"num_experts must be in 1..2\*\*24, not 0"),
        ({"num_experts": 2**24 + 1}, ValueError, r"num_experts must be in 1..2\*\*24, not 16777217"),
        ({"num_experts": 4.5}, TypeError, "num_experts must be an integer, not float"),
        ({"meta": [1]}, TypeError, "meta must be a dict, not list"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(trace, change, error, message):
    parts = {"indices": trace.indices, "weights": trace.weights, "num_experts": 4, "meta": {}, **change}
    with pytest.raises(error, match=message):
        RoutingTrace(**parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": np.int64(7)}, "is a routing trace of format 7; this version reads format 1"),
        ({"indices": np.array([[object()]])}, "array indices has dtype object"),
        ({"indices": np.array([[0.5, 1.0]])}, "array indices has dtype float64"),
        ({"indices": np.zeros(3, np.int32)}, r"array indices has shape \[3\], not 2 dimensions"),
        ({"indices": np.full((3, 2), 9, np.int32)}, "indices must lie in 0..4"),
        ({"weights": np.zeros((1, 2), np.float32)}, r"must both have shape \[R, k\]"),
        ({"num_experts": np.int64(-3)}, "num_experts must be in"),
        ({"num_experts": np.int64(2**31 - 1)}, "num_experts must be in"),  # counts() would take 16 GiB
        ({"meta": np.str_("{")}, "Expecting property name"),
        ({"meta": np.str_("[1]")}, "meta must be a dict, not list"),
        ({"meta": np.str_("[" * 100_000)}, "recursion|Expecting|nested"),
    ],
)
def test_a_file_with_spoilt_content_is_refused(members, tmp_path, change, message):
    write_zip(tmp_path / "t.npz", {f"{name}.npy": npy(array) for name, array in {**members, **change}.items()})
    with pytest.raises(ValueError, match=message):
        RoutingTrace.load(tmp_path / "t.npz")


def test_a_file_without_an_array_names_it_and_what_is_there(members, tmp_path):
    del members["weights"]
    np.savez(tmp_path / "t.npz", **members)
    with pytest.raises(ValueError, match="no array named weights; it has format, indices, meta, num_experts"):
        RoutingTrace.load(tmp_path / "t.npz")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: .*t\.npz"):
        RoutingTrace.load(tmp_path / "t.npz")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04" + bytes(100)])
def test_a_file_that_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "t.npz").write_bytes(content)
    with pytest.raises(ValueError, match="is not a valid routing trace: File is not a zip file"):
        RoutingTrace.load(tmp_path / "t.npz")


def test_a_header_that_promises_more_than_the_file_holds_takes_no_memory(members, tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i4", "fortran_order": False, "shape": (10**12, 1000)})
    files = {f"{name}.npy": npy(array) for name, array in members.items()}
    write_zip(tmp_path / "t.npz", {**files, "indices.npy": header.getvalue()})
    with pytest.raises(ValueError, match="array indices should have 4000000000000000 bytes of data but has 0"):
        RoutingTrace.load(tmp_path / "t.npz")


def test_a_file_that_unpacks_to_more_than_max_bytes_is_refused(members, tmp_path):
    members["indices"], members["weights"] = np.zeros((100_000, 2), np.int32), np.zeros((100_000, 2), np.float32)
    np.savez_compressed(tmp_path / "t.npz", **members)
    assert os.path.getsize(tmp_path / "t.npz") < 10_000
    with pytest.raises(ValueError, match=r"its arrays need 16\d+ bytes, more than max_bytes=1000000"):
        RoutingTrace.load(tmp_path / "t.npz", max_bytes=10**6)


def test_a_file_with_a_flipped_bit_is_refused(trace, tmp_path):
    trace.save(tmp_path / "t.npz")
    raw = bytearray((tmp_path / "t.npz").read_bytes())
    raw[raw.index(struct.pack("<f", 0.7))] ^= 1
    (tmp_path / "t.npz").write_bytes(bytes(raw))
    with pytest.raises(ValueError, match="Bad CRC-32"):
        RoutingTrace.load(tmp_path / "t.npz")


@given(st.data())
def test_no_truncated_or_spoilt_file_raises_anything_but_value_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("spoilt")
    RoutingTrace(np.array([[0, 1], [1, 2]]), np.ones((2, 2)), 2, {"a": 1}).save(folder / "t.npz")
    raw = bytearray((folder / "t.npz").read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / "t.npz").write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    problem = None
    try:
        loaded = RoutingTrace.load(folder / "t.npz")
    except ValueError as error:
        problem = str(error)
    assert "t.npz" in problem if problem else loaded.indices.max() <= loaded.num_experts

"""Files: unpacked without believing them, written whole under any circumstances."""

from __future__ import annotations

import os
import stat
import struct
import threading
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_core.files import array_names, atomic_write, read_arrays

HEADER = "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }"


def write_npz(path, header, compression=zipfile.ZIP_STORED, name="hidden.npy"):
    text = header.encode("latin1")
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(name, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(48))


def read(path):
    return read_arrays(path, {"hidden": (-1, "f")})["hidden"]


def test_the_header_of_these_tests_is_readable(tmp_path):
    write_npz(tmp_path / "a.npz", HEADER)
    np.testing.assert_array_equal(read(tmp_path / "a.npz"), np.zeros((2, 3)))


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{",
        "{'descr': (), 'fortran_order': False, 'shape': (2, 3)}",
        "{1: 2, 'a': 3}",
        "{[]: 1}",
        "-" * 9000 + "1",
        "(" * 9000,
        "if x:\n  y\n z",
        HEADER.replace("(2, 3)", "(True, 6)"),
        HEADER.replace("(2, 3)", "(-2, -3)"),
        HEADER.replace("(2, 3)", "(99999999999999999999999, 0)"),
        HEADER.replace("<f8", "|O"),
    ],
)
def test_a_header_of_nonsense_is_a_value_error(tmp_path, header):
    write_npz(tmp_path / "a.npz", header)
    with pytest.raises(ValueError, match="not a valid file: "):
        read(tmp_path / "a.npz")


@given(st.data())
def test_no_spoilt_header_raises_anything_but_value_error(tmp_path_factory, data):
    place = data.draw(st.integers(0, len(HEADER)))
    noise = data.draw(st.text("(){}[]'\",:01 -+*<>|fOUiV.\\\n\t#\x00e", max_size=4))
    path = tmp_path_factory.mktemp("spoilt") / "a.npz"
    write_npz(path, HEADER[:place] + noise + HEADER[place + data.draw(st.integers(0, 3)) :])
    try:
        assert read(path).size <= 6
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_numpy_does_not_write_is_refused(tmp_path, compression):
    write_npz(tmp_path / "a.npz", HEADER, compression)
    with pytest.raises(ValueError, match="compressed in a way that numpy does not write"):
        read(tmp_path / "a.npz")


def test_a_member_that_is_no_array_is_not_one(tmp_path):
    write_npz(tmp_path / "a.npz", HEADER, name="hidden")
    assert array_names(tmp_path / "a.npz") == []
    with pytest.raises(ValueError, match="it has no array named hidden; it has none"):
        read(tmp_path / "a.npz")


def test_an_archive_of_an_unknown_version_is_a_value_error(tmp_path):
    write_npz(tmp_path / "a.npz", HEADER)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[data.index(b"PK\x01\x02") + 6] = 99  # the version needed to unpack, in the central directory
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(ValueError, match="not a valid file: zip file version"):
        array_names(tmp_path / "a.npz")


# ---------------------------------------------------------------------------------------------------------------------


def test_threads_that_write_one_file_at_the_same_time_leave_one_of_the_versions(tmp_path):
    target, failures = tmp_path / "a.bin", []
    versions = [bytes([n]) * (10_000 * (n + 1)) for n in range(4)]

    def write(content):
        try:
            for _ in range(25):
                with atomic_write(target) as temporary:
                    temporary.write_bytes(content)
                assert target.read_bytes() in versions
        except BaseException as error:  # of a thread: to be seen by the test
            failures.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def test_a_link_stays_a_link_and_its_target_gets_the_content(tmp_path):
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    with atomic_write(tmp_path / "link.txt") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"


def test_a_private_file_stays_private(tmp_path):
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "a.txt").chmod(0o600)
    with atomic_write(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o600


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    with atomic_write(tmp_path / "pipe") as place:
        place.write_bytes(b"through")
    reader.join(10)
    assert received == [b"through"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_name_of_the_greatest_length_can_be_written(tmp_path):
    target = tmp_path / ("x" * 251 + ".npz")
    with atomic_write(target) as temporary:
        temporary.write_bytes(b"1")
    assert target.read_bytes() == b"1"

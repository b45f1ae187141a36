"""Files are whole or not there, whatever moment the writer dies at."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable

import numpy as np
import pytest

from flowrl.errors import DataError
from flowrl.files import (
    JsonLines,
    encode_json,
    filter_json_lines,
    folder_atomically,
    read_json_lines,
    remove_leftovers,
    sha256_file,
    write_json_atomic,
    write_text_atomic,
)
from tests.files.dying import die_at


def every_death(action: Callable[[], object], reset: Callable[[], None], check: Callable[[], None]):
    """Dies at the first call, then the second ... until `action` gets through; checks each time."""
    call = 0
    while True:
        reset()
        done = die_at(call, action)
        check()
        if done:
            return call
        call += 1


def test_a_text_is_old_or_new_whenever_its_writer_dies(tmp_path):
    path = tmp_path / "config.yaml"

    def check():
        assert path.read_text() in ("old", "new")

    calls = every_death(
        lambda: write_text_atomic(path, "new"), lambda: path.write_text("old") and None, check
    )
    assert calls >= 5
    assert path.read_text() == "new"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text_atomic(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_text() == "old"


def test_numbers_that_are_not_finite_become_strings_that_float_reads(tmp_path):
    path = tmp_path / "x.json"
    write_json_atomic(path, {"a": [math.nan, 1.5], "b": {"c": math.inf}, "d": -math.inf})
    strict = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert strict == {"a": ["NaN", 1.5], "b": {"c": "Infinity"}, "d": "-Infinity"}
    assert math.isnan(float(strict["a"][0]))
    assert float(strict["d"]) == -math.inf


def test_numpy_scalars_paths_and_sets_are_written_as_plain_json(tmp_path):
    value = {"n": np.int64(3), "x": np.float32(0.5), "p": tmp_path, "s": {"b", "a"}, "t": (1, 2)}
    read = json.loads(encode_json(value))
    assert read == {"n": 3, "x": 0.5, "p": str(tmp_path), "s": ["a", "b"], "t": [1, 2]}
    assert json.loads(encode_json([np.float32("nan")])) == ["NaN"]


def test_a_value_without_a_json_form_is_refused():
    with pytest.raises(TypeError, match="object has no JSON form"):
        encode_json({"x": object()})


def test_any_text_survives_a_log_also_a_lone_surrogate_and_line_separators(tmp_path):
    texts = ["Zwölf\n\u2028\x85", "\ud800", "\x00\x1b[31m", "", "表情😀"]
    with JsonLines(tmp_path / "log.jsonl") as log:
        log.append({"text": text} for text in texts)
    assert [row["text"] for row in read_json_lines(tmp_path / "log.jsonl")] == texts


@pytest.mark.parametrize("torn", ['{"step":3', "{", '{"step":3}'])
def test_a_torn_last_line_is_cut_on_reopening_and_never_read(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step":1}\n{"step":2}\n' + torn)
    assert [row["step"] for row in read_json_lines(path)] == [1, 2]
    with JsonLines(path) as log:
        assert log.num_cut == len(torn)
        log.append([{"step": 3}])
        log.sync()
    assert path.read_text() == '{"step":1}\n{"step":2}\n{"step":3}\n'


def test_a_log_that_is_only_a_torn_line_longer_than_a_block_is_emptied(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"x" * ((1 << 20) + 7))
    with JsonLines(path) as log:
        assert log.num_cut == (1 << 20) + 7
    assert path.read_bytes() == b""


def test_a_closed_log_refuses_rows(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.append([{}])


def test_a_damaged_row_in_the_middle_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step":1}\n{"ste\n{"step":3}\n')
    with pytest.raises(DataError, match=r"log\.jsonl:2: this row of a log is damaged"):
        list(read_json_lines(path))
    path.write_text("[1]\n")
    with pytest.raises(DataError, match=r"log\.jsonl:1"):
        list(read_json_lines(path))


def test_a_missing_log_has_no_rows(tmp_path):
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []
    assert filter_json_lines(tmp_path / "none.jsonl", lambda row: False) == 0


def test_filtering_a_log_keeps_its_bytes_and_leaves_an_unchanged_file_alone(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step":2 }\n{"step":3}\n{"st')
    assert filter_json_lines(path, lambda row: row["step"] != 2) == 1
    assert path.read_bytes() == b'{"step": 1}\n{"step":3}\n'
    before = path.stat().st_ino
    assert filter_json_lines(path, lambda row: True) == 0
    assert path.stat().st_ino == before
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_folder_is_old_or_new_whenever_its_writer_dies(tmp_path):
    target = tmp_path / "model"

    def write():
        with folder_atomically(target) as folder:
            (folder / "weights").write_text("new")
            (folder / "sub").mkdir()
            (folder / "sub" / "config").write_text("new")

    def reset():
        target.mkdir(exist_ok=True)
        (target / "weights").write_text("old")

    def check():
        remove_leftovers(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["model"]
        if (target / "weights").read_text() == "new":
            assert (target / "sub" / "config").read_text() == "new"

    assert every_death(write, reset, check) > 8
    assert (target / "weights").read_text() == "new"


def test_a_folder_whose_writer_raises_is_not_made_and_the_old_one_stays(tmp_path):
    target = tmp_path / "model"

    def fail() -> None:
        with folder_atomically(target) as folder:
            (folder / "weights").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []
    target.mkdir()
    (target / "weights").write_text("old")
    with pytest.raises(ZeroDivisionError):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (target / "weights").read_text() == "old"


def test_a_folder_set_aside_by_a_crash_comes_back_before_it_is_replaced(tmp_path):
    aside = tmp_path / ".model.previous-1-ab"
    aside.mkdir()
    (aside / "weights").write_text("old")
    with pytest.raises(RuntimeError), folder_atomically(tmp_path / "model"):
        raise RuntimeError
    assert (tmp_path / "model" / "weights").read_text() == "old"
    assert not aside.exists()


def test_sha256_is_of_the_content(tmp_path):
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    assert sha256_file(path).startswith("ba7816bf8f01cfea414140de5dae2223")


def test_a_log_that_is_removed_while_it_is_written_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "log.jsonl"
    with JsonLines(path) as log:
        log.append([{"step": 1}])
        log.sync()
        path.unlink()
        log.append([{"step": 2}])
        with pytest.raises(FileNotFoundError, match=r"removed while.*log\.jsonl"):
            log.sync()


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path, monkeypatch):
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with JsonLines(tmp_path / "log.jsonl") as log:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left") as caught:
            log.append([{"step": 1}])
    assert caught.value.filename == str(tmp_path / "log.jsonl")

"""Data files of every format: recognised by content, read row by row, and again by place."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.config.data import DataConfig
from flowrl.config.roles import CharTokenizer, FreshModel, RoleConfig
from flowrl.data import (
    PromptCursor,
    PromptSet,
    Tokenizer,
    encode_prompts,
    load_rows,
    prepare_model_folder,
)
from flowrl.data.formats import format_of, open_data_file
from flowrl.data.row_file import DataFile
from flowrl.errors import DataError

ROWS = [
    {"question": "Größe?\n\u2028next", "n": "1", "info": {"index": 7, "tags": ["a", "b"]}},
    {"question": 'say "hi", please', "n": "2", "info": {"index": 8, "tags": []}},
    {"question": " " * 70, "n": "3", "info": {"index": 9, "tags": ["c"]}},
]


def write(folder: Path, kind: str, rows: list[dict[str, object]]) -> Path:
    path = folder / f"data.{kind}"
    match kind:
        case "jsonl":
            path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
        case "json":
            path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
        case "csv":
            with path.open("w", newline="") as file:
                flat = [{**row, "info": json.dumps(row["info"])} for row in rows]
                writer = csv.DictWriter(file, list(flat[0]))
                writer.writeheader()
                writer.writerows(flat)
        case "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
        case "arrow":
            table = pa.Table.from_pylist(rows)
            with pa.ipc.new_stream(path, table.schema) as writer:  # as `datasets` writes it
                writer.write_table(table, max_chunksize=2)
    return path


KINDS = ("jsonl", "json", "csv", "parquet", "arrow")


@pytest.mark.parametrize("kind", KINDS)
def test_each_format_is_recognised_by_content_and_has_the_same_rows(tmp_path, kind):
    path = write(tmp_path, kind, ROWS).rename(tmp_path / "unnamed")
    assert format_of(path) == kind
    records = list(open_data_file(path).scan())
    expected = [{**r, "info": json.dumps(r["info"])} for r in ROWS] if kind == "csv" else ROWS
    assert [record.fields for record in records] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_read_again_by_its_place_in_any_order(tmp_path, kind):
    file = open_data_file(write(tmp_path, kind, ROWS * 9))
    records = list(file.scan())
    assert len(records) == 27
    for record in (records[20], records[3], *reversed(records)):
        assert file.read(record.place) == record.fields


def test_an_arrow_file_is_read_like_an_arrow_stream(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(tmp_path / "d", table.schema) as writer:
        writer.write_table(table)
    assert [r.fields for r in open_data_file(tmp_path / "d").scan()] == ROWS


def test_the_places_of_rows_are_lines_where_there_are_lines_and_rows_elsewhere(tmp_path):
    def places(kind: str) -> list[str]:
        file = open_data_file(write(tmp_path, kind, ROWS))
        return [file.where(record.number).rpartition("/")[2] for record in file.scan()]

    assert places("jsonl") == ["data.jsonl:1", "data.jsonl:2", "data.jsonl:3"]
    assert places("parquet") == ["data.parquet:row 1", "data.parquet:row 2", "data.parquet:row 3"]
    assert places("csv") == ["data.csv:2", "data.csv:4", "data.csv:5"]  # a cell has two lines
    assert places("json") == ["data.json:row 1", "data.json:row 2", "data.json:row 3"]


def test_a_file_that_changed_after_it_was_scanned_is_refused(tmp_path):
    file = open_data_file(write(tmp_path, "jsonl", ROWS))
    list(file.scan())
    write(tmp_path, "jsonl", ROWS[:1])
    with pytest.raises(DataError, match="changed while it was in use"):
        file.read(0)


@pytest.mark.parametrize(
    ("content", "what", "hint"),
    [
        (b"\x1f\x8b\x08\0", "compressed by gzip", "gunzip"),
        (b"PK\x03\x04..", "a zip archive or an Excel sheet", "save the sheet as CSV"),
        (b"\x80\x04\x95abc", "a Python pickle, which may run code", "as Parquet or JSON lines"),
        (b"version https://git-lfs.github.com/spec/v1\noid x", "a pointer of Git LFS", "git lfs"),
        (b"\n <!DOCTYPE html>", "HTML or XML", "download the file itself"),
        ("[]".encode("utf-16"), "text in UTF-16", "iconv -f UTF-16 -t UTF-8"),
        (b"ab\0\1\2", "binary data of an unknown format", "JSON lines, a JSON array, CSV"),
        (b'{\n "data": [1]}', "one JSON object over several lines", "jq -c '.[]'"),
        (b'{"data": [\n{"a": 1}]}', "one JSON object over several lines", "'.KEY[]'"),
        (b"plain words", "cannot be recognised", "data.format"),
    ],
)
def test_what_is_no_data_file_is_named_with_what_to_do(tmp_path, content, what, hint):
    path = tmp_path / "d"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_data_file(path)
    assert what in str(caught.value)
    assert hint in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "kind", "found"),
    [("jsonl", "parquet", "found: parquet"), ("parquet", "jsonl", "found: text")],
)
def test_a_format_that_the_content_contradicts_is_refused(tmp_path, wanted, kind, found):
    with pytest.raises(DataError, match=f"not of the format {wanted}") as caught:
        open_data_file(write(tmp_path, kind, ROWS), wanted)
    assert found in str(caught.value)


def test_text_is_read_in_the_format_that_is_insisted_on(tmp_path):
    path = tmp_path / "d.txt"
    path.write_text("prompt\n1+1=\n")
    (row,) = open_data_file(path, "csv").scan()
    assert row.fields == {"prompt": "1+1="}


def problems(file: DataFile) -> list[str]:
    return [
        f"{record.number}: {record.fields.what}"
        for record in file.scan()
        if isinstance(record.fields, DataError)
    ]


def test_a_bad_row_of_a_csv_file_costs_no_other(tmp_path):
    path = tmp_path / "d.csv"
    path.write_bytes(b'a,b\n1,2\n1,2,3\n\n"x"y,2\n\xff,2\n"3 ""q""",4\n"open,5\n')
    file = open_data_file(path)
    good = [r.fields for r in file.scan() if not isinstance(r.fields, DataError)]
    assert good == [{"a": "1", "b": "2"}, {"a": '3 "q"', "b": "4"}]
    assert problems(file) == [
        "3: the row has 3 cells, and the header has 2",
        "5: not CSV: ',' expected after '\"'",
        "6: the row is not UTF-8",
        "8: not CSV: unexpected end of data",
    ]


@pytest.mark.parametrize(("sign", "name"), [("\t", "d.tsv"), (";", "d")])
def test_cells_may_be_separated_by_tabs_or_semicolons(tmp_path, sign, name):
    (tmp_path / name).write_text(f"\ufeffa{sign}b\n1,5{sign}2\n")
    (row,) = open_data_file(tmp_path / name).scan()
    assert row.fields == {"a": "1,5", "b": "2"}


def test_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "d.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(DataError, match=r"d\.csv:1: two columns have the same name"):
        list(open_data_file(tmp_path / "d.csv").scan())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[{"a": 1}, ', "not JSON: Expecting value"),
        ('[{"a": 1} {"a": 2}]', "not JSON: Expecting ',' delimiter"),
        ('[{"a": 1}] x', "not JSON: Extra data"),
        ('[{"a": "x', "not JSON: Unterminated string"),
        ('[{"a": 1}', "not JSON: Expecting ',' delimiter"),
    ],
)
def test_a_broken_json_array_says_where_it_breaks(tmp_path, text, what):
    (tmp_path / "d.json").write_text("\n\n" + text)
    with pytest.raises(DataError, match=what) as caught:
        list(open_data_file(tmp_path / "d.json").scan())
    assert f"{tmp_path / 'd.json'}:3: " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [('[{"a": NaN}]', "NaN is no JSON number"), ("[" * 100_000, "not usable JSON: .*recursion")],
)
def test_json_that_cannot_be_used_is_refused(tmp_path, text, what):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(DataError, match=what):
        list(open_data_file(tmp_path / "d.json").scan())


def test_an_element_that_is_no_object_is_a_bad_row(tmp_path):
    (tmp_path / "d.json").write_text('[1, {"a": 1},\n[2], []]')
    file = open_data_file(tmp_path / "d.json")
    no_object = "the element of the array is no JSON object"
    assert problems(file) == [f"1: {no_object}", f"3: {no_object}", f"4: {no_object}"]


def test_text_that_is_not_utf8_in_a_column_is_a_bad_row(tmp_path):
    text = pa.array([b"ok", b"\xff\xfe", b"ok"]).view(pa.string())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "d")
    file = open_data_file(tmp_path / "d")
    assert problems(file)[0].startswith("2: the row cannot be read")
    assert len(list(file.scan())) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_cursor_goes_on_with_the_same_prompts_in_every_format(tmp_path, kind):
    spec = CharTokenizer(kind="char", alphabet="0123456789+=")
    role = RoleConfig(backend="torch", model=FreshModel(hidden_size=8), tokenizer=spec)
    tokenizer = Tokenizer.load(prepare_model_folder(role, tmp_path / "model", ()))
    sums = [{"question": f"{i}+1=", "n": str(i + 1), "info": {"index": i}} for i in range(23)]
    data = DataConfig(
        train=str(write(tmp_path, kind, sums)),
        prompt="question",
        answer="n",
        solution="{n}",
    )

    def prompts() -> PromptSet:
        return encode_prompts(load_rows(data.train, data, split="train"), tokenizer, data)

    through = PromptCursor(prompts(), seed=3)
    stopped = PromptCursor(prompts(), seed=3)
    assert [item.row for item in stopped.take(17)] == [item.row for item in through.take(17)]
    resumed = PromptCursor.from_json(json.loads(json.dumps(stopped.to_json())), prompts())
    assert [item.row for item in resumed.take(40)] == [item.row for item in through.take(40)]
    assert resumed.to_json() == through.to_json()


def whole_or_refused(path: Path) -> None:
    """Reads a file and every row again, or gets a typed error."""
    try:
        file = open_data_file(path)
        for record in file.scan():
            if not isinstance(record.fields, DataError):
                assert file.read(record.place) == record.fields
    except DataError:
        pass


STARTS = (
    *(b"", b"[", b"{", b'{"a":', b'[{"a":1},', b"a,b\n"),
    *(b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"),
)


@settings(max_examples=150, deadline=5_000)
@given(start=st.sampled_from(STARTS), rest=st.binary(max_size=300))
def test_arbitrary_bytes_are_read_or_refused(tmp_path_factory, start, rest):
    path = tmp_path_factory.getbasetemp() / "arbitrary"
    path.write_bytes(start + rest)
    whole_or_refused(path)


@settings(max_examples=60, deadline=5_000)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_damaged_files_are_read_or_refused(tmp_path_factory, kind, data):
    folder = tmp_path_factory.getbasetemp()
    content = bytearray(write(folder, kind, ROWS * 3).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = folder / "damaged"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    whole_or_refused(path)

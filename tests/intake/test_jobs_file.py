"""Tests of the format of a jobs file: how a line is parsed, and the errors for lines that are refused."""

from __future__ import annotations

import shlex
import string

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from scheduler.core.command_limits import LONGEST_WORD, check_nodes
from scheduler.core.errors import Refused, SchedulerError, UsageError
from scheduler.core.gpu import ResourceRequest, gpu_ids_text, parse_gpu_ids
from scheduler.core.job import JobSpec
from scheduler.core.job_options import LINE_KEYS, job_ids
from scheduler.core.model_table import ModelTable, model_in, need_of
from scheduler.intake import commands_file
from scheduler.intake.jobs_file import (
    FORMAT,
    LONGEST_LINE,
    LineContext,
    Parsed,
    parse,
    quoted,
    write_line,
)

DOOR = LineContext("/jobs", "/home/u")
FOUR = LineContext("/jobs", "/home/u", range(4))


def spec_of(line: str, line_context: LineContext = DOOR) -> JobSpec:
    parsed = parse(line, line_context)
    assert parsed is not None, f"{line!r} was taken for a comment"
    return parsed.spec


def error_of(line: str, line_context: LineContext = DOOR) -> SchedulerError:
    with pytest.raises((UsageError, Refused)) as caught:
        parse(line, line_context)
    error = caught.value
    assert error.what, "an error says what happened"
    assert error.do, f"an error says what would be right: {error.what}"
    assert "\n" not in str(error), "an error is one line"
    return error


# -- the examples of the README ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "priority", "script", "env", "arguments", "allowed"),
    [
        (
            "0,/path/to/train.py,pytorch_env,--llm qwen2.5-7b-inst --epochs 100,0-3",
            0, "/path/to/train.py", "pytorch_env", "--llm qwen2.5-7b-inst --epochs 100", (0, 1, 2, 3),
        ),
        (
            "1,/path/to/eval.py,pytorch_env,--llm qwen2.5-3b-inst --dataset test,",
            1, "/path/to/eval.py", "pytorch_env", "--llm qwen2.5-3b-inst --dataset test", None,
        ),
        (
            "2,/path/to/inference.py,,--llm qwen2.5-32b-inst --batch_size 1,4,5,6,7",
            2, "/path/to/inference.py", "", "--llm qwen2.5-32b-inst --batch_size 1", (4, 5, 6, 7),
        ),
    ],
)  # fmt: skip
def test_the_example_lines_of_the_readme_are_parsed_as_documented(
    line: str, priority: int, script: str, env: str, arguments: str, allowed: tuple[int, ...] | None
) -> None:
    """S3.3, C23: The three example lines of the README are parsed as the README describes."""
    spec = spec_of(line)
    assert (spec.priority, spec.script, spec.conda_env) == (priority, script, env)
    assert spec.arguments == tuple(arguments.split())
    assert spec.allowed == allowed


def test_an_ambiguous_line_gets_one_note_that_says_how_it_was_read() -> None:
    """Contract 3: An unquoted list can belong to the arguments or be the GPU list. One note says how it was read.

    For example, `--batch_size 1,4,5,6,7` is read as `--batch_size 1` on GPUs 4-7.
    """
    parsed = parse("2,/i.py,,--batch_size 1,4,5,6,7", DOOR)
    assert parsed is not None
    assert len(parsed.notes) == 1
    assert "4,5,6,7 is read as the list of allowed GPUs" in parsed.notes[0] and "in quotes" in parsed.notes[0]


@pytest.mark.parametrize(
    "line",
    [
        "2,/i.py,,--batch_size 1,4",  # only one number
        '2,/i.py,,"--batch_size 1",4,5',  # quoted arguments
        "2,/i.py,,--name x,4,5",  # the arguments do not end in a number
        "2,/i.py,,--name x1,4,5",
        "2,/i.py,,--batch_size 1,4-7",  # a range is always a GPU list
    ],
)
def test_an_unambiguous_line_gets_no_note(line: str) -> None:
    """Contract 3: A line that can be read in only one way gives no note."""
    parsed = parse(line, DOOR)
    assert parsed is not None
    assert parsed.notes == ()


# -- number of fields, spaces, comments -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0,/a.py", JobSpec(script="/a.py")),
        ("0,/a.py,", JobSpec(script="/a.py")),
        ("0,/a.py,e", JobSpec(script="/a.py", conda_env="e")),
        ("0,/a.py,e,", JobSpec(script="/a.py", conda_env="e")),
        ("0,/a.py,e,--x 1", JobSpec(script="/a.py", conda_env="e", arguments=("--x", "1"))),
        ("0,/a.py,e,--x 1,", JobSpec(script="/a.py", conda_env="e", arguments=("--x", "1"))),
        ("0,/a.py,,,", JobSpec(script="/a.py")),
        ("0,/a.py,,,2", JobSpec(script="/a.py", allowed=(2,))),
        ("0,/a.py,,,0,2", JobSpec(script="/a.py", allowed=(0, 2))),
        ("  0 ,  /a.py ,  e ,  --x   1  ,  0 , 2  ", JobSpec(script="/a.py", conda_env="e", arguments=("--x", "1"), allowed=(0, 2))),
        ("\t0\t,\t/a.py\t,\te\t,\t--x\t1\t,\t0-1\t", JobSpec(script="/a.py", conda_env="e", arguments=("--x", "1"), allowed=(0, 1))),
        ("0,/a.py,e,--x 1,2\r", JobSpec(script="/a.py", conda_env="e", arguments=("--x", "1"), allowed=(2,))),
        ("0,/a.py,e,--x 1\r\n", JobSpec(script="/a.py", conda_env="e", arguments=("--x", "1"))),
        ("0,/a b/c d.py", JobSpec(script="/a b/c d.py")),
        ('"0","/a.py","e","--x 1","0,2"', JobSpec(script="/a.py", conda_env="e", arguments=("--x", "1"), allowed=(0, 2))),
        ('0,"/a,b.py","e,f"', JobSpec(script="/a,b.py", conda_env="e,f")),
    ],
)  # fmt: skip
def test_a_line_of_two_to_five_fields_with_blanks_around_them_is_a_job(line: str, expected: JobSpec) -> None:
    """S3.5, C09, C24: A line with two to five fields is a job.

    Spaces, tabs and line ends around a field are removed.
    """
    assert spec_of(line) == expected


@pytest.mark.parametrize("line", ["", " ", "\t", "\r", "#", "# 0,/a.py", "  # 0,/a.py", "\t#x", '#0,/a.py,,"open'])
def test_empty_lines_and_comments_are_not_jobs(line: str) -> None:
    """S3.4, C24: Empty lines and comments are not jobs."""
    assert parse(line, DOOR) is None


@pytest.mark.parametrize("arguments", ["#x", "--tag #1 --n 2", "a#b", "--colour #ff0000"])
def test_a_hash_inside_arguments_does_not_begin_a_comment(arguments: str) -> None:
    """C24: A `#` inside the arguments does not begin a comment."""
    assert spec_of(f"0,/a.py,,{arguments}").arguments == tuple(arguments.split())


@pytest.mark.parametrize("line", ["0", "/a.py", "0,", "0,  ,e", '0,""', "python train.py", "0;/a.py"])
def test_a_line_with_too_few_fields_is_refused_with_the_format(line: str) -> None:
    """C24: A line without a priority or a script is refused; the error shows the format."""
    assert FORMAT in error_of(line).do


# -- priority ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("7", 7), ("-3", -3), ("+3", 3), ("007", 7), ("-1000000000", -(10**9)), ("1000000000", 10**9)],
)
def test_priorities_are_whole_numbers_and_may_be_negative(text: str, value: int) -> None:
    """C25: A priority is a whole number and may be negative."""
    assert spec_of(f"{text},/a.py").priority == value


@pytest.mark.parametrize(
    "text",
    [
        "abc",
        "1.5",
        "1e3",
        "",
        "--1",
        "1 2",
        "0x10",
        str(10**30),
        str(10**31),
        "-" + str(10**30),
        "1000000001",
        "½",
        "1_0",
    ],
)
def test_an_invalid_priority_is_refused_with_the_format_or_the_limits(text: str) -> None:
    """C25: A line with an invalid priority is refused; the error shows the format or the limits."""
    error = error_of(f"{text},/a.py,,x")
    assert "priority" in error.what
    assert FORMAT in error.do or "1000000000" in error.do


# -- GPU lists --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("2", (2,)), ("0,2", (0, 2)), ("0-3", (0, 1, 2, 3)), ("0-1,5", (0, 1, 5)), ("0,0", (0,)), ("3,1,2", (1, 2, 3)),
        ("1-1", (1,)), ("0-2,1-3", (0, 1, 2, 3)), (" 0 - 1 , 3 ", (0, 1, 3)), ("", None), ("  ", None), ('"0,1"', (0, 1)),
        ('" 0-1 "', (0, 1)), ("00", (0,)),
    ],
)  # fmt: skip
def test_gpu_lists_are_sorted_and_duplicate_ids_removed(text: str, ids: tuple[int, ...] | None) -> None:
    """S3.8, C23, C26: A GPU list is sorted. An id that occurs twice is kept once."""
    assert spec_of(f"0,/a.py,,--x y,{text}").allowed == ids


@pytest.mark.parametrize(
    "text", ["-1", "a", "0-", "-", ",", "0,", ",0", "0,,1", "1.5", "0 1", "0;1", "0-1-2", "0:3", "all", "0x1", "[0]"]
)
def test_an_invalid_gpu_list_is_refused_with_the_arguments_in_quotes(text: str) -> None:
    """S3.7, S3.8, C26: A line whose fifth field is not a GPU list is refused.

    The error shows the corrected line, with quotes around the arguments.
    """
    error = error_of(f"0,/a.py,e,--x y,{text}")
    assert isinstance(error, UsageError)
    assert '0,/a.py,e,"--x y,' in error.do


@pytest.mark.parametrize("text", ["3-1", "0,3-1"])
def test_a_backward_gpu_range_is_refused(text: str) -> None:
    """S3.8, C26: A GPU range whose first id is above its last id is refused."""
    error = error_of(f"0,/a.py,,--x y,{text}")
    assert "backwards" in error.what


@pytest.mark.parametrize("line", ["0,/a.py,,--x y,3-1", "0,/a.py,,,3-1"])
def test_the_error_for_a_backward_gpu_range_shows_the_corrected_range(line: str) -> None:
    """S3.8, contract 3: If the first id of a GPU range is above the last id, the error shows the corrected range."""
    assert "1-3" in error_of(line).do


@pytest.mark.parametrize("text", ["0-999999999", "4096", "0-4096", "999999999"])
def test_a_gpu_range_above_the_highest_id_is_refused_without_expanding_it(text: str) -> None:
    """C26: A GPU id above 4095 is refused, also in a range. The ids of such a range are never listed in memory."""
    error = error_of(f"0,/a.py,,x,{text}")
    assert isinstance(error, Refused)
    assert "4095" in error.do


def test_a_gpu_id_of_5000_digits_is_a_usage_error() -> None:
    """C26: A GPU id of 5000 digits is a usage error."""
    assert isinstance(error_of(f"0,/a.py,,x,{'9' * 5000}"), UsageError)


@pytest.mark.parametrize("text", ["9", "0,9", "2-4", "4", "9,10"])
def test_an_unmanaged_gpu_is_refused_and_the_error_names_the_managed_ones(text: str) -> None:
    """S3.8, C26: A GPU list with a GPU that is not managed is refused. The error names the managed GPUs."""
    error = error_of(f"0,/a.py,,x,{text}", FOUR)
    assert isinstance(error, Refused)
    assert "0-3" in error.do


def test_every_gpu_list_is_refused_if_no_gpu_is_managed() -> None:
    """S3.8: If no GPU is managed, every GPU list is refused."""
    assert "none" in error_of("0,/a.py,,x,0", LineContext("/jobs", managed=())).do


@given(st.sets(st.integers(0, 4095), min_size=1, max_size=60))
def test_a_written_gpu_list_is_read_back_unchanged(ids: set[int]) -> None:
    """S3.6: A GPU list that is written as text is parsed to the same GPUs."""
    text = gpu_ids_text(ids)
    assert parse_gpu_ids(text) == tuple(sorted(ids))
    assert spec_of(f"0,/a.py,,x,{text}").allowed == tuple(sorted(ids))


# -- quoting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("--name 'a b'", ["--name", "a b"]),
        ('--name "a b"', ["--name", "a b"]),
        ('--name "a,b"', ["--name", "a,b"]),
        ('"--layers 1,2,3"', ["--layers", "1,2,3"]),
        ('"--x ""a,b"""', ["--x", "a,b"]),
        ("\"--x 'a, b'\"", ["--x", "a, b"]),
        ('--x "a,b" --y "c,d"', ["--x", "a,b", "--y", "c,d"]),
        ('--json "{""a"": 1}"', ["--json", "{a: 1}"]),  # outside a CSV field "" is an empty shell word
        ('"--json \'{""a"": [1,2]}\'"', ["--json", '{"a": [1,2]}']),
        ("--x a\\,b", ["--x", "a,b"]),
        ("--x a\\ b", ["--x", "a b"]),
        ("--x \\'", ["--x", "'"]),
        ('--x \\"', ["--x", '"']),
        ("--empty '' --z", ["--empty", "", "--z"]),
        ('""', []),
        ('"a" b', ["a", "b"]),
        ("a'b'c", ["abc"]),
        ("-- --x", ["--", "--x"]),
        ("--x=a=b", ["--x=a=b"]),
    ],
)
@pytest.mark.parametrize("tail", ["", ",", ",0", ",0,2", ";label=z", ",0;label=z"])
def test_arguments_are_unquoted_like_csv_and_split_like_shell_words(field: str, words: list[str], tail: str) -> None:
    """S3.5, S3.6, C22: The quotes of the arguments field are removed as in CSV. The text is then split as a shell does.

    The result does not depend on whether a GPU list, options or nothing follows the field.
    """
    spec = spec_of(f"0,/a.py,,{field}{tail}")
    assert list(spec.arguments) == words
    assert spec.allowed == {"": None, ",": None, ",0": (0,), ",0,2": (0, 2)}.get(tail.split(";")[0])
    assert spec.label == ("z" if "label" in tail else "")


@pytest.mark.parametrize(
    "field", ["it's", "--x 'a", '--x "a', '"--p 1,', "--msg don't --n 1", "\\", "--x a\\", '"a""b"', "'a;label=b"]
)
@pytest.mark.parametrize("tail", ["", ",0"])
def test_an_unbalanced_quote_is_refused_and_the_error_shows_the_literal_spelling(field: str, tail: str) -> None:
    """S3.7, C21: A line with an unbalanced quote is refused. The error shows how to write a literal quote.

    If a backslash ends the field, it escapes the comma. Such a line is valid, and the comma belongs to the argument.
    """
    if tail and field.endswith("\\"):
        assert spec_of(f"0,/a.py,,{field}{tail}").arguments[-1].endswith(",0")
        return
    error = error_of(f"0,/a.py,,{field}{tail}")
    assert isinstance(error, UsageError)
    assert "quote" in str(error) or "\\" in error.do


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("0,/a.py,,--layers 1,2,x", '0,/a.py,,"--layers 1,2,x"'),
        ("0,/a.py,,--name 'a,b'", "0,/a.py,,\"--name 'a,b'\""),
        ("0,/a.py,,--x a,b", '0,/a.py,,"--x a,b"'),
        ("0,/a.py,e,--x a,--y b", '0,/a.py,e,"--x a,--y b"'),
        ("0,/a.py,,--lr 0.1,0.2", '0,/a.py,,"--lr 0.1,0.2"'),
        ('0,/a.py,,--x "a",b', '0,/a.py,,"--x ""a"",b"'),
    ],
)
def test_an_unquoted_comma_is_refused_and_the_suggested_line_is_read_back_correctly(line: str, right: str) -> None:
    """S3.6, S3.7, C22: Arguments with an unquoted comma are refused. The error shows the line with quotes.

    The line with quotes is parsed to the arguments that the user meant.
    """
    error = error_of(line)
    assert right in error.do
    words = spec_of(right).arguments
    written = line.split(",", 3)[3]
    assert " ".join(words).replace('"', "") == written.replace("'", "").replace('"', "")


@given(st.text(st.sampled_from(string.ascii_letters + string.digits + " ,;'\"\\=-#$*"), max_size=40))
@example("--x 'a;label=b'")
@example("--x 1;after=2,3")
@example("a\\,1")
def test_no_text_of_an_accepted_line_is_lost(arguments: str) -> None:
    """S3.7: If a line is accepted, each of its letters is in the parsed arguments, the GPU list or an option."""
    line = f"0,/a.py,,{arguments}"
    try:
        parsed = parse(line, DOOR)
    except SchedulerError:
        return
    assert parsed is not None
    spec = parsed.spec
    kept = "".join(spec.arguments)
    for name in ("label", "cwd", "gpus", "cuda"):
        kept += f"{name}{getattr(spec, name)}" if getattr(spec, name) else ""
    if any(value for value in (spec.after, spec.after_ok, spec.vram_mib, spec.time_limit_s, spec.retries)):
        return  # these values are converted; the tables below test them
    kept += gpu_ids_text(spec.allowed or ())
    letters = sorted(c for c in arguments if c.isalpha())
    assert sorted(c for c in kept if c.isalpha()) == letters


# -- ;key=value -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (";label=base", "label", "base"), (";label=a b", "label", "a b"), (';label="a;b=c,d"', "label", "a;b=c,d"),
        (";after=12", "after", (12,)), (';after="12,13"', "after", (12, 13)), (";after=12+13", "after", (12, 13)),
        (";after_ok=3", "after_ok", (3,)), (";vram=18G", "vram_mib", 18 * 1024), (";vram=512M", "vram_mib", 512),
        (";vram=18GiB", "vram_mib", 18 * 1024), (";time=4h", "time_limit_s", 14400.0), (";time=90", "time_limit_s", 90.0),
        (";time=1-12:00:00", "time_limit_s", 129600.0), (";time=2d", "time_limit_s", 172800.0), (";retries=2", "retries", 2),
        (";cwd=/data/x", "cwd", "/data/x"), (";cwd=~/x", "cwd", "/home/u/x"), (";cwd=x/../y", "cwd", "/jobs/y"),
        (";gpus=2", "gpus", "2"), (";gpus=2x0.5", "gpus", "2x0.5"), (";cuda=local", "cuda", "local"),
        (" ; label = base ", "label", "base"), (";LABEL=base", "label", "base"),
        (";slots=3", "slots", 3), (";slots=1", "slots", 1), (";env=A=a", "variables", ("A=a",)),
        (";env=A=1 B=x=y C=", "variables", ("A=1", "B=x=y", "C=")), (""";env="A='two words' B=1,2;3\"""", "variables", ("A=two words", "B=1,2;3")),
        (";output=none", "output", "none"), (";output=log", "output", "log"), (";stderr=apart", "stderr_apart", True),
        (";stderr=log", "stderr_apart", False), (";gzip=yes", "gzip", True), (";gzip=no", "gzip", False),
        (";log_dir=/logs/x", "log_dir", "/logs/x"), (";log_dir=x/../y", "log_dir", "/jobs/y"), (";log_dir=~/l", "log_dir", "/home/u/l"),
        (";log_name=run 1.x", "log_name", "run 1.x"), (";log_name=é", "log_name", "é"), (";on_finish=/bin/tell", "on_finish", "/bin/tell"),
        (";on_finish=notify", "on_finish", "notify"), (";mail=me@x.org", "mail_to", "me@x.org"), (";info=by hand", "info", "by hand"),
        (';info="a;b=c,d"', "info", "a;b=c,d"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["after the arguments", "before the list", "after the list", "empty fields"])
def test_options_are_accepted_after_fields_four_and_five(options: str, field: str, value: object, place: str) -> None:
    """Contract 3: Options are accepted after the fourth and after the fifth field."""
    line = {
        "after the arguments": f"0,/a.py,,--x 1{options}",
        "before the list": f"0,/a.py,,--x 1{options},0-3" if not options.startswith(";after") else f"0,/a.py,,--x 1{options}",
        "after the list": f"0,/a.py,,--x 1,0-3{options}",
        "empty fields": f"0,/a.py,,,{options}",
    }[place]  # fmt: skip
    spec = spec_of(line)
    assert getattr(spec, field) == value
    assert spec.arguments == (() if place == "empty fields" else ("--x", "1"))
    assert spec.allowed == ((0, 1, 2, 3) if ",0-3" in line else None)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("0", (0,)), ('"0,3"', (0, 3)), ("0+3", (0, 3)), ('"0-2"', (0, 1, 2)), ('"3,0"', (0, 3)), ('" 1 "', (1,)), ("2+2", (2,))],
)  # fmt: skip
@pytest.mark.parametrize(
    "where", ["0,/a.py,,--x 1{}", "0,/a.py,,{}", "0,/a.py,,--x 1{},", "0,/a.py,,--x 1,{}", "0,/a.py,,--x 1{};label=z"]
)
def test_option_on_requests_gpus_by_name(text: str, ids: tuple[int, ...], where: str) -> None:
    """Contract 3, S4.31: A job with `;on=` requests exactly the GPUs that this option lists.

    It may use no other GPU.
    """
    spec = spec_of(where.format(f";on={text}"), FOUR)
    assert spec.on == spec.allowed == ids
    assert need_of(spec, ModelTable())[0] == ResourceRequest(len(ids), 0)


@pytest.mark.parametrize(
    ("line", "says", "do"),
    [
        ("0,/a.py,,x;on=0,3", "belongs to ;on=0 or is the GPU list", ';on="0,3" if it belongs to ;on='),
        ("0,/a.py,,x;on=0,1-3", "belongs to ;on=0 or is the GPU list", ';on="0,1-3" if it belongs to ;on='),
        ("0,/a.py,,x;on=0, 3 ", "belongs to ;on=0 or is the GPU list", ';on="0,3" if it belongs to ;on='),
        ("0,/a.py,,x;on=0,3;label=z", "belongs to ;on=0 or is the GPU list", ';on="0,3" if it belongs to ;on='),
        ("0,/a.py,,x;label=z;on=0,0", "belongs to ;on=0 or is the GPU list", "else put the GPU list before ;on="),
        (
            '0,/a.py,,x;on="0,3",1',
            "on= names GPU 0,3, but the list of allowed GPUs names GPU 1",
            "leave one of them out",
        ),
        ("0,/a.py,,x,1;on=0", "on= names GPU 0, but the list of allowed GPUs names GPU 1", "leave one of them out"),
        ("0,/a.py,,x,0-3;on=0", "on= names GPU 0, but the list of allowed GPUs names GPU 0-3", "leave one of them out"),
        ("0,/a.py,,x;on=0;gpus=1", "on= and gpus= exclude each other", "leave one of them out"),
        ("0,/a.py,,x;on=7", "GPU 7 is not managed here", "managed: 0-3"),
        ("0,/a.py,,x;on=0+7", "GPU 7 is not managed here", "managed: 0-3"),
        ("0,/a.py,,x;on=", ";on=: no GPU is named", "write 0 or 0,3"),
        ("0,/a.py,,x;on=a", ";on=: 'a' is not a GPU list", "write 2 or 0,2"),
        ("0,/a.py,,x;on=3-1", ";on=: the GPU range 3-1 is backwards", "1-3"),
        ("0,/a.py,,x;on=1;on=1", ";on= is given twice", "give it once"),
        (
            "0,/a.py,,x;env=A=1,2",
            "it is not clear whether '2' belongs to ;env=A=1 or is the GPU list",
            ';env="A=1,2" if it belongs to ;env=',
        ),
    ],
)
def test_a_line_with_contradictory_or_ambiguous_gpus_or_variables_is_refused(line: str, says: str, do: str) -> None:
    """Contract 3: A line is refused if its `;on=` or `;env=` is ambiguous, contradictory or invalid."""
    error = error_of(line, FOUR)
    assert says in error.what and do in error.do


def test_a_gpu_list_and_option_on_may_name_the_same_gpus() -> None:
    """Contract 3: A GPU list and `;on=` may both be given if they name the same GPUs."""
    assert spec_of('0,/a.py,,x,0,3;on="0,3"', FOUR).on == (0, 3)
    assert spec_of('0,/a.py,,x;on="0,3",0,3', FOUR).on == (0, 3)


def test_all_options_can_be_combined_in_one_line() -> None:
    """Contract 3: All options can be combined in one line."""
    spec = spec_of("0,/a.py,e,--x 1,0-3;label=base;after=12;vram=18G;time=4h;retries=2;cwd=/data/x;gpus=2;cuda=local")
    assert spec == JobSpec(
        script="/a.py", conda_env="e", arguments=("--x", "1"), allowed=(0, 1, 2, 3), label="base", after=(12,),
        vram_mib=18432, time_limit_s=14400.0, retries=2, cwd="/data/x", gpus="2", cuda="local",
    )  # fmt: skip


@pytest.mark.parametrize(
    "field", ['--m "a;label=b"', '"--m a;label=b"', '--m "x;y=1" "z;w=2"', "a;b", "a;", ";;", "--q ;x"]
)
def test_a_semicolon_in_quotes_or_without_a_key_belongs_to_the_arguments(field: str) -> None:
    """Contract 3: A semicolon belongs to the arguments if it is in quotes, or if no `key=value` follows it."""
    spec = spec_of(f"0,/a.py,,{field},1")
    text = field[1:-1] if field.startswith('"') else field
    assert list(spec.arguments) == shlex.split(text)
    assert (spec.label, spec.allowed) == ("", (1,))


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("gpu", "gpus"),
        ("lable", "label"),
        ("afterok", "after_ok"),
        ("retry", "retries"),
        ("vran", "vram"),
        ("tim", "time"),
    ],
)
def test_the_error_for_an_unknown_option_names_the_most_similar_one(key: str, near: str) -> None:
    """Contract 3: The error for an unknown key names the most similar known key."""
    assert f";{near}=" in error_of(f"0,/a.py,,x;{key}=1").do


def test_the_error_for_an_unknown_option_without_a_similar_one_lists_all() -> None:
    """Contract 3: If no known key is similar to an unknown key, the error lists all known keys."""
    do = error_of("0,/a.py,,x;wibble=1").do
    assert all(key in do for key in LINE_KEYS)
    assert "quote" in do


@pytest.mark.parametrize(
    "option",
    [
        "after=a", "after=", "after=1.5", "after=-1", "after_ok=x", "vram=lots", "vram=-1", "vram=", "time=soon", "time=",
        "time=-5", "time=1h30", "retries=-1", "retries=1.5", "retries=", "retries=9999999", "gpus=", "gpus=a", "gpus=-1",
        "gpus=2x1.5", "gpus=nan", "gpus=inf", "gpus=1e9", "cuda=gpu", "cuda=", "label=a;label=b",
        "slots=0", "slots=-1", "slots=", "slots=a", "slots=1.5", "slots=9999999", "slots=2;slots=3", "env=A", "env==1",
        "env=A=1 B", "env=A='1", "output=", "output=file", "output=NONE", "stderr=", "stderr=yes", "gzip=", "gzip=1",
        "gzip=true", "log_name=", "log_name=a/b", "log_name=..", "log_name=.", "log_name=a.gz", f"log_name={'x' * 201}",
        f"log_name={'é' * 101}", "log_name=a\tb\x1b", "on_finish=", "on_finish=a\x1bb", "mail=", "mail=a\x07",
    ],
)  # fmt: skip
def test_the_error_for_an_invalid_option_value_names_its_key(option: str) -> None:
    """Contract 3: The error for an invalid value of an option names the option, and says how to write the value."""
    key = option.partition("=")[0]
    assert f";{key}=" in error_of(f"0,/a.py,,x;{option}").what


@pytest.mark.parametrize("label", ["", "\x1b[2J", "a\x00b", "x" * 201])
def test_an_empty_too_long_or_unprintable_label_is_refused(label: str) -> None:
    """C14: A label that is empty, too long, or contains control characters is refused."""
    with pytest.raises(UsageError):
        parse(f'0,/a.py,,x;label="{label}"', DOOR)


@pytest.mark.parametrize("tail", ["13", "13,14", " 13", "0-3", "13 , 14"])
def test_an_unquoted_list_after_option_after_is_refused_with_the_quoted_spelling(tail: str) -> None:
    """C22: An unquoted list after `;after=` is refused, because its numbers could be GPUs.

    The error shows the list in quotes.
    """
    error = error_of(f"0,/a.py,,x;after=12,{tail}")
    assert 'after="12,' in error.do


@pytest.mark.parametrize("line", ["0,/a.py,,x;after=12,13;label=z", "0,/a.py,,x;after=12,13 ;time=4h"])
def test_an_unquoted_list_after_option_after_is_refused_before_another_option(line: str) -> None:
    """C22, S3.7: An unquoted list after `;after=` is also refused if another option follows the list."""
    assert "after" in error_of(line).what


def test_a_gpu_list_before_option_after_is_accepted() -> None:
    """C22: If a GPU list precedes `;after=`, an unquoted list of jobs after `;after=` is accepted."""
    spec = spec_of("0,/a.py,,x,0,1;after=12,13")
    assert (spec.allowed, spec.after) == ((0, 1), (12, 13))


@pytest.mark.parametrize(
    ("line", "ok"),
    [
        ("0,/a.py,,x,0,1;gpus=4", False), ("0,/a.py,,x,0,1;gpus=2", True), ("0,/a.py,,x,0;gpus=1.5", False),
        ("0,/a.py,,x,0;gpus=0.5", True), ("0,/a.py,,x,0,1;gpus=3x0.1", False), ("0,/a.py,,x;gpus=4", True),
    ],
)  # fmt: skip
def test_a_job_that_requests_more_gpus_than_its_gpu_list_has_is_refused(line: str, ok: bool) -> None:
    """C27: A job that requests more GPUs than its GPU list contains is refused."""
    if ok:
        spec_of(line)
    else:
        assert isinstance(error_of(line), Refused)


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(f"vram={'9' * 400}", id="vram of 400 digits"),
        pytest.param("vram=99999999999999999999G", id="vram beyond 64 bits"),
        pytest.param(f"time={'9' * 400}:00", id="clock of 400 digits"),
        pytest.param(f"time={'9' * 5000}:00", id="clock of 5000 digits"),
        pytest.param(f"time={'9' * 400}", id="seconds of 400 digits"),
    ],
)
def test_a_number_too_large_for_the_store_is_refused_as_a_mistake_of_its_line(option: str) -> None:
    """P3, P8: If a number is too large for the store, its line is refused like a line with any other mistake."""
    with pytest.raises((UsageError, Refused)):
        parse(f"0,/a.py,,x;{option}", DOOR)


# -- scripts, paths, environments -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("/a.py", "/a.py"), ("a.py", "/jobs/a.py"), ("./a.py", "/jobs/a.py"), ("sub/../a.py", "/jobs/a.py"),
        ("../a.py", "/a.py"), ("~/a.py", "/home/u/a.py"), ("$HOME/a.py", "/jobs/$HOME/a.py"), ("~b/a.py", "/jobs/~b/a.py"),
        ("/a b.py", "/a b.py"), ("./-rf", "/jobs/-rf"), ("/a*.py", "/a*.py"), ("/$(id).py", "/$(id).py"),
        ("'/a.py'", "/jobs/'/a.py'"),
    ],
)  # fmt: skip
def test_a_relative_script_path_starts_at_the_folder_of_the_jobs_file(written: str, path: str) -> None:
    """C34: A relative script path starts at the folder of the jobs file. Only `~/` is expanded."""
    assert spec_of(f"0,{written}").script == path


@pytest.mark.parametrize("script", ["-rf", "--help", "-c"])
def test_a_script_name_that_looks_like_an_option_is_refused_with_the_correct_spelling(script: str) -> None:
    """C33: A script whose name begins with `-` is refused. The error shows the name with `./` before it."""
    assert f"./{script}" in error_of(f"0,{script},,x").do


@pytest.mark.parametrize(
    ("written", "env"),
    [
        ("e", "e"),
        ("/opt/e", "/opt/e"),
        ("~/e", "/home/u/e"),
        ("sub/e", "/jobs/sub/e"),
        ("my env", "my env"),
        ("~", "~"),
    ],
)
def test_a_python_environment_is_read_as_a_name_or_a_path(written: str, env: str) -> None:
    """Contract 3: An environment with a slash is read as a path. Any other environment is read as a name."""
    assert spec_of(f"0,/a.py,{written},x").conda_env == env


def test_a_python_environment_name_that_looks_like_an_option_is_refused() -> None:
    """C33: An environment whose name begins with `-` is refused."""
    assert "environment" in error_of("0,/a.py,--name,x").what


# -- shells, control characters, sizes --------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    ["$(id)", "`id`", "|", "&&", "a;b", ">", "<", "$HOME", "*", "~", "!!", "${X}", "?", "[a]", "{a}", "&", "(x)", "%s"],
)
def test_shell_syntax_in_arguments_is_passed_unchanged(word: str) -> None:
    """C32: Shell syntax in the arguments is passed to the script unchanged."""
    assert spec_of(f"0,/a.py,,--x {word} y").arguments == ("--x", word, "y")


@pytest.mark.parametrize("word", ["$HOME", "$(id)", "`id`", "${X}", "*.txt"])
def test_one_note_says_that_text_which_a_shell_would_expand_is_literal(word: str) -> None:
    """Contract 3, settled details: One note says that texts such as `$HOME` are passed unchanged, not expanded."""
    parsed = parse(f"0,/a.py,,--x {word} {word}", DOOR)
    assert parsed is not None and len(parsed.notes) == 1
    assert word in parsed.notes[0] and "is passed unchanged" in parsed.notes[0]


@pytest.mark.parametrize(
    "line", ["a\0b", "0,/a\0.py", "0,/a.py,e\0", "0,/a.py,,x\0y", "0,/a.py,,x,0\0", "0,/a.py,,x;cwd=/x\0"]
)
def test_a_line_with_a_nul_byte_is_refused(line: str) -> None:
    """C12: A line with a NUL byte in any field is refused."""
    assert "NUL" in error_of(line).what


@pytest.mark.parametrize("line", ["0,/\x1ba\0.py", "0,/\x07a.py,e\0", "0,/a.py,,x;cwd=\x1b\0"])
def test_a_nul_byte_after_another_control_character_is_refused_by_name(line: str) -> None:
    """C12, C14: The error names the NUL byte, even if another control character precedes it."""
    assert "NUL" in error_of(line).what


@pytest.mark.parametrize("text", ["\x1b]0;x\x07", "\x1b[2J", "\x08", "\x7f", "\x85"])
def test_other_control_characters_in_arguments_are_kept(text: str) -> None:
    """C14: Other control characters in arguments are kept; the views escape them (see tests/views)."""
    assert spec_of(f"0,/a.py,,a{text}b").arguments == (f"a{text}b",)


def test_an_argument_is_refused_if_it_is_longer_than_the_kernel_accepts() -> None:
    """An argument longer than the kernel accepts (E2BIG) is refused when the line is read, not when the job starts."""
    assert spec_of(f"0,/a.py,,{'x' * LONGEST_WORD}").arguments == ("x" * LONGEST_WORD,)
    for text in ("x" * (LONGEST_WORD + 1), "x" * 200_000, "é" * (LONGEST_WORD // 2 + 1)):
        assert str(LONGEST_WORD) in error_of(f"0,/a.py,,{text}").do


def test_option_launch_selects_python_or_torchrun() -> None:
    assert spec_of("0,/a.py").launch == "python" == spec_of("0,/a.py,,;launch=python").launch
    assert spec_of("0,/a.py,,--x;launch=torchrun").launch == "torchrun"
    error = error_of("0,/a.py,,;launch=mpirun")
    assert error.what == ";launch=: unknown value 'mpirun'" and error.do == "known: python, torchrun"
    error = error_of("0,/a.sh,,;launch=torchrun")
    assert "torchrun runs only Python scripts" in error.what and "a.sh" in error.what and error.exit_code == 3


def test_the_length_limit_of_a_command_counts_bytes() -> None:
    """The limit for the length of the whole command (E2BIG) is in bytes, not in characters."""
    with pytest.raises(UsageError, match="too long"):
        check_nodes(["é" * 1000] * 600)
    check_nodes(["e" * 1000] * 600)


def test_a_command_with_too_many_words_is_refused() -> None:
    """The limit for the length of the whole command (E2BIG) applies to the bytes of all its words together."""
    with pytest.raises(UsageError) as caught:
        check_nodes(["x" * 1023] * 1025)
    assert "too long" in caught.value.what and caught.value.do
    check_nodes(["x" * 1023] * 1024)


def test_a_line_that_is_too_long_is_refused_and_the_error_names_the_limit() -> None:
    """C15: A line that is too long is refused; the error names the limit."""
    assert str(LONGEST_LINE) in error_of("0,/a.py,," + "x " * (LONGEST_LINE // 2)).do


# -- --llm ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ("--llm a", "a"), ("--llm=a", "a"), ("--llm a --llm b", "b"), ("--llm=a --llm b", "b"), ("", None), ("--llm", None),
        ("--llmx a", None), ("-- --llm a", None), ("--llm a -- --llm b", "a"), ("'--llm a'", None), ("--llm 'a b'", "a b"),
        ("--name --llm", None), ("--llm=", ""), ("--llm a --llm", "a"),
    ],
)  # fmt: skip
def test_the_model_of_a_line_is_the_last_llm_argument_before_a_double_dash(arguments: str, model: str | None) -> None:
    """S3.13, C30: The model of a job is the value of its last `--llm` argument.

    Arguments after a bare `--` do not count.
    """
    assert model_in(spec_of(f"0,/a.py,,{arguments}").arguments) == model


# -- writing lines ----------------------------------------------------------------------------------------


def test_write_line_quotes_arguments_that_contain_commas() -> None:
    """S3.6: `write_line` puts arguments that contain commas in quotes. So the line is parsed to the same arguments."""
    line = write_line("/a.py", arguments="--layers 1,2", gpus="0,1")
    assert line == '0,/a.py,,"--layers 1,2",0,1'
    spec = spec_of(line)
    assert (spec.arguments, spec.allowed) == (("--layers", "1,2"), (0, 1))


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\0b"])
@pytest.mark.parametrize("field", ["script", "conda", "arguments", "gpus"])
def test_write_line_refuses_line_breaks_and_nul_bytes(field: str, text: str) -> None:
    """C32: `write_line` refuses line breaks and NUL bytes in every field."""
    values = {"script": "/a.py", field: text}
    with pytest.raises(UsageError) as caught:
        write_line(values.pop("script"), **values)
    assert caught.value.do


@pytest.mark.parametrize("script", ["", "  "])
def test_write_line_refuses_an_empty_script(script: str) -> None:
    """S3.41: `write_line` refuses an empty script."""
    with pytest.raises(UsageError):
        write_line(script)


PRINTABLE = st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])
NASTY = st.sampled_from(
    [",", '"', "'", ";", "\\", "#", "-", "--", "=", ";label=x", " ", "\t", '""', "é", "\u3000", "0", "1,2", "$(x)"]
)
TEXT = st.lists(st.one_of(NASTY, st.text(PRINTABLE, max_size=4)), max_size=6).map("".join)


@given(
    script=TEXT,
    conda=TEXT,
    words=st.lists(TEXT, max_size=5),
    gpus=st.sets(st.integers(0, 60), max_size=5),
    priority=st.integers(-(10**9), 10**9),
)
@example(script='"', conda='"', words=['"', ",", ";label=x"], gpus={1}, priority=-1)
@example(script=" x ", conda=" ", words=["", " ", "\\"], gpus=set(), priority=0)
@example(script="a;label=b", conda="c;d=e", words=["f;gpus=2", "1"], gpus={2, 3}, priority=0)
def test_any_line_of_write_line_is_parsed_back_to_the_same_values(
    script: str, conda: str, words: list[str], gpus: set[int], priority: int
) -> None:
    """S3.6, S3.7, C22: Any line that `write_line` returns is parsed to the values from which it was written."""
    path = "/" + script
    assume(not conda.startswith("-") and "/" not in conda)
    line = write_line(path, priority=priority, conda=conda, arguments=shlex.join(words), gpus=gpu_ids_text(gpus))
    assert "\n" not in line and "\r" not in line
    spec = spec_of(line)
    assert list(spec.arguments) == words
    assert spec.allowed == (tuple(sorted(gpus)) or None)
    assert spec.conda_env == conda
    assert spec.priority == priority
    assert spec.label == spec.gpus == ""
    assert spec.script == spec_of("0," + (quoted(path) or path)).script
    assert spec.script == path or "." in script or "/" in script  # otherwise the path was normalised


@given(TEXT)
def test_a_quoted_label_is_parsed_back_unchanged(text: str) -> None:
    """S3.6: A quoted label is parsed back unchanged."""
    spec = spec_of(f"0,/a.py,,x;label={_label(text)}") if 0 < len(text) <= 200 and '"' not in text else None
    assert spec is None or spec.label == text


def _label(text: str) -> str:
    return f'"{text}"'


# -- arbitrary text ---------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        "0", "1", "-1", ",", ",", ",", ",", '"', "'", "\\", ";", "=", ";label=", ";after=", ";after_ok=", ";vram=", ";time=",
        ";retries=", ";cwd=", ";gpus=", ";cuda=", ";x=", ";on=", ";slots=", ";env=", "A=1", ";output=", "none",
        ";stderr=apart", ";gzip=yes", ";log_dir=", ";log_name=", ";on_finish=", ";mail=", ";info=", "a.py", "/a.py", "~", "~/", "#", " ", "\t", "\r", "-", "--", "0-3",
        "2x0.5", "18G", "4h", "1:2", "local", "\x1b", "é", "٣", "²", "\u2028", "\ud7ff", "1e9", "nan", "inf", "\0",
    ]
)  # fmt: skip


@given(st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=16).map("".join), st.lists(PIECES, max_size=12).map(lambda p: "0,a.py,," + "".join(p))))  # fmt: skip
@example("0,a.py,,;vram=0" + "9" * 30)
def test_any_text_is_read_as_a_job_as_no_job_or_refused(text: str) -> None:
    """P3, P8: Any text is read as a job, as an empty line or comment, or it raises UsageError or Refused."""
    try:
        found = parse(text, FOUR)
    except (UsageError, Refused) as error:
        assert error.what
        return
    assert found is None or isinstance(found, Parsed)
    if found is not None:
        assert JobSpec.from_dict(found.spec.as_dict()) == found.spec
        assert found.spec.script.startswith("/")
        assert found.spec.allowed is None or found.spec.allowed == tuple(sorted(set(found.spec.allowed)))


@given(st.text(st.sampled_from(string.ascii_letters + " \t=,.-$*#;"), max_size=60))
def test_the_fast_path_splits_plain_arguments_like_shlex(text: str) -> None:
    """S3.5: Arguments without quotes are split by faster code. It returns the same words as `shlex.split`."""
    spec = spec_of(f"0,/a.py,,{quoted(text)}")
    assert list(spec.arguments) == shlex.split(text)


# -- job numbers, the commands file -----------------------------------------------------------------------


@pytest.mark.parametrize(("text", "ids"), [("12", (12,)), ("12,13", (12, 13)), ("1+2 3", (1, 2, 3)), ("5,5", (5,))])
def test_a_list_of_job_ids_is_read(text: str, ids: tuple[int, ...]) -> None:
    """Contract 3, `after`: Job ids may be separated by commas, `+` or spaces. Duplicates are removed."""
    assert job_ids(text) == ids


@pytest.mark.parametrize("text", ["", ",", "a", "1-3", "1.5", "9" * 16])
def test_an_invalid_list_of_job_ids_is_refused(text: str) -> None:
    """Contract 3, `after`: A text that is not a list of job ids is refused. The error says how to write such a list."""
    with pytest.raises(UsageError) as caught:
        job_ids(text)
    assert caught.value.do


@pytest.mark.parametrize("line", ["echo hi", "  echo 'a,b' | cat ", "x=1; echo $x # not a comment of ours"])
def test_a_line_of_a_commands_file_is_one_shell_command(line: str) -> None:
    """Contract 3, commands file: A line is one shell command, run with `sh -c`."""
    parsed = commands_file.parse(line, DOOR)
    assert parsed is not None
    assert parsed.spec == JobSpec(source="commands", arguments=("sh", "-c", line.strip()))


@pytest.mark.parametrize("line", ["", "  ", "# x", "  # x"])
def test_empty_lines_and_comments_of_a_commands_file_are_not_jobs(line: str) -> None:
    """Contract 3, commands file: Empty lines and comments are not jobs."""
    assert commands_file.parse(line, DOOR) is None


@pytest.mark.parametrize("line", ["echo \0", "x" * (LONGEST_WORD + 1)])
def test_a_command_with_a_nul_byte_or_too_many_bytes_is_refused(line: str) -> None:
    """C12, C15: A command is refused if it has a NUL byte or is longer than the kernel accepts."""
    with pytest.raises(UsageError) as caught:
        commands_file.parse(line, DOOR)
    assert caught.value.do


def test_the_length_limit_of_a_commands_file_line_counts_bytes() -> None:
    """If a command is longer than the kernel accepts (E2BIG), it is refused when its line is read.

    The limit is in bytes, not in characters.
    """
    with pytest.raises(UsageError):
        commands_file.parse("é" * (LONGEST_WORD // 2 + 1), DOOR)

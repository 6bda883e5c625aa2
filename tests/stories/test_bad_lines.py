"""Bad lines among good lines: a real scheduler refuses only the bad line and logs it once, with the correct form."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.stories.harness import wait_for
from tests.stories.pouring import Pouring

MOST_GROWTH_KB = 32 * 1024


@pytest.fixture
def pouring(scheduler) -> Pouring:
    """Return a running scheduler with two GPUs, and scripts for its lines."""
    found = Pouring(scheduler(gpus=2))
    found.s.start()
    return found


def peak_kb(pid: int) -> int:
    """Return the peak memory use of this process, in KiB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def test_c12_a_nul_byte_refuses_one_line(pouring):
    """C12: A line with a NUL byte is refused; the other lines run."""
    pouring.judge(
        [
            (b"0,note,,a\0b", "NUL byte"),
            (b"0,no\0te,,a", "NUL byte"),
            (b"\0", "NUL byte"),
            (b"\0" * 5000, "NUL byte"),
            (b"0,note,,a;label=\0", "NUL byte"),
        ]
    )


def test_c13_invalid_utf8_refuses_one_line(pouring):
    """C13: A line with invalid UTF-8 is refused, and the reason names the wrong byte; the other lines run."""
    pouring.judge(
        [
            (b"\xff\xfe", "not UTF-8 at byte 1"),
            (b"0,note,,caf\xe9", "not UTF-8 at byte 12"),
            (b"0,note,,\xed\xa0\x80", "not UTF-8"),  # half of a surrogate pair
            (b"0,note,,\xc0\xaf", "not UTF-8"),  # a slash encoded in two bytes
        ]
    )
    shown = pouring.s.cli("status").stdout
    assert "not UTF-8" in shown and "\ufffd" not in pouring.s.cli("status", "--json").stderr


def test_c13_a_first_line_that_resembles_a_utf16_mark_refuses_no_other_line(scheduler):
    """C13: A first line that only resembles a UTF-16 byte order mark is refused; the rest of the file is read."""
    p = Pouring(scheduler(gpus=1))
    p.pour(b"\xff\xfe", p.good("a"))
    p.s.start()
    p.rest()
    assert p.noted() == ["a"] and "not UTF-8 at byte 1" in p.refused()[1]


def test_c14_control_characters_reach_the_job_unchanged_and_are_shown_escaped(pouring):
    """C14: Control characters reach the job unchanged, and are escaped in all output and in the main log."""
    evil = "\x1b]0;x\x07\x1b[2J\x9b31m\u202egpj\x7f"
    pouring.pour(f'0,words,,"{evil}";gpus=0', f"{evil},note,,{evil}", f"0,no-such{evil},,")
    pouring.read()
    s = pouring.s
    s.wait_state(1, "done")
    assert pouring.words(1) == [evil]
    assert "whole number" in pouring.refused()[2]
    for words in (["status"], ["jobs"], ["show", "1"], ["why", "1"], ["show", "2"], ["why", "2"]):
        out = s.cli(*words)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out.stdout + out.stderr), words
    said = s.said() + (s.folder / "gpu_scheduler.log").read_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said)
    assert json.loads(s.cli("show", "1", "--json").stdout)["arguments"] == [evil]


def test_c15_a_ten_megabyte_line_is_refused_with_little_memory(pouring):
    """C15: A line of 10 MB is refused and needs little memory; the other lines run."""
    pouring.judge([("0,note,,first-mistake,x", "not a GPU list")])
    before = peak_kb(pouring.s.pid)
    pouring.judge(
        [
            (b"a" * 10_000_000, "the line is longer than 1048576 bytes"),
            ('0,note,,"' + "b" * 10_000_000, "the line is longer than"),
        ]
    )
    assert peak_kb(pouring.s.pid) - before < MOST_GROWTH_KB
    assert len(json.dumps(pouring.s.status())) < 20_000


def test_c15_many_long_refused_lines_are_not_kept_in_memory(pouring):
    """C15, C20: The scheduler keeps the reasons of refused lines in memory, but not their text."""
    pouring.judge([("0,note,,first-mistake,x", "not a GPU list")])
    before = peak_kb(pouring.s.pid)
    for number in range(10):
        pouring.pour(*(f"{number}.{n}" + "x" * 1_000_000 for n in range(10)))
        pouring.read()
    assert len(pouring.refused()) == 101
    assert peak_kb(pouring.s.pid) - before < MOST_GROWTH_KB


def test_c21_an_unbalanced_quote_refuses_only_its_own_line(pouring):
    """C21: A line with an unbalanced quote is refused; the following lines run."""
    pouring.judge(
        [
            ('0,note,,"--p 1,', "a double quote is not closed"),
            ("0,note,,--p 'x", "a quote is not closed"),
            ('0,note,"env,a,', "a double quote is not closed"),
            ('0,"note,,a,', "a double quote is not closed"),
            ('"0,note,,a,', "a double quote is not closed"),
            ('0,note,,a;label="b', "a double quote is not closed"),
            ('0,note,,a,"0,1', "a double quote is not closed"),
            ("0,note,,a\\", "cannot split the arguments"),
        ]
    )


def test_c22_the_corrected_line_in_the_reason_runs_as_intended(pouring):
    """C22: An ambiguous line is refused; the line shown in the reason runs with exactly the intended words."""
    samples = [
        ("0,words,,--layers 1,2,3x", ["--layers", "1,2,3x"]),
        ("0,words,,--x a,b", ["--x", "a,b"]),
        ("0,words,,--x 1,2 --y", ["--x", "1,2", "--y"]),
        ('0,words,,--say "a b",c', ["--say", "a b,c"]),
        ("0,words,,--range 3-1,2-a", ["--range", "3-1,2-a"]),
    ]
    pouring.judge([(line, "if this belongs to the arguments, quote them: ") for line, _ in samples])
    for number, (_, words) in enumerate(samples):
        reason = pouring.refused()[2 * (number + 1)]
        pouring.pour(reason.split("if this belongs to the arguments, quote them: ")[1])
        states = pouring.rest()
        job = max(states)
        assert states[job] == "done" and pouring.words(job)[: len(words)] == words
    fine = {'"--x ""a,b"" --layers 1,2"': ["--x", "a,b", "--layers", "1,2"], '"a ""b"" c"': ["a", "b", "c"], "'' x": ["", "x"],
            '--x "a,b" y': ["--x", "a,b", "y"], '--empty ""': ["--empty", ""]}  # fmt: skip
    for text, words in fine.items():
        pouring.pour(f"0,words,,{text};gpus=0")
        assert pouring.words(max(pouring.rest())) == words


def test_c23_the_last_field_may_be_a_gpu_list_with_commas(scheduler):
    """C23: The last field may be a GPU list with commas.

    A number directly before the list is an argument and no part of the list. This is logged once.
    """
    p = Pouring(scheduler(gpus=8))
    p.s.start()
    p.pour("0,words,,--a b,4,5,6,7", "0,words,,--n 2,4,5-7", "0,words,,--batch_size 1,4,5,6,7")
    p.rest()
    jobs = [p.s.job(n) for n in (1, 2, 3)]
    assert [job["allowed_gpus"] for job in jobs] == [[4, 5, 6, 7]] * 3
    assert [job["gpus"][0] in (4, 5, 6, 7) for job in jobs] == [True] * 3
    assert jobs[2]["arguments"] == ["--batch_size", "1"]
    p.s.says("4,5,6,7 is read as the list of allowed GPUs, and the arguments end with 1", times=1)


def test_c24_wrong_fields_are_refused_and_comments_ignored(pouring):
    """C24: Lines with missing or surplus fields are refused; comments, outer blanks and empty lines are ignored."""
    pouring.judge(
        [
            ("0", "at least a priority and a script"),
            ("just some words", "at least a priority and a script"),
            (",", "priority must be a whole number, not ''"),
            (",,,,", "priority must be a whole number, not ''"),
            ("0,", "the script is missing"),
            ("0,  ,,a", "the script is missing"),
            ("note,0", "priority must be a whole number, not 'note'"),
            ("priority,script_path,conda_env,arguments,allowed_gpus", "priority must be a whole number"),
            ("0,note,,a,0,extra", "not a GPU list"),
            ("0,note,,a,0,1,# two GPUs", "not a GPU list"),
            ("0;gpus=1,note,,a", "belong after the fourth field"),
        ]
    )
    first = len(pouring.noted())
    pouring.pour("", "   \t ", "# 0,note,,never", "  # 0,note,,never", " 0 ,  note ,  , spaced  ,  ", "0,note,,hash#tag # x",
                 "0,note", "\t0,note,,tabbed\t")  # fmt: skip
    pouring.rest()
    assert sorted(pouring.noted()[first:]) == ["", "hash#tag", "spaced", "tabbed"]
    arguments = [job["arguments"] for job in json.loads(pouring.s.cli("jobs", "--json").stdout)["jobs"]]
    assert ["hash#tag", "#", "x"] in arguments


def test_c25_bad_priorities_are_refused(scheduler):
    """C25: A priority is a whole number; any other priority is refused. Jobs with lower numbers start first."""
    p = Pouring(scheduler(gpus=1))
    p.s.append("5,words,,late", "-7,words,,early", "+0,words,,middle")
    p.s.start()
    p.rest()
    started = [row[0] for row in p.s.rows("SELECT id FROM jobs ORDER BY started_at")]
    assert [p.words(job)[0] for job in started] == ["early", "middle", "late"]
    bad = ["1.5", "abc", "1e3", "0x10", "--1", "- 1", "NaN", "inf", "\u0663", "1_000", ""]
    p.judge(
        [(f"{text},note,,never", "the priority must be a whole number") for text in bad]
        + [(f"{text},note,,never", "out of range") for text in ("1" + "0" * 29, "-" + "9" * 29, "1000000001")]
        + [("1" + "0" * 5000 + ",note,,never", "the priority must be a whole number")]
    )


def test_c26_bad_gpu_lists_are_refused(pouring):
    """C26: Bad GPU lists are refused when they are read, without much memory; a GPU named twice counts once."""
    before = peak_kb(pouring.s.pid)
    pouring.judge(
        [
            ("0,note,,never,9", "GPU 9 is not managed here; managed: 0,1"),
            ("0,note,,never,1-3", "GPUs 2,3 are not managed here"),
            ("0,note,,never,-1", "not a GPU list"),
            ("0,note,,never,a", "not a GPU list"),
            ("0,note,,never,1-0", "is backwards"),
            ("0,note,,never,0-", "not a GPU list"),
            ("0,note,,never,0;1", "not a GPU list"),
            ("0,note,,never,0 1", "not a GPU list"),
            ("0,note,,never,0,,1", "not a GPU list"),
            ("0,note,,never,0-999999999", "GPU"),
            ("0,note,,never,99999999999999999999999", "GPU"),
            ("0,note,,never,0-99999999999999999999999", "GPU"),
            ("0,note,,never,\u0661", "not a GPU list"),
        ]
    )
    assert peak_kb(pouring.s.pid) - before < MOST_GROWTH_KB
    pouring.pour("0,words,,doubled,0,0,0-1,1")
    job = pouring.s.job(max(pouring.rest()))
    assert job["allowed_gpus"] == [0, 1] and job["state"] == "done"


def test_c27_a_need_that_can_never_be_met_is_refused_at_once(pouring):
    """C27: A line with a need that the managed GPUs can never meet is refused when it is read."""
    pouring.judge(
        [
            ("0,note,,never;gpus=4", "2"),
            ("0,note,,never,0;gpus=2", "only GPU 0 is allowed"),
            ("0,note,,never;gpus=3x0.5", "3"),
            ("0,note,,never;gpus=-1", "gpus"),
            ("0,note,,never;gpus=nan", "gpus"),
            ("0,note,,never;gpus=inf", "gpus"),
            ("0,note,,never;gpus=1e9", "gpus"),
            ("0,note,,never;gpus=much", "gpus"),
            ("0,note,,never;gpus=", "gpus"),
        ]
    )


def test_c27_refused_lines_are_read_again_after_the_number_of_gpus_changed(scheduler):
    """C27: If the number of GPUs has changed, `start` reads the refused lines of the jobs file again.

    Each of them becomes one job if the scheduler can now run it, and otherwise stays refused.
    """
    p = Pouring(scheduler(gpus=1))
    s = p.s
    lines = ["0,words,,wide;gpus=2", "0,words,,other,3", p.good("good"), "0,words,,x,never", "0,words,,huge;gpus=8",
             "0,words,,twice;gpus=2", "0,words,,twice;gpus=2", "0,words,,grown"]  # fmt: skip
    (s.jobs_file).write_text("\n".join(lines))
    s.start()
    s.wait_ended(2)
    with s.jobs_file.open("a") as stream:
        stream.write(";gpus=9\n")
    p.read()
    assert sorted(p.refused()) == [1, 2, 4, 5, 6, 7, 8]
    s.stop()
    s.gpus = 4
    s.start()
    s.wait_ended(5)
    assert sorted(p.words(n)[0] for n in (2, 3, 4, 5)) == ["grown", "other", "twice", "wide"]
    assert sorted(p.refused()) == [4, 5, 8] and s.status()["repeated_lines"] == 1
    s.says("jobs.txt:5: ", times=2)  # its reason has changed
    s.says("jobs.txt:4: ", times=1)
    s.kill()
    s.start()
    s.jobs_file.write_text("# edited\n" + s.jobs_file.read_text())
    s.append("0,words,,last")
    s.wait_ended(6)
    assert len(s.states()) == 6 and p.noted() == ["good"]
    s.stop()
    s.gpus = 8
    s.start()
    s.wait_ended(7)
    assert p.words(7)[0] == "huge" and sorted(p.refused()) == [5, 9]


def test_c27_a_refused_line_starts_no_job_after_its_corrected_copy_ran(scheduler):
    """C27: A refused line that becomes valid starts no job if its corrected copy has already run.

    This holds even if the job of the corrected copy failed.
    """
    p = Pouring(scheduler(gpus=1))
    p.script("fails", "#!/bin/sh\necho fails >> noted\nexit 3\n")
    p.s.append("0,fails,,x,5", "0,fails,,x,0")
    p.s.start()
    p.rest()
    p.s.stop()
    p.s.gpus = 6
    p.s.start()
    wait_for(lambda: p.refused() == {}, "it is read again")
    p.pour(p.good("after"))
    p.rest()
    assert p.noted() == ["fails", "after"]


def test_c28_jobs_for_a_paused_gpu_wait(pouring):
    """C28: A job for a paused GPU waits with the reason `paused`; other jobs run."""
    s = pouring.s
    s.cli("pause", "0")
    pouring.pour("0,note,,waits,0", pouring.good("other"), "0,note,,next,1")
    pouring.read()
    s.wait_state(2, "done")
    s.wait_state(3, "done")
    assert (s.job(1)["state"], s.job(1)["reason_code"]) == ("pending", "paused") and pouring.refused() == {}
    s.cli("resume", "0")
    s.wait_state(1, "done")


def test_c29_an_unknown_model_gets_the_default_need_and_is_logged_once(scheduler):
    """C29: A job with an unknown model gets the default need and a note; the model is logged once."""
    p = Pouring(scheduler(gpus=1))
    table = {"default_requirement": 0.25, "models": {"qwen2.5-7b": 1.0, "qwen2.5-3b": 0.5}}
    (p.s.folder / "llm_config.json").write_text(json.dumps(table))
    p.s.append("0,words,,--llm qwen2.5-7", "0,words,,--llm nosuch", "0,words,,--llm qwen2.5-3b")
    p.s.start()
    p.rest()
    assert [p.s.job(n)["need"] for n in (1, 2, 3)] == [0.25, 0.25, 0.5]
    assert p.s.job(1)["notes"] == [
        "model qwen2.5-7 is not in the model table (did you mean qwen2.5-7b?); the job requests the default, 0.25"
    ]
    assert p.s.job(2)["notes"] == ["model nosuch is not in the model table; the job requests the default, 0.25"]
    assert p.s.job(3)["notes"] == []
    p.s.says("model nosuch is not in", times=1)


def test_c30_the_last_llm_option_before_a_double_dash_names_the_model(scheduler):
    """C30: The model of a job is the last `--llm NAME` or `--llm=NAME` before a bare `--`, as argparse reads it."""
    p = Pouring(scheduler(gpus=1))
    table = {"default_requirement": 0.2, "models": {"a": 0.5, "b": 0.6, "a b": 0.7}}
    (p.s.folder / "llm_config.json").write_text(json.dumps(table))
    samples = {
        "--x 1": 0.2, "--llm": 0.2, "--llm a": 0.5, "--llm=a": 0.5, "--llm a --llm b": 0.6, "--llm=b --llm a": 0.5,
        "--llm 'a b'": 0.7, "'--llm a'": 0.2, "-- --llm a": 0.2, "--llm a -- --llm b": 0.5, "--prompt '--llm b'": 0.2,
        "--llmx a": 0.2, "--llm=": 0.2, '"--llm a,b"': 0.2, "--LLM a": 0.2,
    }  # fmt: skip
    p.s.append(*(f"0,words,,{text}" for text in samples))
    p.s.start()
    p.rest()
    found = {n: p.s.rows("SELECT need_parts FROM jobs WHERE id=?", n)[0][0] / 1000 for n in range(1, len(samples) + 1)}
    assert dict(zip(samples, found.values(), strict=True)) == samples


def test_c31_the_last_valid_model_table_stays_in_force_if_the_file_is_broken(scheduler):
    """C31: Each broken model table is logged once, with line and column; the last valid table stays in force."""
    p = Pouring(scheduler(gpus=1, monitor_interval=1))
    s, path = p.s, p.s.folder / "llm_config.json"
    good = json.dumps({"default_requirement": 1.0, "models": {"m": 0.5}})

    def save(text: str) -> None:
        # `write_text` alone would first empty the table; the empty table is broken, too, and might be reported.
        aside = path.with_name("aside")
        aside.write_text(text)
        aside.replace(path)

    save(good)
    s.hold("a")
    s.append(s.line("a", more="--llm m"))
    s.start()
    s.wait_state(1, "running")
    save(good[: len(good) // 2])
    wait_for(lambda: s.said().count("the previous model table stays in force") == 1, "the report")
    assert re.search(r"llm_config.json:1:\d+: not JSON", s.said())
    s.append(s.line("b", more="--llm m"))
    s.wait_state(2, "done")
    assert [s.job(n)["need"] for n in (1, 2)] == [0.5, 0.5]
    save(good.replace("0.5", "0.25"))
    wait_for(lambda: "model table reloaded" in s.said(), "the mended table")
    assert s.job(1)["need"] == 0.5 and s.status()["gpus"][0]["allocated"] == 0.5
    s.append(s.line("c", more="--llm m"))
    s.wait_state(3, "done")
    assert s.job(3)["need"] == 0.25
    save(good[: len(good) // 2])
    wait_for(lambda: s.said().count("the previous model table stays in force") == 2, "the second report")
    s.release("a")
    s.wait_ended(3)


PAYLOADS = ["; touch CANARY", "$(touch CANARY)", "`touch CANARY`", "| touch CANARY", "&& touch CANARY", "> CANARY",
            "' ; touch CANARY ; '", "$HOME", "*", "~", "!!", "%n", "{a,b}"]  # fmt: skip


def test_c32_no_shell_interprets_a_field(pouring):
    """C32: Shell characters in any field reach the job unchanged or are refused; no shell interprets them."""
    s = pouring.s
    for number, text in enumerate(PAYLOADS):
        field = '"' + f"'{text}'".replace('"', '""') + '"' if "'" not in text else f'"""{text}"""'
        pouring.pour(f"0,words,,{field};gpus=0")
        assert pouring.words(number + 1) == [text] if max(pouring.rest()) == number + 1 else False, text
    begun = len(PAYLOADS)
    for text in (text for text in PAYLOADS if text != "~"):  # expanded to the home folder, as documented
        name = text.replace("/", "_")
        pouring.script(name, "#!/bin/sh\necho script >> noted\n")
        pouring.pour(f'0,"{name}",,{begun};gpus=0')
        begun += 1
    pouring.rest()
    assert pouring.noted() == ["script"] * (len(PAYLOADS) - 1)
    keys = ("label", "cwd", "gpus", "after", "after_ok", "time", "retries", "vram", "cuda", "launch")
    lines = [f'0,words,,{key}{n};{key}="{text}";gpus=0' if key != "gpus" else f'0,words,,g{n};gpus="{text}"'
             for key in keys for n, text in enumerate(PAYLOADS)]  # fmt: skip
    lines += [f'0,words,"{text}",env{n};gpus=0' for n, text in enumerate(PAYLOADS)]
    lines += [f'"{text}",words,,priority;gpus=0' for text in PAYLOADS] + [
        f'0,words,,list,"{text}"' for text in PAYLOADS
    ]
    lines += [f"0,words{text},,bare;gpus=0" for text in PAYLOADS] + [f"0,words,,bare{text},0" for text in PAYLOADS]
    pouring.pour(*lines)
    pouring.read()
    accepted = len(s.states()) - 2 * len(PAYLOADS) + 1
    assert accepted + len(pouring.refused()) == len(lines)

    def settled() -> bool:
        waiting = s.rows("SELECT count(*) FROM jobs WHERE finished_at IS NULL AND reason_code<>'missing'")
        return waiting == [(0,)]

    wait_for(settled, "all ended, or wait for what is not there")
    made = [path for path in s.folder.rglob("*") if path.name == "CANARY"]
    assert not made


def test_c33_a_script_or_environment_that_begins_with_a_dash_is_refused(pouring):
    """C33: A script or environment that begins with a dash is refused, with the correct spelling."""
    for name in ("-rf", "--help"):
        pouring.script(name, "#!/bin/sh\necho dash >> noted\n")
    pouring.judge(
        [
            ("0,-rf,,a", "looks like an option; if a script really is named -rf, write ./-rf"),
            ("0,--help,,a", "looks like an option; if a script really is named --help, write ./--help"),
            ("0,-c,,a", "looks like an option"),
            ("0,note,-p,a", "cannot be the name of an environment"),
            ("0,note,--name,a", "cannot be the name of an environment"),
        ]
    )
    pouring.pour("0,./-rf,,-rf --help -- -x;gpus=0", "0,./--help,,;gpus=0")
    pouring.rest()
    assert pouring.noted().count("dash") == 2


def test_c34_paths_are_relative_to_the_jobs_file(pouring):
    """C34: Paths are relative to the folder of the jobs file; only a leading ~/ is expanded."""
    s = pouring.s
    home = Path(s.environ["HOME"])
    inner = s.folder / "a folder"
    inner.mkdir()
    (inner / "my script").write_text("#!/bin/sh\necho inner >> noted\n")
    (inner / "my script").chmod(0o755)
    pouring.pour("0,a folder/my script,,1;gpus=0", "0,a folder/../note,,dots;gpus=0", f'0,"{s.folder}/note",,absolute;gpus=0',
                 "0,./note,,here;gpus=0")  # fmt: skip
    pouring.rest()
    assert sorted(pouring.noted()) == ["absolute", "dots", "here", "inner"]
    pouring.pour(
        "0,~/no-such-script-of-gpujob,,;gpus=0",
        "0,$HOME/note,,;gpus=0",
        "0,~nobody/note,,;gpus=0",
        "0,a folder,,;gpus=0",
    )
    pouring.read()
    scripts = [s.job(n)["script"] for n in range(5, 9)]
    assert scripts == [
        str(home / "no-such-script-of-gpujob"),
        f"{s.folder}/$HOME/note",
        f"{s.folder}/~nobody/note",
        f"{s.folder}/a folder",
    ]
    wait_for(lambda: [s.job(n)["reason_code"] for n in (5, 6, 7)] == ["missing"] * 3, "they wait")
    for number in (5, 6, 7):
        assert scripts[number - 5] in s.job(number)["reason"]
    wait_for(lambda: s.job(8)["reason_code"] == "missing" or s.job(8)["state"] == "failed", "a folder is no script")

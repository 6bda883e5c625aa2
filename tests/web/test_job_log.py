"""Tests of a job's log over HTTP: last lines, later and earlier parts, and search, for logs of any size and content."""

from __future__ import annotations

import gzip
import os
import random
import signal
from pathlib import Path

import pytest

from tests.stories.harness import wait_for
from tests.web.page import Answer, Page


def submit(page: Page, text: str, **options: object) -> int:
    answer = page.post("/api/jobs", {"command": ["sh", "-c", text], "cpu": True, **options})
    assert answer.status == 201, answer.text
    return int(answer.json()["id"])


def ended(page: Page, text: str = "true", **options: object) -> tuple[int, Path]:
    """Run a job to its end; return its id and the path of its log."""
    number = submit(page, text, **options)
    wait_for(lambda: page.scheduler.states().get(number) in ("done", "failed", "cancelled"), "its end")
    return number, Path(page.scheduler.rows("SELECT log FROM jobs WHERE id=?", number)[0][0])


def get(page: Page, number: int, query: str = "") -> Answer:
    answer = page.get(f"/api/jobs/{number}/log{query}")
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-store"
    return answer


def at(answer: Answer, name: str) -> int:
    return int(answer.headers[f"x-gpujob-log-{name}"])


def test_tail_returns_the_last_lines_of_a_log(page: Page) -> None:
    """`tail` returns the last lines of a log (200 by default). The last line may be unfinished.

    The log of a waiting job is empty.
    """
    number, log = ended(page, "seq 1000; printf 'no end'")
    assert get(page, number).text == "".join(f"{n}\n" for n in range(802, 1001)) + "no end"
    assert get(page, number, "?tail=3").text == "999\n1000\nno end"
    assert get(page, number, "?tail=0").text == ""
    whole = get(page, number, "?tail=100000")
    assert whole.text == log.read_text() and at(whole, "size") == log.stat().st_size and at(whole, "unfinished") == 6
    for text in ("-1", "x", "1.5", "", "%00", "9" * 20):
        assert page.get(f"/api/jobs/{number}/log?tail={text}").status == 400, text
    page.post("/api/queue/pause")
    waiting = submit(page, "true")
    answer = get(page, waiting)
    assert answer.text == "" and at(answer, "size") == 0
    page.post("/api/queue/resume")


@pytest.mark.parametrize("packed", [False, True])
def test_earlier_parts_are_returned_piece_by_piece(page: Page, packed: bool) -> None:
    """`before` returns the part of a log before a position.

    The parts and the last lines together are the whole log, without repetition.
    """
    number, _ = ended(page, "seq 5000; printf 'no end'", **({"gzip": True} if packed else {}))
    answer = get(page, number, "?tail=1000")
    whole = answer.text
    assert whole.startswith("4002\n") and at(answer, "size") == at(answer, "end") + at(answer, "unfinished")
    for _ in range(5):
        if not at(answer, "start"):
            break
        answer = get(page, number, f"?before={at(answer, 'start')}&tail=1000")
        assert at(answer, "unfinished") == 0 and at(answer, "size") > at(answer, "end")
        whole = answer.text + whole
    assert whole == "".join(f"{n}\n" for n in range(1, 5001)) + "no end"
    assert get(page, number, "?before=0").text == ""
    assert get(page, number, "?before=999999999&tail=1").text == "no end"
    for query in ("before=1&from=1", "before=1&find=x", "before=-1", "before=x"):
        assert page.get(f"/api/jobs/{number}/log?{query}").status == 400, query


def test_each_found_line_has_its_position_in_a_header(page: Page) -> None:
    number, _ = ended(page, "seq 90000")
    answer = get(page, number, "?find=777&tail=1000")
    places = answer.headers["x-gpujob-log-places"].split(",")
    lines = answer.text.splitlines()
    assert len(lines) > len(places) == 200
    for place, line in list(zip(places, lines[-200:], strict=True))[::40]:
        told, text = line.split(":")
        assert told == text and get(page, number, f"?from={place}").text.startswith(f"{text}\n")
    assert "x-gpujob-log-places" not in get(page, number, "?find=nowhere").headers


def test_from_returns_the_part_of_a_log_after_the_previous_answer(page: Page) -> None:
    """`from` returns the part of a log after the previous answer.

    An unfinished last line is sent again once it is longer.
    """
    go = page.folder / "go"
    number = submit(
        page,
        f"printf 'one\\ntw'; while [ ! -e {go} ]; do sleep 0.01; done; printf 'o\\n'; printf 'ü☃\\n%.0s' $(seq 300)",
    )
    first = wait_for(lambda: (a := get(page, number)).text == "one\ntw" and a, "the first of it")
    assert (at(first, "end"), at(first, "unfinished")) == (4, 2)
    go.touch()
    wait_for(lambda: page.scheduler.states()[number] == "done", "its end")
    text, end = first.text[:-2], at(first, "end")
    while True:
        answer = get(page, number, f"?from={end}")
        text += answer.text
        if at(answer, "end") == end:
            break
        end = at(answer, "end")
    assert text == "one\ntwo\n" + "ü☃\n" * 300 and end == at(answer, "size")


def test_a_log_longer_than_an_answer_is_followed_in_parts(page: Page) -> None:
    """An answer has about 1 MiB at most. If a log is longer, it is returned in several answers.

    An answer ends after a line or, if a line is very long, between two characters of this line.
    """
    number, log = ended(page)
    lines = "".join(f"{n} {'x' * 90}\n" for n in range(30_000))
    log.write_text(lines + "☃" * 400_000)
    text, end, answers = "", 0, 0
    while True:
        answer = get(page, number, f"?from={end}")
        assert len(answer.body) <= (1 << 20) + 4096
        answers += 1
        cut = at(answer, "unfinished")
        text += answer.text[: len(answer.text) - cut]
        if at(answer, "end") == end:
            text += answer.text
            break
        end = at(answer, "end")
    assert answers > 3 and text.startswith(lines) and "\ufffd" not in text
    assert text[len(lines) :].count("☃") > 100_000


def test_a_truncated_log_is_returned_from_its_start(page: Page) -> None:
    """If a log was truncated after the previous answer, it is returned from its start. A header of the answer says so.

    Each attempt has its own log.
    """
    number, log = ended(page, "seq 500; exit $((2 - GPUJOB_ATTEMPT))", retries=0)
    end = at(get(page, number), "end")
    log.write_text("new\n")
    answer = get(page, number, f"?from={end}")
    assert answer.text == "new\n" and answer.headers["x-gpujob-log-restarted"] == "1" and at(answer, "end") == 4
    page.post(f"/api/jobs/{number}/retry")
    wait_for(lambda: page.get(f"/api/jobs/{number}").json()["state"] == "done", "the second attempt")
    assert at(get(page, number), "attempt") == 2 and get(page, number, "?attempt=1").text == "new\n"
    for attempt in ("0", "3", "x"):
        assert page.get(f"/api/jobs/{number}/log?attempt={attempt}").status in (400, 404)


def test_find_returns_numbered_lines(page: Page) -> None:
    """`find` returns the last lines that contain a text, with their line numbers.

    The search ignores upper and lower case. The text is not a pattern.
    """
    number, _ = ended(page, "for n in $(seq 400); do echo line $n; done; echo 'Error: [a-z]+ .*'; echo end")
    assert get(page, number, "?find=error").text == "401:Error: [a-z]+ .*\n"
    assert get(page, number, "?find=LINE%2039&tail=2").text == "398:line 398\n399:line 399\n"
    assert get(page, number, "?find=%5Ba-z%5D%2B").text.startswith("401:")
    assert get(page, number, "?find=nothing").text == ""
    for query in ("?find=", "?find=x&from=0", f"?find={'x' * 201}"):
        assert page.get(f"/api/jobs/{number}/log{query}").status == 400


@pytest.mark.parametrize("end", [b"", b"\x1b[0m", b"\r", b"unfinished"])
def test_invisible_bytes_after_the_last_line_end_do_not_count_as_a_line(page: Page, end: bytes) -> None:
    """If the bytes after the last line end are invisible, they do not count as a line.

    The line number that is shown for a search hit is therefore the same with and without these bytes.
    """
    number, log = ended(page)
    log.write_bytes(b"one\nneedle\nthree\n" + end)
    assert get(page, number, "?find=needle").text == "2:needle\n"
    log.write_bytes(b"needle\n" + b"x" * 99 + b"\n" + b"x\n" * (1 << 20) + end)  # the word is not in the last block
    assert get(page, number, "?find=needle").text == "1:needle\n"


def test_k15_a_word_is_found_in_a_log_full_of_colours(page: Page) -> None:
    """K15: A word is found even if an escape sequence splits the word and the log has 5 MB of such sequences.

    The search ends within the time limit.
    """
    number, log = ended(page)
    line = b"\x1b[31mstep\x1b[0m\x1b[1;32m ok\x1b[0m\r\x1b[K\n"
    log.write_bytes(line * 20 + b"a nee\x1b[7mdle\x1b[0m here\n" + line * (5_000_000 // len(line)))

    def whole() -> Answer | None:
        answer = get(page, number, "?find=needle")
        return None if "x-gpujob-log-cut" in answer.headers else answer

    # The limit is elapsed time, and the page's process has a low priority: on a busy machine a search may be cut.
    assert wait_for(whole, "a search within its time limit").text == "21:a needle here\n"


def test_s17_progress_bars_are_one_line_and_control_characters_are_removed(page: Page) -> None:
    """S17: A progress bar, which overwrites its line with carriage returns, is shown as one line.

    Escape sequences and control characters are removed or made visible.
    """
    number, log = ended(page)
    bar = b"".join(b"\r%3d%%" % n for n in range(101)) + b"\n"
    log.write_bytes(
        bar
        + b"\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b2J\x00\x07\xff\xfe \xe2\x80\xaeturned\r\n"
        + bytes(range(128, 256))
    )
    answer = get(page, number)
    first, second, rest = answer.text.split("\n")
    assert first == "100%" and second.startswith("red") and "title" not in second and "\\u202eturned" in second
    assert not [c for c in answer.text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c == "\u202e"]
    assert "\ufffd" in rest


def test_k15_logs_of_ten_gigabytes_are_shown_with_limited_memory(page: Page) -> None:
    """K15: The page shows the end of very large or binary logs with limited memory.

    The logs are a sparse file of 10 GiB, a line of 1 GiB, and binary data.
    """
    number, log = ended(page)
    get(page, number)
    before = page.rss_kib()
    with log.open("r+b") as stream:
        stream.truncate(10 << 30)
        stream.seek(0, os.SEEK_END)
        stream.write(b"\nthe last but one\nthe last\n")
    answer = get(page, number)
    assert answer.text.endswith("the last but one\nthe last\n") and len(answer.body) <= 2 << 20
    assert at(answer, "size") == (10 << 30) + 27
    assert get(page, number, "?tail=2").text == "the last but one\nthe last\n"
    found = get(page, number, "?find=last%20but")
    assert found.text == "-2:the last but one\n" and found.headers["x-gpujob-log-cut"] == "1"
    assert len(get(page, number, f"?from={5 << 30}").body) <= 2 << 20
    with log.open("r+b") as stream:
        stream.truncate(1 << 30)
        stream.seek(-300_000, os.SEEK_END)
        stream.write(b"x" * 300_000)
    assert len(get(page, number).body) <= 2 << 20 and get(page, number, "?tail=1").text.endswith("xxx")
    assert len(get(page, number, "?find=xx").body) <= 2 << 20
    noise = random.Random(4).randbytes(3 << 20)
    log.write_bytes(noise)
    assert len(get(page, number, "?tail=10000").body) <= 4 << 20
    grown = page.rss_kib() - before
    print(f"memory grew by {grown / 1024:.0f} MiB")
    assert grown < 150 << 10
    log.write_bytes(b"")


def test_packed_logs_are_shown_unpacked_with_limited_memory(page: Page) -> None:
    """Packed logs are shown unpacked. The page needs limited memory even if a small packed log unpacks to 600 MiB."""
    number, log = ended(page, "seq 1000", gzip=True)
    assert log.name.endswith(".gz") and get(page, number, "?tail=2").text == "999\n1000\n"
    whole = get(page, number, "?tail=10000")
    assert at(whole, "size") == at(whole, "end") == 3893
    assert get(page, number, "?from=3889").text == "000\n" and get(page, number, "?find=77&tail=1").text == "977:977\n"
    log.write_bytes(log.read_bytes()[:-200])
    assert get(page, number).status == 200
    log.write_bytes(gzip.compress(bytes(1 << 20), 9) * 600)
    before = page.rss_kib()
    answer = get(page, number)
    assert answer.headers["x-gpujob-log-cut"] == "1" and len(answer.body) <= 2 << 20
    assert page.rss_kib() - before < 100 << 10


@pytest.mark.parametrize("what", ["fifo", "folder", "gone", "device", "forbidden"])
def test_k16_a_pipe_or_link_in_place_of_a_log_does_not_block(page: Page, what: str) -> None:
    """K16, S20: If the log is missing or is not a regular file, the answer is 404 with a reason.

    The request never blocks.
    """
    number, log = ended(page)
    log.unlink()
    if what == "fifo":
        os.mkfifo(log)
    elif what == "folder":
        log.mkdir()
    elif what == "device":
        log.symlink_to("/dev/zero")
    elif what == "forbidden":
        log.symlink_to("/proc/self/mem")
    for query in ("", "?from=0", "?find=x"):
        answer = page.get(f"/api/jobs/{number}/log{query}")
        allowed = (404, 200) if what == "forbidden" else (404,)
        assert answer.status in allowed, (query, answer.status)
        assert answer.status == 200 or list(answer.json()) == ["error"]


def test_s20_a_log_query_that_names_a_file_or_path_is_400(page: Page) -> None:
    """S20: If a parameter of the query names a file or a path, the answer is 400."""
    number, _ = ended(page)
    for query in ("?file=/etc/passwd", "?path=..", "?log=/etc/passwd", "?attempt=../1", "?attempt=1/../../x"):
        assert page.get(f"/api/jobs/{number}/log{query}").status == 400, query


def test_an_answer_contains_a_growing_log_only_up_to_its_size_at_the_request(page: Page) -> None:
    """An answer contains a fast-growing log only up to its size at the time of the request."""
    number = submit(page, "yes | head -c 20000000; exec sleep 600")
    wait_for(lambda: page.scheduler.states()[number] == "running", "that it runs")
    try:
        wait_for(lambda: at(get(page, number), "size") > 4 << 20, "some of it")
        assert len(get(page, number, "?from=0").body) <= 2 << 20
        assert get(page, number, "?find=nothing").text == ""
        assert len(get(page, number, "?find=y&tail=10000").text.splitlines()) == 10_000
    finally:
        pid = page.get(f"/api/jobs/{number}").json()["pid"]
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: page.scheduler.states()[number] == "failed", "its end")
    Path(page.get(f"/api/jobs/{number}").json()["log"]).write_bytes(b"")

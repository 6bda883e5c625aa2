"""Tests of the parser of the `ts` command line, which follows getopt."""

from __future__ import annotations

import pytest

from scheduler.ts.words import Mistake, read


@pytest.mark.parametrize(
    ("words", "options", "command"),
    [
        ("-nf echo -n x", {"n": "", "f": ""}, "echo -n x"),
        ("-L lab true", {"L": "lab"}, "true"),
        ("-Llab true", {"L": "lab"}, "true"),
        ("-nLlab true", {"n": "", "L": "lab"}, "true"),
        ("-nL lab true", {"n": "", "L": "lab"}, "true"),
        ("-D 0,1 -W2 -d -N 3 true", {"D": "0,1", "W": "2", "d": "", "N": "3"}, "true"),
        ("--gpus 2 true", {"G": "2"}, "true"),
        ("--gpus=2 true", {"G": "2"}, "true"),
        ("--gpu_indices=0,3 true", {"g": "0,3"}, "true"),
        ("-g 0,3 true", {"g": "0,3"}, "true"),
        ("-n -- -x", {"n": ""}, "-x"),
        ("true -L no option of ours", {}, "true -L no option of ours"),
        ("-EzBmO name true", {"E": "", "z": "", "B": "", "m": "", "O": "name"}, "true"),
    ],
)
def test_s4_3_options_of_a_new_job_are_parsed_like_getopt(words: str, options: dict[str, str], command: str) -> None:
    """S4.3: Option letters may be joined. The value of an option may follow it directly, or be the next word.

    The words of the job's command are not changed.
    """
    typed = read(words.split())
    assert (typed.action, typed.options, " ".join(typed.command)) == ("add", options, command)


@pytest.mark.parametrize(
    ("words", "action", "value"),
    [
        ("", "l", None),
        ("-l", "l", None),
        ("-s", "s", None),
        ("-s 3", "s", "3"),
        ("-s3", "s", "3"),
        ("-w", "w", None),
        ("-U 1-2", "U", "1-2"),
        ("-S", "S", None),
        ("-S4", "S", "4"),
        ("-M", "M", None),
        ("-Mjson", "M", "json"),
        ("--serialize=json", "M", "json"),
        ("--serialize tab", "M", "tab"),
        ("--get_label", "a", None),
        ("--get_label=3", "a", "3"),
        ("--full_cmd 3", "F", "3"),
        ("--count_running", "R", None),
        ("--last_queue_id", "q", None),
        ("--setenv A=b=c", "setenv", "A=b=c"),
        ("--setenv=A=b=c", "setenv", "A=b=c"),
        ("--set_logdir /x", "set_logdir", "/x"),
        ("--get_log", "get_logdir", None),
        ("-g", "g", None),
        ("-KC", "C", None),
    ],
)
def test_s4_4_actions_are_parsed_with_and_without_a_value(words: str, action: str, value: str | None) -> None:
    """S4.4: An action has a short or a long name, and may have a value.

    If several actions are given, the last action counts. If no action is given, the action is `-l`.
    """
    typed = read(words.split())
    assert (typed.action, typed.value, typed.command) == (action, value, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-Z", "Wrong option Z."),
        ("-nZ true", "Wrong option Z."),
        ("-D", "Option D missing argument."),
        ("-L", "Option L missing argument."),
        ("--nonsense", "Wrong option --nonsense."),
        ("--get", "Option --get is ambiguous."),
        ("--setenv", "Option --setenv missing argument."),
        ("--help=x", "Option --help takes no argument."),
        ("-n", "The command is missing."),
    ],
)
def test_s4_7_mistakes_are_reported_in_the_words_of_the_original(words: str, said: str) -> None:
    """S4.7: For a mistake, the program prints the message of the original `ts`.

    Mistakes are unknown options, missing or superfluous values, and a missing command.
    """
    with pytest.raises(Mistake, match=f"^{said.replace('.', '[.]')}$"):
        read(words.split())

"""Parser of the `ts` command line, like `getopt_long`: options come first; the first other word begins the command."""

from __future__ import annotations

from collections.abc import Sequence

NONE, NEEDED, MAYBE = "none", "needed", "maybe"  # MAYBE: needed, unless the option is the last word

SHORT: dict[str, str] = {
    **dict.fromkeys("KClTRqBhVnfmdEz", NONE),
    **dict.fromkeys("StcpoisrwkuaFUgM", MAYBE),
    **dict.fromkeys("LNDWOG", NEEDED),
}
LONG: dict[str, tuple[str, str]] = {  # name → (letter or name of the option, whether it takes a value)
    "getenv": ("getenv", NEEDED), "setenv": ("setenv", NEEDED), "unsetenv": ("unsetenv", NEEDED),
    "set_gpu_free_perc": ("set_gpu_free_perc", NEEDED), "get_gpu_free_perc": ("get_gpu_free_perc", NONE),
    "get_label": ("a", MAYBE), "full_cmd": ("F", MAYBE), "count_running": ("R", NONE), "last_queue_id": ("q", NONE),
    "get_logdir": ("get_logdir", NONE), "set_logdir": ("set_logdir", NEEDED), "serialize": ("M", MAYBE),
    "gpus": ("G", NEEDED), "gpu_indices": ("g", MAYBE), "help": ("h", NONE), "version": ("V", NONE),
}  # fmt: skip
ACTIONS = frozenset((*"KClTRqhVStcpoisrwkuaFUM", "getenv", "setenv", "unsetenv", "set_gpu_free_perc",
                     "get_gpu_free_perc", "get_logdir", "set_logdir"))  # fmt: skip


class Mistake(Exception):
    """Raised if the command line has a mistake."""


class Typed:
    """A parsed command line.

    ``action``: letter or name of the action, ``add`` for a new job, ``l`` for an empty command line; ``value``: value
    of the action or None; ``options``: options of a new job by letter; ``command``: words of its command.
    """

    def __init__(self) -> None:
        self.action = ""
        self.value: str | None = None
        self.options: dict[str, str] = {}
        self.command: list[str] = []


def read(words: Sequence[str]) -> Typed:
    """Parse the words of a command line. Raises Mistake."""
    typed = Typed()
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            position += 1
            break
        if not word.startswith("-") or word == "-":
            break
        position += 1
        if word.startswith("--"):
            position = _long(typed, word[2:], words, position)
        else:
            position = _short(typed, word[1:], words, position)
    typed.command = list(words[position:])
    if "g" in typed.options and not typed.command and not typed.action:
        if typed.options["g"]:
            raise Mistake("-g names the GPUs of a job: the command is missing.")
        typed.action = "g"
    if not typed.action:
        typed.action = "add" if typed.command else "l"
    if typed.action == "l" and typed.options:
        raise Mistake("The command is missing.")
    return typed


def _short(typed: Typed, letters: str, words: Sequence[str], position: int) -> int:
    """Read a word of option letters and return the position of the next word. Raises Mistake."""
    while letters:
        letter, letters = letters[0], letters[1:]
        takes = SHORT.get(letter)
        if takes is None:
            raise Mistake(f"Wrong option {letter}.")
        if takes != NONE:
            return _value(typed, letter, takes, letters or None, letter, words, position)
        _take(typed, letter, None)
    return position


def _long(typed: Typed, text: str, words: Sequence[str], position: int) -> int:
    name, equals, value = text.partition("=")
    if name not in LONG:
        near = [known for known in LONG if known.startswith(name)]
        if len(near) != 1:
            raise Mistake(f"Wrong option --{name}." if not near else f"Option --{name} is ambiguous.")
        name = near[0]
    what, takes = LONG[name]
    if equals and takes == NONE:
        raise Mistake(f"Option --{name} takes no argument.")
    return _value(typed, what, takes, value if equals else None, f"--{name}", words, position)


def _value(
    typed: Typed, what: str, takes: str, given: str | None, shown: str, words: Sequence[str], position: int
) -> int:
    """Store an option with its value. Return the position of the first word after the option and its value.

    ``what``: letter or name of the option. ``takes``: whether the option takes a value: NONE, NEEDED or MAYBE.
    ``given``: a value in the same word as the option. If ``given`` is None and the option takes a value, the value is
    the word at ``position``, the word after the option. ``shown``: the option as the user wrote it, for error messages.
    Raises Mistake if a needed value is missing.
    """
    if given is None and takes != NONE and position < len(words):
        given, position = words[position], position + 1
    if given is None and takes == NEEDED:
        raise Mistake(f"Option {shown} missing argument.")
    _take(typed, what, given)
    return position


def _take(typed: Typed, what: str, value: str | None) -> None:
    if what in ACTIONS:
        typed.action, typed.value = what, value  # the last of several actions counts, as in the original
    else:
        typed.options[what] = value or ""

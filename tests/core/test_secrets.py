"""Tests of the secrets that are hidden when a command is shown."""

from __future__ import annotations

import random
import string
import time

import pytest

from scheduler.core.job import JobSpec
from scheduler.core.secrets import is_secret, without_secrets, words_without_secrets
from tests.stories.secret_shapes import SECRET, SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_s15_secrets_of_all_known_forms_are_hidden(name: str) -> None:
    """S15: Secrets are hidden in argument lists, in shell text, and in the names that lists show."""
    words = SHAPES[name]
    assert SECRET in " ".join(words)
    shown = words_without_secrets(words)
    assert SECRET not in " ".join(shown) and "***" in " ".join(shown)
    assert len(shown) == len(words)
    assert SECRET not in without_secrets(" ".join(f'"{w}"' if " " in w and '"' not in w else w for w in words))
    for spec in (JobSpec(arguments=words), JobSpec(arguments=("x",), label=words[0].replace("=my ", "="))):
        assert SECRET not in spec.shown_words(10_000) + spec.shown_name


@pytest.mark.parametrize(
    "text",
    [
        "--max-tokens 512 --tokenizer gpt2 --pad_token <pad> --num-key-value-heads 8 --key-dim 64 --lr 1e-3",
        "--max_new_tokens=131072 --tokenizer_path=/m/tok --keyframes 3 --keypoint-model x --bos-token=<s>",
        "jobs.txt:7: unknown key 'vrm'; keys: label, after; write ;key=value, KEY=VALUE",
        "http://host:8080/x?lr=1 ssh://me@host/path --user me --password --verbose",
        "--author me --monkey=x --authors a,b --seckill 3 hf_x sk-1 train.py --mode key",
    ],
)
def test_s15_text_that_only_resembles_a_secret_is_shown(text: str) -> None:
    """S15: Text that only looks like a secret is shown: counts of tokens, names of models, messages of the program."""
    assert without_secrets(text) == text
    assert words_without_secrets(text.split()) == tuple(text.split())


def test_s15_a_short_number_is_hidden_as_a_password_but_not_as_a_token() -> None:
    assert is_secret("--password", "1234") and is_secret("SECRET_SEED", "7") and not is_secret("--token", "32")
    assert is_secret("--token", "1234567890")


def test_s15_hiding_takes_linear_time_and_keeps_the_number_of_words() -> None:
    """S15: The time to hide secrets grows linearly with the length of the text.

    The number of words does not change.
    """
    began = time.process_time()
    for piece in (
        "a",
        "token",
        "-token ",
        "a-",
        "key=' ",
        "://",
        "x://a:",
        '"key":"',
        "bearer ",
        "eyJ",
        "--user ",
        "=",
    ):
        words_without_secrets([(piece * 140_000)[:131_071]])
    assert time.process_time() - began < 20  # quadratic time would be minutes
    dice = random.Random(7)
    letters = string.ascii_letters[:6] + "=:-_.'\"@/ \n\\" + "é"
    for _ in range(500):
        words = ["".join(dice.choices([*letters, "token", "--key", "secret"], k=dice.randint(0, 12))) for _ in range(6)]
        assert len(words_without_secrets(words)) == 6

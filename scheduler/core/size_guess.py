"""A first guess of the GPU memory of a model, from the size and the number format in its name.

The guess is a multiple of the weights, and a constant (`USES`). To run a model takes its weights, activations and the key-value
cache. Training adapters (LoRA) adds gradients and activations. Full training takes about 18 bytes for each parameter: weights,
a copy of them in fp32, gradients, and the two moments of Adam. The first measured run corrects the guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

RUN, ADAPTERS, TRAINING = "run", "adapters", "training"
# Use → the multiple of the weights, and MiB for the CUDA context, libraries and activations.
USES = {RUN: (1.2, 4096), ADAPTERS: (1.6, 8192), TRAINING: (9.0, 6144)}
_TRAINING = re.compile(
    r"(?<![a-z])(pre|re)?train(er|ing)?(?![a-z])|fine[-_]?tun|(?<![a-z])(sft|dpo|ppo|grpo|rlhf)(?![a-z])"
)
_ADAPTERS = re.compile(r"(?<![a-z])(q?lora|peft|adapters?)(?![a-z])")
SIZES = (0.01, 2000.0)  # billions of parameters; other numbers are no sizes
# Bytes for each parameter by the words of a name; the first match counts. Four-bit formats store scales, too.
_FORMATS = (
    (re.compile(r"(?<![a-z0-9])(awq|gptq|[a-z]*4[-_]?bits?|int4|nf4|fp4|w4a16|q4(_[a-z0-9_]+)?|mxfp4|nvfp4)(?![a-z0-9])"), 0.6),
    (re.compile(r"(?<![a-z0-9])(8[-_]?bits?|int8|fp8|w8a8|w8a16|q8(_0)?)(?![a-z0-9])"), 1.1),
    (re.compile(r"(?<![a-z0-9])(fp32|float32|f32)(?![a-z0-9])"), 4.0),
)  # fmt: skip
_HALF = 2.0  # bytes of bf16 and fp16, in which most models are published
_SIZE = re.compile(
    r"(?<![a-z0-9.])(?:(?P<experts>[0-9]{1,3})x)?(?P<number>[0-9]{1,4}(?:\.[0-9]{1,2})?)(?P<unit>[bm])(?![a-z0-9])"
)
# Experts share the attention layers: Mixtral 8x7B has 46.7, and 8x22B has 141 billion parameters.
_EXPERTS_SHARE = 0.83


def billions_in(name: str) -> float | None:
    """Return the billions of parameters that a model name tells, such as 7.0 for ``qwen2.5-7b-inst``; None if it tells none.

    The largest number counts: ``qwen3-30b-a3b`` has 30 billion parameters, of which 3 are active.
    """
    found = []
    for match in _SIZE.finditer(name.lower().replace("_", "-")):
        size = float(match["number"]) * int(match["experts"] or 1) / (1000.0 if match["unit"] == "m" else 1.0)
        size *= _EXPERTS_SHARE if match["experts"] else 1.0
        if SIZES[0] <= size <= SIZES[1]:
            found.append(size)
    return max(found, default=None)


def use_of(script: str, words: Iterable[str]) -> str:
    """Return whether a job runs a model, or trains it, as its words tell: a key of `USES`.

    ``script``: the name of its script; ``words``: its arguments. Only the name of the script tells that it trains.
    """
    name = script.lower()
    if _ADAPTERS.search(name) or any(_ADAPTERS.search(word.lower()) for word in words):
        return ADAPTERS
    return TRAINING if _TRAINING.search(name) else RUN


def guessed_mib(name: str, use: str = RUN) -> int | None:
    """Return the MiB of GPU memory that a model of this name is guessed to need; None if its name tells no size.

    ``use``: a key of `USES`.
    """
    size = billions_in(name)
    if size is None:
        return None
    plain = name.lower()
    width = next((width for sign, width in _FORMATS if sign.search(plain)), _HALF)
    times, constant = USES[use]
    return math.ceil(size * 1e9 * width * times / (1 << 20)) + constant


def guess_from_run(mib: int, use: str) -> int:
    """Return the MiB that a model is guessed to need for a use, if running it took ``mib`` MiB."""
    times, constant = USES[RUN]
    weights = max(0.0, (mib - constant) / times)
    times, constant = USES[use]
    return max(mib, math.ceil(weights * times) + constant)

"""A first guess of the GPU memory of a model, from the size and the number format in its name.

The guess is for running the model (inference): the weights, `RUNNING` times as much for activations and the key-value
cache, and `CONTEXT_MIB` for the CUDA context and libraries. Training needs more; the first measured run corrects the guess.
"""

from __future__ import annotations

import math
import re

RUNNING = 1.2
CONTEXT_MIB = 1536
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


def guessed_mib(name: str) -> int | None:
    """Return the MiB of GPU memory that a model of this name is guessed to need; None if its name tells no size."""
    size = billions_in(name)
    if size is None:
        return None
    plain = name.lower()
    width = next((width for sign, width in _FORMATS if sign.search(plain)), _HALF)
    return math.ceil(size * 1e9 * width * RUNNING / (1 << 20)) + CONTEXT_MIB

"""Mutated YAML files: what a slip of the hand, or malice, makes of a good one."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

PAYLOAD = "neondist-was-here"
LAUGHS = "\n".join(
    ["x0: &x0 [a, a, a, a, a, a, a, a, a]", *(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 10))]
)
VALUES = [
    "", "0", "-1", "1", "2", "1e9", "-1e-9", "1000000000", "99999999999999999999999", ".inf", "-.inf", ".nan", "1e400",
    "true", "no", "null", "~", "[]", "{}", "[1, 2]", "[[1, 2], [3]]", "{a: 1}",
    "text", "'5'", '"\\0"', "é", "'''", "#",
    "*nowhere", "&a 1", "&a [*a]", "!!int x", "!!binary aGVsbG8=", "!!set {a, b}", "2024-01-01",
    f"!!python/object/apply:os.system ['touch {PAYLOAD}']", f"!!python/object/new:os.mkdir [{PAYLOAD}]",
    "!!python/name:os.system", f"!!python/object/apply:builtins.open [{PAYLOAD}, w]",
    "!<tag:yaml.org,2002:python/none>",
    f"!os.system 'touch {PAYLOAD}'", "!FitExperiment {}", "!Hook {}", "!Registered {}", "!Layer {}", "!SGD {}",
    "!MNIST {path: /dev/null}", "!MNIST {path: '/'}", "!CIFAR10 {path: ''}", "!CIFAR10 {path: 7}",
    "!MNIST {serialized_path: '{rank.__class__.__mro__}.h5'}", "!MNIST {serialized_path: '{rank!r:>99999999999}.h5'}",
    "!MNIST {serialized_path: '{size}{0}{'}", "!MNIST {serialized_path: '../../../../proc/version'}",
    "!MNIST {serialized_path: '/proc/nothing/{rank}.h5'}", "!MNIST {serialized_path: '/dev/null/{rank}'}",
    '!MNIST {serialized_path: "a\\0b{rank}"}', "!Synthetic {shape: [0, 5, 1]}", "!Synthetic {shape: [1]}",
    "!ConvLayerDist {out_channels: 1, kernel_size: 3}", "!Sum {layers: []}", "!Sequential {layers: []}",
    "!FCLayerDist {out_features: 0}", "!DropoutLayerDist {}", "!Dice {}", "!Adam {}", "!CrossEntropy {}", "!GB {}",
]  # fmt: skip
_WORDS = re.compile(r"(?<=[:\[,] )[^\s,\[\]{}]+|(?<=- )\S+|(?<=: )\{.*?\}|!\w+")
_PUNCTUATION = [*"{}[]:,-!&*'\"#|>%@`?\t\n ", "\0", "\x85", "\ufeff", "---", "...", "<<: ", "\u2028"]


def mutated(texts: Sequence[str], count: int, seed: int = 0) -> Iterator[str]:
    """Yield `count` files, each one of `texts` with one to three mutations."""
    draw = random.Random(seed)
    for case in range(count):
        text = texts[case % len(texts)]
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            text = draw.choice(_MUTATIONS)(text, draw)
        yield text


def _value(text: str, draw: random.Random) -> str:
    words = list(_WORDS.finditer(text))
    if not words:
        return text + draw.choice(VALUES)
    word = draw.choice(words)
    return text[: word.start()] + draw.choice(VALUES) + text[word.end() :]


def _swap(text: str, draw: random.Random) -> str:
    """Put one value of the file in the place of another."""
    words = list(_WORDS.finditer(text))
    if len(words) < 2:
        return text
    there, word = draw.sample(words, 2)
    return text[: word.start()] + there[0] + text[word.end() :]


def _character(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(["", draw.choice(_PUNCTUATION)]) + text[at + draw.choice([0, 1, 1]) :]


def _line(text: str, draw: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    at = draw.randrange(len(lines))
    lines[at] = draw.choice(["", lines[at] * 2, " " + lines[at], lines[at].lstrip(), lines[at][: len(lines[at]) // 2]])
    return "".join(lines)


def _field(text: str, draw: random.Random) -> str:
    """Write another letter in a field's name, or add a field."""
    names = list(re.finditer(r"\w+(?=:)", text))
    if not names or draw.random() < 0.2:
        return text + draw.choice([f"\nextra: {draw.choice(VALUES)}\n", f"\n{LAUGHS}\n", "\n<<: {epochs: 2}\n"])
    name = draw.choice(names)
    new = draw.choice([name[0] + "s", name[0][1:], name[0].upper(), "__class__", "self", "0", draw.choice(names)[0]])
    return text[: name.start()] + new + text[name.end() :]


def _cut(text: str, draw: random.Random) -> str:
    return text[: draw.randrange(len(text) + 1)]


_MUTATIONS = [_value, _value, _value, _value, _swap, _swap, _character, _character, _line, _line, _field, _cut]

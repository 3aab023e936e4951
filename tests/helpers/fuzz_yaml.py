"""Mutations of YAML files: typing errors and malicious content."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

PAYLOAD = "neondist-was-here"
BILLION_LAUGHS = "\n".join(
    ["x0: &x0 [a, a, a, a, a, a, a, a, a]", *(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 10))]
)
HOSTILE_VALUES = [
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


def mutate_texts(texts: Sequence[str], count: int, seed: int = 0) -> Iterator[str]:
    """Yield `count` files, each one of `texts` with one to three mutations."""
    rng = random.Random(seed)
    for case in range(count):
        text = texts[case % len(texts)]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            text = rng.choice(_MUTATIONS)(text, rng)
        yield text


def _value(text: str, rng: random.Random) -> str:
    words = list(_WORDS.finditer(text))
    if not words:
        return text + rng.choice(HOSTILE_VALUES)
    target = rng.choice(words)
    return text[: target.start()] + rng.choice(HOSTILE_VALUES) + text[target.end() :]


def _swap(text: str, rng: random.Random) -> str:
    """Replace one value of the file by another."""
    words = list(_WORDS.finditer(text))
    if len(words) < 2:
        return text
    other, target = rng.sample(words, 2)
    return text[: target.start()] + other[0] + text[target.end() :]


def _character(text: str, rng: random.Random) -> str:
    index = rng.randrange(len(text) + 1)
    return text[:index] + rng.choice(["", rng.choice(_PUNCTUATION)]) + text[index + rng.choice([0, 1, 1]) :]


def _line(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    index = rng.randrange(len(lines))
    lines[index] = rng.choice(
        ["", lines[index] * 2, " " + lines[index], lines[index].lstrip(), lines[index][: len(lines[index]) // 2]]
    )
    return "".join(lines)


def _field(text: str, rng: random.Random) -> str:
    """Change the name of a field, or add a field."""
    names = list(re.finditer(r"\w+(?=:)", text))
    if not names or rng.random() < 0.2:
        return text + rng.choice(
            [f"\nextra: {rng.choice(HOSTILE_VALUES)}\n", f"\n{BILLION_LAUGHS}\n", "\n<<: {epochs: 2}\n"]
        )
    name = rng.choice(names)
    new = rng.choice([name[0] + "s", name[0][1:], name[0].upper(), "__class__", "self", "0", rng.choice(names)[0]])
    return text[: name.start()] + new + text[name.end() :]


def _cut(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


_MUTATIONS = [_value, _value, _value, _value, _swap, _swap, _character, _character, _line, _line, _field, _cut]

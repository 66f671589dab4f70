"""Seeded completions to grade: ordinary ones, and adversarial ones whose right verdict is known by
construction.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from reward_service.rules.format import TAGS
from reward_service.rules.item import RewardItem

GOLD = r"\frac{7391}{3}+\sqrt{5}"  # no random expression over small numbers has this value
WHOLE = "7391"
_SOUP = [
    r"\frac",
    r"\sqrt",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "^",
    "_",
    "+",
    "-",
    "*",
    "/",
    "=",
    "<",
    ",",
    ";",
    "|",
    "!",
    "%",
    "x",
    "y",
    "pi",
    r"\pi",
    r"\infty",
    r"\cup",
    r"\in",
    r"\pm",
    r"\left(",
    r"\right)",
    r"\text{",
    r"\boxed{",
    "$",
    r"\\",
    "&",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    " ",
    " ",
    "0",
    "1",
    "2",
    "3",
    "12",
    "0.5",
    "1,000",
    "e",
    "i",
    r"\int",
    r"\sum_{k=1}^{9}",
    r"\lim",
    r"\overline{3}",
    "or",
    "and",
    "not",
    "percent",
    "cm",
    r"^\circ",
    ":",
    ".",
    "°",
    "½",
    "²",
    "−",
    "≤",
    "∞",
    "答案",
    "입니다",
    "\u200b",
    "\u202e",
    "\x00",
    "\ud800",
    "٣",
    "３",
]
_CODE = [
    "__import__('os').system('touch {mark}')",
    "exec(\"open('{mark}','w')\")",
    "().__class__.__base__.__subclasses__()",
    "{{{{7391}}}}.__class__",
    "7391 if open('{mark}','w') else 7391",
    "eval('7391')",
    "int('7391')",
    "(lambda: 7391)()",
    "print(7391)",
    "sum([7390,1])",
    "${{7391}}.x",
    "f'{{7391}}'",
    "7391 # ok",
    "'7391'.strip()",
    "sympify('7391')",
    "\\input{{/etc/passwd}} 7391",
    "%s7391",
    "7391;import os",
    "`7391`.x()",
    "[x for x in [7391]][0]",
]
_HEDGED = [
    "7390, 7391",
    "7391 or 7392",
    "either 7391 or 5",
    "7391, 7391.5",
    "maybe 7391",
    "not 7391",
    "about 7391",
    r"\{7390, 7391\}",
    "7390 7391",
    "7391 or so",
    "between 7390 and 7392",
    "73 91",
    "7391/7391/1",
    "7391=7392",
    r"\approx 7391",
    "7391 + x",
    "7391x",
    "7391_8",
    "7391!",
    "-7391",
    "7391%",
    "(7391, 7391)",
    "[7391, 7392]",
    "x > 7391",
    r"x \ge 7391",
    "7391:1",
    "7391.0000000000001",
    "7391e1",
    "7391^2",
    "0.7391",
    "True",
    "nan",
    "1e7391",
]


@dataclass(frozen=True)
class Case:
    """An item and the accuracy it must get if its status is ok."""

    kind: str
    item: RewardItem
    accuracy: float


def _wrap(answer: str) -> str:
    return f"<think>work</think>\n<answer>{answer}</answer>"


def _nested(draw: random.Random) -> str:
    depth = draw.choice([5, 50, 500, 5000])
    opening, closing = draw.choice(
        [
            ("{", "}"),
            ("(", ")"),
            (r"\frac{1}{1+", "}"),
            (r"\sqrt{", "}"),
            ("[", "]"),
            ("|", "|"),
            (r"\text{", "}"),
            (r"\boxed{", "}"),
            ("-(", ")"),
            ("2^{", "}"),
            (r"\{", r"\}"),
        ]
    )
    missing = draw.choice([0, 0, 1, depth])
    return opening * depth + str(draw.randint(2, 99)) + closing * (depth - missing)


def _tower(draw: random.Random) -> str:
    base, levels = draw.randint(2, 99), draw.randint(2, 6)
    style = draw.choice(["**", "^", "^{"])
    if style == "^{":
        return f"{base}^{{" * levels + "9" + "}" * levels
    return style.join([str(base)] * levels) + draw.choice(["", "!", " mod 10", "-1", "/7"])


def _huge(draw: random.Random) -> str:
    digits = "".join(draw.choices("123456789", k=draw.choice([30, 400, 5000, 30000])))
    return draw.choice(
        [
            "{}",
            "-{}",
            "{}!",
            "1/{}",
            "0.{}",
            "1e{}",
            "{}^{{12}}",
            "10^{{{}}}",
            "2^{}",
            r"\sqrt{{{}}}",
            "({}+x)^{{99}}",
            r"\binom{{{}}}{{7}}",
        ]
    ).format(digits)


def _tags(draw: random.Random) -> str:
    pieces = [*TAGS, "<answer>7", "<", "think>", "</answer", " ", "x", "<ANSWER>"]
    text = "".join(draw.choices(pieces, k=draw.choice([3, 20, 2000, 40000])))
    return text.replace("7391", "")


def _soup(draw: random.Random) -> str:
    return _wrap("".join(draw.choices(_SOUP, k=draw.choice([3, 8, 20, 80, 400]))))


def _noise(draw: random.Random) -> str:
    alphabet = [
        chr(code) for code in (*range(32), 127, 0x85, 0xAD, 0x2028, 0xFEFF, 0xD800, 0xDFFF, 0xFFFF)
    ]
    marks = "".join(draw.choices(alphabet[:9] + alphabet[14:], k=draw.randint(1, 9)))
    place = draw.randint(1, 3)
    return WHOLE[:place] + marks + WHOLE[place:]  # a mark inside the number makes it no number


def _digits(draw: random.Random) -> str:
    zeros = draw.choice([0x0660, 0x06F0, 0x0966, 0xFF10, 0x1D7CE, 0x2460, 0x2070, 0x2080])
    return "".join(chr(zeros + int(digit)) for digit in str(draw.randint(10, 7000)))


def _long(draw: random.Random) -> str:
    piece = draw.choice(
        [
            "1+",
            "x",
            "9",
            " ",
            "\\",
            "{",
            "(",
            "a b ",
            "1,",
            r"\text{a}",
            "$",
            "7391 ",
            "é",
            "<",
            r"\frac12",
            "=",
            "or ",
        ]
    )
    text = piece * (2**20 // len(piece))
    return draw.choice([_wrap(text), f"<think>{text}", f"<answer>{text}", text, _wrap("1" + text)])


def adversarial(count: int, seed: int, mark: str = "/nonexistent/mark") -> list[Case]:
    """`count` cases; injected code would create the file `mark` if it ran. About one in ten is
    right.
    """
    draw = random.Random(seed)
    makers: list[tuple[str, float, Callable[[], tuple[str, str]]]] = [
        ("nested", 10, lambda: (_wrap(_nested(draw)), GOLD)),
        ("tower", 10, lambda: (_wrap(_tower(draw)), GOLD)),
        ("huge", 10, lambda: (_wrap(_huge(draw)), GOLD)),
        ("tags", 10, lambda: (_tags(draw), WHOLE)),
        ("soup", 20, lambda: (_soup(draw), GOLD)),
        ("noise", 10, lambda: (_wrap(_noise(draw)), WHOLE)),
        ("code", 10, lambda: (_wrap(draw.choice(_CODE).format(mark=mark)), WHOLE)),
        ("hedged", 10, lambda: (_wrap(draw.choice(_HEDGED)), WHOLE)),
        ("digits", 9, lambda: (_wrap(_digits(draw)), WHOLE)),
        ("long", 1, lambda: (_long(draw), GOLD)),
    ]
    right = [
        WHOLE,
        "7,391",
        "7391.0",
        r"\boxed{7391}",
        "$7391$",
        "x = 7391",
        "14782/2",
        "７３９１",
        "7391 cm",
        "The answer is 7391.",
    ]
    cases = []
    for number in range(count):
        if draw.random() < 0.1:
            filler = "so " * draw.choice([0, 10, 1000])
            text = f"<think>{filler}</think><answer>{draw.choice(right)}</answer>"
            cases.append(Case("right", RewardItem(str(number), text, WHOLE), 1.0))
            continue
        kind, _, make = draw.choices(makers, weights=[maker[1] for maker in makers])[0]
        text, gold = make()
        cases.append(Case(kind, RewardItem(str(number), text, gold), 0.0))
    return cases


def ordinary(groups: int, size: int, seed: int) -> list[RewardItem]:
    """`groups` questions with `size` answers each, as in training: whole numbers, decimals,
    fractions, surds, lists.
    """
    draw, items = random.Random(seed), []
    for group in range(groups):
        a, b = draw.randint(2, 999), draw.randint(2, 99)
        gold, answers = draw.choice(
            [
                (
                    str(a),
                    [
                        f"{a}",
                        f"{a}.0",
                        f"{a + 1}",
                        f"The answer is {a}.",
                        f"\\boxed{{{a}}}",
                        f"{a} apples",
                    ],
                ),
                (
                    f"\\frac{{{a}}}{{{b}}}",
                    [
                        f"{a}/{b}",
                        f"\\frac{{{2 * a}}}{{{2 * b}}}",
                        f"\\dfrac{{{a}}}{{{b + 1}}}",
                        f"{a / b:.4f}",
                    ],
                ),
                (
                    f"{a}\\sqrt{{{b}}}",
                    [
                        f"{a}\\sqrt{{{b}}}",
                        f"\\sqrt{{{a * a * b}}}",
                        f"{a}\\sqrt{{{b + 1}}}",
                        f"{a}",
                    ],
                ),
                (
                    f"{a},{a + b}",
                    [f"{a + b}, {a}", f"{a} and {a + b}", f"{a}", f"\\{{{a},{a + b}\\}}"],
                ),
                (f"{b}x^2+{a}", [f"{a}+{b}x^2", f"{b}x^2-{a}", f"{b} x^2 + {a}", f"x^2+{a}"]),
                (f"#### {a}", [f"{a}", f"${a}", f"{a - 1}", f"x={a}"]),
            ]
        )
        items += [
            RewardItem(f"{group}/{i}", _wrap(draw.choice(answers)), gold) for i in range(size)
        ]
    return items

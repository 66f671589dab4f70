"""Multiple choice: which option letter an answer names."""

from __future__ import annotations

import re

from reward_service.math.extraction import LEAD, WRAPPER

_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_LETTER_AND_TEXT = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(([a-z])\)|([a-z])\s*[).:]|([a-z])\s+[-–=]+)\s*(.*)",
    re.DOTALL | re.IGNORECASE,
)
_MORE_LETTERS = re.compile(r"(?:\bor\b|\band\b|,|/|;|&|\|)\s*\(?[A-J]\b|\([A-J]\)|\b[A-J]\)")
_LETTER_IN_WORDS = re.compile(
    r"(?:(?i:\b(?:is|option|choice|answer)\b)|[:：=]|答案|选|選|정답은|답은)"
    r"[\s是为:：]*\(?([A-J])\)?(?![A-Za-z])"
)


def choice_letter(text: str, gold: bool = False) -> str:
    """The option letter that `text` names, in upper case, or "" if it names none or several.

    A reference answer (`gold`) counts as a choice only if it is a capital letter, or any letter in
    parentheses, with or without the text of the option after it.
    """
    text = " ".join(
        LEAD.sub("", re.sub(r"\\[,;:! ]|[$*`~]", " ", WRAPPER.sub(r"\1 ", text)).strip()).split()
    )
    match = _LETTER.fullmatch(text)
    if match:
        return match.group(1).upper() if not gold or match.group(1).isupper() or "(" in text else ""
    match = _LETTER_AND_TEXT.fullmatch(text)
    if match and (not gold or (match.group(1) or match.group(2) or "a").isupper()):
        return (
            ""
            if _MORE_LETTERS.search(match.group(4))
            else next(filter(None, match.groups()[:3])).upper()
        )
    if gold:
        return ""
    letters = {match.group(1) for match in _LETTER_IN_WORDS.finditer(text)}
    return letters.pop() if len(letters) == 1 and not _MORE_LETTERS.search(text) else ""

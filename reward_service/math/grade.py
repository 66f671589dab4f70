"""The verdict on a final answer, as every verifier returns it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grade:
    """Verdict on a final answer: the extracted answer, and the reason for the verdict.

    `accuracy` counts only if `status` is "ok". The other status is "ungradable": the reference
    answer does not allow a verdict.
    """

    accuracy: float
    extracted: str = ""
    reason: str = ""
    status: str = "ok"

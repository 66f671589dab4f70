"""Evaluation measures: pure functions of graded samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

PASS_KS, MAJ_K = (1, 8, 64), 8  # the pass@k and maj@k that are reported where there are so many samples


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold one of the c right ones: 1 - C(n-c, k) / C(n, k).

    Unbiased for any k <= n (Chen et al., 2107.03374). Raises ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(
            f"pass@k needs 0 <= c <= n and 1 <= k <= n, but n={n}, c={c}, k={k}: sample at least k answers"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)  # exact integers: no overflow, no cancellation


def maj_at_k(extracted: Sequence[str], correct: Sequence[bool], k: int) -> float:
    """Share of blocks of k samples whose plurality answer is right (self-consistency, 2203.11171), in sample order.

    Disjoint consecutive blocks estimate the expectation over k-subsets; a remainder shorter than k is left out. A
    sample without an extracted answer ("") does not vote; ties go to the answer seen first; a block without votes is
    wrong. An answer is right if its first vote was graded right. Raises ValueError when fewer than k samples are given
    or lengths differ."""
    if len(extracted) != len(correct):
        raise ValueError(f"maj@k got {len(extracted)} answers but {len(correct)} grades")
    if not 1 <= k <= len(extracted):
        raise ValueError(f"maj@{k} needs at least {k} samples a prompt (and k >= 1), but there are {len(extracted)}")
    blocks = len(extracted) // k
    wins = 0
    for start in range(0, blocks * k, k):
        votes = Counter(answer for answer in extracted[start : start + k] if answer)  # keeps first-seen order
        if votes:
            winner = max(votes, key=votes.__getitem__)
            wins += bool(correct[list(extracted).index(winner, start)])
    return wins / blocks


def summarise(
    prompt_ids: Sequence[str],
    sample_index: Sequence[int],
    correct: Sequence[float | None],
    format_ok: Sequence[float | None],
    extracted: Sequence[str],
    lengths: Sequence[int],
    ks: Sequence[int] = PASS_KS,
    maj_k: int = MAJ_K,
) -> dict[str, float | int | None]:
    """One table row: {"pass@1", ..., "maj@8", "format", "length", "prompts", "samples", "ungraded"}.

    All sequences are per sample, any order. ``correct`` (1 = right) and ``format_ok`` are None or nan where the
    reward's status was not ok: such samples are counted as ungraded and enter nothing but ``length`` (mean tokens of a
    completion). pass@k and maj@k are means over prompts with at least k graded samples, and None where no prompt has
    that many: never a silent 0."""
    order = np.lexsort((np.asarray(sample_index), np.asarray(prompt_ids, dtype=object).astype(str)))
    grades = np.array([math.nan if c is None else float(c) for c in correct], dtype=np.float64)
    formats = np.array([math.nan if f is None else float(f) for f in format_ok], dtype=np.float64)
    by_prompt: dict[str, list[int]] = {}
    for i in order:
        group = by_prompt.setdefault(str(prompt_ids[i]), [])
        if not math.isnan(grades[i]):
            group.append(int(i))
    result: dict[str, float | int | None] = {}
    for k in ks:
        scores = [pass_at_k(len(g), int((grades[g] >= 1).sum()), k) for g in by_prompt.values() if len(g) >= k]
        result[f"pass@{k}"] = _mean(scores)
    result[f"maj@{maj_k}"] = _mean(
        [
            maj_at_k([extracted[i] for i in g], list(grades[g] >= 1), maj_k)
            for g in by_prompt.values()
            if len(g) >= maj_k
        ]
    )
    result["format"] = _mean(formats[~np.isnan(formats)])
    result["length"] = _mean(np.asarray(lengths, dtype=np.float64))
    result |= {"prompts": len(by_prompt), "samples": len(grades), "ungraded": int(np.isnan(grades).sum())}
    return result


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None

"""Evaluation measures: pure functions of graded samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

# The pass@k and maj@k that are reported where each prompt has at least k samples.
PASS_KS, MAJ_K = (1, 8, 64), 8
RERANK_N = 16  # the largest number of samples that a reward model chooses among


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of pass@k from n samples, c of them correct (Chen et al., 2107.03374).

    It is the probability that k of the n samples, drawn without replacement, hold a correct one:
    1 - C(n-c, k) / C(n, k). Raises ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(
            f"pass@k needs 0 <= c <= n and 1 <= k <= n, but n={n}, c={c}, k={k}: sample at least "
            "k answers"
        )
    # The binomials are exact integers: no overflow and no cancellation.
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(extracted: Sequence[str], correct: Sequence[bool], k: int) -> float:
    """Share of blocks of k samples whose plurality answer is correct (2203.11171).

    Blocks are disjoint and consecutive in sample order; their mean estimates the expectation over
    k-subsets, and a remainder shorter than k is left out. A sample without an extracted answer
    ("") does not vote, ties go to the answer seen first, and a block without votes is wrong. An
    answer is correct if the first sample with it was graded correct. Raises ValueError when there
    are fewer than k samples or lengths differ."""
    if len(extracted) != len(correct):
        raise ValueError(f"maj@k got {len(extracted)} answers but {len(correct)} grades")
    if not 1 <= k <= len(extracted):
        raise ValueError(
            f"maj@{k} needs at least {k} samples a prompt (and k >= 1), but there are "
            f"{len(extracted)}"
        )
    blocks = len(extracted) // k
    wins = 0
    for start in range(0, blocks * k, k):
        # A Counter keeps the order in which answers were first seen.
        votes = Counter(answer for answer in extracted[start : start + k] if answer)
        if votes:
            winner = max(votes, key=votes.__getitem__)
            wins += bool(correct[list(extracted).index(winner, start)])
    return wins / blocks


def best_of_n(scores: Sequence[float], correct: Sequence[bool], n: int) -> float:
    """Share of blocks of n samples whose sample with the highest score is correct (best-of-N).

    Blocks are those of `maj_at_k`; ties go to the sample seen first. Raises ValueError when there
    are fewer than n samples or lengths differ."""
    wins = [
        bool(correct[start + int(np.argmax(scores[start : start + n]))])
        for start in _blocks(len(scores), len(correct), n, "best")
    ]
    return float(np.mean(wins))


def weighted_maj_at_k(
    extracted: Sequence[str], correct: Sequence[bool], scores: Sequence[float], k: int
) -> float:
    """`maj_at_k` with each vote weighted by the sample's score, which must not be negative.

    It joins self-consistency and reward model (Math-Shepherd, 2312.08935, equation 7)."""
    wins = []
    for start in _blocks(len(extracted), len(correct), k, "weighted maj"):
        votes: Counter[str] = Counter()
        for i in range(start, start + k):
            if extracted[i]:
                votes[extracted[i]] += scores[i]
        winner = max(votes, key=votes.__getitem__) if votes else None
        wins.append(winner is not None and bool(correct[list(extracted).index(winner, start)]))
    return float(np.mean(wins))


def _blocks(samples: int, grades: int, n: int, measure: str) -> range:
    """The first index of each whole block of n samples."""
    if samples != grades or not 1 <= n <= samples:
        raise ValueError(
            f"{measure}@{n} needs at least {n} samples a prompt, each with a grade: there are "
            f"{samples} samples and {grades} grades"
        )
    return range(0, samples // n * n, n)


def rerank(
    prompt_ids: Sequence[str],
    correct: Sequence[float],
    extracted: Sequence[str],
    judged: Mapping[str, Sequence[float]],
    n: int = RERANK_N,
) -> dict[str, float | None]:
    """{"maj@n", "best@n/MODEL", "weighted_maj@n/MODEL"}, all over the same samples.

    The sequences have one entry per sample, and ``judged`` holds such a sequence of scores for each
    reward model. A sample takes no part if its grade or any model's score is nan. The values are
    means over the prompts that have at least n samples left: None where no prompt has, and for
    weighted votes where a score is negative."""
    grades = np.asarray(correct, np.float64)
    known = ~np.isnan(grades)
    for scores in judged.values():
        known &= ~np.isnan(np.asarray(scores, np.float64))
    members: dict[str, list[int]] = {}
    for i in np.flatnonzero(known):
        members.setdefault(str(prompt_ids[i]), []).append(int(i))
    chosen = [np.array(m) for m in members.values() if len(m) >= n]
    answers = np.asarray(extracted, dtype=object)
    result: dict[str, float | None] = {
        f"maj@{n}": _mean([maj_at_k(list(answers[m]), grades[m] >= 1, n) for m in chosen])
    }
    for name, scores in judged.items():
        s = np.asarray(scores, np.float64)
        result[f"best@{n}/{name}"] = _mean([best_of_n(s[m], grades[m] >= 1, n) for m in chosen])
        weighted = None
        if not any((s[m] < 0).any() for m in chosen):
            weighted = _mean(
                [weighted_maj_at_k(list(answers[m]), grades[m] >= 1, s[m], n) for m in chosen]
            )
        result[f"weighted_maj@{n}/{name}"] = weighted
    return result


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
    """The measures of one evaluation.

    Keys: "pass@1", ..., "maj@8", "format", "length", "prompts", "samples", "ungraded". The
    sequences have one entry per sample, in any order. ``correct`` (1 = correct) and ``format_ok``
    are None or nan where the status of the reward is not ok: such samples count as ungraded and
    enter only "length", the mean number of tokens of a completion. pass@k and maj@k are means over
    the prompts with at least k graded samples, and None, not 0, where no prompt has as many."""
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
        scores = [
            pass_at_k(len(g), int((grades[g] >= 1).sum()), k)
            for g in by_prompt.values()
            if len(g) >= k
        ]
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
    result |= {
        "prompts": len(by_prompt),
        "samples": len(grades),
        "ungraded": int(np.isnan(grades).sum()),
    }
    return result


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None

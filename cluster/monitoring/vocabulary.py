"""The words that records, metrics and reports have in common. Pure."""

from __future__ import annotations

# The status of a reward. Only the rewards of status ok are averaged and trained on.
STATUSES = ("ok", "error", "timeout", "ungradable")

SATURATED, LEARNABLE, COLLAPSED, SCATTERED, UNDETERMINED = (
    "saturated",
    "learnable",
    "collapsed",
    "scattered",
    "undetermined",
)
# The regime of a group and the grades of its answers (learner/algorithms/regimes.py).
REGIMES = {
    SATURATED: "all right",
    LEARNABLE: "mixed",
    COLLAPSED: "all wrong, answers alike",
    SCATTERED: "all wrong, answers diverse",
    UNDETERMINED: "of fewer than two graded answers",
}

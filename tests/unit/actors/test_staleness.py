"""The bound on staleness against a simulation of the loop, the books of groups, and the seeds of
samples.
"""

from __future__ import annotations

import itertools
import random

import pytest

from actors.staleness import ConservationError, Ledger, admissible, sample_seed


@pytest.mark.parametrize("per_step, bound", list(itertools.product((1, 2, 5, 8), (0, 1, 2, 3))))
def test_bound_is_exact_in_a_simulated_loop(per_step: int, bound: int) -> None:
    """Trained in order of admission, per_step a version: admitting all that is allowed reaches the
    bound, and one group more would break it.
    """

    def worst(extra: int) -> int:
        waiting: list[int] = []  # version each waiting group was admitted at
        oldest = 0
        for version in range(12):
            waiting += [version] * (admissible(len(waiting), per_step, bound) + extra)
            trained, waiting = waiting[:per_step], waiting[per_step:]
            assert len(trained) == per_step, "the loop would wait for groups that nobody may admit"
            oldest = max(oldest, *(version - v for v in trained))
        return oldest

    assert worst(0) == bound
    assert worst(1) > bound


@pytest.mark.parametrize("seed", range(20))
def test_bound_holds_under_any_pace_of_admission(seed: int) -> None:
    """Admission in random portions, as generation would allow; staleness of every trained group
    stays in bound.
    """
    rng = random.Random(seed)
    per_step, bound = rng.randint(1, 6), rng.randint(0, 3)
    waiting: list[int] = []
    version = 0
    for _ in range(300):
        room = admissible(len(waiting), per_step, bound)
        waiting += [version] * rng.randint(0, room)
        if len(waiting) >= per_step and rng.random() < 0.7:
            assert all(version - v <= bound for v in waiting[:per_step])
            del waiting[:per_step]
            version += 1


def test_admissible_is_never_negative() -> None:
    assert (
        admissible(0, 32, 0),
        admissible(32, 32, 0),
        admissible(40, 32, 1),
        admissible(99, 32, 0),
    ) == (32, 0, 24, 0)


def test_ledger_conserves_groups() -> None:
    ledger = Ledger()
    for i in range(6):
        ledger.admit(i)
    for i in (3, 0, 1, 2):  # in any order
        ledger.finish(i)
    ledger.train([0, 2])
    ledger.drop(1, "dead")
    ledger.check()
    assert ledger.counts() == {
        "admitted": 6,
        "trained": 2,
        "filtered": 1,
        "in_flight": 2,
        "queued": 1,
    }
    assert ledger.filtered == {"dead": 1}
    assert ledger.waiting == 3


@pytest.mark.parametrize("fault, words", [
    (lambda b: b.finish(0), "group 0 finished"),  # twice
    (lambda b: b.finish(99), "group 99 finished"),  # never admitted
    (lambda b: b.train([2]), "group 2 trained"),  # still being generated
    (lambda b: b.train([0, 0]), "group 0 trained"),  # trained twice
    (lambda b: (b.drop(0, "dead"), b.train([0])), "group 0 trained"),  # filtered and trained
    (lambda b: b.drop(2, "dead"), "group 2 filtered (dead)"),
    (lambda b: b.admit(7), "out of order"),
    (lambda b: b.admit(1), "out of order"),
])  # fmt: skip
def test_ledger_refuses_lost_and_double_groups(fault: object, words: str) -> None:
    ledger = Ledger()
    for i in range(3):
        ledger.admit(i)
    ledger.finish(0)
    with pytest.raises(ConservationError) as caught:
        fault(ledger)  # type: ignore[operator]
    assert words in str(caught.value)


def test_ledger_check_finds_a_lost_group() -> None:
    ledger = Ledger()
    ledger.admit(0)
    ledger.in_flight.clear()
    with pytest.raises(ConservationError, match="not conserved"):
        ledger.check()


def test_seed_depends_on_every_argument_and_on_nothing_else() -> None:
    base = (1, "p", 2, 3, 4)
    assert sample_seed(*base) == sample_seed(*base)
    others = [
        (9, "p", 2, 3, 4),
        (1, "q", 2, 3, 4),
        (1, "p", 9, 3, 4),
        (1, "p", 2, 9, 4),
        (1, "p", 2, 3, 9),
    ]
    assert len({sample_seed(*a) for a in [base, *others]}) == 6
    random.seed(0)
    assert sample_seed(*base) == sample_seed(*base)
    # A constant of the format: another value would silently change every recorded run.
    assert sample_seed(0, "a", 0, 0, 0) == 6044015246149321335


def test_seeds_do_not_collide_and_fit_vllm() -> None:
    seeds = [
        sample_seed(0, f"p{p}", g, i, v) for p, g, i, v in itertools.product(range(8), repeat=4)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    # Fields are separated: moving a digit from one to the next is another draw.
    assert sample_seed(0, "p", 1, 11, 0) != sample_seed(0, "p", 11, 1, 0)

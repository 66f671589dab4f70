"""From prompts to scored groups: admitting prompts, collecting what is generated, and its rewards.

Which groups exist and how far each has come is State (`ledger`, `waiting`); the object references
of what is being generated or waits to be trained on are in the run's GroupQueue.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.data.prompt import Prompt
from actors.rollouts import Group
from actors.staleness import admissible
from cluster.stopping import RunError
from learner.algorithms import regimes
from learner.algorithms.assemble import alive
from learner.stages.engines import check_failures
from learner.stages.rl.batch import Batch
from learner.stages.rl.clock import Clock
from learner.stages.rl.run import RLRun
from learner.state import State

MAX_DRAWS = 4  # default of algorithm.options.max_draws, a multiple of rollout.prompts_per_step


def draw(run: RLRun, state: State, clock: Clock) -> Batch:
    """The groups of one step with their rewards, in the order of their ids.

    These are rollout.prompts_per_step groups. With algorithm.filter=resample as many more are drawn
    as it takes for that many to have rewards that differ, within algorithm.options.max_draws.
    """
    cfg = run.cfg
    wanted, a = cfg.rollout.prompts_per_step, cfg.algorithm
    limit = int(a.options.get("max_draws", MAX_DRAWS) * wanted)
    batch, more, refusals = Batch(()), wanted, Refusals(run, state)
    while more:
        with clock.phase("gen"):
            admit(run, state, more, len(batch.members))
            groups = collect(run, state, more, len(batch.members), refusals)
        with clock.phase("reward"):
            batch = Batch((*batch.members, *run.groups.score(groups)))
            check_failures(cfg, batch.scores)
        more = 0
        if a.filter == "resample":
            usable = alive(cfg, batch.metas, batch.scores)
            more = regimes.groups_to_draw(wanted, usable, len(batch.members), 0, limit)
    return batch


def admit(run: RLRun, state: State, needed: int, drawn: int = 0) -> None:
    """Admit as many prompts as can still be trained on within rollout.max_staleness versions.

    At least those of the `needed` next groups are admitted that are not on their way. `drawn`:
    groups of this step that are here already. The bound is derived in actors/staleness.py.
    """
    r = run.cfg.rollout
    waiting = state.ledger.waiting - drawn
    room = 0 if drawn else admissible(waiting, r.prompts_per_step, r.max_staleness)
    admitted = []
    for prompt in run.data.sampler.next(max(room, needed - waiting)):
        group_id = state.ledger.admitted
        state.ledger.admit(group_id)
        state.waiting[group_id] = prompt
        admitted.append((group_id, prompt))
    state.sampler = run.data.sampler.state()
    submit(run, state, admitted)


def submit(run: RLRun, state: State, groups: Sequence[tuple[int, Prompt]]) -> None:
    """Have the completions of admitted groups, given as (group id, prompt), made."""
    for group_id in run.groups.submit(groups, state.version):
        state.ledger.finish(group_id)


def collect(run: RLRun, state: State, n: int, drawn: int, refusals: Refusals) -> list[Group]:
    """The `n` oldest admitted groups, once all of them are finished.

    Others that finish meanwhile stay in the queue. Prompts are admitted in place of refused ones.
    """
    queue, ledger = run.groups, state.ledger
    while True:
        finished = {g.meta.group_id for g in queue.finished}
        oldest = sorted(ledger.in_flight | finished)[:n]
        if not any(group_id in ledger.in_flight for group_id in oldest):
            return queue.take(oldest)
        for group_id in queue.wait():
            ledger.finish(group_id)
        refusals.take_in()
        admit(run, state, n, drawn)


class Refusals:
    """The prompts of one step that no generator takes."""

    def __init__(self, run: RLRun, state: State) -> None:
        self.run, self.state, self.count = run, state, 0

    def take_in(self) -> None:
        """Leave out the groups that were refused since the last call.

        Raises RunError where a step has more of them than it has prompts.
        """
        refused, limit = self.run.groups.refused, self.run.cfg.rollout.prompts_per_step
        while refused:
            group_id, reason = refused.pop(0)
            self.state.ledger.finish(group_id)
            self.state.ledger.drop(group_id, "refused")
            del self.state.waiting[group_id]
            self.count += 1
            self.run.progress.note(f"group {group_id} is left out: {reason}")
            if self.count > limit:
                raise RunError(
                    f"{self.count} prompts of one step were refused by the generators; the last: "
                    f"{reason}. Mend the data."
                )

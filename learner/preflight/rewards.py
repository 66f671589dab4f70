"""The check that the configured rewards accept answers known to be right and no wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.data.prompt import Prompt
from conf.schema import Config
from learner.preflight.machine import PreflightError

PROBES = 8  # held-out prompts whose right answers are scored
WRONG = "-7654321.5"  # the answer to no question


def right_answer(prompt: Prompt) -> str | None:
    """Return an answer known to be right, or None if the data set holds only a way to check one."""
    return prompt.gold if prompt.task in ("math", "reasoning_gym") else None


def check_rewards(cfg: Config, prompts: list[Prompt]) -> tuple[str, str]:
    """Run `probe_rewards` and return its result.

    If the algorithm trains on given answers, rewards only measure, so an error becomes a note.
    """
    try:
        return probe_rewards(cfg, prompts)
    except PreflightError as error:
        if cfg.algorithm.data not in ("dataset", "pairs"):
            raise
        return "only measured in evaluations", str(error)


def probe_rewards(cfg: Config, prompts: list[Prompt]) -> tuple[str, str]:
    """Score the right answers of a few prompts, and one wrong answer.

    They are scored as in training, in a process that can be killed. Returns (summary, note or "").
    Raises PreflightError if so many rewards fail that they would stop the run, if no right answer
    is judged right, or if the wrong answer is.
    """
    from reward_service.combine import rule_weights
    from reward_service.processes import RewardPool

    reward = {
        "rules": rule_weights(cfg.reward.rules, cfg.reward.models),
        "combine": cfg.reward.combine,
        "timeout_s": cfg.reward.timeout_s,
        "options": {"max_tokens": cfg.rollout.max_tokens, **cfg.reward.options},
    }
    known = [(p, right_answer(p)) for p in prompts[:PROBES]]
    right = [
        probe_item(cfg, f"right/{i}", p, answer)
        for i, (p, answer) in enumerate(known)
        if answer is not None
    ]
    pool = RewardPool(reward, 1)
    try:
        *results, wrong = pool.score([*right, probe_item(cfg, "wrong", prompts[0], WRONG)])
    finally:
        pool.close()
    return judge_probes(cfg, prompts[0], results, wrong)


def probe_item(cfg: Config, name: str, prompt: Prompt, answer: str) -> Any:
    """Return the RewardItem of a response that gives `answer` in the R1 format."""
    from reward_service.rules.item import RewardItem

    opening = "" if "<think>" in prompt.prefill else "<think>"
    return RewardItem(
        name,
        f"{prompt.prefill}{opening}so</think><answer>{answer}</answer>",
        prompt.gold,
        prompt.text,
        prompt.task,
        prompt.data_source,
        1,
        cfg.rollout.max_tokens,
        False,
        dict(prompt.extra),
    )


def judge_probes(cfg: Config, first: Prompt, results: Sequence[Any], wrong: Any) -> tuple[str, str]:
    """Return (summary, note or "") of the results. Raises PreflightError as `probe_rewards` does.

    first: the first prompt, to which the wrong answer was given. results: of the right answers.
    wrong: the result of the wrong answer.
    """
    total = len(results) + 1
    failed = [r for r in [*results, wrong] if r.status != "ok"]
    if len(failed) / total > cfg.reward.max_failure_share:
        raise PreflightError(
            f"{len(failed)} of {total} rewards of known answers are not ok, more than "
            f"reward.max_failure_share={cfg.reward.max_failure_share:g}. The first: "
            f"{failed[0].status}, {failed[0].reason}. Mend the reward or the data."
        )
    verdicts = [r.parts["accuracy"] for r in results if "accuracy" in r.parts]
    if wrong.parts.get("accuracy", 0.0) >= 1:
        raise PreflightError(
            f"the rule accuracy calls {WRONG} a right answer to {first.question!r}, whose answer "
            f"is {first.gold!r}. Check data.answer_key and the reward."
        )
    none_right = bool(verdicts) and max(verdicts) < 1
    if none_right and first.task == "math":
        raise PreflightError(
            f"the rule accuracy calls the data set's own answer {first.gold!r} to "
            f"{first.question!r} wrong: {results[0].reason}. Check data.answer_key."
        )
    summary = (
        f"{sum(v >= 1 for v in verdicts)} of {len(verdicts)} right answers judged right; "
        f"a wrong one gets {wrong.total:g}"
    )
    if failed:
        example = f"{failed[0].status}, {failed[0].reason}"
        return summary, f"{len(failed)} of {total} not ok, such as: {example}"
    if not results:
        task = first.task
        return summary, f"no right answer is known for task {task}; only a wrong one was scored"
    if none_right:  # reasoning-gym stores no answer that its own verifier accepts for some puzzles
        reason = results[0].reason
        return summary, f"{first.data_source} stores no answer that its verifier accepts: {reason}"
    return summary, ""

"""Checks whether settings can work together, before any engine starts.

The schema checks each setting alone. Imports nothing slow, so that a mistake in a setting is
reported in a second or two.
"""

from __future__ import annotations

from conf.schema import Config
from conf.settings import check_each
from learner.checks.algorithm import check_advantage, check_algorithm
from learner.checks.batches import check_batches
from learner.checks.inputs import check_data, check_model
from learner.checks.reward_training import check_reward_training
from learner.checks.rewards import check_rewards
from learner.checks.run import check_run
from learner.checks.sampling import check_sampling

__all__ = ["validate"]


def validate(cfg: Config) -> None:
    """Raise ConfigError on the first setting that cannot work.

    Reads the config.json of models that lie in a local folder, and whether named files exist.
    """
    check_each(cfg)
    check_advantage(cfg)
    check_run(cfg)
    check_model(cfg)
    check_data(cfg)
    check_batches(cfg)
    check_reward_training(cfg)
    if cfg.stage.evaluates:
        check_algorithm(cfg)
    if cfg.generates:
        check_sampling(cfg)
        check_rewards(cfg)

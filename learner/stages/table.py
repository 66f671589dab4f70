"""Every stage by name.

A new stage is one file beside this one, one line here, and one YAML file.
"""

from __future__ import annotations

from conf.schema import Config
from learner.stage import Stage
from learner.stages import annotate, pretrain, reward_model
from learner.stages.rl import loop

STAGES: dict[str, Stage] = {
    stage.name: stage for stage in (loop.STAGE, pretrain.STAGE, reward_model.STAGE, annotate.STAGE)
}


def pipeline(cfg: Config) -> list[Stage]:
    """The stages of a run, in their order. So far a run is the one stage that its settings name."""
    return [STAGES[cfg.stage.name]]

"""All settings of a run: for each its type, its default, its meaning and the values it may have.

Each setting is declared once, by `conf.field.setting`. The settings table in docs/configuration.md,
the checks of single values and the search for unknown keys all read these declarations
(conf/settings.py). How settings must fit together is checked in learner/checks/.

Imports nothing heavier than the standard library, so that a mistake in a setting is reported in a
second or two. Sizes are counts of prompts, samples (completions) or tokens. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conf.field import ConfigError, setting
from conf.system import (
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    GeneratorConfig,
    GuardsConfig,
    LearnerConfig,
    LoggingConfig,
    ReferenceConfig,
)
from conf.task import (
    AlgorithmConfig,
    AnnotateConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    StageConfig,
)

__all__ = [
    "AlgorithmConfig",
    "AnnotateConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "GeneratorConfig",
    "GuardsConfig",
    "LearnerConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "StageConfig",
]


@dataclass
class Config:
    """The whole run. The settings that people give most often stand at the top level."""

    experiment: str = setting("r1_zero", "Name of the experiment, which names the run's folder.")
    steps: int = setting(64, "Number of training steps.", low=0)
    seed: int = setting(0, "Seed of everything random in the run.", low=0)
    run_dir: str = setting("", "Folder of the run; empty: outputs/EXPERIMENT-TIME.")
    resume: str = setting(
        "never",
        "Whether to go on with an earlier run: never; auto: where there are checkpoints; or the "
        "folder or address of a run or a checkpoint.",
    )
    preflight: bool = setting(
        False, "Check everything that the run needs, print a table and start nothing."
    )
    allow_changes: bool = setting(
        False, "Whether to resume although settings differ from those of the checkpoint."
    )
    stage: StageConfig = field(default_factory=StageConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    annotate: AnnotateConfig = field(default_factory=AnnotateConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def generates(self) -> bool:
        """Whether generators and the reward service run."""
        return self.stage.answers == "policy"

    @property
    def samples_per_step(self) -> int:
        """Number of samples in a training step."""
        return self.rollout.prompts_per_step * self.rollout.group_size

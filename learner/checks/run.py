"""Checks of where a run writes, resumes and places its actors."""

from __future__ import annotations

from pathlib import Path

from cluster import placement
from conf.schema import Config, ConfigError
from learner.checkpoints.retention import check_best


def check_run(cfg: Config) -> None:
    """Raise ConfigError for a `resume` that names nothing, and for impossible places.

    An address such as s3://BUCKET/RUN is looked up when the run starts.
    """
    if (
        cfg.resume not in ("never", "auto")
        and "://" not in cfg.resume
        and not Path(cfg.resume).is_dir()
    ):
        raise ConfigError(
            "resume",
            cfg.resume,
            "expected one of never, auto, or the folder of a run or a checkpoint",
        )
    if cfg.checkpoint.keep_best:
        check_best(cfg)
    if cfg.cluster.resources:
        placement.check(cfg.cluster.resources)
    if cfg.resume == "auto" and not cfg.run_dir:
        raise ConfigError(
            "resume", cfg.resume, "needs run_dir, the folder of the run to go on with"
        )

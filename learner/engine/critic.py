"""PPO's critic: a value head on its own copy of the model, with its own DeepSpeed engine.

The value of a token is read from the state before it, which has seen the text so far but not the
token. The head starts at 0. Settings in algorithm.options:

- critic_lr: learning rate; default optimizer.lr.
- value_clip: clip of the value loss; null turns it off.
- value_lam: lambda of the value targets; default algorithm.lam (VC-PPO's decoupled lambdas).
- value_pretrain_steps: number of first steps in which only the critic is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from actors.modeling.loading import load_model
from actors.modeling.policy import disable_dropout
from cluster.monitoring.stat import Accumulator, Stat
from learner.algorithms import advantages
from learner.algorithms.losses import value_loss
from learner.engine.accumulation import accumulate
from learner.engine.optimizer import build_engine
from learner.engine.samples import MicroBatch, Sample, micro_batch


class ValueModel(nn.Module):
    """The decoder of a causal LM with a linear head of one value."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.decoder = model.get_decoder()
        self.head = nn.Linear(
            model.config.hidden_size, 1, bias=False, dtype=next(model.parameters()).dtype
        )
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the value of the state before each token `ids[rows, columns]`, float32 [M].

        ids: int64 [B, T], right-padded.
        rows, columns: int64 [M] with columns >= 1.
        """
        hidden = self.decoder(input_ids=ids, use_cache=False).last_hidden_state[rows, columns - 1]
        return self.head(hidden)[:, 0].float()


class Critic:
    """One rank's share of the critic.

    cfg: conf.schema.Config.
    saved: a checkpoint's critic.safetensors, or None for a new critic.
    """

    def __init__(self, cfg: Any, device: Any, saved: Path | None) -> None:
        self.cfg, self.device = cfg, device
        options = cfg.algorithm.options
        self.clip = options.get("value_clip")
        self.value_lam = options.get("value_lam", cfg.algorithm.lam)
        self.model = ValueModel(load_model(cfg.model, cfg.seed))
        disable_dropout(self.model)
        learning_rate = float(options.get("critic_lr", cfg.optimizer.lr))
        self.engine, self.optimizer = build_engine(cfg, self.model, learning_rate, saved)

    def evaluate(self, batch: MicroBatch) -> None:
        """Set the values of the batch's samples under the present critic. Call without gradient."""
        p = batch.packed
        values = p.split(self.engine(p.ids, p.rows, p.columns))
        for sample, sample_values in zip(batch.samples, values, strict=True):
            sample.values = sample_values

    def set_targets(
        self,
        samples: list[Sample],
        rewards: np.ndarray,
        valid: np.ndarray,
        kl: list[np.ndarray],
        values: list[np.ndarray],
    ) -> Stat:
        """Set the value targets of this rank's samples: GAE with value_lam over the whole batch.

        samples: of this rank.
        rewards, valid: float64 [N] and bool [N], of the whole batch in the plan's order.
        kl, values: lists of N float64 [K], likewise.

        Returns the explained variance of the values over the valid samples of the whole batch,
        which is the same on every rank.
        """
        a = self.cfg.algorithm
        kl_in_reward = kl if a.kl_placement == "reward" and a.beta > 0 else None
        per_token = advantages.token_rewards(
            rewards, np.array([len(v) for v in values]), valid, kl_in_reward, a.beta
        )
        _, targets = advantages.gae(per_token, values, a.gamma, self.value_lam)
        for sample in samples:
            sample.targets = targets[sample.index]
        explained = advantages.explained_variance(
            [t for t, ok in zip(targets, valid, strict=True) if ok],
            [v for v, ok in zip(values, valid, strict=True) if ok],
        )
        return Stat(explained, 1.0, explained, explained)

    def update(
        self, samples: list[Sample], micro_batches: int, update: int, stats: Accumulator
    ) -> None:
        """Make optimizer step `update`; every rank skips it if any loss was not finite."""

        def loss(m: int) -> tuple[Tensor, Mapping[str, Stat], bool]:
            b = micro_batch(samples, update, m, self.device)
            p = b.packed
            values = self.engine(p.ids, p.rows, p.columns)
            old_values, targets = b.pad(b.flat("values")), b.pad(b.flat("targets"))
            value, loss_stats = value_loss(
                b.pad(values), old_values, targets, b.weights(), b.mask(), self.clip
            )
            return value, loss_stats, b.filler

        self.optimizer.skip = not accumulate(self.engine, micro_batches, loss, stats)
        self.engine.step()
        self.optimizer.skip = False

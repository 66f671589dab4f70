"""PPO's critic: a value head on its own copy of the model, as a second DeepSpeed engine with its own optimizer.

A token's value is read from the state before it (what has been said, not what is about to be). The head starts at 0.
Options (algorithm.options): critic_lr (default optimizer.lr), value_clip (null: off), value_lam (lambda of the targets,
default algorithm.lam: decoupled lambdas), value_pretrain_steps (steps in which only the critic learns).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from cluster.monitoring.stat import Stat
from learner.algorithms import advantages
from learner.algorithms.losses import value_loss
from learner.engine.samples import MicroBatch, Sample, micro_batch


class ValueModel(nn.Module):
    """forward(ids [B, T], rows [M], columns [M]) -> float32 [M]: value of the state before each token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.decoder = model.get_decoder()
        self.head = nn.Linear(
            model.config.hidden_size, 1, bias=False, dtype=next(model.parameters()).dtype
        )
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        hidden = self.decoder(input_ids=ids, use_cache=False).last_hidden_state[rows, columns - 1]
        return self.head(hidden)[:, 0].float()


class Critic:
    """One rank's share of the critic. `cfg`: conf.schema.Config."""

    def __init__(self, cfg: Any, device: Any, saved: Path | None) -> None:
        import deepspeed

        from actors.modeling.loading import load_model
        from actors.modeling.policy import disable_dropout
        from learner.engine import tensors
        from learner.engine.rank import deepspeed_config, skippable_adamw

        self.cfg, self.device = cfg, device
        options = cfg.algorithm.options
        self.clip = options.get("value_clip")
        self.value_lam = options.get("value_lam", cfg.algorithm.lam)
        self.model = model = ValueModel(load_model(cfg.model, cfg.seed))
        disable_dropout(model)
        if saved:
            tensors.load_weights(saved, model)
        lr = float(options.get("critic_lr", cfg.optimizer.lr))
        self.optimizer = skippable_adamw(model.parameters(), cfg.optimizer, lr)
        numel = sum(p.numel() for p in model.parameters())
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=deepspeed_config(cfg, numel)
        )
        tensors.prepare(self.engine, self.optimizer)
        if saved:
            tensors.load_optimizer(saved, model, self.optimizer)

    def evaluate(self, batch: MicroBatch) -> None:
        """Set each sample's values under the critic as it stands (call without gradient)."""
        values = self.engine(batch.ids, batch.rows, batch.columns)
        for s, piece in zip(batch.samples, values.split(batch.lengths), strict=True):
            s.values = piece.cpu().numpy()

    def set_targets(
        self,
        samples: list[Sample],
        rewards: np.ndarray,
        valid: np.ndarray,
        kl: list[np.ndarray],
        values: list[np.ndarray],
        stats: dict[str, Any],
        report: bool,
    ) -> None:
        """Value targets by GAE with value_lam, from the whole batch; `report`: also its explained variance."""
        a = self.cfg.algorithm
        in_reward = kl if a.kl_placement == "reward" and a.beta > 0 else None
        per_token = advantages.token_rewards(
            rewards, np.array([len(v) for v in values]), valid, in_reward, a.beta
        )
        _, targets = advantages.gae(per_token, values, a.gamma, self.value_lam)
        for s in samples:
            s.targets = targets[s.index]
        if report:
            explained = advantages.explained_variance(
                [t for t, ok in zip(targets, valid, strict=True) if ok],
                [v for v, ok in zip(values, valid, strict=True) if ok],
            )
            stats["explained_variance"] = Stat(explained, 1.0, explained, explained)

    def update(
        self, samples: list[Sample], micro_batches: int, u: int, stats: dict[str, Any]
    ) -> None:
        """One optimizer step on the samples of optimizer step u; skipped on all ranks when anything is not finite."""
        from learner.engine.rank import accumulate

        def loss(m: int) -> tuple[Tensor, dict[str, Any], bool]:
            chosen = [s for s in samples if s.update == u and s.micro_batch == m]
            b = micro_batch(chosen, self.device, samples[0] if samples else None)
            values = self.engine(b.ids, b.rows, b.columns)
            return *value_loss(
                b.pad(values),
                b.pad(b.flat("values")),
                b.pad(b.flat("targets")),
                b.weights(),
                b.mask(),
                self.clip,
            ), b.empty

        self.optimizer.skip = not accumulate(self.engine, micro_batches, loss, stats)
        self.engine.step()
        self.optimizer.skip = False

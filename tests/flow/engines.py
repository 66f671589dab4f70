"""What the flow tests share: a small random model, its weights as a published version, and
generators to break.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from actors import weight_transfer
from actors.generator import Generator
from actors.records import Bucket, GroupMeta, GroupRequest, Probe, SamplingParams, checksum
from actors.staleness import sample_seed
from cluster.monitoring.stat import Accumulator
from learner.engine.rank import LearnerRank
from learner.engine.weights import buckets, flatten

WAIT_S = 120.0
CONTEXT = 224
PROBE_IDS = [list(range(7, 40)), list(range(60, 30, -1))]


def make_model(directory: Path, seed: int = 0) -> Any:
    """A 2-layer random Llama with tied embeddings and the character tokenizer, written as a Hugging
    Face folder.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from actors.modeling.tokenizer import save_tokenizer

    tokenizer = save_tokenizer(directory, CONTEXT)
    torch.manual_seed(seed)
    # A wide initialisation: the next-token distribution is then far from uniform, so errors show.
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            initializer_range=0.15,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(directory)
    return model.eval()


def perturbed(model: Any, seed: int, scale: float = 0.05) -> Any:
    """A copy with noise on every parameter."""
    import copy

    other = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(scale * torch.randn(p.shape, generator=rng))
    return other


def publish(model: Any, limit: int = 1 << 16) -> list[Bucket]:
    """The model's parameters as buckets in the object store, by the learner's own packing."""
    out = []
    for group in buckets(list(model.named_parameters()), limit):
        buffer, entries = flatten(group)
        out.append(Bucket(ray.put(buffer), entries, checksum(buffer)))
    return out


def hf_logprobs(model: Any, ids: Sequence[int]) -> np.ndarray:
    """float32 [len - 1]: log-probs of ids[1:] by a plain Hugging Face forward pass."""
    with torch.no_grad():
        x = torch.tensor([list(ids)])
        logits = torch.log_softmax(model(x).logits[0, :-1], -1)
    return logits.gather(1, x[0, 1:, None])[:, 0].numpy()


def probe(model: Any, tolerance: float = 1e-4) -> Probe:
    return Probe(PROBE_IDS, [hf_logprobs(model, ids) for ids in PROBE_IDS], tolerance)


def update(generator: Any, version: int, model: Any, **changes: Any) -> dict[str, float]:
    """Load and prove `model`; `changes` replace buckets or probe."""
    return ray.get(
        generator.update_weights.remote(
            version,
            changes.get("buckets") or publish(model),
            changes.get("probe") or probe(model),
            60.0,
        ),
        timeout=WAIT_S,
    )


def request(
    group_id: int, samples: int = 4, max_tokens: int = 40, version: int = 0, run_seed: int = 0
) -> GroupRequest:
    prompt = list(range(7 + group_id % 40, 20 + group_id % 40 + group_id % 7))
    seeds = [sample_seed(run_seed, f"p{group_id}", group_id, i, version) for i in range(samples)]
    return GroupRequest(group_id, f"p{group_id}", prompt, seeds, SamplingParams(max_tokens))


def generate(generator: Any, requests: Sequence[GroupRequest]) -> list[tuple[GroupMeta, Any]]:
    """All groups at once; returns (meta, ROLLOUT table) in order."""
    refs = [generator.generate.options(num_returns=2).remote(r) for r in requests]
    return [tuple(ray.get(list(pair), timeout=WAIT_S)) for pair in refs]


class BreakableGenerator(Generator):
    """A generator whose re-packing of tied heads can be taken away: the fault that vLLM keeps
    silent about.
    """

    async def set_repack(self, on: bool) -> None:
        engine = weight_transfer.ObjectStoreEngine
        if not hasattr(engine, "kept"):
            engine.kept = engine.repack_embeddings
        engine.repack_embeddings = engine.kept if on else lambda self: None


def start_generator(name: str, model_path: str, tokenizer: Any) -> Any:
    from actors.generator import engine_args
    from cluster.environment import generator_env
    from conf.schema import GeneratorConfig

    cfg = GeneratorConfig()
    args = engine_args(cfg, model_path, "float32", CONTEXT, False)
    return (
        ray.remote(BreakableGenerator)
        .options(
            num_cpus=0,
            max_concurrency=1000,
            runtime_env={"env_vars": generator_env(cfg.kv_cache_gib)},
        )
        .remote(name, args, [tokenizer.eos_token_id])
    )


class GradientRank(LearnerRank):
    """A learner rank that shows the gradient of an optimizer step without making the step."""

    def gradient(self, job: Any) -> dict[str, np.ndarray]:
        """The gradient of optimizer step 0, whole, float32 by parameter name; changes no weight."""
        from deepspeed.utils import safe_get_full_grad

        stats = Accumulator()
        self.accumulate(self.prepare(job, stats), job, 0, stats)
        gradients = {}
        for name, p in self.policy.model.named_parameters():
            gradient = safe_get_full_grad(p) if self.cfg.learner.zero_stage else p.grad
            gradients[name] = gradient.detach().float().cpu().numpy().copy()
        self.step(0.0, False)
        return gradients if self.rank == 0 else {}


class SwitchableRank(GradientRank):
    """A learner rank that was started with a critic and takes on any algorithm: one engine serves
    the tests of all.
    """

    def use(self, algorithm: Any, head: np.ndarray) -> None:
        """`algorithm`: AlgorithmConfig; `head` float32 [1, hidden]: weights of the critic's value
        head.
        """
        self.kept = getattr(self, "kept", self.critic)
        self.cfg.algorithm = algorithm
        self.critic = self.kept if algorithm.critic else None
        with torch.no_grad():
            self.kept.model.head.weight.copy_(torch.tensor(head))

    def critic_gradient(self, job: Any) -> dict[str, np.ndarray]:
        """The gradient of the critic's optimizer step 0, whole, by parameter name; changes no
        weight.
        """
        found: dict[str, np.ndarray] = {}

        def keep(closure: Any = None) -> None:
            found.update(
                {n: p.grad.numpy().copy() for n, p in self.critic.model.named_parameters()}
            )

        samples = self.prepare(job, Accumulator())
        self.critic.optimizer.step = keep
        try:
            self.critic.update(samples, job.micro_batches[0], 0, Accumulator())
        finally:
            del self.critic.optimizer.step
        return found

"""A generator: one Ray actor that owns one vLLM engine and steps it in a thread of its own.

New groups join the running batch (continuous batching across groups). Weights are exchanged between
two decode steps, so the tokens of one completion may come from several policy versions; vLLM's
weight-version spans tell which. Prompts and completions are token ids, and nothing is detokenised
here (DESIGN invariant 1).
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from actors import weight_transfer
from actors.records import ROLLOUT, Bucket, GroupMeta, GroupRequest, Probe, PromptRow, check_rollout
from actors.weight_transfer import WeightSyncError


@dataclass
class _Running:
    """A group that is being generated; `left` counts its unfinished completions."""

    request: GroupRequest
    future: Future
    outputs: list[Any]
    left: int = field(default=0)
    cached: int = 0  # prompt tokens, over all completions, that were in the prefix cache


class Generator:
    """Ray actor (asyncio). `engine_args` are vLLM's.

    A completion ends with the first of `stop_token_ids`, which belongs to it.
    """

    def __init__(self, name: str, engine_args: dict[str, Any], stop_token_ids: list[int]) -> None:
        self.name = name
        self.stop_token_ids = stop_token_ids
        self.epoch = 0
        self.version = -1  # no weights are proved yet: it serves only after the first sync
        self._commands: queue.Queue = queue.Queue()
        self._running: dict[int, _Running] = {}
        self._failure: BaseException | None = None
        weight_transfer.register()
        from vllm import EngineArgs, LLMEngine

        self.engine = LLMEngine.from_engine_args(EngineArgs(**engine_args))
        self._requests = 0
        threading.Thread(target=self._loop, name="engine", daemon=True).start()

    def __repr__(self) -> str:
        return self.name if self.version < 0 else f"{self.name} v{self.version}"

    # ---- called by the driver ------------------------------------------------------------

    async def generate(self, request: GroupRequest) -> tuple[GroupMeta, pa.RecordBatch]:
        """All completions of one group. Returns scalars, for the driver, and a ROLLOUT batch.

        Both are None when the group was abandoned.
        """
        row = request.prompt_ids
        if isinstance(row, PromptRow):
            prompts = await row.table
            ids = prompts.column("prompt_ids")[row.row].as_py()
            request = dataclasses.replace(request, prompt_ids=ids)
        return await self._call(lambda future: self._admit(request, future))

    async def update_weights(
        self, version: int, buckets: list[Bucket], probe: Probe | None, timeout_s: float
    ) -> dict[str, float]:
        """Load `buckets` between two decode steps and prove them by `probe`.

        Returns load_s and probe_s, in seconds, and probe_max_abs_diff, the largest difference of a
        log-prob. Raises WeightSyncError when a checksum differs, or a log-prob by more than its
        tolerance; the generator then serves nothing until a later update succeeds.
        """
        # The buckets are fetched before the engine pauses. They are views of the object store.
        buffers = await asyncio.wait_for(asyncio.gather(*[b.ref for b in buckets]), timeout_s)
        updates = [
            {"buffer": buffer, "entries": b.entries, "digest": b.digest}
            for buffer, b in zip(buffers, buckets, strict=True)
        ]
        return await self._call(
            lambda future: future.set_result(self._update_weights(version, updates, probe))
        )

    async def ping(self) -> dict[str, Any]:
        """The generator's state. The engine's thread answers, so an answer proves that it steps."""
        return await self._call(
            lambda future: future.set_result(
                {"name": self.name, "version": self.version, "groups": len(self._running)}
            )
        )

    async def abandon(self, epoch: int) -> int:
        """Stop work on every group of an epoch before this one; its caller gets None.

        Groups of those epochs that arrive later are refused as well, because calls may overtake one
        another. Returns the number of groups that were running.
        """
        return await self._call(lambda future: future.set_result(self._abandon(epoch)))

    async def logprobs(self, ids: list[list[int]]) -> list[np.ndarray]:
        """float32 [len - 1] for each sequence: log-probs of ids[1:] under the current weights."""
        return await self._call(lambda future: future.set_result(self._logprobs(ids)))

    async def _call(self, command: Callable[[Future], None]) -> Any:
        if self._failure is not None:
            raise RuntimeError(f"{self.name}: engine stopped: {self._failure!r}") from self._failure
        future: Future = Future()
        self._commands.put((command, future))
        return await asyncio.wrap_future(future)

    # ---- run by the engine's thread ------------------------------------------------------

    def _loop(self) -> None:
        try:
            while True:
                self._run_commands(block=not self.engine.has_unfinished_requests())
                if self.engine.has_unfinished_requests():
                    self._deliver(self.engine.step())
        except BaseException as error:  # noqa: BLE001 - every waiting caller must get the error
            self._failure = error
            while not self._commands.empty():
                self._commands.get()[1].set_exception(error)
            for running in self._running.values():
                running.future.set_exception(error)
            raise

    def _run_commands(self, block: bool) -> None:
        while True:
            try:
                command, future = self._commands.get(block=block)
            except queue.Empty:
                return
            block = False
            try:
                command(future)
            except Exception as error:  # noqa: BLE001 - belongs to the caller of this command
                future.set_exception(error)

    def _admit(self, request: GroupRequest, future: Future) -> None:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        if self.version < 0:
            raise WeightSyncError(
                f"{self.name}: asked to generate while its weights are not proved"
            )
        if request.epoch < self.epoch:
            return future.set_result((None, None))
        if request.group_id in self._running:
            raise ValueError(f"{self.name}: group {request.group_id} is already running here")
        s = request.sampling
        for index, seed in enumerate(request.seeds):
            params = VllmParams(
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                max_tokens=s.max_tokens,
                seed=seed,
                logprobs=0,
                stop_token_ids=self.stop_token_ids,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            # The salt keeps blocks computed under older weights out of this request's prefix.
            self.engine.add_request(
                f"{request.group_id}/{index}",
                {"prompt_token_ids": request.prompt_ids, "cache_salt": str(self.version)},
                params,
            )
        self._running[request.group_id] = _Running(
            request, future, [None] * len(request.seeds), len(request.seeds)
        )

    def _abandon(self, epoch: int) -> int:
        self.epoch = epoch
        abandoned, self._running = self._running, {}
        for group_id, running in abandoned.items():
            self.engine.abort_request([f"{group_id}/{i}" for i in range(len(running.outputs))])
            running.future.set_result((None, None))
        return len(abandoned)

    def _deliver(self, outputs: list[Any]) -> list[Any]:
        """Hand finished completions to their groups. Returns the outputs of probes."""
        probes = []
        for output in outputs:
            group, _, index = output.request_id.partition("/")
            if not output.finished:
                continue
            if group == "probe":
                probes.append(output)
                continue
            running = self._running[int(group)]
            running.outputs[int(index)] = output.outputs[0]
            running.left -= 1
            running.cached += output.num_cached_tokens or 0
            if running.left == 0:
                del self._running[int(group)]
                try:
                    running.future.set_result(self._record(running))
                except Exception as error:  # noqa: BLE001 - the caller judges a malformed group
                    running.future.set_exception(error)
        return probes

    def _record(self, running: _Running) -> tuple[GroupMeta, pa.RecordBatch]:
        """Scalars and ROLLOUT of a finished group."""
        request, outputs = running.request, running.outputs
        n = len(outputs)
        lengths = np.array([len(o.token_ids) for o in outputs], np.int64)
        versions = [token_versions(o.weight_versions, len(o.token_ids)) for o in outputs]
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array([request.group_id] * n, pa.int64()),
                pa.array([request.prompt_id] * n, pa.string()),
                pa.array(range(n), pa.int32()),
                pa.array([request.prompt_ids] * n, pa.list_(pa.int32())),
                pa.array([list(o.token_ids) for o in outputs], pa.list_(pa.int32())),
                pa.array([sampled_logprobs(o) for o in outputs], pa.list_(pa.float32())),
                pa.array(versions, pa.list_(pa.int32())),
                pa.array([o.finish_reason for o in outputs], pa.string()),
            ],
            schema=ROLLOUT,
        )
        flat = np.concatenate(versions)
        meta = GroupMeta(
            request.group_id,
            request.prompt_id,
            len(request.prompt_ids),
            lengths,
            tuple(o.finish_reason for o in outputs),
            int(flat.min()),
            int(flat.max()),
            self.name,
            running.cached,
        )
        return meta, check_rollout(batch)

    def _update_weights(
        self, version: int, updates: list[dict[str, Any]], probe: Probe | None
    ) -> dict[str, float]:
        start = time.monotonic()
        self.version = -1  # half-loaded weights must not serve, whatever happens below
        self.engine.collective_rpc("start_weight_update")
        for update in updates:
            self.engine.collective_rpc("update_weights", args=(update,))
        self.engine.collective_rpc("finish_weight_update")
        self.engine.set_weight_version(str(version))
        self.engine.reset_prefix_cache()
        loaded = time.monotonic()
        worst = self._prove(version, probe) if probe else 0.0
        self.version = version
        return {
            "load_s": loaded - start,
            "probe_s": time.monotonic() - loaded,
            "probe_max_abs_diff": worst,
        }

    def _prove(self, version: int, probe: Probe) -> float:
        """The largest difference of a log-prob. WeightSyncError if any exceeds its tolerance."""
        ours, theirs = (np.concatenate(v) for v in (self._logprobs(probe.ids), probe.logprobs))
        difference = np.abs(ours - theirs)
        worst = float(difference.max())
        # Rounding grows with the logits, so the tolerance grows with the log-prob. A NaN fails too.
        if not (difference <= probe.tolerance * np.maximum(1.0, np.abs(theirs))).all():
            raise WeightSyncError(
                f"{self.name}: after loading version {version} the probe's log-probs differ from "
                f"the learner's by up to {worst:.3g}, tolerance {probe.tolerance:.3g} "
                "(generator.sync_tolerance; times the log-prob where that is below -1). The "
                "generator does not compute what the learner computes; it will not serve."
            )
        return worst

    def _logprobs(self, ids: list[list[int]]) -> list[np.ndarray]:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        logprobs: dict[int, np.ndarray] = {}
        index_of = {}  # request id -> index into `ids`
        for i, sequence in enumerate(ids):
            self._requests += 1
            index_of[f"probe/{self._requests}"] = i
            self.engine.add_request(
                f"probe/{self._requests}",
                {"prompt_token_ids": sequence, "cache_salt": f"probe{self._requests}"},
                VllmParams(
                    max_tokens=1,
                    temperature=1.0,
                    prompt_logprobs=0,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                ),
            )
        while len(logprobs) < len(ids):
            for output in self._deliver(self.engine.step()):
                tokens = output.prompt_token_ids
                logprobs[index_of[output.request_id]] = np.array(
                    [
                        entry[t].logprob
                        for t, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
                    ],
                    np.float32,
                )
        return [logprobs[i] for i in range(len(ids))]


def token_versions(spans: list[Any] | None, length: int) -> np.ndarray:
    """int32 [length]: the policy version of each token, from vLLM's spans (version, start, end)."""
    versions = np.full(length, -1, np.int32)
    for span in spans or ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise WeightSyncError(
            f"{int((versions < 0).sum())} of {length} tokens carry no policy version"
        )
    return versions


def sampled_logprobs(output: Any) -> np.ndarray:
    """float32 [tokens]: log-prob of each token under the distribution it was sampled from."""
    return np.array(
        [
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ],
        np.float32,
    )


def engine_args(
    generator: Any, model_path: str, dtype: str, max_length: int, on_gpu: bool
) -> dict[str, Any]:
    """vLLM's engine arguments from the settings (GeneratorConfig); `max_length` in tokens."""
    args = dict(
        model=model_path,
        load_format="safetensors",
        dtype=dtype,
        max_model_len=max_length,
        max_num_seqs=generator.max_num_seqs,
        enforce_eager=generator.enforce_eager,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
        weight_transfer_config={"backend": generator.weight_backend},
    )
    if generator.block_size:
        args["block_size"] = generator.block_size
    if on_gpu:
        args["gpu_memory_utilization"] = generator.gpu_memory_utilization
    else:
        # For part of a prompt vLLM rewinds the request's random generator, which torch cannot do
        # on the CPU.
        args.update(enable_chunked_prefill=False, max_num_batched_tokens=max(8192, max_length))
    return args

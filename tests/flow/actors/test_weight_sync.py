"""Weights into a real vLLM engine: proved after each load, and every damage is caught rather than
served.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayTaskError

from actors.records import Probe
from tests.flow.engines import (
    PROBE_IDS,
    WAIT_S,
    generate,
    hf_logprobs,
    perturbed,
    probe,
    publish,
    request,
    update,
)


def refused(call: Any, *words: str) -> None:
    with pytest.raises(RayTaskError) as caught:
        call()
    assert type(caught.value.cause).__name__ == "WeightSyncError", caught.value
    for word in words:
        assert word in str(caught.value.cause)


def serves_nothing(generator: Any) -> None:
    refused(lambda: generate(generator, [request(1)]), "not proved")


def test_each_sync_is_proved(generator: Any, model: Any) -> None:
    worst = []
    for version in (1, 2, 3):
        newer = perturbed(model, version)
        figures = update(generator, version, newer)
        worst.append(figures["probe_max_abs_diff"])
        found = ray.get(generator.logprobs.remote(PROBE_IDS), timeout=WAIT_S)
        for ids, values in zip(PROBE_IDS, found, strict=True):
            assert np.abs(values - hf_logprobs(newer, ids)).max() < 1e-4
            assert (
                np.abs(values - hf_logprobs(model, ids)).max() > 0.05
            )  # the probe can tell the two apart
    print(f"largest probe difference of three syncs: {max(worst):.2g}")
    assert max(worst) < 1e-4
    assert ray.get(generator.ping.remote(), timeout=WAIT_S)["version"] == 3


def test_one_bucket_or_many_load_the_same(generator: Any, model: Any) -> None:
    newer = perturbed(model, 7)
    whole, small = publish(newer, 1 << 30), publish(newer, 1 << 12)
    assert len(whole) == 1 and len(small) > 5
    assert update(generator, 1, newer, buckets=whole)["probe_max_abs_diff"] < 1e-4
    one = ray.get(generator.logprobs.remote(PROBE_IDS), timeout=WAIT_S)
    update(generator, 2, model)
    assert update(generator, 3, newer, buckets=small)["probe_max_abs_diff"] < 1e-4
    two = ray.get(generator.logprobs.remote(PROBE_IDS), timeout=WAIT_S)
    assert all((a == b).all() for a, b in zip(one, two, strict=True))


def test_a_flipped_bit_is_refused_by_checksum(generator: Any, model: Any) -> None:
    good = publish(model)
    damaged = np.array(ray.get(good[1].ref))
    damaged[len(damaged) // 2] ^= (
        1  # the lowest bit of a mantissa byte: far below what a log-prob would show
    )
    bad = [good[0], replace(good[1], ref=ray.put(damaged)), *good[2:]]
    refused(
        lambda: update(generator, 1, model, buckets=bad),
        "checksum",
        good[1].digest,
        good[1].entries[0].name,
    )
    serves_nothing(generator)
    update(generator, 2, model)
    assert len(generate(generator, [request(1)])) == 1


def test_the_silent_fault_of_a_tied_head_is_caught(generator: Any, model: Any) -> None:
    """Without re-packing, the output projection stays the old one and vLLM says nothing."""
    ray.get(generator.set_repack.remote(False), timeout=WAIT_S)
    try:
        refused(
            lambda: update(generator, 1, perturbed(model, 1)),
            "version 1",
            "generator.sync_tolerance",
            "will not serve",
        )
        serves_nothing(generator)
    finally:
        ray.get(generator.set_repack.remote(True), timeout=WAIT_S)
    assert update(generator, 2, perturbed(model, 1))["probe_max_abs_diff"] < 1e-4
    assert len(generate(generator, [request(1)])) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_never_serve(generator: Any, model: Any, value: float) -> None:
    import copy

    import torch

    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[3, 3] = value
    refused(
        lambda: update(generator, 1, broken, probe=probe(model)), "differ from the learner's by"
    )
    refused(
        lambda: update(generator, 1, broken), "differ from the learner's by"
    )  # nan equals nan to nobody
    serves_nothing(generator)


def test_old_prefix_blocks_are_not_reused(generator: Any, model: Any) -> None:
    """The same prompt before and after a sync: its cached keys and values belong to the old
    weights.
    """
    same = request(5, samples=2, max_tokens=8)
    generate(generator, [same])
    newer = perturbed(model, 3)
    update(generator, 1, newer)
    _, table = generate(generator, [same])[0]
    prompt, completion = (
        table.column("prompt_ids")[0].as_py(),
        table.column("completion_ids")[0].as_py(),
    )
    wanted = hf_logprobs(newer, prompt + completion)[len(prompt) - 1 :]
    assert np.abs(wanted - np.array(table.column("behaviour_logprobs")[0].as_py())).max() < 1e-4


def test_a_bucket_that_never_comes_has_a_deadline(generator: Any, model: Any) -> None:
    @ray.remote(num_cpus=0)
    def never() -> np.ndarray:
        time.sleep(WAIT_S)
        return np.zeros(1, np.uint8)

    missing = never.remote()
    good = publish(model)
    started = time.monotonic()
    with pytest.raises(Exception, match="(?i)time"):
        ray.get(
            generator.update_weights.remote(
                1, [replace(good[0], ref=missing), *good[1:]], probe(model), 1.0
            ),
            timeout=WAIT_S,
        )
    assert time.monotonic() - started < 30
    ray.cancel(missing, force=True)
    # Nothing was loaded: version 0 still serves.
    assert generate(generator, [request(2)])[0][0].version_max == 0


def test_a_wrong_probe_is_refused_whatever_was_loaded(generator: Any, model: Any) -> None:
    shifted = [v + np.float32(4e-3) for v in probe(model).logprobs]
    refused(lambda: update(generator, 1, model, probe=Probe(PROBE_IDS, shifted, 1e-4)), "0.004")


def test_rounding_may_be_as_large_as_the_log_prob_and_no_larger(generator: Any, model: Any) -> None:
    """Float32 logits of 30 cannot agree to what logits of 1 agree to; a token as likely as not
    still must.
    """
    exact = probe(model)
    unlikely = max(exact.logprobs[0].min(), exact.logprobs[1].min(), key=abs)
    row, at = next(
        (i, int(x.argmin())) for i, x in enumerate(exact.logprobs) if x.min() == unlikely
    )
    assert unlikely < -4

    def shifted(place: int, by: float) -> Any:
        changed = [x.copy() for x in exact.logprobs]
        changed[row][place] += by
        return replace(exact, logprobs=changed)

    update(generator, 1, model, probe=shifted(at, 2 * exact.tolerance))
    refused(
        lambda: update(
            generator, 2, model, probe=shifted(at, 2 * exact.tolerance * -float(unlikely))
        ),
        "times the log-prob",
    )
    likely = int(exact.logprobs[row].argmax())
    allowed = exact.tolerance * max(1.0, -float(exact.logprobs[row][likely]))
    refused(
        lambda: update(generator, 3, model, probe=shifted(likely, 1.5 * allowed)), "will not serve"
    )
    update(generator, 4, model, probe=shifted(likely, 0.5 * allowed))

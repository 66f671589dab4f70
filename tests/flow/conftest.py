"""Engines shared by the flow tests. Everything starts once a session, and only when a test asks for
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300  # of one flow test; every wait inside is shorter


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray of the test session's own."""
    import ray

    from cluster.environment import process_env

    # Calls return two objects; where one failed on purpose nobody asks for the other.
    os.environ.update(process_env(), RAY_IGNORE_UNHANDLED_ERRORS="1")
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=256 << 20,
        namespace="tests",
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.flow.engines import make_model

    folder = tmp_path_factory.mktemp("small_model")
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def model(model_path: Path) -> Any:
    """The small model by transformers, float32, to be copied and never changed."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def generators(cluster: None, model_path: Path) -> Iterator[list[Any]]:
    """Two generators that hold nothing proved yet."""
    import ray
    from transformers import AutoTokenizer

    from tests.flow.engines import start_generator

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    actors = [start_generator(f"generator-{i}", str(model_path), tokenizer) for i in range(2)]
    ray.get([a.ping.remote() for a in actors], timeout=240)
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def pair(generators: list[Any], model: Any) -> list[Any]:
    """Both generators, serving version 0 of the small model."""
    from tests.flow.engines import update

    for generator in generators:
        update(generator, 0, model)
    return generators


@pytest.fixture
def generator(pair: list[Any]) -> Any:
    return pair[0]

"""A wrong setting is refused before an engine starts, by one sentence that says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import CONF, read, rewrite
from conf.field import Bounds
from conf.schema import Config, ConfigError
from conf.settings import bounds, choices, declarations, get, keys, nearest
from learner.algorithms import parts
from learner.checks import validate
from learner.main import load, main

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that looks like a model with a context of 128 tokens; nothing loads it here."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    return str(folder)


def error_of(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv)
    return str(caught.value)


CASES = [
    (["rollout.group_sise=4"], ["rollout.group_sise=4", "unknown setting", "rollout.group_size"]),
    (
        ["rolout.group_size=4"],
        ["rolout.group_size=4", "unknown setting", "Did you mean rollout.group_size"],
    ),
    (["stepz=4"], ["stepz=4", "unknown setting", "steps"]),
    (
        ["+rollout.foo=1"],
        ["rollout.foo=1", "unknown setting"],
    ),  # Hydra's own "+" would let it through
    (["+foo=1"], ["foo=1", "unknown setting"]),
    (["steps=abc"], ["steps=abc", "Integer"]),
    (["rollout.group_size=1.5"], ["rollout.group_size=1.5", "Integer"]),
    (["optimizer.lr=fast"], ["optimizer.lr=fast", "Float"]),
    (["cluster.dashboard=maybe"], ["cluster.dashboard=maybe", "bool"]),
    (["data.terms=[2,a]"], ["data.terms=[2,a]", "Integer"]),
    (["seed=null"], ["seed=null", "must be given"]),
    (["steps="], ["steps=", "Integer"]),
    (["garbage"], ["garbage", "key=value"]),
    (
        ["learner.updates_per_batch=5"],
        [
            "learner.updates_per_batch=5",
            "divide rollout.prompts_per_step=32",
            "[1, 2, 4, 8, 16, 32]",
        ],
    ),
    (["learner.ranks=3"], ["learner.ranks=3", "divide the 256 samples", "rollout.group_size=8"]),
    (["rollout.group_size=1"], ["rollout.group_size=1", "at least 2"]),
    (
        ["algorithm.kl_placement=none"],
        ["algorithm.beta=0.001", "kl_placement=none", "algorithm.beta=0"],
    ),
    (
        ["rollout.max_tokens=100"],
        ["rollout.max_tokens=100", "128 tokens", "data.max_prompt_tokens=48", "148"],
    ),
    (["learner.micro_batch_tokens=50"], ["learner.micro_batch_tokens=50", "112 tokens"]),
    (
        ["algorithm.normaliser=foo"],
        ["algorithm.normaliser=foo", "sequence_mean, token_mean, constant"],
    ),
    (["algorithm.loss=foo"], ["algorithm.loss=foo", "ppo_clip"]),
    (["algorithm.advantage=foo"], ["algorithm.advantage=foo", "rloo"]),
    (
        ["algorithm=grpo_process", "data=gsm_symbolic"],
        ["data.steps=:", "grpo_process needs step rewards", "data=arithmetic"],
    ),
    (["data.steps=foo"], ["data.steps=foo", "running_sum"]),
    (["data.sampler=balanced"], ["data.sampler=balanced", "never come again", "data.size"]),
    (["data=gsm_symbolic", "data.size=10"], ["data.size=10", "a size of its own"]),
    (["data.curriculum_replay=2"], ["data.curriculum_replay=2", "at most 1"]),
    (
        ["algorithm.beta=0", "algorithm.reference_reset_every=5"],
        ["algorithm.reference_reset_every=5", "no reference"],
    ),
    (
        ["algorithm.beta=0", "algorithm.exact_kl_tokens=5"],
        ["algorithm.exact_kl_tokens=5", "no reference"],
    ),
    (
        ["algorithm=dapo", "reward=dapo"],
        ["reward.rules.soft_overlong=1.0", "overlong_share", "one of the two"],
    ),
    (["algorithm.kl=k9"], ["algorithm.kl=k9", "k1, k2, k3"]),
    (["algorithm.normaliser=constant"], ["algorithm.loss_constant=None", "positive divisor"]),
    (["learner.zero_stage=4"], ["learner.zero_stage=4", "0, 1, 2, 3"]),
    (["model.dtype=float8"], ["model.dtype=float8", "float32, bfloat16"]),
    (["resume=sometimes"], ["resume=sometimes", "expected one of"]),
    (["resume=auto"], ["resume=auto", "run_dir"]),
    (["algorithm=nope"], ["algorithm=nope", "dr_grpo, grpo"]),
    (["experiment=nope"], ["experiment=nope", "r1_zero"]),
    (["reward=zzz"], ["reward=zzz", "r1_zero"]),
    (["logging=zzz"], ["logging=zzz", "default"]),
    (["+reward.rules.nope=1"], ["reward.rules.nope=1", "unknown rule", "accuracy"]),
    (["rollout.top_p=0.9"], ["rollout.top_p=0.9", "importance ratio", "rollout.top_p=1"]),
    (["rollout.top_k=5"], ["rollout.top_k=5", "importance ratio"]),
    (["rollout.top_p=1.5"], ["rollout.top_p=1.5", "(0, 1]"]),
    (["rollout.temperature=0"], ["rollout.temperature=0", "more than 0"]),
    (["rollout.max_staleness=1"], ["rollout.max_staleness=1", "algorithm.tis_cap"]),
    (["steps=-1"], ["steps=-1", "at least 0"]),
    (["seed=-1"], ["seed=-1", "at least 0"]),
    (["optimizer.lr=-0.1"], ["optimizer.lr=-0.1", "at least 0"]),
    (["algorithm.beta=-1"], ["algorithm.beta=-1", "at least 0"]),
    (["algorithm.beta=nan"], ["algorithm.beta=nan", "at least 0"]),
    (["algorithm.beta=inf"], ["algorithm.beta=inf", "at least 0"]),
    (["algorithm.tis_cap=0"], ["algorithm.tis_cap=0", "more than 0"]),
    (["generator.count=0"], ["generator.count=0", "at least 1"]),
    (["learner.cpus=-1"], ["learner.cpus=-1", "at least 0"]),
    (["evaluation.samples=0"], ["evaluation.samples=0", "at least 1"]),
    (["reward.max_failure_share=2"], ["reward.max_failure_share=2", "[0, 1]"]),
    (["generator.weight_backend=nccl"], ["generator.weight_backend=nccl", "GPU"]),
    (["generator.block_size=48"], ["generator.block_size=48", "multiple of 32"]),
    (["data=files"], ["data.path=", "questions"]),
    (["data.terms=[]"], ["data.terms=[]", "how many numbers"]),
    (["model=/no/such/model"], ["model.path=/no/such/model", "config.json"]),
    (["model.path=???"], ["model.path=???", "must be given"]),
]


# What must be given to a file that says ???.
GIVEN = {
    "custom": ["reward.options.custom.mine.path=mine.py"],
    "orm": ["reward.models.orm.path=some/orm"],
    "prm": ["reward.models.prm.path=some/prm", "data.steps=newline"],
    "orm_prm": ["reward.models.orm.path=some/orm", "reward.models.prm.path=some/prm"],
    "best_of_n": ["reward.models.orm.path=some/orm", "reward.models.prm.path=some/prm"],
    "reward_hacking": ["reward.models.orm.path=some/orm"],
    "process_supervision": ["reward.models.prm.path=some/prm"],
    "train_prm": ["reward_model.path=tests/data"],
}
ORM = ["reward=orm", "reward.models.orm.path=some/orm"]
REWARD_MODELS = [
    (["reward=orm"], ["reward.models.orm.path=???", "must be given"]),
    (
        [*ORM, "reward.models.orm.path=new"],
        ["reward.models.orm.path=new", "reward_model.initial=true"],
    ),
    ([*ORM, "reward.models.orm.path=/no/such"], ["reward.models.orm.path=/no/such", "config.json"]),
    (
        [*ORM, "+reward.models.orm.size=3"],
        ["reward.models.orm.size=3", "path, kind, probability, steps"],
    ),
    ([*ORM, "+reward.models.orm.kind=good"], ["kind: good", "outcome or process"]),
    (
        [*ORM, "+reward.models.other.path=a/b"],
        ["reward.models.other=a/b", "+reward.rules.other=1.0"],
    ),
    ([*ORM, "+reward.models.format.path=a/b"], ["reward.models.format=", "a rule of this name"]),
    ([*ORM, "reward.rules.orm=0"], ["reward.rules=", "every weight is 0"]),
    (
        [*ORM, "+reward.models.orm.kind=process", "data.steps="],
        ["data.steps=", "process model orm"],
    ),
    (
        [
            *ORM,
            "+reward.models.orm.kind=process",
            "algorithm=grpo_process",
            "reward.combine=product",
        ],
        ["reward.combine=product", "add up"],
    ),
    (
        [*ORM, "algorithm=grpo_process", "data.steps=newline"],
        ["data.steps=newline", "process model", "running_sum"],
    ),
    ([*ORM, "reward_model.every=5"], ["reward_model.refresh=:", "reward_model.every=5", "Name it"]),
    (["stage=reward_model", "reward_model.refresh=orm"], ["reward_model.refresh=orm", "stage=rl"]),
    (
        [*ORM, "reward_model.refresh=prm", "reward_model.every=5"],
        ["reward_model.refresh=prm", "expected one of"],
    ),
    (
        [*ORM, "reward_model.refresh=orm", "reward_model.every=5", "reward_model.kind=process"],
        ["reward_model.source=policy", "annotate_steps"],
    ),
    (
        [*ORM, "reward_model.refresh=orm", "reward_model.every=5", "reward_model.source=files"],
        ["reward_model.source=files", "refreshed on samples"],
    ),
    ([*ORM, "reward_model.replay=1"], ["reward_model.replay=1", "below 1"]),
    (
        ["stage=reward_model", "reward_model.source=files"],
        ["reward_model.path=:", "labelled answers"],
    ),
    (
        ["stage=reward_model", "reward_model.kind=process", "reward_model.loss=pairwise"],
        ["reward_model.loss=pairwise", "Use pointwise"],
    ),
    (["data.steps=separator:"], ["data.steps=separator:", "separator:TEXT"]),
]


@pytest.mark.parametrize("argv, words", [*CASES, *REWARD_MODELS], ids=lambda v: " ".join(v))
def test_error_names_the_key_and_the_cure(model: str, argv: list[str], words: list[str]) -> None:
    base = [] if argv[0].startswith("experiment=") else ["experiment=r1_zero"]
    text = error_of([*base, f"model={model}", *argv])
    for word in words:
        assert word in text
    assert len(text) < 400 and "\n" not in text


def test_a_reward_model_is_trained_further_as_it_began(model: str, tmp_path: Path) -> None:
    told = {
        "implicit": {
            "architectures": ["LlamaForCausalLM"],
            "volley_reward": {"head": "implicit", "beta": 0.5},
        },
        "scalar": {"architectures": ["LlamaForSequenceClassification"]},
        "causal": {"architectures": ["Llama"]},
    }
    for name, config in told.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    train = ["experiment=train_orm", f"model={model}"]
    for name, head, beta, words in (
        ("implicit", "scalar", 0.5, ["reward_model.head=scalar", "whose head is implicit"]),
        ("implicit", "implicit", 0.2, ["beta=0.5, not reward_model.beta=0.2"]),
        ("scalar", "implicit", 0.2, ["reward_model.head=implicit", "whose head is scalar"]),
    ):
        text = error_of(
            [
                *train,
                f"reward_model.init={tmp_path / name}",
                f"reward_model.head={head}",
                f"reward_model.beta={beta}",
            ]
        )
        assert all(word in text for word in words), text
    for name, head in (
        ("implicit", "implicit"),
        ("scalar", "scalar"),
        ("causal", "implicit"),
        ("causal", "scalar"),
    ):
        load(
            [
                *train,
                f"reward_model.init={tmp_path / name}",
                f"reward_model.head={head}",
                "reward_model.beta=0.5",
            ]
        )
    refreshed = [
        *ORM,
        f"model={model}",
        "reward_model.refresh=orm",
        "reward_model.every=5",
        f"reward.models.orm.path={tmp_path / 'scalar'}",
        "experiment=r1_zero",
    ]
    load(refreshed)
    assert "whose head is scalar" in error_of([*refreshed, "reward_model.head=implicit"])


@pytest.mark.parametrize("argv, words", [
    (["rollout.group_sise=4"], "Did you mean rollout.group_size?"),
    (["rollout.group_size=1"], "rollout.group_size=1: "),
    (["model=/no/such/model"], "model.path=/no/such/model: "),
])  # fmt: skip
def test_the_program_refuses_quickly(model: str, argv: list[str], words: str) -> None:
    """Exit status 2, one line, within 10 s, and no output folder."""
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", "learner.main", "experiment=r1_zero", f"model={model}", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert time.monotonic() - started < 10
    assert run.returncode == 2
    assert run.stdout == ""
    assert (
        run.stderr.startswith("volley: error: ")
        and words in run.stderr
        and run.stderr.count("\n") == 1
    )


OVERRIDES = [
    ("+rollout={foo: 1}", "rollout.foo=1: unknown setting. Did you mean "),
    ("~rollout.foo", "rollout.foo=: unknown setting."),
    ("rollout.group_sise=4,8", "rollout.group_sise=4,8: unknown setting."),
    ("algorithm@x.y=grpo", "settings="),
    ("rollout={group_size: abc}", "rollout.group_size=abc: expected a value of type Integer."),
    ("rollout=5", "rollout=5: expected a mapping"),
    ("steps=1,abc", "steps=1,abc: expected a value of type Integer."),
    ("reward.rules.accuracy=abc", "reward.rules.accuracy=abc: expected a value of type Float."),
    ("reward.rules=5", "reward.rules=5: expected a mapping"),
    ("reward.models=null", "reward.models=null: a value must be given."),
    ("data.terms=5", "data.terms=5: expected a list"),
    ("run_dir=[1]", "run_dir=[1]: expected a value of type String."),
    ("algorithm.tis_cap=abc", "algorithm.tis_cap=abc: expected a value of type Float."),
    ("algorithm=recipe/nope", "algorithm=recipe/nope: expected one of cispo, "),
    ("algorithm=grpo,nope", "algorithm=grpo,nope: expected one of cispo, "),
    ("stage=nope", "stage=nope: expected one of annotate, pretrain, reward_model, rl."),
    ("+foo/bar=x", "foo/bar=x: unknown setting."),
    ("=3", "=3: expected key=value."),
    ("steps=1=2", "steps=1=2: expected key=value."),
    ("steps=1,2", "settings="),  # from here on in Hydra's words
    ("reward.options.foo=3", "reward.options.foo=3: Could not override"),
    ("run_dir=outputs/${nope}", "run_dir=outputs/${nope}: Interpolation key 'nope' not found"),
    ("+reward.rules.x=[1]", "reward.rules.x=[1]: expected a value of type Float."),
    ("rollout.timeout_s=???", "rollout.timeout_s=???: must be given."),
]


@pytest.mark.parametrize("override, start", OVERRIDES)
def test_a_wrong_override_is_named_in_one_line(model: str, override: str, start: str) -> None:
    text = error_of(["experiment=r1_zero", f"model={model}", override])
    assert text.startswith(start) and "\n" not in text


@pytest.mark.parametrize(
    "override", ["stepz=4", "steps=abc", "algorithm=nope", "seed=null", "+rollout.foo=1"]
)
def test_overrides_are_checked_before_anything_is_composed(
    override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conf.compose.compose", lambda *_, **__: pytest.fail("composed"))
    error_of([override])


@pytest.mark.parametrize("override, value", [
    ("algorithm.tis_cap=null", None),
    ("steps='5'", 5),
    ("steps=${seed}", 0),
    ("cluster.dashboard=no", False),
    ("optimizer.lr=1", 1.0),
    ("+model.architecture.layers=1", {"layers": 1}),
    ("+reward.options.custom={mine: {path: x}}", {"custom": {"mine": {"path": "x"}}}),
    ("hydra.job.name=x", None),
])  # fmt: skip
def test_what_the_types_admit_is_composed(override: str, value: object) -> None:
    cfg = read([override]).cfg
    key = override.partition("=")[0].lstrip("+").replace(".layers", "").replace(".custom", "")
    assert key.startswith("hydra.") or get(cfg, key) == value


def test_each_run_of_a_sweep_is_checked_before_the_first_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--multirun", "experiment=r1_zero", "rollout.group_sise=4,8"]) == 2
    assert capsys.readouterr().err.startswith("volley: error: rollout.group_sise=4,8: unknown")


def test_a_file_with_an_unknown_or_wrong_setting_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CONF, tmp_path / "conf")
    monkeypatch.setattr("conf.compose.CONF", tmp_path / "conf")
    file = tmp_path / "conf" / "data" / "arithmetic.yaml"
    shipped = file.read_text()
    for line, words in (
        ("foo: 3", ["data.foo=:", "data/arithmetic", "'foo' not in 'DataConfig'"]),
        ("size: abc", ["data.size=:", "data/arithmetic", "Integer"]),
        ("size: [", ["arithmetic.yaml"]),
    ):
        file.write_text(f"{shipped}{line}\n")
        text = error_of(["experiment=r1_zero"])
        assert all(word in text for word in words) and "\n" not in text, text


@pytest.mark.parametrize("template", choices("data.template"))
def test_every_template_of_the_prompts_is_allowed(model: str, template: str) -> None:
    cfg = load(["experiment=r1_zero", f"model={model}", f"data.template={template}"])
    assert cfg.data.template == template


@pytest.mark.parametrize("path", sorted((CONF / "algorithm").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_algorithms_load(model: str, path: Path) -> None:
    cfg = load([f"model={model}", "data.max_prompt_tokens=40", f"algorithm={path.stem}"])
    assert cfg.algorithm.name == path.stem
    parts.check(cfg.algorithm)


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_experiments_load(model: str, path: Path) -> None:
    """With a stand-in for the model where the experiment names a pre-trained one."""
    argv = [f"experiment={path.stem}", *GIVEN.get(path.stem, [])]
    if "tiny_random" not in path.read_text():
        argv.append(f"model={model}")
    assert load(argv).experiment == path.stem


@pytest.mark.parametrize("group", ["reward", "cluster", "logging"])
def test_every_file_of_the_other_groups_loads(model: str, group: str) -> None:
    for path in sorted((CONF / group).glob("*.yaml")):
        load(
            [
                "experiment=r1_zero",
                f"model={model}",
                f"{group}={path.stem}",
                *GIVEN.get(path.stem, []),
            ]
        )


def test_short_forms() -> None:
    assert rewrite(["experiment=r1_zero"]) == ["+experiment=r1_zero"]
    assert rewrite(["model=tiny"]) == ["model=tiny"]
    assert rewrite(["model=a/b"]) == ["model=hub", "model.path=a/b"]
    assert rewrite(["data=countdown"]) == ["data=reasoning_gym", "data.name=countdown"]
    assert rewrite(["data=x/y.jsonl"]) == ["data=files", "data.path=x/y.jsonl"]
    assert rewrite(["cluster=10.0.0.1:6379"]) == ["cluster=auto", "cluster.address=10.0.0.1:6379"]
    assert rewrite(["cluster=local", "steps=3"]) == ["cluster=local", "steps=3"]


def test_names_that_config_repeats_are_those_of_the_code() -> None:
    """The schema lists the names, because it imports nothing; the code holds their meanings."""
    from actors.data.build import BUILDERS
    from actors.data.prompt import TEMPLATES
    from learner.algorithms import losses, parts

    for key, registry in (
        ("algorithm.loss", losses.LOSSES),
        ("algorithm.data", parts.DATA),
        ("data.template", TEMPLATES),
        ("data.kind", [*BUILDERS, "corpus"]),  # the corpus has texts, not prompts
        ("stage.name", [path.stem for path in (CONF / "stage").glob("*.yaml")]),
    ):
        assert set(choices(key)) == set(registry), key


@pytest.mark.parametrize("key", keys())
def test_every_setting_is_declared_in_full(key: str) -> None:
    """A meaning that ends as a sentence does; a default that the choices and bounds allow."""
    meaning, default = declarations()[key].metadata["help"], get(Config(), key)
    assert meaning[0].isupper() or meaning.startswith(("auto:", "`"))
    assert meaning.endswith(".") and "|" not in meaning and len(meaning) > 10
    assert not choices(key) or default in choices(key)
    if isinstance(default, int | float) and not isinstance(default, bool):
        assert bounds(key).violation(default) == ""


def test_bounds_say_what_was_expected() -> None:
    assert [str(b) for b in (Bounds(), Bounds(low=0), Bounds(above=1), Bounds(high=2))] == [
        "",
        ">= 0",
        "> 1",
        "<= 2",
    ]
    share = Bounds(above=0, high=1)
    assert str(share) == "(0, 1]" and str(Bounds(low=0, below=1)) == "[0, 1)"
    assert share.violation(0.5) == share.violation(1) == Bounds().violation(float("nan")) == ""
    assert share.violation(0) == share.violation(float("nan")) == "expected more than 0"
    assert share.violation(2) == "expected a number in (0, 1], so at most 1"
    assert Bounds(low=0, below=1).violation(1) == "expected a number in [0, 1), so below 1"


def test_a_key_leads_to_its_value_and_a_wrong_one_to_the_nearest() -> None:
    assert get(Config(), "rollout.group_size") == 8
    assert nearest("rollout.grupsize") == "rollout.group_size"
    assert nearest("zzzzzz") == ""


def test_validate_passes_what_divides() -> None:
    cfg = Config()
    cfg.model = replace(cfg.model, path="some/hub-id")  # unknown context: checked when it is loaded
    cfg.reward.rules = {"accuracy": 1.0}
    cfg.learner = replace(cfg.learner, ranks=2, updates_per_batch=4)
    validate(cfg)
    assert cfg.samples_per_step == 256

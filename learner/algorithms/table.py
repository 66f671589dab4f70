"""The tables of docs/algorithms.md, written from the files in conf/algorithm/.

`python -m learner.algorithms.table` rewrites them. Each file gives one row: `name`, `source`,
`rewards` and `coefficient` in words, the other columns from the settings of the algorithm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf.schema import AlgorithmConfig
from learner.algorithms.parts import DATA, OPTIONS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "conf" / "algorithm"
ALGORITHMS_MARKS = (
    "<!-- table: python -m learner.algorithms.table -->",
    "<!-- end of table -->",
)
OPTIONS_MARKS = (
    "<!-- options: python -m learner.algorithms.table -->",
    "<!-- end of options -->",
)
HEADER = (
    "name",
    "data source",
    "reward",
    "gradient coefficient",
    "KL",
    "normaliser",
    "source",
)


def settings(file: Path) -> Any:
    """The settings in an algorithm's file over those of the files that its `defaults` name.

    Returns an OmegaConf node typed by AlgorithmConfig. Interpolations such as
    ${rollout.max_tokens} stay as they are. Raises omegaconf's errors for a key that
    AlgorithmConfig does not have."""
    return OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), _resolved(file))


def _resolved(file: Path) -> Any:
    """The content of a file with its `defaults` merged in, in the order in which they stand."""
    own = OmegaConf.load(file)
    merged = OmegaConf.create()
    for entry in own.pop("defaults", []) + ["_self_"]:
        if entry == "_self_":
            merged = OmegaConf.merge(merged, own)
        else:
            parent = entry.partition("@")[0].removeprefix("/algorithm/")
            merged = OmegaConf.merge(merged, _resolved(file.parent / f"{parent}.yaml"))
    return merged


def kl_term(cfg: Any) -> str:
    """Kind and place of the KL term of an AlgorithmConfig, in words."""
    if cfg.advantage == "dpo":
        return "in the implicit reward"
    if cfg.beta > 0 and cfg.kl_placement != "none":
        return f"{cfg.kl} in the {cfg.kl_placement}"
    return "none"


def algorithms_table(folder: Path = FOLDER) -> str:
    """One row for each FOLDER/NAME.yaml as Markdown, by data source and then by name."""
    algorithms = [settings(file) for file in sorted(folder.glob("*.yaml"))]
    algorithms.sort(key=lambda cfg: [*DATA].index(cfg.data))
    rows = [
        (
            f"`{cfg.name}`",
            DATA[cfg.data],
            cfg.rewards,
            cfg.coefficient,
            kl_term(cfg),
            cfg.normaliser,
            cfg.source,
        )
        for cfg in algorithms
    ]
    return _markdown(HEADER, rows)


def options_table() -> str:
    """The keys of algorithm.options with their meaning, as Markdown."""
    return _markdown(("key", "meaning"), [(f"`{key}`", text) for key, text in OPTIONS.items()])


def _markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header)]
    lines += [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(document: Path, folder: Path = FOLDER) -> None:
    """Replace both tables of a Markdown file; all text outside their marks stays.

    Raises ValueError where a mark is missing."""
    text = document.read_text()
    for (start, end), table in (
        (ALGORITHMS_MARKS, algorithms_table(folder)),
        (OPTIONS_MARKS, options_table()),
    ):
        before, _, rest = text.partition(start)
        _, mark, after = rest.partition(end)
        if not mark:
            raise ValueError(f"{document}: expected the lines {start} and {end}")
        text = f"{before}{start}\n{table}\n{end}{after}"
    document.write_text(text)


if __name__ == "__main__":
    write(ROOT / "docs" / "algorithms.md")

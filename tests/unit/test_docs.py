"""Documents that are written from the code say what the code says."""

from pathlib import Path

from conf.schema import table

ROOT = Path(__file__).resolve().parents[2]


def test_configuration_table_is_that_of_the_schema():
    assert (ROOT / "docs" / "configuration.md").read_text().endswith(table())

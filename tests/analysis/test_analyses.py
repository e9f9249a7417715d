"""Every analysis writes what it declares, on runs and on none, and the workflow knows the same tables."""

import importlib

import pytest

from project import ROOT
from qkpipe.analysis import runs, signals
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table

SCHEMAS = {
    "residual": {"residual": "RESIDUAL"},
    "isolation": {"isolation": "ISOLATION"},
    "generality": {"factorial": "FACTORIAL", "generality": "GENERALITY"},
    "entry": {"entry": "ENTRY", "entry_runs": "ENTRY_RUNS", "entry_predictors": "ENTRY_PREDICTORS"},
    "loci": {"loci": "LOCI"},
    "sweep": {"threshold_sweep": "SWEEP", "threshold_transfer": "TRANSFER"},
    "capping": {"capping": "CAPPING", "capping_curves": "CAPPING_CURVES"},
    "entropy": {"onsets": "ONSETS", "onset_order": "ONSET_ORDER", "entropy_heads": "ENTROPY_HEADS"},
    "law": {
        **{"law_runs": "LAW_RUNS", "law": "LAW", "law_collapse": "LAW_COLLAPSE"},
        **{"law_settings": "LAW_SETTINGS"},
        **{"same_mode": "SAME_MODE", "prediction": "PREDICTION"},
    },
    "contest": {"contest": "CONTEST", "contest_runs": "CONTEST_RUNS", "contest_roc": "CONTEST_ROC"},
    "survival": {"survival": "SURVIVAL"},
    "sensitivity": {"sensitivity": "SENSITIVITY"},
    "remedies": {"remedies": "REMEDIES"},
    "repairs": {"repairs": "REPAIRS"},
    "horizon": {"horizon": "HORIZON", "horizon_curves": "HORIZON_CURVES"},
}
FILLED = {
    *("residual", "isolation", "factorial", "loci", "threshold_sweep", "capping", "capping_curves", "onsets"),
    *("onset_order", "entropy_heads", "law_runs", "same_mode", "contest_runs", "survival", "sensitivity"),
    "remedies",
}


@pytest.fixture(scope="module")
def empty(tmp_path_factory, synthetic):
    paths = StudyPaths("tiny", tmp_path_factory.mktemp("empty"))
    runs.aggregate(paths, synthetic[1], [])
    signals.build(paths, synthetic[1])
    return paths, synthetic[1]


@pytest.mark.parametrize("name", SCHEMAS)
def test_tables_have_their_schemas_with_runs_and_without(synthetic, empty, name):
    module = importlib.import_module(f"qkpipe.analysis.{name}")
    paths, study = synthetic
    signals.build(paths, study)
    written = module.build(paths, study)
    assert tuple(path.stem for path in written) == module.OUTPUTS == tuple(SCHEMAS[name])
    for path in written:
        table = read_table(path)
        assert table.schema.equals(getattr(module, SCHEMAS[name][path.stem]))
        assert (table.num_rows > 0) == (path.stem in FILLED), path.stem
    for path in module.build(*empty):
        assert read_table(path).num_rows == 0


def test_the_workflow_names_the_same_tables():
    text = (ROOT / "rules" / "common.smk").read_text()
    declared = eval(text.partition("\nANALYSES = ")[2].partition("\n}\n")[0] + "}")
    assert {name: tuple(tables) for name, tables in SCHEMAS.items()} == declared


def test_every_table_is_described_in_the_database():
    from qkpipe.store.database import DESCRIPTIONS

    assert {table for tables in SCHEMAS.values() for table in tables} <= set(DESCRIPTIONS)

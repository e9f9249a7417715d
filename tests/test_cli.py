"""The command line says what is wrong in one line, and does nothing then."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from qkpipe.config import load_study
from qkpipe.paths import StudyPaths

TINY = Path(__file__).parent / "tiny"


@pytest.fixture
def study(tmp_path):
    """A copy of the tiny study to spoil; ``edit(file, change)`` rewrites one of its files."""
    folder = tmp_path / "study"
    shutil.copytree(TINY, folder)

    def edit(file, change):
        path = folder / file
        body = yaml.safe_load(path.read_text())
        change(body)
        path.write_text(yaml.safe_dump(body, sort_keys=False))
        return folder

    return edit


def arm(**body):
    return ("arms.yaml", lambda arms: arms.update(spoilt=body))


def scale(**sections):
    return ("study.yaml", lambda study: study["scales"]["tiny"].update(sections))


BAD_CONFIG = {
    "misspelt key": (
        arm(atention={"kind": "sdpa"}),
        ["arms.yaml", "spoilt.atention", "did you mean 'attention'"],
    ),
    "misspelt inner key": (arm(attention={"tiles": 4}), ["arms.yaml", "spoilt.attention.tiles", "'tile'"]),
    "tile 0": (
        arm(attention={"kind": "streaming", "tile": 0}),
        ["arms.yaml", "spoilt.attention.tile", "greater than or equal to 1", "got 0"],
    ),
    "mantissa 0": (
        arm(attention={"kind": "streaming", "precision": {"uniform": 0}}),
        ["arms.yaml", "spoilt.attention.precision.uniform", "greater than or equal to 1", "got 0"],
    ),
    "mantissa 24": (
        arm(attention={"kind": "streaming", "precision": {"uniform": 24}}),
        ["arms.yaml", "spoilt.attention.precision.uniform", "less than or equal to 23", "got 24"],
    ),
    "unknown quantity": (
        arm(attention={"kind": "streaming", "precision": {"only": {"accumulator": 7}}}),
        ["arms.yaml", "spoilt.attention.precision", "'accumulator'", "acc"],
    ),
    "k at the rank": (
        arm(probe={"kind": "causal", "action": "on_target", "k": 16, "side": "two_sided"}),
        ["arms.yaml", "spoilt.probe.k", "16", "1 to 15"],
    ),
    "unknown mechanism": (
        arm(interventions=[{"kind": "gaurd"}]),
        ["arms.yaml", "spoilt.interventions.0", "gaurd", "'guard'"],
    ),
    "unknown twin": (arm(twin="fp23"), ["arms.yaml", "spoilt.twin", "'fp23'", "did you mean 'fp32'"]),
    "a circle": (arm(extends="spoilt"), ["arms.yaml", "spoilt.extends", "circle"]),
    "precision on sdpa": (
        arm(attention={"kind": "sdpa", "precision": {"uniform": 2}}),
        ["arms.yaml", "spoilt.attention", "kind: streaming"],
    ),
    "heads that do not divide": (
        scale(model={"d_model": 16, "n_heads": 3}),
        ["study.yaml", "n_heads=3", "16"],
    ),
    "a hash that is none": (
        ("study.yaml", lambda study: study["corpora"]["shakespeare"].update(sha256="abc")),
        ["study.yaml", "corpora.shakespeare.sha256", "abc"],
    ),
    "unknown corpus": (scale(corpus="bard"), ["study.yaml", "scales.tiny.corpus", "'bard'", "shakespeare"]),
    "roles that overlap": (
        ("study.yaml", lambda study: study["roles"]["confirmatory"].update(seeds=[2])),
        ["study.yaml", "roles", "seed 2", "disjoint"],
    ),
    "a target of nobody": (
        ("study.yaml", lambda study: study["targets"]["core"].update(arms=["fp23"])),
        ["study.yaml", "targets.core.arms", "'fp23'"],
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_config_is_one_line(case, study, qkpipe, tmp_path):
    (file, change), words = BAD_CONFIG[case]
    folder = study(file, change)
    status, out, err = qkpipe("--config", folder, "--root", tmp_path, "train", "--arm", "spoilt", "--seed", 0)
    assert (status, out) == (2, "")
    assert err.startswith("qkpipe: error: ")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == [], err
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "scratch").exists()


BAD_CALLS = {
    "unknown arm": (
        ["train", "--arm", "falty", "--seed", 0],
        ["arms.yaml", "'falty'", "did you mean 'faulty'"],
    ),
    "negative seed": (["train", "--arm", "fp32", "--seed", -1], ["fp32.seed", "-1"]),
    "unknown scale": (["--scale", "huge", "plan"], ["study.yaml", "scale", "'huge'", "tiny"]),
    "unknown target": (["runs", "--target", "cor"], ["study.yaml", "'cor'", "did you mean 'core'"]),
    "no data": (["train", "--arm", "fp32", "--seed", 0], ["meta.json", "qkpipe data"]),
    "no runs": (["runs", "--target", "core"], ["requested runs are missing", "fp32/seed=0"]),
    "no database": (["query", "from runs"], ["study.duckdb"]),
    "unknown figure": (["figure", "gaurd"], ["'gaurd'", "guard"]),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call_is_one_line(case, qkpipe, tmp_path):
    args, words = BAD_CALLS[case]
    status, out, err = qkpipe("--config", TINY, "--root", tmp_path, *args)
    assert (status, out) == (2, "")
    assert err.startswith("qkpipe: error: ")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == [], err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2\n", ["'a' is given twice"]),
        ("a: [1\n", ["not valid YAML"]),
        ("- a\n", ["must be a mapping", "list"]),
        (None, ["no such file"]),
    ],
)
def test_unreadable_yaml_is_one_line(text, words, study, qkpipe, tmp_path):
    path = study("arms.yaml", lambda arms: None) / "arms.yaml"
    path.unlink() if text is None else path.write_text(text)
    status, _, err = qkpipe("--config", path.parent, "plan")
    assert status == 2
    assert err.count("\n") == 1
    assert [word for word in ["arms.yaml", *words] if word not in err] == [], err


def test_global_options_stand_on_either_side(qkpipe, tmp_path):
    before = qkpipe("--config", TINY, "--root", tmp_path, "status")
    assert before == qkpipe("status", "--config", TINY, "--root", tmp_path)
    assert before[0] == 0


def test_plan_counts_runs_and_costs_them(qkpipe, tmp_path):
    status, out, _ = qkpipe("--config", TINY, "--root", tmp_path, "plan")
    lines = out.splitlines()
    assert status == 0
    assert lines[1].split() == ["core", "tuning", "4", "2", "8", "0", "8"]
    assert lines[2].split() == ["all", "tuning", "4", "3", "12", "0", "12"]
    tokens = 8 * 20 * 2 * 32
    assert lines[5].split()[:4] == ["tiny", "core", "8", f"{tokens:.3g}"]
    assert "stated" in lines[5]
    assert qkpipe("--config", TINY, "--root", tmp_path, "plan", "--flops", "0")[0] == 2


def test_plan_by_a_throughput_of_the_caller(qkpipe, tmp_path):
    """Twice the throughput, half the hours."""
    hours = []
    for flops in ("1e4", "2e4"):
        _, out, _ = qkpipe("--config", TINY, "--root", tmp_path, "plan", "--flops", flops)
        hours.append(float(out.splitlines()[5].split()[5]))
    assert hours[0] == pytest.approx(2 * hours[1], rel=0.01) and hours[1] > 1


def test_status_tells_states_apart(qkpipe, tmp_path):
    import fcntl

    run, paths = load_study(TINY).resolve("faulty", 1), StudyPaths("tiny", tmp_path)
    scratch = paths.scratch(run.run_id)
    lock = scratch.lock
    lock.parent.mkdir(parents=True)
    lock.touch()
    scratch.identity.write_text(json.dumps({"scale": "tiny", "arm": "faulty", "seed": 1}))
    asked = ("--config", TINY, "--root", tmp_path, "status")
    assert qkpipe(*asked)[1].splitlines() == [
        "unfinished  faulty/seed=1",
        "tiny: 0 done, 0 running, 1 unfinished, 11 missing",
    ]
    with lock.open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert "running     faulty/seed=1" in qkpipe(*asked)[1]


def test_schemas_are_those_of_the_models():
    from qkpipe.config.schema import SCHEMAS, render, schemas

    root = Path(__file__).parents[1]
    for stem, schema in schemas().items():
        written = (root / SCHEMAS / f"{stem}.schema.json").read_text()
        assert written == render(schema), f"{stem}.schema.json is behind the models: run `make schema`"


def test_effective_config_names_every_arm(qkpipe, tmp_path):
    import json

    assert qkpipe("--config", TINY, "--root", tmp_path, "effective-config")[0] == 0
    written = json.loads(StudyPaths("tiny", tmp_path).effective_config.read_text())
    study = load_study(TINY)
    assert {name: body["config_hash"] for name, body in written["arms"].items()} == {
        name: study.resolve(name, 7).config_hash for name in study.runnable
    }

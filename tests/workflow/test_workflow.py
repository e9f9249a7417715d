"""The workflow's plan: what is asked for, what is refused, and that rules and code name the same files. Nothing trains."""

import re
import subprocess
import sys

import pytest

from project import ROOT, run_snakemake
from qkpipe.config import load_study

TINY = ROOT / "tests" / "tiny"


def job_counts(process):
    """Jobs by rule of a dry run."""
    assert process.returncode == 0, process.stdout + process.stderr
    table = (process.stdout + process.stderr).partition("Job stats:")[2].partition("total")[0]
    return {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}


def test_all_of_the_real_study_plans(tmp_path):
    study = load_study()
    counts = job_counts(run_snakemake(tmp_path, "-n", "all"))
    assert counts["train"] == len(study.requested("all"))
    assert counts["mirror"] == counts["report"] == counts["database"] == counts["all"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".snakemake"]


def test_core_is_the_default_and_seeds_replace_the_declared(tmp_path):
    counts = job_counts(run_snakemake(tmp_path, "-n", "--config", f"study={TINY}", "seeds=[0,5,6]"))
    assert counts["core"] == 1
    assert counts["train"] == 4 * 3


def test_a_run_of_an_unknown_arm_is_refused(tmp_path):
    run = "results/tiny/runs/falty/seed=0/run.json"
    unknown = run_snakemake(tmp_path, "-n", run, "--config", f"study={TINY}")
    assert unknown.returncode != 0
    assert "MissingRuleException" in unknown.stdout + unknown.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("scale=huge", ["study.yaml", "'huge'", "tiny"]),
        ("seeds=3", ["seeds=3", "seeds=[0,1,2]"]),
        ("seeds=[a]", ["'a'", "seeds=[0,1,2]"]),
        ("sedes=[1]", ["sedes", "archive, device_check, scale, seeds, study"]),
        ("device_check=nowhere.json", ["device_check=nowhere.json", "no such file", "make device-check"]),
        ("archive=bucket", ["archive=bucket", "s3://bucket/folder"]),
        ("study=nowhere", ["nowhere", "no such file"]),
    ],
)
def test_bad_config_is_one_line(tmp_path, option, words):
    process = run_snakemake(tmp_path, "-n", "core", "--config", f"study={TINY}", option)
    said = [line for line in process.stderr.splitlines() if not line.startswith("Using workflow")]
    assert process.returncode != 0
    assert len(said) == 1
    assert [word for word in ["qkpipe: error:", *words] if word not in said[0]] == [], said


def test_lint_finds_only_that_rules_have_no_container(tmp_path):
    """Software comes from `make env`, pinned, and not from an environment for every rule."""
    process = run_snakemake(tmp_path, "--lint")
    findings = set(re.findall(r"^ +\* (.*?):?$", process.stdout + process.stderr, re.MULTILINE))
    assert findings <= {"Specify a conda environment or container for each rule."}


def test_every_run_file_can_be_asked_for_by_name(tmp_path):
    from qkpipe.paths import StudyPaths

    files = StudyPaths("tiny").run("fp32", 77).outputs
    process = run_snakemake(tmp_path, "-n", *files, "--config", f"study={TINY}")
    assert job_counts(process) == {"data": 1, "train": 1}


def test_tables_of_the_device_check_are_those_of_the_code():
    from qkpipe.bench.device import TABLES

    text = (ROOT / "rules" / "common.smk").read_text()
    declared = re.search(r"DEVICE_TABLES = .*?for name in (\(.*?\))", text, re.DOTALL)
    assert eval(declared[1]) == tuple(TABLES)


def test_figures_read_what_the_rules_say():
    from qkpipe.report.figures import FIGURES

    text = (ROOT / "rules" / "common.smk").read_text()
    declared = eval(text.partition("FIGURES = ")[2].partition("\n}\n")[0] + "}")
    assert declared.keys() == FIGURES.keys()
    assert {name: set(tables) for name, tables in declared.items()} == {
        name: set(module.TABLES) for name, module in FIGURES.items()
    }
    for name in declared:
        assert (ROOT / "workflow" / "report" / f"{name}.rst").exists()


def test_make_targets_of_the_readme_exist():
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)\b", readme))
    assert {"env", "study", "test"} <= named
    for target in sorted(named):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr


def blocks(language):
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )


def fenced(language):
    lines = [line for block in blocks(language) for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_snakemake_commands_of_the_readme_plan(tmp_path):
    import shlex

    commands = [shlex.split(line)[1:] for line in fenced("bash") if line.startswith("snakemake")]
    assert len(commands) >= 4
    for args in commands:
        if "--profile" in args:  # another test's matter: it needs the executor's plugin and the user's folder
            continue
        assert job_counts(run_snakemake(tmp_path, "-n", *args)), args


def test_qkpipe_commands_of_the_readme_parse(monkeypatch):
    import shlex

    from qkpipe.cli import _parser

    lines = [line for line in fenced("bash") if line.startswith("qkpipe")]
    assert len(lines) >= 4
    for line in lines:
        args = shlex.split(line)[1:]
        assert _parser(args).parse_args(args).run


def test_the_arm_and_the_corpora_of_the_readme_are_valid(tmp_path):
    import shutil

    import yaml

    text, corpora = blocks("yaml")
    folder = tmp_path / "config"
    shutil.copytree(ROOT / "workflow" / "config", folder)
    with (folder / "arms.yaml").open("a") as arms:
        arms.write(f"\n{text}\n")
    config = yaml.safe_load((folder / "study.yaml").read_text())
    for key, more in yaml.safe_load(corpora).items():
        config[key] |= more
    (folder / "study.yaml").write_text(yaml.safe_dump(config))
    study = load_study(folder)
    assert study.resolve(text.partition(":")[0], 0).interventions


def test_make_profiles_links_once_and_overwrites_nothing(tmp_path):
    def make():
        environment = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
        return subprocess.run(
            ["make", "profiles"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30
        )

    link = tmp_path / ".config" / "snakemake" / "slurm"
    assert make().returncode == make().returncode == 0
    assert link.resolve() == ROOT / "profiles" / "slurm"
    link.unlink()
    link.mkdir()
    refused = make()
    assert refused.returncode != 0
    assert "not ours" in refused.stderr
    assert link.is_dir() and not link.is_symlink()

"""Profiles: found by name, complete, and none undone by another."""

import re
import subprocess
import sys

import pytest
import yaml

from project import ROOT, run_snakemake
from workflow.test_workflow import TINY, job_counts


def profile(name):
    return yaml.safe_load((ROOT / "profiles" / name / "config.yaml").read_text())


def test_the_default_profile_leaves_the_others_alone():
    """It is loaded on every call and wins: a key of its own in another profile would be without effect."""
    default = profile("default")
    assert not default.keys() & {"executor", "jobs", "default-resources"}
    for name in ("slurm", "ci"):
        own = profile(name)
        overridden = {key for key in own.keys() & default.keys() if own[key] != default[key]}
        assert not overridden, name


def test_every_step_after_training_is_in_the_clusters_group():
    """One that is not would be a job of its own in the middle of the group."""
    text = "".join(
        (ROOT / "rules" / f"{stage}.smk").read_text()
        for stage in ("analysis", "tables", "report", "benchmark", "portability")
    )
    rules = re.split(r"^ *rule ", text, flags=re.MULTILINE)[1:]
    names = set()
    for rule in rules:
        if "localrule: True" not in rule and not rule.startswith(("train_second", "portability:")):
            named = re.search(r'^ *name: "(\w+)"', rule, re.MULTILINE)
            if not rule.startswith(":"):
                names.add(named[1] if named else re.match(r"\w+", rule)[0])
    analyses = re.search(
        r"^ANALYSES = {(.*?)^}", (ROOT / "rules" / "common.smk").read_text(), re.MULTILINE | re.DOTALL
    )
    names |= {f"analyse_{name}" for name in re.findall(r'^ +"(\w+)":', analyses[1], re.MULTILINE)}
    names.remove("benchmark")  # no study target asks for it
    assert set(profile("slurm")["groups"]) == {f"{name}=tables" for name in names}


@pytest.mark.parametrize("name", ["slurm", "ci"])
def test_a_profile_by_its_folder_plans_the_study(tmp_path, name):
    process = run_snakemake(
        tmp_path, "-n", "core", "--profile", ROOT / "profiles" / name, "--config", f"study={TINY}"
    )
    assert job_counts(process)["train"] == 8


def test_profile_slurm_works_as_typed_once_it_is_linked(tmp_path):
    """From the repository root, which has no folder `slurm`, and with nothing of Slurm installed."""
    environment = {"PATH": f"{sys.prefix}/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    subprocess.run(
        ["make", "profiles"], cwd=ROOT, env=environment, check=True, capture_output=True, timeout=60
    )
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--profile",
        "slurm",
        "-n",
        "core",
        "--directory",
        tmp_path / "work",
    ]
    typed = subprocess.run(
        [*command, "--config", f"study={TINY}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job_counts(typed)["train"] == 8
    assert "profile" in typed.stderr and "slurm" in typed.stderr.partition("specific")[0]

"""Runs and the database go to an object store, and a second call sends nothing: moto plays the store."""

import os
import subprocess
import sys
import time
import urllib.request

import boto3
import pytest

from project import run_snakemake
from qkpipe.paths import StudyPaths
from store.synthetic import SHAPES, write_run, write_study
from workflow.test_workflow import job_counts

ADDRESS = "http://127.0.0.1:5058"


@pytest.fixture
def bucket(monkeypatch):
    """Name of an empty bucket that this process and its children reach."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": ADDRESS,
        "SNAKEMAKE_STORAGE_S3_ENDPOINT_URL": ADDRESS,
    }.items():
        monkeypatch.setenv(name, value)
    serve = "from moto.server import main; main(['--host', '127.0.0.1', '--port', '5058'])"
    server = subprocess.Popen(
        [sys.executable, "-c", serve], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(ADDRESS).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, "moto did not come up"
                time.sleep(0.2)
        boto3.client("s3").create_bucket(Bucket="study")
        yield "study"
    finally:
        server.kill()
        server.wait()


def contents(bucket):
    listed = boto3.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])
    return {entry["Key"]: (entry["Size"], entry["LastModified"]) for entry in listed}


def test_finished_runs_are_archived_once_under_the_names_they_have_here(bucket, tmp_path):
    study, paths = write_study(tmp_path / "config"), StudyPaths("tiny", tmp_path)
    for key in study.requested("core", [0]):
        write_run(paths, study, key, SHAPES[key.arm])
    meta = paths.data("words", "bytes") / "meta.json"
    meta.parent.mkdir(parents=True)
    meta.touch()
    os.utime(meta, (0, 0))
    (paths.results / "kernels.compiled").touch()  # no run needs them here
    names = [
        path.relative_to(tmp_path).as_posix()
        for key in study.requested("core", [0])
        for path in paths.run(key.arm, key.seed).outputs
    ]
    told = ["archive_runs", "--config", f"study={tmp_path / 'config'}", f"archive=s3://{bucket}/here"]

    sent = run_snakemake(tmp_path, *told, "seeds=[0]")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    there = contents(bucket)
    assert {key: size for key, (size, _) in there.items()} == {
        f"here/{name}": (tmp_path / name).stat().st_size for name in names
    }
    again = run_snakemake(tmp_path, *told, "seeds=[0]")
    assert again.returncode == 0, again.stdout + again.stderr
    assert contents(bucket) == there

    everything = job_counts(run_snakemake(tmp_path, "-n", "archive", *told[1:], "seeds=[0]"))
    assert everything["archive_database"] == everything["database"] == 1
    assert "archive_run" not in everything

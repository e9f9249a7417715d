# make env | study | test | test-slow | test-slurm | test-slurm-quick | test-tracking | bench | kernels-test | kernels-quick |
#   device-check | lint | schema | profiles | clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SCALE ?= micro
PROFILES := $(or $(XDG_CONFIG_HOME),$(HOME)/.config)/snakemake

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: env study test test-slow test-slurm test-slurm-quick test-tracking bench kernels-test kernels-quick device-check \
  lint schema profiles clean

env: $(STAMP)

# Installed again when a dependency, a pin or the interpreter's choice changes; else a second call does nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "make env: $(PYTHON) is not Python 3.11 or newer; try: make env PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make env: $(PYTHON) has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): a few minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[study,test]'
	@touch $@

study: env
	snakemake core --config scale=$(SCALE)
	@echo
	@echo "Report:    results/$(SCALE)/report/index.html"
	@echo "Database:  results/$(SCALE)/study.duckdb   (duckdb results/$(SCALE)/study.duckdb, or: qkpipe query 'from runs')"
	@echo "Runs:      mlflow ui   (in this folder, then http://localhost:5000)"
	@echo "Commands are in $(BIN): source $(BIN)/activate"

# The CPU kernels are compiled before the two workers start, or each would compile them.
test: lint
	qkpipe warm-up
	OMP_NUM_THREADS=1 pytest -n 2 --dist loadfile -m "not slow and not slurm and not tracking"

test-slow: env
	OMP_NUM_THREADS=1 pytest -m "slow and not slurm and not tracking"

# A throwaway Slurm on this machine, installed from Debian where missing; where that cannot be, this says why and passes.
test-slurm: SLURM_TESTS := -n 3
# A few minutes: two runs share a job, the table over them waits, and a cancelled run with a GPU goes on.
test-slurm-quick: SLURM_TESTS := -k "share_a_job or cancelled"
test-slurm test-slurm-quick: env
	@tests/slurm/local_slurm start || { status=$$?; test $$status -eq 75 && echo "make $@: SKIPPED" >&2 && exit 0; exit $$status; }
	@if test -L /etc/slurm/slurm.conf; then OMP_NUM_THREADS=1 pytest $(SLURM_TESTS) -m slurm tests/slurm; status=$$?; \
	  tests/slurm/local_slurm stop; exit $$status; fi

test-tracking: env
	pytest -m tracking tests/tracking

bench: env
	snakemake benchmark --force --config scale=$(SCALE)
	@echo "Table: results/$(SCALE)/benchmark/operators.parquet   Figure: results/$(SCALE)/figures/benchmark.png"

# The Triton kernels under the interpreter and by static compilation, on the oldest and the newest supported Triton.
kernels-test: env
	tests/kernels/run_environments.sh -m "not slow"

# The device check from end to end on a CPU, and the dispatch to the kernels, on the newest Triton.
kernels-quick: env
	tests/kernels/run_environments.sh --newest tests/kernels/test_device_check.py tests/kernels/test_dispatch.py

# On a machine with a GPU: needs torch, triton and numpy alone, and nothing installed. kernels/ is imported under another name.
device-check:
	@mkdir -p build/path && ln -sfn $(CURDIR)/kernels build/path/qkpipe_kernels
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/build/path $(PYTHON) -m qkpipe_kernels.device_check --out results/device_check.json

lint: env
	ruff check
	ruff format --check

schema: env
	qkpipe schema

# Snakemake looks for --profile NAME in its user folder, not in ./profiles.
profiles:
	@mkdir -p $(PROFILES)
	@if [ -e $(PROFILES)/slurm ] && [ "$$(readlink -f $(PROFILES)/slurm)" != "$(CURDIR)/profiles/slurm" ]; then \
	  echo "make profiles: $(PROFILES)/slurm is there and not ours; move it, or use --profile profiles/slurm" >&2; exit 1; fi
	@ln -sfn $(CURDIR)/profiles/slurm $(PROFILES)/slurm
	@echo "snakemake --profile slurm now finds $(CURDIR)/profiles/slurm"

# What can be made again in a minute. results/, scratch/ and mlflow.db hold work and are left to you.
clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build src/*.egg-info
	find src kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +

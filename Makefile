# hashbench. `make help` lists the targets; only Python 3.11 or newer, make and pip are needed.

PYTHON  ?= python3
SUITE   ?= torchvision
MODELS  ?= default
MODES   ?= training inference
ONLY    ?=
FLAGS   ?=
CORES   := $(shell getconf _NPROCESSORS_ONLN)
# One more test at a time than there are cores: many wait for processes that they have started. Those of quick do not,
# and each worker imports torch and collects the tests for ten seconds.
WORKERS ?= $(if $(filter quick,$@),$(CORES),$(shell expr $(CORES) + 1))
NIGHTS  ?= results/nightly
AUDIT   ?= results/audit
WRITE   ?=
PIP_FLAGS ?= --quiet
STRESS  ?=
EXPECTED ?= $(if $(wildcard results/expected/*.csv),results/expected)
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
STRESSED = $(if $(STRESS),--stress)
CHOICE   = $(if $(ONLY),--only $(ONLY),--models $(MODELS))

ifndef OUTPUT
NOTHING_TO_RESUME := $(filter --resume,$(FLAGS))
OUTPUT := results/$(shell date +%Y-%m-%d_%H%M%S)
endif

# pip compiles nothing here (see setup): without this, every process would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup sweep compare nightly audit report bench gpu test quick exhaustive test-machines test-versions lint types check clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  make sweep ONLY=\"resnet18 vit_b_16\" SUITE=torchvision MODELS=all MODES=training OUTPUT=results/mine FLAGS=\"--runs 5\""
	@echo "  make compare BASE=results/expected NEW=results/mine"

setup: $(STAMP) ## Make the environment in .venv

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("hashbench needs Python 3.11 or newer, $(PYTHON) is %d.%d. Say which with make PYTHON=python3.12." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "make setup: installs torch, torchvision and what tests need into $(VENV): 5 GB, two to ten minutes, most of it the download."
	@# Debian's python3 without python3-venv cannot make pip in a new environment; the pip outside of it can.
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) 2>/dev/null \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	@# Python compiles what it imports, a tenth of the 300 MB of sources that pip would compile for a minute.
	@echo "make setup: 1 of 2, the packages; pip is silent until it is done (make setup PIP_FLAGS=--verbose shows more)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-compile --disable-pip-version-check --progress-bar off -e '.[dev]'
	@echo "make setup: 2 of 2, the native tracer: compiles it once, half a minute"
	@$(BIN)/hashbench native || true  # it has said why: then the Python tracer is used
	@touch $@
	@echo "make setup: done. Next: . $(BIN)/activate"

sweep: $(STAMP) ## Run the zoo: each model twice, training and inference; prints where the results are
	@test -z "$(NOTHING_TO_RESUME)" || { echo "make sweep FLAGS=--resume needs the folder of the sweep to complete: OUTPUT=results/mine" >&2; exit 2; }
	@for mode in $(MODES); do \
		$(BIN)/hashbench sweep --suite $(SUITE) --$$mode $(CHOICE) --output $(OUTPUT)/$$mode $(STRESSED) $(FLAGS) || exit $$?; \
	done
	@echo "All results of this sweep: $(OUTPUT)"

compare: $(STAMP) ## What changed from BASE to NEW (CSV files or results folders)
	@test -n "$(BASE)" && test -n "$(NEW)" || { echo "make compare needs both: make compare BASE=results/expected NEW=results/mine" >&2; exit 2; }
	@$(BIN)/hashbench compare $(BASE) $(NEW) $(FLAGS)

nightly: $(STAMP) ## Sweep all suites, compare with results/expected and last night, write the report in NIGHTS
	@$(BIN)/hashbench nightly --suite $(if $(filter file,$(origin SUITE)),all,$(SUITE)) --modes $(MODES) $(CHOICE) --output $(NIGHTS) \
		$(if $(EXPECTED),--expected $(EXPECTED)) $(STRESSED) $(if $(FLAGS),-- $(FLAGS))

audit: $(STAMP) ## Every op of torch: documented against measured, in AUDIT (goes on where it stopped)
	@$(BIN)/hashbench audit --jobs 2 --resume --output $(AUDIT) $(if $(WRITE),--write $(WRITE)) $(FLAGS)

report: $(STAMP) ## The report of all nights in NIGHTS, as NIGHTS/report.html
	@$(BIN)/hashbench report $(NIGHTS) $(if $(EXPECTED),--expected $(EXPECTED)) --html $(NIGHTS)/report.html $(FLAGS)

bench: $(STAMP) ## The overhead and throughput benchmarks, as tables
	$(BIN)/python -m benchmarks $(FLAGS)

gpu: $(STAMP) ## All that is worth measuring on a GPU, in eight minutes, as CSVs and a page in results/gpu
	@$(BIN)/python -m benchmarks.gpu_hour $(FLAGS)

test: $(STAMP) ## The tests, on all cores: ten to fifteen minutes on two
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not exhaustive" $(FLAGS)

quick: $(STAMP) ## The tests that start no process and take less than a second each: two minutes on two cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow and not exhaustive" $(FLAGS)

exhaustive: $(STAMP) ## Every test, then torch's op database under the native tracer: an hour; before a release
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(FLAGS)
	$(BIN)/python -m tests.core.trace.native.parity lists
	$(BIN)/python -m tests.core.trace.native.parity op_db

test-machines: $(STAMP) ## The tests as on other machines: other vector units and libraries, one thread, one core, busy cores
	$(BIN)/python tests/machines.py $(FLAGS)

test-versions: $(STAMP) ## The quick tests with the oldest and the newest libraries, for before a release: 6 GB, some minutes
	$(BIN)/python tests/versions.py $(FLAGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test ## What CI runs: lint, strict types on the package, tests

clean: ## Remove the environment and caches; results stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

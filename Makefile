# Everything a developer or a continuous build does. `make help` lists the verbs.
PYTHON ?= python3
COVERAGE_MIN ?= 85
WORKERS ?= 3
ARGS ?=

BIN := .venv/bin
comma := ,
# Relative on purpose: pip reads the file for the build of rayhive itself, too. Python compiles a module
# when it is first imported, and most of the modules never are.
PIP := PIP_NO_COMPILE=1 PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help sweep test coverage test-all lint bench docs constraints clean

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
		awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo 'Variables: PYTHON=python3.12  WORKERS=3  ARGS="options for the sweep, pytest or the benchmarks"'

sweep: .venv/.runtime ## run the quickstart study (or ARGS="FILE --set k=v") and print its table
	$(BIN)/python experiments/sweep.py $(ARGS)

test: lint ## lint, then every test but the slow ones and those for a GPU, in WORKERS processes
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu" $(ARGS)

coverage: lint ## the same while the coverage of all processes is measured, which takes longer
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -m "not slow and not gpu" $(ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --fail-under=$(COVERAGE_MIN)

test-all: lint ## lint, then every test that this machine can run
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/.dev ## ruff, mypy, import-linter and the links of the documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_links.py

bench: .venv/.runtime ## run the benchmarks (or ARGS="NAME ..."), write benchmarks/RESULTS.md
	$(BIN)/python benchmarks/run_all.py $(ARGS)

docs: .venv/.docs ## build the documentation into site/
	$(BIN)/mkdocs build --strict --quiet

constraints: ## resolve every dependency afresh and rewrite constraints.txt
	PYTHON=$(PYTHON) scripts/refresh_constraints.sh

clean: ## remove what the tools leave behind; .venv and runs stay
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# The pip of an older Python takes a minute longer to resolve.
define install
	@$(PYTHON) -m venv .venv
	@$(PIP) --upgrade 'pip>=26'
	@$(PIP) -e '.[$(1)]'
endef

# A stamp stands for what is installed; a changed dependency or pin makes it out of date.
.venv/.runtime: pyproject.toml constraints.txt
	@echo 'rayhive: installing into .venv; a minute or two on a fresh machine ...'
	$(call install,fast)
	@touch $@

.venv/.dev: pyproject.toml constraints.txt
	@echo 'rayhive: installing into .venv, with the tools of development; two or three minutes ...'
	$(call install,fast$(comma)dev)
	@touch .venv/.runtime $@

.venv/.docs: .venv/.runtime
	@echo 'rayhive: adding the tools of documentation to .venv ...'
	@$(PIP) -e '.[docs]'
	@touch $@

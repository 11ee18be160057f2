# Thin: makes the harness, then hands over to snakemake. `make help` lists the targets.
# Paths stay relative, so that a folder may have blanks in its name.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
CORES ?= all
export PYTHON
# Files are UTF-8, whatever the locale says.
export LC_ALL := C.UTF-8
export PYTHONUTF8 := 1
# A user without a name, or with a home that can't be written, gets both from here.
export USER ?= uid$(shell id -u)
ifneq ($(shell test -n "$$HOME" && test -w "$$HOME" && echo yes),yes)
export XDG_CACHE_HOME ?= $(shell mkdir -p .cache && pwd)/.cache
endif

RUN := envs/harness/.venv/bin/python
SNAKEMAKE := $(RUN) -m snakemake
PYTEST := $(RUN) -m pytest

# One thing after the other, whatever -j says: installing and testing at once would test half an installation.
.NOTPARALLEL:
.PHONY: help demo demo-ladder setup harness bench bench-analysis test test-all lint schemas bundle published clean-results clean-envs

help: ## This list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

demo: harness ## Set up what is needed and run the default experiment to reports/demo.html and .pdf
	@$(SNAKEMAKE) --cores $(CORES)
	@echo "The report: reports/demo.html, reports/demo.pdf; in short: results/demo/summary.md"

demo-ladder: harness ## The tier ladder without a GPU: conversations that outgrow one tier after the other
	@$(SNAKEMAKE) --cores $(CORES) --configfile config/demo-ladder.yaml
	@echo "The report: reports/demo-ladder.html, reports/demo-ladder.pdf; in short: results/demo-ladder/summary.md"

setup: harness ## The harness and the default experiment's engines, nothing else
	@$(SNAKEMAKE) --cores $(CORES) env

bench: harness ## Measure how truly load clients measure: reports/client-truth.html and .pdf
	@$(SNAKEMAKE) -s workflow/bench.smk --cores $(CORES)
	@echo "The report: reports/client-truth.html, reports/client-truth.pdf; in short: results/client-truth/tables/summary.md"

ANALYSIS := PYTHONPATH=tests:tests/unit $(RUN) tests/benchmarks/analysis.py
bench-analysis: harness-dev ## Measure how the analysis grows with requests and trials: results/bench-analysis/points.json
	@$(ANALYSIS) requests
	@$(ANALYSIS) requests --chunks 128
	@$(ANALYSIS) experiment
	@$(ANALYSIS) table

harness: ## What runs snakemake: envs/harness/.venv
	@envs/harness/install.sh

.PHONY: harness-dev
harness-dev:
	@envs/harness/install.sh --dev

# A file's tests stay together, because they share what is costly. Two engines at a time: a start keeps one core busy.
TESTS := $(PYTEST) -n 2 --dist loadfile
test: harness-dev setup test-stub test-engine ## All tests but the slow ones; the last ones start real engines

.PHONY: test-stub test-engine
test-stub: harness-dev
	@$(TESTS) -m "not engine and not slow"

test-engine: harness-dev setup
	@$(TESTS) -m "engine and not slow"

test-all: harness-dev setup ## Slow variants as well
	@$(TESTS) -m "not engine"
	@$(TESTS) -m engine

lint: harness-dev ## ruff, mypy, snakefmt, snakemake --lint
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) -m snakefmt --check --line-length 120 workflow
	@$(RUN) .ci/lint_workflow.py

schemas: harness ## Generate workflow/schemas, the key reference of config/README.md, the tables of README.md
	@$(RUN) -m kvladder.config.schema
	@$(RUN) tests/workflow/faults.py
	@$(RUN) -m kvladder.bench.headline

bundle: ## The cuda stack's offline bundle for a GPU host without network, into .bundle/
	@envs/cuda/offline/build.sh .bundle

published: harness ## Rebuild the reports of results/published from their raw data; measures nothing
	@$(RUN) -m kvladder.provenance.publish rebuild

clean-results: ## Remove results and reports that aren't published
	@find results reports -mindepth 1 -maxdepth 1 ! -name published -exec rm -rf {} + 2>/dev/null || true

clean-envs: ## Remove the environments that setup made
	@rm -rf envs/*/.venv envs/*/.cache envs/clients/*/.venv

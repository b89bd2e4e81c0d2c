# Every verb makes the environment it needs; the second time that costs nothing.

PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed
# Headway alone, without extras: enough for make run, and there in seconds.
MINIMAL := .venv/.minimal
RESULTS := .test-results.json
# The tests that reach every statement and branch of the watcher.
WATCHER_TESTS := tests/watcher tests/web/test_pages_of_the_dead.py
# Each step's output in one piece, where make can do that.
APART := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

# The tests start thousands of Pythons: without compiled files each would compile all it imports once more.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run demo test coverage check trace bench faults schemas compat mutants docs site package clean
.PHONY: lint types contracts applies

help:
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(SETUP)  ## create .venv with everything in it

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[all,dev]'
	-@$(BIN)/python -m compileall -qq -j 0 .venv/lib  # by all processors; pip takes one. Some packages bring what is no Python
	@touch $@ $(MINIMAL)

$(MINIMAL): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

run: $(MINIMAL)  ## run the main job of examples/ads
	$(BIN)/python examples/ads/run.py

demo: $(SETUP)  ## a lively installation in a temporary directory, with its dashboard, until Ctrl-C
	$(BIN)/headway demo

# Tests wait for half of their time and more: four at a time keep two processors busy.
test: $(SETUP)  ## obtain the servers the tests need and run them
	-@$(BIN)/python -m tests.services.firestore
	-@$(BIN)/python -m tests.services.chromium
	-@$(BIN)/python -m tests.services.nginx
	$(BIN)/pytest -n 4 --dist worksteal --results=$(RESULTS) $(IGNORE)

# Apart from test, because a tracer doubles its time and stands in the way of tests about signals and start-up.
coverage: $(SETUP)  ## run the tests with branch coverage of every process
	$(BIN)/pytest -n 4 --dist worksteal --cov --cov-report=term

# A missing server is a reason to skip on a laptop; here it is a failure. The watcher's tests run once, under coverage.
check: export CI = true
check: $(SETUP)  ## what CI runs: lint, types, import contracts, docs, site, package, test, the watcher's coverage, trace
	$(MAKE) --no-print-directory --jobs=2 $(APART) --keep-going types applies docs site package contracts lint
	$(MAKE) --no-print-directory test IGNORE='$(WATCHER_TESTS:%=--ignore=%)'
	$(BIN)/pytest -q -n 4 --dist worksteal --cov=headway.watcher --cov-report= \
		--results=$(RESULTS) --append-results $(WATCHER_TESTS)
	$(BIN)/coverage report --include='src/headway/watcher/*' --fail-under=100
	$(MAKE) --no-print-directory trace

# What check does before the tests, two at a time: each is one processor's work and has its say apart.
lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(SETUP)
	$(BIN)/mypy

contracts: $(SETUP)
	$(BIN)/lint-imports

applies: $(SETUP)
	$(BIN)/python tools/mutants.py --check

trace: $(SETUP)  ## compare docs/internals/requirements.md with what the last make test proved
	$(BIN)/python tools/trace.py $(RESULTS)

bench: $(SETUP)  ## run bench/*.py one after another into bench/results/, then say which goals were met
	$(BIN)/python tools/bench.py

faults: $(SETUP)  ## run the long campaigns of kills, cuts and corruption
	$(BIN)/pytest -m 'faults or slow' --timeout=3600

schemas: $(SETUP)  ## let schemathesis look for server errors behind every route of the OpenAPI document
	$(BIN)/pytest -m faults tests/web/test_schemathesis.py --timeout=3600

compat: $(SETUP)  ## run the suite on every Python, Redis, RQ and redis-py we claim, as far as they are to be had
	$(BIN)/python tools/compat.py

mutants: $(SETUP)  ## change the source in the ways of tests/mutants/*.toml and see that the named tests notice
	$(BIN)/python tools/mutants.py

docs: $(SETUP)  ## check links, run the examples in the docs, compare the generated pages
	$(BIN)/python tools/docs.py

site: $(SETUP)  ## build the documentation site into dist/site, without a warning
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --jobs auto docs dist/site

package: $(SETUP)  ## build wheel and sdist into dist, check their data, and try the wheel alone
	$(BIN)/python tools/package.py

clean:  ## remove what the verbs made
	rm -rf .venv dist bench/results $(RESULTS) .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

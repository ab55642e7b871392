# make demo: train, measure, and write a page of results. make test: everything that is checked.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-soak browser docs format clean

# One installation serves both; it is redone when what it installs from changes.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,test]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/fisherhash demo

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup

# For the tests of the search page, which are skipped without: Debian's Chromium, and axe-core, which
# looks for what a screen reader or a keyboard would stumble over.
browser: node_modules/axe-core/axe.min.js
	command -v chromium || (apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium)

node_modules/axe-core/axe.min.js:
	npm install --silent --no-save --no-package-lock --no-audit --no-fund axe-core@4

# Minutes: writers killed at random moments, damaged index files, thousands of damaged images.
test-slow: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m slow

# About an hour: 10,000 mutated folders, repair of 1,000,000 items, 200 backups beside a writer.
test-soak: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py

# The documentation as a site, in site/index.html. A warning or a broken link is an error.
docs: $(VENV)/installed
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) fisherhash-demo node_modules site

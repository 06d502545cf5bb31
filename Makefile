# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TESTS ?= tests

.PHONY: demo test test-slow bench lint format clean

demo: $(INSTALLED)  ## the decode loop: 64 real prompts through 16 rows
	$(BIN)/python examples/decode_loop.py $(ARGS)

test: $(INSTALLED)  ## the default tests
	$(BIN)/python -m pytest -n auto $(TESTS)

test-slow: $(INSTALLED)  ## the tests that take longer
	$(BIN)/python -m pytest -n auto -m slow $(TESTS)

bench: $(INSTALLED)  ## the benchmarks, one after another
	PJRT_NPROC=1 $(BIN)/python benchmarks/bookkeeping.py
	$(BIN)/python benchmarks/bookkeeping.py
	$(BIN)/python benchmarks/storage.py
	$(BIN)/python benchmarks/decode.py

lint: $(INSTALLED)  ## what CI and pre-commit check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvpool needs Python 3.11 or newer, got " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,examples]"
	touch $@

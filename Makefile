# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TESTS ?= tests
# A folder of recorded requests for the benchmarks of the memory and the host tier; without one
# they are generated.
TRACES ?=
# The compiler of jax's CUDA plugin, to compile kernels where there is no GPU. Beside the
# environment and not in it: a plugin without the rest of CUDA would complain at every start.
COMPILER := .venv/gpu-compiler

.PHONY: demo test test-slow test-gpu bench lint format clean

demo: $(INSTALLED)  ## the decode loop: 64 real prompts through 16 rows
	$(BIN)/python examples/decode_loop.py $(ARGS)

test: $(INSTALLED)  ## the default tests
	$(BIN)/python -m pytest -n auto $(TESTS)

test-slow: $(INSTALLED)  ## the tests that take longer
	$(BIN)/python -m pytest -n auto -m slow $(TESTS)

test-gpu: $(INSTALLED)  ## the tests on a Hopper GPU or a later one
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[cuda13]"
	$(BIN)/python -m pytest -m gpu $(TESTS)

bench: $(INSTALLED)  ## the benchmarks, one after another
	PJRT_NPROC=1 $(BIN)/python benchmarks/bookkeeping.py
	$(BIN)/python benchmarks/bookkeeping.py
	$(BIN)/python benchmarks/storage.py
	$(BIN)/python benchmarks/shared_storage.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/sizing.py
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/memory.py $(TRACES)
	$(BIN)/python benchmarks/tiers.py $(TRACES)

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
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target $(COMPILER) $$($(BIN)/python -c 'import jax; print(*(f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt")))') \
	  nvidia-cuda-nvcc nvidia-nvvm || echo "NO GPU COMPILER: the tests that compile the GPU kernels will be skipped"
	touch $@

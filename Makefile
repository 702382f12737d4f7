# Every target installs its requirements. Prerequisites are Python 3.11, pip and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-cpus check format docs test-docs pictures bench campaign learning-campaign \
	credit-lab counterfactual-campaign browser-campaign sandbox-campaign \
	red-team-campaign text-games-campaign gpu-campaign gpu-wheels test-integrations packaging clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

demo: $(VENV)/.demo  ## Run the examples with an expert and a random policy
	@$(BIN)/python examples/demo.py

# Byte-compile once, since the processes that tests start may not be allowed to write caches.
test: $(VENV)/.dev  ## Run the quick tests in two processes
	@$(BIN)/python -m compileall -q reward_kit
	@$(BIN)/python -m pytest -n 2 --dist worksteal

# Includes tests/slow_tests.txt, and all examples of property tests.
test-all: $(VENV)/.dev  ## Run all tests except campaigns (20 min)
	@$(BIN)/python -m compileall -q reward_kit
	@HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest -n 2 --dist worksteal

# Tests with results that depend on the CPU: they use PyTorch or NumPy, or compare figures byte by byte.
NUMERIC_TESTS := tests/agent/policies tests/credit tests/rl tests/tokens \
	tests/runs/statistics tests/runs/test_calibration.py tests/test_agreement.py tests/runs/comparison \
	tests/cli/test_run_hf.py tests/pages/test_figures.py \
	tests/test_household_agent.py tests/test_training_loop.py tests/test_rl_helpers.py tests/test_rl_processing.py
# Instruction sets of PyTorch, oneDNN, MKL, OpenBLAS, NumPy (names of NumPy 1 and 2, which warns about unknown ones) and the C library.
AVX512 := AVX512F,AVX512CD,AVX512_SKX,AVX512_CLX,AVX512_CNL,AVX512_ICL,AVX512_SPR,X86_V4
CPU_sse := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Nehalem \
	NPY_DISABLE_CPU_FEATURES=$(AVX512),AVX2,FMA3,X86_V3 GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX2,-FMA
CPU_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 OPENBLAS_CORETYPE=Haswell \
	NPY_DISABLE_CPU_FEATURES=$(AVX512)
CPU_all :=
CPUS ?= sse avx2 all
THREADS ?= 1 2 4
test-cpus: $(VENV)/.dev  ## Run numeric tests with other CPU instruction sets (20 min; CPUS=sse, avx2 or all selects one)
	@$(foreach cpu,$(CPUS),$(foreach threads,$(THREADS), \
		echo "Instructions: $(cpu), threads: $(threads)" && \
		env OMP_WAIT_POLICY=passive OMP_NUM_THREADS=$(threads) $(CPU_$(cpu)) \
			$(BIN)/python -m pytest -W ignore::ImportWarning -n 2 --dist worksteal $(NUMERIC_TESTS) &&)) true

check: $(VENV)/.dev  ## Check lint, format, types and layering
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_house.py

format: $(VENV)/.dev  ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

pictures: $(VENV)/.browser  ## Regenerate the pictures of the docs from real runs (requires Chromium)
	@$(BIN)/python docs/draw_figures.py
	@$(BIN)/python docs/take_pictures.py

docs: $(VENV)/.docs  ## Build the docs site; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in site/. To view it: $(BIN)/python -m http.server --directory site"

test-docs: $(VENV)/.dev .integrations/.learners .integrations/.ray  ## Run all code blocks of the docs, including training (8 min)
	@$(BIN)/python -m pytest -n 2 -m "" tests/pages

bench: $(VENV)/.dev .integrations/.learners .integrations/.ray  ## Run the benchmarks, compared with inspect-ai, verifiers, RLlib and TRL
	@$(BIN)/python benchmarks/transport.py
	@$(BIN)/python benchmarks/rollouts.py --peers
	@$(BIN)/python benchmarks/many_episodes.py
	@$(BIN)/python benchmarks/household.py
	@$(BIN)/python benchmarks/sandbox.py
	@$(BIN)/python benchmarks/credit.py
	@$(BIN)/python benchmarks/tokens.py
	@$(BIN)/python benchmarks/episodes.py
	@$(BIN)/python benchmarks/managers.py
	@$(BIN)/python benchmarks/report.py
	@$(BIN)/python benchmarks/reward_agent.py
	@$(BIN)/python benchmarks/serve.py
	@.integrations/ray/bin/python benchmarks/ray_engine.py
	@$(BIN)/python benchmarks/generate.py
	@.integrations/learners/bin/python benchmarks/train_step.py
	@$(BIN)/python benchmarks/pipeline.py

campaign: $(VENV)/.dev $(VENV)/.statistics $(VENV)/.browser  ## Run the long tests: kill -9 and resume, coverage of intervals, pages
	@$(BIN)/python -m pytest -m campaign

browser-campaign: $(VENV)/.browser  ## Run the browser tests in headless Chromium (apt install chromium)
	@$(BIN)/python -m pytest -m "" tests/browser

learning-campaign: $(VENV)/.dev  ## Train on the lakes (3 seeds), and compare algorithms in the household (5 arms, 10 seeds; 1 h)
	@$(BIN)/python -m pytest -s -m campaign tests/rl/training/test_frozen_lake_example.py
	@$(BIN)/reward-kit sweep examples/alfworld_household/sweep.yaml --trust

CASES ?= tests/sandbox/cases
USER_PYTHON ?= /usr/bin/python3
sandbox-campaign: $(VENV)/.dev  ## Test the sandbox: hostile code, 100,000 calls, 1,000,000 malformed results (CASES=folder, USER_PYTHON=…)
	@$(BIN)/python -m pytest -m campaign tests/sandbox
	@$(BIN)/python -m tests.sandbox.hostile_campaign $(CASES) --user-python $(USER_PYTHON)

credit-lab: $(VENV)/.dev  ## Score estimators against measured values, and update the page on credit (15 min)
	@$(BIN)/python benchmarks/credit_lab.py

counterfactual-campaign: $(VENV)/.dev  ## Test reward-kit why: planted mistakes, coverage of intervals, cost (10 min)
	@$(BIN)/python benchmarks/counterfactual.py

red-team-campaign: $(VENV)/.dev  ## Check verifiers with planted weaknesses and their fixed versions (30 min)
	@$(BIN)/python benchmarks/red_team/campaign.py

text-games-campaign: $(VENV)/.text-games  ## Test with TextWorld's engine: 100 household episodes, games of every generator
	@$(BIN)/python -m pytest -m "" tests/environments/household tests/environments/test_textworld.py

DEVICE ?= cuda
SIZE ?= full
OUT ?= runs/gpu
gpu-campaign: $(VENV)/.dev  ## Run everything that depends on a GPU (DEVICE=cuda or cpu, SIZE=full or tiny, OUT=folder, STAGES=…)
	@$(BIN)/python benchmarks/gpu_campaign/campaign.py --device $(DEVICE) --size $(SIZE) --out $(OUT) \
		$(if $(STAGES),--stages $(STAGES)) $(if $(AGAIN),--again $(AGAIN)) $(if $(BUDGET),--budget $(BUDGET))

GPU_PYTHON ?=
gpu-wheels: $(VENV)/.dev  ## Collect the wheels that gpu-campaign needs on a machine without network (GPU_PYTHON=3.12, HAVE=numpy, TRL=1)
	@$(BIN)/python benchmarks/gpu_campaign/wheels.py $(if $(GPU_PYTHON),--python $(GPU_PYTHON)) \
		$(if $(HAVE),--have $(HAVE)) $(if $(TRL),--trl)

PEERS := mcp agents endpoints learners verifiers openenv ray serve earlier axolotl
test-integrations: $(VENV)/.dev $(PEERS:%=.integrations/.%)  ## Test against trainers, engines, servers and environments of other projects (requires npm, 8 GB)
	@$(BIN)/python -m pytest -m campaign tests/integrations
	@.integrations/ray/bin/python -m pytest -m campaign tests/integrations/ray

# Test the distribution with the newest and with the oldest versions that pyproject.toml allows.
ONLY_newest := -k "not oldest"
ONLY_oldest := -k oldest
packaging: $(VENV)/.packaging  ## Build, install and test the wheel (VERSIONS=newest or oldest selects one)
	@$(BIN)/python -m pytest -m campaign tests/distribution $(ONLY_$(VERSIONS))

clean:  ## Remove virtual environments and build outputs
	rm -rf $(VENV) .peers .integrations gpu-wheels site dist build .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@echo "Creating a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing reward-kit and the requirements of the examples (about 100 MB)"
	@$(PIP) --editable '.[games,mcp]' 'pytest>=8.3,<10'
	@touch $@

# torch is installed first and pinned, so that its dependents use this build instead of one with gigabytes of CUDA.
$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing PyTorch (about 200 MB, once)"
	@$(PIP) 'torch==2.13.0'
	@echo "Installing reward-kit and its development tools (about 250 MB)"
	@$(PIP) --editable '.[games,train,lora,constrained,dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.text-games: $(VENV)/.dev
	@echo "Installing TextWorld and ALFWorld (about 400 MB)"
	@$(PIP) --editable '.[text-games]'
	@touch $@

# References for the statistics.
$(VENV)/.statistics: $(VENV)/.dev
	@echo "Installing SciPy and statsmodels (about 150 MB)"
	@$(PIP) scipy==1.17.1 statsmodels==0.15.0
	@touch $@

$(VENV)/.browser: $(VENV)/.dev
	@echo "Installing Playwright and Pillow (about 50 MB)"
	@$(PIP) 'playwright==1.65.2' 'pillow>=11,<14'
	@touch $@

$(VENV)/.packaging: $(VENV)/.dev
	@echo "Installing build and uv (about 50 MB)"
	@$(PIP) 'build>=1.3,<2' 'uv>=0.13,<0.14'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@echo "Installing the docs tools"
	@$(PIP) --editable '.[docs]'
	@touch $@

# Each kind has a separate virtual environment, since servers pin different major versions of the SDK.
.integrations/.agents: Makefile
	@echo "Installing agent frameworks and command-line agents from PyPI and npm into .integrations (about 900 MB)"
	@$(PYTHON) -m venv .integrations/agents
	@.integrations/agents/bin/python -m pip install --quiet openai-agents==0.24.0 \
	  'pydantic-ai-slim[openai,anthropic]==2.68.0' anthropic==2.14.0 \
	  langchain==1.5.2 langgraph==1.2.24 langchain-openai==1.7.4 langchain-anthropic==1.7.10
	@npm install --silent --prefix .integrations/agents_npm @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0
	@touch $@

.integrations/.mcp: Makefile
	@echo "Installing MCP servers from PyPI and npm into .integrations (about 200 MB)"
	@$(PYTHON) -m venv .integrations/mcp
	@.integrations/mcp/bin/python -m pip install --quiet mcp-server-time==2026.10.19 mcp-server-git==2026.10.19
	@$(PYTHON) -m venv .integrations/mcp1
	@.integrations/mcp1/bin/python -m pip install --quiet mcp-server-time==2025.9.25 'mcp>=1,<2'
	@$(PYTHON) -m venv .integrations/mcp_tasks
	@.integrations/mcp_tasks/bin/python -m pip install --quiet fastmcp-tasks==4.1.4
	@npm install --silent --prefix .integrations/npm \
		@modelcontextprotocol/server-filesystem@2026.8.31 @modelcontextprotocol/server-everything@2026.8.31
	@touch $@

.integrations/.endpoints: Makefile constraints.txt
	@echo "Installing transformers serve and the LiteLLM proxy into .integrations (about 2 GB)"
	@$(PYTHON) -m venv .integrations/transformers
	@.integrations/transformers/bin/python -m pip install --quiet --constraint constraints.txt 'torch==2.13.0'
	@.integrations/transformers/bin/python -m pip install --quiet --constraint constraints.txt \
		'transformers[serving]==5.24.0'
	@$(PYTHON) -m venv .integrations/litellm
	@.integrations/litellm/bin/python -m pip install --quiet 'litellm[proxy]==1.108.7'
	@touch $@

# verl without its dependencies: it pins versions that conflict, and the tests need only its losses.
.integrations/.learners: Makefile constraints.txt pyproject.toml
	@echo "Installing TRL and verl into .integrations (about 1.9 GB)"
	@$(PYTHON) -m venv .integrations/learners
	@.integrations/learners/bin/python -m pip install --quiet --constraint constraints.txt 'torch==2.13.0'
	@.integrations/learners/bin/python -m pip install --quiet --constraint constraints.txt \
		trl==1.16.0 transformers==5.23.0 tensordict==0.15.3 hydra-core==1.3.8 codetiming==1.4.0 ray==2.60.0 \
		orjson==3.13.0 pandas==3.1.1 pydantic==2.14.3 anyio==4.16.0 aiohttp==3.14.5 torchdata==0.11.0 \
		TransferQueue==0.1.11 pillow==13.0.0 cachetools==8.0.1 fastapi==0.165.0 uvicorn==0.54.0 peft==0.21.2 \
		pytest==9.2.0 pytest-asyncio==1.5.0 hypothesis==6.170.15
	@.integrations/learners/bin/python -m pip install --quiet --no-deps verl==0.9.1
	@.integrations/learners/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

# A virtual environment for each peer whose pins conflict with those of others or with ours.
.integrations/.verifiers: Makefile constraints.txt pyproject.toml
	@echo "Installing verifiers into .integrations (about 300 MB)"
	@$(PYTHON) -m venv .integrations/verifiers
	@.integrations/verifiers/bin/python -m pip install --quiet --constraint constraints.txt \
		verifiers==0.4.0 pytest==9.2.0 pytest-asyncio==1.5.0
	@.integrations/verifiers/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

.integrations/.openenv: Makefile
	@echo "Installing OpenEnv into .integrations (about 300 MB)"
	@$(PYTHON) -m venv .integrations/openenv
	@.integrations/openenv/bin/python -m pip install --quiet openenv==0.10.0
	@touch $@

.integrations/.ray: Makefile constraints.txt pyproject.toml
	@echo "Installing Ray into .integrations (about 1.3 GB)"
	@$(PYTHON) -m venv .integrations/ray
	@.integrations/ray/bin/python -m pip install --quiet --constraint constraints.txt 'torch==2.13.0'
	@.integrations/ray/bin/python -m pip install --quiet --constraint constraints.txt \
		'ray[default,train]==2.60.0' pytest==9.2.0 pytest-asyncio hypothesis --editable '.[train,games,ray]'
	@touch $@

.integrations/.serve: Makefile
	@echo "Installing schemathesis into .integrations (about 100 MB)"
	@$(PYTHON) -m venv .integrations/serve
	@.integrations/serve/bin/python -m pip install --quiet schemathesis==4.32.5 prometheus-client==0.26.0
	@touch $@

# The earlier package works with the first major version of mcp only, but does not pin it.
.integrations/.earlier: Makefile
	@echo "Installing reward-kit 0.4.1 into .integrations (about 500 MB)"
	@$(PYTHON) -m venv .integrations/earlier
	@.integrations/earlier/bin/python -m pip install --quiet reward-kit==0.4.1 'mcp<2'
	@touch $@

# Axolotl pins CUDA builds, an older transformers than ours, and many unused packages.
.integrations/.axolotl: Makefile constraints.txt
	@echo "Installing Axolotl into .integrations (about 2.9 GB)"
	@$(PYTHON) -m venv .integrations/axolotl
	@.integrations/axolotl/bin/python -m pip install --quiet --constraint constraints.txt 'torch==2.13.0'
	@.integrations/axolotl/bin/python -m pip install --quiet --no-deps \
		axolotl==0.19.0 trl==1.9.0 axolotl-contribs-lgpl==0.0.7 bitsandbytes==0.50.2 triton==3.6.0
	@.integrations/axolotl/bin/python -m pip install --quiet --constraint constraints.txt \
		transformers==5.23.0 'huggingface_hub>=1.31,<2' tokenizers==0.23.1 peft==0.20.0 accelerate==1.13.0 \
		datasets==4.8.4 pydantic==2.12.5 PyYAML==6.0.3 packaging==26.0 'kernels>=0.16,<0.17' 'numpy>=2.1,<3' \
		'numba>=0.63.1,<1' scipy addict fire einops colorama typer==0.25.1 python-dotenv==1.0.1 fastcore \
		tensorboard art posthog==6.7.11 mistral-common==1.11.5 langdetect==1.0.9 immutabledict==4.2.0 jinja2 \
		anyio==4.14.2 sentencepiece evaluate==0.4.1 schedulefree==1.4.1 optimum==1.16.2 zstandard==0.22.0 wandb psutil
	@touch $@

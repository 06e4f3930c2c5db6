# make run [FLAGS="--steps 300"] | make test [STEP=4] | make diff STEP=4 | make plot LOGS="a.jsonl b.jsonl"
# make exercise STEP=4 [LEVEL=blank] [FROM=3] | make check STEP=4 [RUNG=5] | make watch STEP=4 | make hint STEP=4 | make solution STEP=4
# make restart STEP=4 [LEVEL=blank] [FROM=3]
# make extend [NAME=muon] | make kernels
# make hang N=3 [ANSWER="2 hang3.py:14"]
# make hunt SEED=today [LEVEL=any] [ANSWER="zero.py:120"] | make probe OF=gradient RANK=0 [AT=1] [NAME=model.norm.weight]
# make simulate STEP=8 RANKS=16 FLAGS="--pp 2"
# make attack SEED=7 COUNT=50 | make wrong [STEP=3]
# make site, then make site-open or make site-test | make slides
# make lint | make rest | make sweep | make break | make mutate | make carry | make figures | make bench
#
# The environment is made in .venv when it is missing or not of this requirements.txt; a .venv that is a link stays as it is.
# PYTHON=python make test uses one of your own instead.
ifndef PYTHON
PYTHON := .venv/bin/python
VENV := .venv/requirements.txt
endif
PYTEST = $(PYTHON) -m pytest -q -c tests/pytest.ini --rootdir .
TESTS ?= tests exercises/ladder

.PHONY: run test lint rest sweep diff exercise restart check watch hint solution extend break mutate plot carry figures bench simulate kernels attack wrong hang hunt probe site slides site-open site-test
.PHONY: .venv/requirements.txt
.DEFAULT_GOAL := run

.venv/requirements.txt:
	@if [ -L .venv ] || cmp -s requirements.txt $@; then exit 0; fi; set -e; \
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, python3 is {sys.version}")'; \
	set -x; python3 -m venv .venv; .venv/bin/python -m pip install -q -r requirements.txt; cp requirements.txt $@

run: $(VENV)
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc_per_node 8 step08_5d/train.py --model tiny-moe --pp 2 --cp 2 --tp 2 --ep 2 --steps 40 $(FLAGS)

test: $(VENV)
	$(PYTEST) $(if $(STEP),tests/test_step0$(STEP)*.py,-m "not slow and not sweep" $(TESTS))

lint: $(VENV)
	@$(PYTHON) -m pip install -q ruff==0.17.6
	$(PYTHON) -m ruff check --no-cache .

rest: $(VENV)
	$(PYTEST) -m "slow and not sweep" $(TESTS)

sweep: $(VENV)
	$(PYTEST) -m sweep $(if $(STEP),tests/test_step0$(STEP)*.py,$(TESTS))

diff:
	@python3 tools/diff.py "$(STEP)" $(FILE)

# a red rung, status 3, is no mistake: make has nothing to add
exercise restart check watch hint solution: $(VENV)
	@$(PYTHON) tools/exercise.py "$(STEP)" $@ LEVEL="$(LEVEL)" FROM="$(FROM)" RUNG="$(RUNG)" || [ $$? -eq 3 ]

hang: $(VENV)
	@$(PYTHON) exercises/hangs/lab.py "$(N)" "$(ANSWER)" || [ $$? -eq 3 ]

hunt: $(VENV)
	@$(PYTHON) tools/hunt.py hunt SEED="$(SEED)" LEVEL="$(LEVEL)" ANSWER="$(ANSWER)" || [ $$? -eq 3 ]

probe: $(VENV)
	@$(PYTHON) tools/hunt.py probe OF="$(OF)" RANK="$(RANK)" AT="$(AT)" NAME="$(NAME)"

extend: $(VENV)
	@$(PYTHON) tools/extend.py $(NAME)

kernels: $(VENV)
	@$(PYTHON) -c 'import triton' 2>/dev/null || $(PYTHON) -m pip install -q triton==3.9.0
	$(PYTEST) exercises/kernels
	$(PYTHON) exercises/kernels/count.py

break: $(VENV)
	$(PYTHON) tools/break_it.py

mutate: $(VENV)
	$(PYTHON) tools/mutate.py $(FLAGS)

plot: $(VENV)
	@test -n "$(LOGS)" || { echo 'make plot LOGS="a.jsonl b.jsonl"' >&2; exit 2; }
	$(PYTHON) tools/plot.py $(LOGS)

simulate: $(VENV)
	@$(PYTHON) tools/simulate "$(STEP)" "$(RANKS)" $(FLAGS)

carry:
	@python3 tools/carry.py

figures: $(VENV)
	set -e; for make in $(filter-out %/common.py,$(wildcard tools/figures/*.py)); do $(PYTHON) $$make; done

bench: $(VENV)
	set -e; for bench in tools/bench/bench*.py; do $(PYTHON) $$bench; done

wrong: $(VENV)
	$(PYTHON) tools/wrong.py $(STEP)

attack: $(VENV)
	$(PYTHON) tests/attack --seed "$(or $(SEED),0)" --count $(or $(COUNT),36)

# Sphinx, and what it wants, in an environment of its own: out/site-venv
SPHINX = out/site-venv/bin/python
$(SPHINX): tools/site/requirements.txt
	python3 -m venv out/site-venv
	$(SPHINX) -m pip install -q -r $<
	@touch $@

site: $(VENV) $(SPHINX)
	$(SPHINX) tools/site/build.py $(PYTHON)
	$(SPHINX) tools/site/slides.py

slides: $(SPHINX)
	$(SPHINX) tools/site/slides.py

site-open:
	@test -d out/site || { echo 'make site builds it first' >&2; exit 2; }
	python3 -m http.server --bind 127.0.0.1 --directory out/site 8000

# a checker of accessibility, fetched by npm and not kept
AXE = out/axe/package/axe.min.js
$(AXE):
	mkdir -p out/axe
	cd out/axe && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz

# of what make site has built; without a site, or without a Chromium, these fail
site-test: $(VENV) $(AXE)
	SITE=out/site $(PYTEST) tests/test_site.py

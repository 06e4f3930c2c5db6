# make help prints the targets.
#
# The environment is made in .venv when it is missing or does not match requirements.txt; a .venv that is a link stays as it is.
# PYTHON=python make test uses an environment of your own instead.
ifndef PYTHON
PYTHON := .venv/bin/python
VENV := .venv/requirements.txt
endif
PYTEST = $(PYTHON) -m pytest  # pyproject.toml has its options

.PHONY: help run plot test sweep lint diff exercise restart check watch hint solution hang hunt probe extend capstone certify kernels simulate plan
.PHONY: prove gpu
.PHONY: carry readme mistakes site .venv/requirements.txt
.DEFAULT_GOAL := help

define HELP
Run
  make run [FLAGS="--steps 300"]       train a mixture of experts on 8 processes, sharded in four ways
  make plot LOGS="a.jsonl b.jsonl"     draw the losses of several runs

Learn
  make diff STEP=4 [FILE=train.py]     what step 4 changes, in the order to read it
  make exercise STEP=4 [LEVEL=blank] [FROM=3]    copy step 4 without its technique, for you to write
  make check STEP=4 [RUNG=5]           which rungs of the ladder are green; make watch checks at every save
  make hint STEP=4                     the next of three hints for the first red rung
  make solution STEP=4                 how your functions differ from ours
  make restart STEP=4                  start the exercise over; your old folder is renamed
  make hang N=3 [ANSWER="RANK FILE:LINE"]        a run that hangs: which rank, which line?
  make play STEP=5, or N=4, or FILE=mine.py RANKS=4       step 5's by_hand.py, or hang 4, or your program, rank by rank in a browser
  make hunt SEED=today [ANSWER="FILE:LINE"]      find a planted mistake, one number at a time
  make probe OF=gradient RANK=0 [AT=1] [NAME=model.norm.weight]    one number of one rank, with and without the mistake
  make extend [NAME=muon]              list the extensions, or copy one to exercise/
  make capstone                        copy the model for a trainer of your own, which you write from nothing, to exercise/
  make certify [NAME=pp] [ALL=1]       judge it under the next layout: does it train to the same numbers as one process?
  make kernels                         test the Triton kernels, and count the bytes that they move; installs Triton if it is missing

Ask
  make plan FLAGS="--model llama-8b --gpus 64"             which layout should I use?
  make simulate STEP=4 RANKS=8 FLAGS="--model llama-8b --tp 8"    what would it do, on GPUs I do not have?
  make prove ADAPTER=mine.py WORLD=4 FLAGS="tp=2 pp=2"     does my trainer train to the same numbers as one process?
  make gpu                             what do the steps do on my GPUs? a report within 20 minutes: docs/gpus.md

Check
  make test [STEP=4]                   the quick tests, five to seven minutes; with STEP, all tests of that step but the long ones
  make test CHANGED=1 [BASE=REV]       the quick tests of the steps, tools and pages that have changed, or changed since REV
  make sweep [STEP=4] [SEED=123]       the long tests, and a hundred random layouts of every step; prints the seed
  make lint                            ruff, in an environment of its own

Maintain
  make carry [CHECK=1] [BASE=REV]      merge uncommitted changes in a step into all later steps and extensions
  make readme                          write the tables that are generated into the pages
  make mistakes                        plant each mistake, and check that its test goes red
  make site                            build the site and the workshop's slides in out/site, in an environment of their own
endef
export HELP

help:
	@echo "$$HELP"

# a target that does not exist
.DEFAULT:
	@echo "make $@: no such target" >&2; echo "$$HELP" >&2; exit 2

.venv/requirements.txt:
	@if [ -L .venv ] || cmp -s requirements.txt $@; then exit 0; fi; set -e; \
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, python3 is {sys.version}")'; \
	set -x; python3 -m venv .venv; .venv/bin/python -m pip install -q -r requirements.txt; cp requirements.txt $@

run: $(VENV)
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc_per_node 8 step08_5d/train.py --model tiny-moe --pp 2 --cp 2 --tp 2 --ep 2 --steps 40 $(FLAGS)

CHECK_STEP = $(if $(STEP),@ls tests/test_step0$(STEP)*.py >/dev/null 2>&1 || { echo "STEP=$(STEP): no tests of such a step; choose from 1 to 8" >&2; exit 2; })
# some tests run make, which must not inherit CHANGED there
unexport CHANGED BASE
test: $(VENV)
ifdef CHANGED
	@tests=$$($(PYTHON) dev/changed.py $(BASE)) || exit 2; [ -z "$$tests" ] || $(PYTEST) $$tests
else
	$(CHECK_STEP)
	$(PYTEST) $(if $(STEP),-m "not sweep" tests/test_step0$(STEP)*.py)
endif

RUFF = 0.17.6
lint:
	@[ "$$(out/lint-venv/bin/ruff --version 2>&1)" = "ruff $(RUFF)" ] || \
	{ python3 -m venv out/lint-venv && out/lint-venv/bin/python -m pip install -q ruff==$(RUFF); }
	out/lint-venv/bin/ruff check --no-cache .

sweep: $(VENV)
	$(CHECK_STEP)
	@seed=$${SEED:-$$(date +%s)}; echo "make sweep SEED=$$seed draws these layouts again"; \
	SEED=$$seed $(PYTEST) -m sweep $(if $(STEP),tests/test_step0$(STEP)*.py)

diff:
	@python3 tools/diff.py "$(STEP)" $(FILE)

# a red rung (status 3) is not an error, so make has nothing to add
exercise restart check watch hint solution: $(VENV)
	@$(PYTHON) exercises/exercise.py "$(STEP)" $@ LEVEL="$(LEVEL)" FROM="$(FROM)" RUNG="$(RUNG)" || [ $$? -eq 3 ]

hang: $(VENV)
	@$(PYTHON) exercises/hangs/lab.py "$(N)" "$(ANSWER)" || [ $$? -eq 3 ]

play: $(VENV)
	@$(PYTHON) tools/play $(if $(N),--ranks 4 exercises/hangs/hang$(N).py,$(if $(FILE),$(if $(RANKS),--ranks $(RANKS)) \
	    $(ALSO:%=--also %) $(FILE) $(FLAGS),$(or $(wildcard step0$(STEP)_*/by_hand.py),step0$(STEP)/by_hand.py)))

hunt: $(VENV)
	@$(PYTHON) exercises/hunt.py hunt SEED="$(SEED)" LEVEL="$(LEVEL)" ANSWER="$(ANSWER)" || [ $$? -eq 3 ]

probe: $(VENV)
	@$(PYTHON) exercises/hunt.py probe OF="$(OF)" RANK="$(RANK)" AT="$(AT)" NAME="$(NAME)"

extend: $(VENV)
	@$(PYTHON) exercises/extend.py $(NAME)

capstone: $(VENV)
	@$(PYTHON) exercises/certify.py capstone

certify: $(VENV)
	@$(PYTHON) exercises/certify.py NAME="$(NAME)" ALL="$(ALL)" || [ $$? -eq 3 ]

kernels: $(VENV)
	@$(PYTHON) -c 'import triton' 2>/dev/null || $(PYTHON) -m pip install -q triton==3.9.0
	$(PYTEST) exercises/kernels
	$(PYTHON) exercises/kernels/count.py

mistakes: $(VENV)
	$(PYTHON) dev/break_it.py

plot: $(VENV)
	@test -n "$(LOGS)" || { echo 'make plot LOGS="a.jsonl b.jsonl"' >&2; exit 2; }
	$(PYTHON) tools/plot.py $(LOGS)

plan: $(VENV)
	@$(PYTHON) tools/plan $(FLAGS)

simulate: $(VENV)
	@$(PYTHON) tools/simulate "$(STEP)" "$(RANKS)" $(FLAGS)

prove: $(VENV)
	@$(PYTHON) tools/prove "$(ADAPTER)" $(if $(WORLD),--world "$(WORLD)") --flags "$(FLAGS)"

gpu: $(VENV)
	@$(PYTHON) tools/gpu.py $(FLAGS)

carry:
	@python3 dev/carry.py $(if $(BASE),--base "$(BASE)") $(if $(CHECK),--check)

readme: $(VENV)
	@$(PYTHON) dev/readme.py

# Sphinx and its dependencies get an environment of their own, out/site-venv
SPHINX = out/site-venv/bin/python
$(SPHINX): dev/site/requirements.txt
	python3 -m venv out/site-venv
	$(SPHINX) -m pip install -q -r $<
	@touch $@

site: $(VENV) $(SPHINX)
	$(SPHINX) dev/site/build.py $(PYTHON)
	$(SPHINX) dev/site/slides.py

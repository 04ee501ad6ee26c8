# One line a verb: what it does stands in python/trainfleet/cli/<verb>.py. `make` alone lists them.
#
# No variable stands in a recipe, and none is exported expanded: Python reads them raw from MAKEFLAGS, so that a value is only
# ever data. That is what the loop is for: make would export (and expand) what stood on its command line.
$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(eval unexport $(name))))
override export PYTHONPATH := python
.DEFAULT_GOAL := help
.PHONY: help setup doctor recipes config plan tokenize train profile scaling inspect sample status logs stop checkpoints verify eval export report clean test drills check

help:
	@echo "trainfleet: one config.yaml, from bare nodes to a trained model. First: make train"
	@awk -F ':.*## | +\\[' '/^[a-z]+:.*## / { printf "  make %-11s %-58s %s\n", $$1, $$2, $$3 ? "[" $$3 : "" }' Makefile

setup: .venv/.stamp ## make this machine or the fleet ready [NODES CONFIG SET]
	@.venv/bin/python -m trainfleet setup

doctor: .venv/.stamp ## is the fleet fit to train: versions, links, health [LIFT=host NODES CONFIG SET]
	@.venv/bin/python -m trainfleet doctor

recipes: .venv/.stamp ## the complete configs that come with this
	@.venv/bin/python -m trainfleet recipes

config: .venv/.stamp ## write a recipe to config.yaml [RECIPE=ssh-4-nodes CONFIG=path YES=1]
	@.venv/bin/python -m trainfleet config

plan: .venv/.stamp ## print what would run, and what was derived and why [NODES CONFIG SET OUT=folder]
	@.venv/bin/python -m trainfleet plan

tokenize: .venv/.stamp ## turn the sources into tokens [NODES CONFIG SET]
	@.venv/bin/python -m trainfleet tokenize

train: .venv/.stamp ## tokenize if need be, train, report; again resumes [NODES CONFIG SET='train.steps=50 ...']
	@.venv/bin/python -m trainfleet train

profile: .venv/.stamp ## a short run, and where its time goes; the trace stays [NODES CONFIG SET]
	@.venv/bin/python -m trainfleet profile

scaling: .venv/.stamp ## the same job at several sizes: speed, efficiency, plot [NODES='1 2 4' WEAK=1 STEPS=20 CONFIG SET]
	@.venv/bin/python -m trainfleet scaling

inspect: .venv/.stamp ## show a sample of the training order; check the dataset [SAMPLE=0 VERIFY=1 CONFIG SET]
	@.venv/bin/python -m trainfleet inspect

sample: .venv/.stamp ## continue a text with the trained model [PROMPT='def ' CONFIG SET]
	@.venv/bin/python -m trainfleet sample

status: .venv/.stamp ## how the run stands [CONFIG SET]
	@.venv/bin/python -m trainfleet status

logs: .venv/.stamp ## what every node wrote [FOLLOW=1 CONFIG SET]
	@.venv/bin/python -m trainfleet logs

stop: .venv/.stamp ## stop the run at its next step, with a checkpoint [CONFIG SET]
	@.venv/bin/python -m trainfleet stop

checkpoints: .venv/.stamp ## every checkpoint: step, size, loss, layout, good or broken [CONFIG SET]
	@.venv/bin/python -m trainfleet checkpoints

verify: .venv/.stamp ## read one checkpoint through, every byte and number [STEP=200 CONFIG SET]
	@.venv/bin/python -m trainfleet verify

eval: .venv/.stamp ## loss, perplexity and accuracy on the validation split; or lm-eval's [TASKS CONFIG SET]
	@.venv/bin/python -m trainfleet eval

export: .venv/.stamp ## the model as a Hugging Face folder [OUT=folder CONFIG SET]
	@.venv/bin/python -m trainfleet export

report: .venv/.stamp ## draw the plots and report.html again [CONFIG SET]
	@.venv/bin/python -m trainfleet report

clean: .venv/.stamp ## stop all, remove what can be made again [PURGE=1 YES=1 CONFIG SET]
	@.venv/bin/python -m trainfleet clean

test: .venv/.stamp-test ## run the tests
	@.venv/bin/python -m trainfleet test

drills: .venv/.stamp-test ## the slow tests: machines that die, links that are cut
	@.venv/bin/python -m pytest -q --durations=15 tests/distributed tests/fleet tests/drills \
	  --ignore=tests/distributed/test_line.py --ignore=tests/distributed/test_training.py # these two are in make test

check: .venv/.stamp-test ## lint, types and shell scripts
	@.venv/bin/python -m trainfleet check

.DEFAULT:
	@echo "error: no such verb; make alone lists them" >&2; exit 2

.venv/.stamp: requirements.lock scripts/venv.sh
	@scripts/venv.sh apply requirements.lock

.venv/.stamp-test: .venv/.stamp requirements-test.lock
	@scripts/venv.sh apply requirements-test.lock
	@touch .venv/.stamp-test

"""Reference deployments of examples/, started by their documented commands, with everything switched on at once.

Each scenario copies one example, starts its processes as its README says, disturbs them, and checks the whole history at
the end (`history.py`) without asking Headway. The short profile runs in `make test`, the long one in `make faults`: it
repeats random disturbances for ten minutes by a printed seed. `HEADWAY_SCENARIO_SEED=17` replays that one.
"""

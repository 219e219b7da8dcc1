"""Tasks in Harbor's format (Terminal-Bench, SWE-style), without Docker.

The format is that of the PyPI package harbor 0.26.0 (Apache-2.0): `harbor/models/task/paths.py` (files of a task),
`models/task/config.py` (task.toml), `models/task/task.py` (the instruction), `models/task/verifier_mode.py` (where
tests run), `models/trial/paths.py` (/logs, /tests, /solution), `verifier/verifier.py` (the reward),
`agents/oracle.py` (the solution), `utils/env.py` (variables), `cli/template-task/` (the standard Dockerfile).
"""

"""The trainer: configuration, mesh, data, step, loop, checkpoints and metrics. `python -m train --help`."""

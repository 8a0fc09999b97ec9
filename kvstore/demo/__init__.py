"""A session that outlives its machine, on a real model: `./scripts/demo`, or `python -m kvstore.demo.run`."""

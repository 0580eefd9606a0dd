"""Pipeline parallelism: schedules as data, and the runtime that executes them."""

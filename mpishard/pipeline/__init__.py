"""Pipeline parallelism: schedules as data, and the runtime that works them off."""

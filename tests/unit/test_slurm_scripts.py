"""How a batch script of ``slurm/`` leaves, under stand-ins for Slurm's commands, the launcher and the training."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mpishard.launch.exit_codes import START_AGAIN

TRAIN = Path(__file__).parents[2] / "slurm" / "train.sbatch"

PROGRAMS = {
    # Says which MPI it has, and trains until Slurm asks it to leave.
    "python": f"""case $1 in -c) echo "MPICH Version: 5" ;; *) exit {START_AGAIN} ;; esac""",
    "mpirun": "echo 2",  # the size of the world
    "srun": "true",
    "squeue": """scontrol --oneliner show job 1 | sed 's/.*JobState=//; s/ .*//'""",
    # Does not answer its first $DEAF calls; $ANSWER: a request that is taken is answered.
    "scontrol": """
calls=$(($(cat calls 2>/dev/null || echo 0) + 1))
echo "$calls" >calls
if [ "$calls" -le "$DEAF" ]; then
    echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
    exit 1
elif [ "$1" = requeue ]; then
    echo "$2" >>requeued
    [ "$ANSWER" = yes ] || { echo "Unexpected message received for job $2" >&2; exit 1; }
else
    echo "JobId=1 JobName=train JobState=$STATE Restarts=$(cat requeued 2>/dev/null | wc -l) PreemptTime=None"
fi
""",
}


# Sourced by Bash before the script.  Nobody waits: the script's clock goes on by itself.
CLOCK = "sleep() { SECONDS=$((SECONDS + ${1%.*} + 1)); }"


@pytest.fixture
def leave(tmp_path):
    """Run the script to its end; what it wrote, its exit code, and the jobs that were queued again."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    (tmp_path / "clock").write_text(CLOCK)

    def run(deaf=0, answer="yes", state="RUNNING", **environment):
        given = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2", **environment}
        stand_ins = {"PATH": f"{tmp_path}:{os.defpath}", "BASH_ENV": str(tmp_path / "clock")}
        stand_ins |= {"DEAF": str(deaf), "ANSWER": answer, "STATE": state}
        done = subprocess.run(
            ["bash", str(TRAIN), "train.py"],
            cwd=tmp_path,
            env={**given, **stand_ins},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
            check=False,
        )
        requeued = tmp_path / "requeued"
        return done.stdout, done.returncode, requeued.read_text().split() if requeued.exists() else []

    return run


@pytest.mark.parametrize(("deaf", "answer"), [(0, "yes"), (0, "no"), (1, "yes"), (2, "no"), (4, "yes")])
def test_a_job_is_queued_again_once_however_late_slurm_answers(leave, deaf, answer):
    log, code, requeued = leave(deaf, answer)
    assert requeued == ["1"] and code == START_AGAIN, log
    assert log.count("job 1 leaves with code 75 and is queued again") == 1, log


def test_one_of_an_array_is_queued_again_by_its_full_name(leave):
    log, _, requeued = leave(SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="1")
    assert requeued == ["17_1"], log


def test_a_job_that_was_cancelled_is_not_queued_again(leave):
    log, code, requeued = leave(2, state="CANCELLED")
    assert code == START_AGAIN and not requeued
    assert "job 1 leaves with code 75; it is CANCELLED, so this script does not queue it again" in log


def test_a_slurm_that_never_answers_is_not_waited_for_without_limit(leave):
    log, code, requeued = leave(10**6, PATIENCE="0")
    assert code == 2 and not requeued
    assert "Slurm did not queue job 1 again within 0 s; submit it again, and it goes on" in log


@pytest.mark.parametrize(
    ("script", "environment", "options"),
    [
        ("optimize(resume=True)", {}, ""),
        ('add_argument("--resume")', {}, "--resume"),
        ('add_argument("--resume")', {"RESUME": ""}, ""),
        ("optimize(resume=True)", {"RESUME": "--again yes"}, "--again yes"),
    ],
)
def test_a_script_gets_the_option_to_resume_that_it_has(leave, tmp_path, script, environment, options):
    (tmp_path / "train.py").write_text(script)
    log, _, requeued = leave(**environment)
    assert requeued == ["1"] and f"train.py {options}\n" in log, log

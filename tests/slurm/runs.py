"""Runs of a tiny model as jobs of the cluster, started with the script that the documentation shows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from nestmodel import newest_checkpoint
from tests.conftest import MessyCorpora
from tests.distributed.runs import REPOSITORY
from tests.slurm.cluster import Cluster, Job, wait_until
from tests.training import TINY

SCRIPT = REPOSITORY / "examples" / "slurm" / "fit.sbatch"
NUM_STEPS = 8
CHECKPOINT_EVERY = 2
PAUSE_AT = 5
"""The step before which a run pauses; its newest checkpoint is then that of step 4."""

# The nodes of the test have no names in DNS, and no GPU.
ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY),
}


def submit(cluster: Cluster, folder: Path, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> Job:
    """Submits the script, without GPUs and with one task on each of two nodes unless options say otherwise."""
    log = folder / "job.log"
    command = ["sbatch", "--parsable", f"--chdir={folder}", f"--output={log}", "--gpus-per-node=0"]
    command += ["--ntasks-per-node=1", *options, str(SCRIPT), *arguments]
    return Job(cluster, cluster.run(*command, **(ENVIRONMENT | environment)).strip(), log)


@dataclass
class TinyRun:
    """A run of a few steps in a folder, which may pause at a known place."""

    cluster: Cluster
    corpora: MessyCorpora
    folder: Path

    def submit(self, *options: str, pauses: bool = False, in_validation: bool = False) -> Job:
        """Starts a job, or another one that continues the run."""
        if not pauses:
            self.go()
        self._write_config(in_validation)
        return submit(self.cluster, self.folder, "run", "--config", "tiny.yaml", options=options)

    def submit_array(self, num_seeds: int) -> list[Job]:
        """Starts an array of pausing jobs and returns them once all of them run."""
        output = f"--output={self.folder}/job-%a.log"
        array = self.submit(f"--array=0-{num_seeds - 1}", output, pauses=True)

        def running() -> dict[str, str]:
            states = self.cluster.run("squeue", "--noheader", "--array", f"--jobs={array.id}", "--format=%K %T %A")
            lines = [line.split() for line in states.splitlines()]
            return {task: job_id for task, state, job_id in lines if state == "RUNNING"}

        wait_until("all tasks of the array run", lambda: len(running()) == num_seeds)
        return [Job(self.cluster, running()[str(i)], self.folder / f"job-{i}.log") for i in range(num_seeds)]

    def _write_config(self, in_validation: bool) -> None:
        pause: dict[str, Any] = {"directory": str(self.folder), "step": PAUSE_AT, "validation": in_validation}
        callbacks = [{"class_path": "tests.distributed.pause.Pause", "init_args": pause}]
        trainer = {**TINY["trainer"], "max_steps": NUM_STEPS, "accelerator": "cpu", "callbacks": callbacks}
        trainer |= {"val_check_interval": 4, "lightning": {"limit_val_batches": 1}}
        data = {**TINY["data"], "corpus": str(self.corpora.speech), "noise": str(self.corpora.noise)}
        data |= {"val_corpus": str(self.corpora.speech)}
        data["plan"] = {"max_batch_seconds": 10.0, "microbatches_per_step": 4}
        config = {**TINY, "trainer": trainer, "data": data, "checkpoints": {"every_n_steps": CHECKPOINT_EVERY}}
        (self.folder / "tiny.yaml").write_text(yaml.safe_dump(config))

    def wait_for_pause(self, job: Job, num_ranks: int = 2) -> None:
        """Waits until all ranks pause and the checkpoint before is written."""

        def has_paused() -> bool:
            return all((self.folder / f"reached-{rank}").exists() for rank in range(num_ranks))

        wait_until("the run pauses", has_paused, job.explain)

    def go(self) -> None:
        (self.folder / "go").touch()

    def checkpoint(self) -> dict[str, Any]:
        """Returns the contents of the newest checkpoint."""
        path = newest_checkpoint(self.folder / "run")
        assert path is not None
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
        return found

    def newest_step(self) -> int:
        return int(self.checkpoint()["global_step"])

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.checkpoint()["state_dict"])

    def leftovers(self, job: Job) -> list[str]:
        """Returns the processes and files that a job has left on any node; checkpoints are no leftovers."""
        shared = [path for path in Path("/dev/shm").rglob("*") if f"{job.id}-" in str(path)]
        partial = list((self.folder / "run").rglob("*.partial"))
        return [str(path) for path in (*shared, *partial)] + [str(pid) for pid in job.processes()]

"""A SLURM cluster of two nodes on this machine, with daemons, ports, keys and files of its own.

All of its processes have the path of its configuration in their environment, by which they are found and ended.
"""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.distributed.runs import REPOSITORY
from tests.ports import free_port
from tests.slurm.reaper import processes_with

PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "srun", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
NODES = ("n1", "n2")
DEADLINE_S = 240
"""A start of a run takes 15 s on an idle machine, and a requeued job waits for ten seconds before."""

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

# A requeued job waits until the credentials of its former start have expired, two minutes by default. A node is down
# when its slurmd has not answered for SlurmdTimeout.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
FirstJobId={first_job}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=30
MinJobAge=3600
JobRequeue=0
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=1
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


def wait_until(what: str, is_so: Callable[[], object], explain: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}\n{explain()}"
        time.sleep(0.1)


class Cluster:
    """Two nodes with four processors each, `n1` and `n2`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))
        }
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": self._path()}
        self.marker = f"SLURM_CONF={folder / 'slurm.conf'}"
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def _path(self) -> str:
        return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def start(self) -> None:
        """Starts the daemons and waits until both nodes are idle."""
        host = socket.gethostname().partition(".")[0]
        settings = {"host": host, "user": getpass.getuser(), "ctld_port": free_port(), "folder": self.folder}
        # So high that no file of another run in /dev/shm has the id of one of these jobs in its name.
        settings["first_job"] = 1_000_000 + os.getpid() % 1_000_000 * 50
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 State=UNKNOWN\n"
            for name in NODES
        ]
        (self.folder / "slurm.conf").write_text(_CONFIGURATION.format(**settings) + "".join(nodes))
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in files.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        wait_until("munged listens", (self.folder / "munge.socket").exists, self._logs)
        self._daemon("slurmctld", "-D", "-c")
        for name in NODES:
            self.start_node(name)
        wait_until("both nodes are idle", lambda: self.states() == {"idle"}, self._logs)

    def start_node(self, name: str) -> None:
        self._nodes[name] = self._daemon("slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """Kills the slurmd of a node, as a crash does: the processes of its jobs go on."""
        self._nodes[name].send_signal(signal.SIGKILL)
        self._nodes[name].wait()

    def _daemon(self, program: str, *options: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{program}.log").open("ab") as log:
            daemon = subprocess.Popen(
                [program, *options],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests; they end the daemons
            )
        self.daemons.append(daemon)
        return daemon

    def states(self) -> set[str]:
        """Returns the states in which nodes are."""
        return set(self.run("sinfo", "--noheader", "--format=%T", check=False).split())

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """Returns what a command of SLURM prints."""
        done = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}\n{self._logs()}"
        return done.stdout

    def _logs(self) -> str:
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))


class Job:
    """A job that was submitted with `examples/slurm/fit.sbatch`."""

    def __init__(self, cluster: Cluster, job_id: str, log: Path) -> None:
        self.cluster, self.id, self._log = cluster, job_id, log

    def field(self, name: str) -> str:
        text = self.cluster.run("scontrol", "show", "job", "--oneliner", self.id)
        found = re.search(rf"\b{name}=(\S+)", text)
        assert found is not None, text
        return found[1]

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def state(self) -> str:
        return self.field("JobState")

    def restarts(self) -> int:
        return int(self.field("Restarts"))

    def wait(self) -> str:
        """Waits until the job has ended and no process of it is left; returns its state and the code of the script."""
        wait_until(f"job {self.id} has ended", lambda: self.state() in ENDED, self.explain)
        wait_until("no process is left", lambda: not self.processes(), self.explain)
        return f"{self.state()} {self.field('ExitCode').partition(':')[0]}"

    def wait_for_log(self, line: str) -> None:
        wait_until(f"the log contains: {line}", lambda: line in self.log(), self.explain)

    def ranks(self) -> dict[int, int]:
        """Returns the process ids of the ranks by rank."""
        found = {}
        for pid in self.processes():
            if "fit" in _words(pid) and any(word.endswith("/nestmodel") for word in _words(pid)):
                found[int(_environment(pid)["SLURM_PROCID"])] = pid
        return found

    def processes(self) -> list[int]:
        return processes_with(f"SLURM_JOB_ID={self.id}")

    def explain(self) -> str:
        processes = {pid: _words(pid) for pid in self.processes()}
        return f"{self.cluster.run('scontrol', 'show', 'job', self.id)}\n{processes}\n{self.log()}"


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Runs a cluster during the block. Its processes are killed at the end, also if this process is killed."""
    # Not in a folder of pytest: the path of a socket has at most 107 bytes.
    folder = tempfile.mkdtemp(prefix="slurm-")
    cluster = Cluster(Path(folder))
    reaper = subprocess.Popen(
        [sys.executable, "-m", "tests.slurm.reaper", cluster.marker, folder],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        cluster.start()
        yield cluster
    finally:
        assert reaper.stdin is not None
        reaper.stdin.close()
        reaper.wait()
        for daemon in cluster.daemons:
            daemon.wait()

"""A private Slurm of one node, without munge, systemd or global state."""

import contextlib
import os
import pathlib
import pwd
import shutil
import socket
import subprocess
import tempfile
import time

from tests.support import processes
from tf_xshard.multi_worker import local_cluster

_NUM_TASKS = 4
_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=20
SchedulerParameters=sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=1000 State=UNKNOWN
PartitionName=p Nodes={host} Default=YES State=UP
"""


def is_installed():
    """Whether the daemons can be started."""
    return _daemon("slurmctld") is not None and _daemon("slurmd") is not None


def _daemon(name):
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextlib.contextmanager
def running():
    """Yields the environment in which `srun` and `sbatch` reach this Slurm."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        for part in ("state", "spool"):
            (folder / part).mkdir(mode=0o755)
        config = folder / "slurm.conf"
        config.write_text(
            _CONFIG.format(
                host=socket.gethostname().partition(".")[0],
                user=pwd.getpwuid(os.getuid()).pw_name,
                folder=folder,
                ports=local_cluster.free_ports(2),
                cores=_NUM_TASKS,
            )
        )
        environment = {**os.environ, "SLURM_CONF": str(config)}
        with contextlib.ExitStack() as stack:
            for daemon in ("slurmctld", "slurmd"):
                stack.enter_context(
                    processes.started(
                        [_daemon(daemon), "-D"],
                        tensorflow=0,
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
            _wait_for_node(environment, folder)
            yield environment


def _wait_for_node(environment, folder):
    for _ in range(300):
        found = processes.run(
            ["sinfo", "-h", "-o", "%T"], tensorflow=0, env=environment
        )
        if "idle" in found.stdout:
            return
        time.sleep(0.1)
    logs = "".join(path.read_text()[-3000:] for path in folder.glob("*.log"))
    raise RuntimeError(f"Slurm did not start: {found.stderr}\n{logs}")

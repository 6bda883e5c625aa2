"""Shim on a node of a cluster: claims the attempt, starts the job on the GPUs that the engine gave, records its ending.

`run_on_node.sh` runs it as ``python3 -I -S -B node_shim.py LAUNCH``. LAUNCH: a private file with a JSON object, which
has the keys of `shim.py` (``data`` as base64; ``base``: the whole environment) and: ``tied`` (whether the engine signals
only the shim), ``log``, ``errors`` (paths; empty: none), ``placeholder`` (the text in place of the ids of the GPUs in
``argv`` and ``changes``). The shim imports only `shim.py` and `supervisor.py`, which the daemon has copied into the same
folder: a node need not have gpujob.
"""

import base64
import errno
import json
import os
import signal
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import shim
import supervisor

# Variables that the engine sets on the node: they replace those of the submitter's environment.
FROM_NODE = (
    "SLURM",
    "RAY_",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ROCR_VISIBLE_DEVICES",
    "TMPDIR",
    "HOSTNAME",
)
IDS = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
CARDS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")  # numbers that are not those inside a cgroup
PR_SET_PDEATHSIG = 1
LATE_S = 5.0  # a network file system may show a new file late


def ids_given(names):
    """Return the ids of the GPUs that the engine gave, from the first of these variables that is set."""
    for name in names:
        text = os.environ.get(name, "")
        if text and text != "NoDevFiles":
            return text
    return ""


class NodeShim(shim.Shim):
    def run(self):
        """Run the job to its end. Return its exit code, 128 + the signal that ended it, or 1 if it did not start."""
        self.code = None
        never = super().run()
        return never if self.code is None else self.code

    def in_child(self):
        """Make the kernel kill the job when the shim is killed: the engine may kill only the shim."""
        if self.launch["tied"]:
            self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait(self, pid, text):
        self.code = super().wait(pid, text)

    def set_signals(self):
        super().set_signals()
        if self.launch["tied"]:
            import ctypes

            signal.signal(signal.SIGTERM, self.on_stop)
            self.prctl = ctypes.CDLL(None).prctl

    def terminal_closed(self):
        return False  # there is none

    def on_hangup(self, *_):
        """Do nothing: there is no terminal."""

    def on_stop(self, *_):
        """Pass a SIGTERM on to the job: the engine sends it only to the shim."""
        if self.job:
            try:
                os.killpg(self.job, signal.SIGTERM)
            except OSError:
                return  # no process of the group is left

    def claim(self, path):
        place = {
            "node": os.environ.get("SLURMD_NODENAME", ""),
            "host": socket.gethostname(),
            "gpus": ids_given(CARDS),
            "engine_job": os.environ.get("SLURM_JOB_ID") or os.environ.get("RAY_JOB_SUBMISSION_ID", ""),
            "partition": os.environ.get("SLURM_JOB_PARTITION", ""),
        }
        self.launch["data"] += json.dumps(place).encode() + b"\n"
        super().claim(path)
        os.unlink(self.launch["path"])  # it holds the environment of the job

    def start(self):
        stage = "log"
        try:
            self.open_streams()
            stage = "environment"
            environment = self.environment()
            stage = "folder"
            os.chdir(self.launch["cwd"])
            stage = "program"
            self.launch["argv"][0] = self.found(self.launch["argv"][0], environment)
            return self.fork(environment)
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or errno.EINVAL
            what = self.launch["argv"][0]
            self.say(f"gpujob: cannot start {what} on {socket.gethostname()}: {os.strerror(number)} ({stage})")
            self.write_end(self.fd, "never", 1000 * supervisor.STAGES.index(stage) + number)
            os.close(self.fd)
            return 0

    def open_streams(self):
        """Replace stdin, stdout and stderr by /dev/null and the logs of the job."""
        fd = os.open(os.devnull, os.O_RDWR)
        os.dup2(fd, 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        out = os.open(self.launch["log"], flags, 0o600) if self.launch["log"] else fd
        errors = os.open(self.launch["errors"], flags, 0o600) if self.launch["errors"] else out
        os.dup2(out, 1)
        os.dup2(errors, 2)
        for opened in {fd, out, errors}:
            if opened > 2:
                os.close(opened)

    def environment(self):
        """Return the environment of the job: the submitter's, then what the engine set, then what gpujob adds."""
        placeholder, ids = self.launch["placeholder"], ids_given(IDS)
        made = {name: value for name, value in self.launch["base"].items() if not name.startswith(FROM_NODE)}
        made.update((name, value) for name, value in os.environ.items() if name.startswith(FROM_NODE))
        for name, value in self.launch["changes"].items():
            if value is None:
                made.pop(name, None)
            else:
                made[name] = value.replace(placeholder, ids)
        self.launch["argv"] = [word.replace(placeholder, ids) for word in self.launch["argv"]]
        return made

    def found(self, program, environment):
        """Return the path of a program. A name without / is searched in the PATH of the job, on this node."""
        if "/" in program:
            return program
        for folder in environment.get("PATH", os.defpath).split(":"):
            path = os.path.join(folder, program)
            if folder and os.access(path, os.X_OK) and not os.path.isdir(path):
                return path
        raise FileNotFoundError(errno.ENOENT, "not found in PATH")


def main():
    path = sys.argv[1]
    begun = time.monotonic()
    while True:
        try:
            with open(path, "rb", opener=supervisor.plain) as stream:
                launch = json.loads(stream.read())
            break
        except FileNotFoundError:
            if time.monotonic() - begun > LATE_S:
                return 0  # another copy of this attempt has taken the file
            os.listdir(os.path.dirname(path))  # makes NFS look again
            time.sleep(0.5)
    launch["data"] = base64.b64decode(launch["data"])
    launch["path"] = path
    return NodeShim(launch).run()


if __name__ == "__main__":
    sys.exit(main())

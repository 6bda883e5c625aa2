"""The classes of failures: name, meaning, hint, and the signs by which a line of a log shows them.

`failure_classes.py: classify` finds the class of a failed attempt. A line has the first class of `CLASSES` of which it
has a sign. A new class or sign needs logs in tests/data/failures/train.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

OUT_OF_MEMORY, NCCL, BAD_ORDINAL, ENVIRONMENT, HOST_MEMORY = (
    "oom",
    "nccl",
    "device_ordinal",
    "environment",
    "host_memory",
)
TRACEBACK, TIME_LIMIT, INTERRUPTED, CRASH = "traceback", "time_limit", "interrupted", "crash"
KILLED, START, IMPORT, PERMISSION, MISSING_FILE = "killed", "start", "import", "permission", "missing_file"
ILLEGAL_ACCESS, SHARED_MEMORY, NETWORK, GPU_ERROR = "illegal_access", "shared_memory", "network", "gpu_error"
SYNTAX, ARGUMENTS, ASSERTION = "syntax", "arguments", "assertion"

# A text that is a part of the line, ignoring case, with `*` for any characters; or such a text, which makes the search
# fast, and a regular expression that must match too. The expressions are compiled at the first failure.
Sign = Union[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class FailureClass:
    """A class of failures. ``meaning``: completes "the job failed because …"; ``hint``: what the user can do."""

    name: str
    meaning: str
    hint: str
    signs: tuple[Sign, ...] = ()


# In the order of the search: a class stands before the classes whose signs its own lines may have, too.
# fmt: off
_ROWS = (
    FailureClass(
        ENVIRONMENT, "the conda or virtual environment could not be activated",
        "the command did not run: see the output of the activation above in the log; set conda_mode: direct to run no "
        "activation scripts, or raise activation_limit to give them more time",
        (
            ("gpujob: environment ", r"^gpujob: environment .* could not be activated"),
            "environmentlocationnotfound: ", "environmentnamenotfound: ", "directorynotacondaenvironmenterror",
            "your shell has not been properly configured to use 'conda activate'", "run 'conda init' before 'conda activate'",
            "not a conda environment: ", "could not find conda environment: ", "cannot activate, prefix does not exist",
            ("activate", r"(?i)bin/activate: (no such file|permission denied)|bin/activate: not found|can't open .*bin/activate"),
            ("activate", r"(?i)(can't open|cannot open|unable to (open|source)) \S*/activate\b"),
            ("activate", r"(?i)\bactivate: (not found|command not found|no such file or directory)"),
            ("conda: ", r"(?i)\b(conda|mamba|micromamba): (command )?not found"),
            ("pyenv: version", r"pyenv: version .* is not installed"),
        ),
    ),
    FailureClass(
        TIME_LIMIT, "it reached its time limit",
        "give it more time (;time= or --time), or let the script save checkpoints and continue from them",
        (
            "due to time limit", "time limit reached", "time limit exceeded", "exceeded time limit", "run time limit",
            "time_limit exceeded", "exceeded its time limit", "job exceeded walltime", "walltime exceeded", "walltime * exceeded limit",
        ),
    ),
    FailureClass(
        SHARED_MEMORY, "the shared memory (/dev/shm) is too small",
        "use fewer DataLoader workers (num_workers), or enlarge /dev/shm (docker run --shm-size, or mount -o remount,size=)",
        (
            "insufficient shared memory", "out of shared memory", "unexpected bus error encountered in worker",
            "is killed by signal: bus error", "unable to allocate shared memory", "no space left on device*/dev/shm",
            "/dev/shm*no space left on device",  # noqa: S108
            "unable to write to file </torch_", "shared memory object*no space left", "error while creating shared memory",
            ("shm", r"(?i)(unable to|could not|failed to) (open|create|allocate|mmap|extend) (the )?(a )?(shm|shared memory)|/dev/shm.*(too small|is full)"),
        ),
    ),
    FailureClass(
        GPU_ERROR, "the GPU failed: memory error (ECC), GPU lost, XID, NVLink error",
        "the GPU has a fault: run the job on another one, and tell an administrator (nvidia-smi -q, dmesg | grep -i xid)",
        (
            "uncorrectable ecc", "ecc_uncorrectable", "eccuncorrectable", "double bit ecc", "double-bit ecc", "uncorrectable nvlink error",
            "nvlink_uncorrectable", "nvlinkuncorrectable", "gpu is lost", "gpu_is_lost", "fallen off the bus",
            "unable to determine the device handle for gpu", "hardware stack error", "gpu requires reset", "gpu reset required",
            "row remapping fail", "cuda_error_contained", "cudaerrorcontained", "hardware_stack_error", "error containment",
            ("xid", r"(?i)\bxid\b\s*(\(PCI|error|\d|:)"),
            ("nvlink", r"(?i)nvlink.*\b(fatal|error|failure)"),
        ),
    ),
    FailureClass(
        OUT_OF_MEMORY, "GPU memory ran out",
        "it ran out of GPU memory: ",  # `more_memory` adds what helps
        (
            ("out of memory", r"(?i)\b(cuda|hip|xpu|mps|gpu|cublas|cudnn|npu|xla)\b.*\bout of memory"),
            ("out of memory", r"(?i)out of memory(?!: kill).*\b(on gpu|gpu memory|hbm|on device|cuda)\b"),
            ("out of memory", r"(?i)out of memory (allocating|while trying to allocate) [\d,]+ bytes"),
            ("outofmemoryerror", r"^(?!ray\.exceptions)[\w.]*\b(torch|cuda|cupy|cudf|numba|gpu)[\w.]*OutOfMemoryError|^OutOfMemoryError: (CUDA|HIP|XPU|MPS|Out of memory alloc)"),
            ("out_of_memory", r"(?i)cuda_error_out_of_memory|hip_error_out_of_memory|out_of_memory: cuda|ncclcudaoutofmemory|GGML_STATUS_ALLOC_FAILED"),
            "cudaerrormemoryallocation", "hiperroroutofmemory", "cudamalloc failed", "out of gpu memory",
            ("_alloc_failed", r"(?i)cu(blas|dnn|solver|sparse|fft|rand)(_status)?_alloc_failed|rocblas.*alloc_failed"),
            ("cublas_status_not_initialized", r"(?i)cublas_status_not_initialized when calling `?cublasCreate"),
            ("resource", r"(?i)resource[_ ]?exhausted.*(memory|alloc|\boom\b)|resourceexhaustederror(?!.*(message|quota|rate))"),
            "oom when allocating tensor", "failed to allocate device", "no available memory for the cache blocks",
            ("kv cache", r"(?i)larger than the (maximum number of tokens that can be stored in KV cache|available KV cache memory)"),
            ("gpu memory utilization", r"(?i)free memory on device .*less than desired gpu memory utilization"),
            ("cuda", r"(?i)failed to allocate .*\b(cuda|gpu|device)\b.*(buffer|memory)|unable to allocate cuda\d* buffer|cuda.*memory allocation (failed|error|failure)"),
            "not enough gpu memory", "not enough memory on gpu", "insufficient gpu memory", "not enough memory*--mem-fraction-static",
        ),
    ),
    FailureClass(
        ILLEGAL_ACCESS, "a GPU kernel failed: illegal memory access, device-side assert, misaligned address, launch failure",
        "run it once with CUDA_LAUNCH_BLOCKING=1 to see the failing call; often an index or label is out of range",
        (
            "illegal memory access", "device-side assert", "misaligned address", "unspecified launch failure", "illegal_address",
            "illegaladdress", "cuda_error_launch_failed", "cudaerrorlaunchfailure", "cuda_error_assert", "cudaerrorassert",
            "misaligned_address", "cudaerrormisalignedaddress", "the launch timed out and was terminated", "invalid program counter",
            "an illegal instruction was encountered", "operation not supported on global/shared address space",
            "too many resources requested for launch",
            ("invalid configuration argument", r"(?i)cuda.*invalid configuration argument"),
            ("_execution_failed", r"(?i)cu(blas|dnn)_status_execution_failed"),
            ("cudnn_status_internal_error", r"(?i)cudnn_status_internal_error"),
            ("assertion", r"(?i)block: \[\d+, ?\d+, ?\d+\], thread: \[\d+, ?\d+, ?\d+\].*assertion"),
            "memory access fault by gpu",
        ),
    ),
    FailureClass(
        BAD_ORDINAL, "it used the number of a GPU that it cannot see",
        "the script counts its GPUs from 0: set cuda_ids: local (or ;cuda=local on the line), "
        "so that --cuda is 0 instead of the GPU's number on the server",
        (
            "invalid device ordinal", "cuda_error_invalid_device", "cudaerrorinvaliddevice", "invalid device id",
            "invalid device function ordinal",
            ("torch.cuda.device_count() is", r"(?i)deserialize object on cuda device \d+ but"),
            ("cuda device", r"(?i)invalid cuda device|no such cuda device|cuda device \d+ (is not available|does not exist|not found)"),
            ("invalid cuda", r"(?i)invalid cuda '?device=?"),
            ("you requested gpu", r"(?i)you requested gpus?: \["),
            ("gpu", r"(?i)\bgpu (id|index|ordinal|number)\b.*\b(out of range|invalid|does not exist|not visible)|invalid gpu (id|index|ordinal|number)"),
            ("visible", r"(?i)\bnot in (the )?visible_?devices|device .* not found.*visible devices"),
            "device index must not be greater than", "tensorflow device*does not exist",
        ),
    ),
    FailureClass(
        "no_gpu", "it found no GPU, or no driver or library that fits",
        "check that it requests a GPU (;gpus=1), that nvidia-smi works, and that its framework is a build for this driver and GPU",
        (
            "no cuda-capable device", "no rocm-capable device", "unexpected error from cudagetdevicecount", "but your machine only has: []",
            "can only be used on cuda devices", "cuda driver not functional", "forward compatibility was attempted",
            ("gpu is required", r"(?i)\bgpu is required"),
            "found no nvidia driver", "driver version is insufficient", "nvidia driver on your system is too old",
            "torch not compiled with cuda enabled", "no kernel image is available", "no cuda gpus are available",
            "no hip gpus are available", "cuda is not available", "cuda not available", "no gpu found", "no gpus found",
            "no gpu is available", "no visible gpu devices", "failed to initialize nvml", "gpu access blocked by the operating system",
            "no gpu/tpu found", "no supported gpu", "torch.cuda.is_available() is false", "cuda unknown error", "cuda_error_no_device",
            "cudaerrornodevice", "cuda_error_no_binary_for_gpu", "cudaerrornokernelimagefordevice", "cudaerrorinsufficientdriver",
            "cuda_error_system_driver_mismatch", "cudaerrorsystemdrivermismatch", "cuda_error_system_not_ready", "cudaerrorsystemnotready",
            "error 802: system not yet initialized", "driver/library version mismatch",
            "nvidia-smi has failed because it couldn't communicate", "couldn't communicate with the nvidia driver",
            "unable to initialize backend 'cuda'", "unable to initialize backend 'gpu'", "unsupported toolchain", "unsupported ptx version",
            "cuda_error_unsupported_ptx_version", "cuda devices are busy or unavailable",
            "cuda-capable device(s) is/are busy or unavailable", "failed call to cuinit", "nvml shared library not found",
            "nvmlerror_librarynotfound", "nvmlerror_driver", "failed to infer device type", "could not select device driver",
            "unknown runtime specified nvidia", "requires a gpu", "no accelerator*found",
            ("gpu", r"(?i)\b(needs?|requires?) (at least )?(a|an|one|1) (nvidia |cuda |cuda-capable )?gpu\b"),
            ("nvidia-container-cli", r"nvidia-container-cli: (initialization|device|driver) error"),
            ("cuda", r"(?i)cuda (driver )?initialization.*(error|failure)|initialization error.*cuda|cuda error: initialization error"),
        ),
    ),
    FailureClass(
        "port", "an address or port is already in use",
        "choose another port (torchrun: --master-port, or --standalone), or end the process that has it (ss -ltnp)",
        (
            "address already in use", "eaddrinuse", "errno: 98", "[errno 98]", "port is already allocated", "cannot find empty port",
            ("port", r"(?i)\bport \d+ is (already )?(in use|used|allocated|taken|occupied)|\bport \d+ is not available|port already in use"),
        ),
    ),
    FailureClass(
        NCCL, "the communication between GPUs or processes failed (NCCL, gloo, rendezvous)",
        "look for an earlier error in the other ranks' output; else run it with NCCL_DEBUG=INFO, or try NCCL_P2P_DISABLE=1",
        (
            ("nccl", r"(?i)nccl (error|communicator|operation.*failed|comm.*abort)|ncclsystemerror|ncclinternalerror|ncclremoteerror|ncclinvalidusage|ncclinvalidargument|ncclunhandledcudaerror"),
            ("nccl", r"(?i)worknccl.*(timeout|timed out|timing out)|processgroupnccl.*(error|exception|timed out|timeout|timing out|abort)|nccl.*(timeout|timed out)"),
            "watchdog caught collective operation timeout", "unhandled system error", "unhandled cuda error", "distbackenderror",
            "distnetworkerror", "diststoreerror", "rendezvoustimeouterror", "rendezvousconnectionerror", "rendezvousclosederror",
            "connectfullmesh failed",
            ("gloo", r"(?i)gloo/|gloo.*(error|failed|timed out|timeout|connection)"),
            ("monitoredbarrier", r"(?i)monitoredbarrier.*(fail|timeout|timed out|error)|in monitoredbarrier"),
            "the client socket has timed out after", "the client socket has failed to connect to any network address",
            "waiting for clients*clients joined", "timed out initializing process group in store based barrier",
            ("tcpstore", r"(?i)tcpstore.*(timed? ?out|fail|broken|error|reset|closed)"),
            "some nccl operations have failed or timed out",
            ("mpi", r"(?i)\bmpi_(allreduce|send|recv|isend|irecv|bcast|barrier|wait(all)?)\b.*(error|failed)|\bucx\b.*(error|failed)"),
            ("horovod", r"(?i)horovod.*(internal ?error|has been shut down|stalled)"),
            "socket timeout*store", "c10d/utils.hpp", "barrier timed out", "store->get(", "tcpstore.hpp", "socketprogress: ",
            "wait timeout after*keys:",
        ),
    ),
    FailureClass(
        "cuda_option", "the script does not know the option --cuda, which the scheduler added",
        "the script does not know --cuda, which is added to .py lines: set cuda_ids: none (or ;cuda=none on the line)",
        (
            ("cuda", r"(?i)(unrecogni[sz]ed (arguments?|options?)|no such option|unknown (option|argument|flag|command[ -]?line flag)|unexpected (argument|option|extra arguments?)|not recogni[sz]ed|not used by the hfargumentparser|could not consume arg|invalid option|not defined)\b.*(?<![\w-])--?cuda(?![\w-])"),
            "unknown command line flag 'cuda'", "option --cuda not recognized",
        ),
    ),
    FailureClass(
        ARGUMENTS, "the command has wrong arguments: an unknown, missing or invalid option",
        "compare the arguments of the job with the usage that the script prints (--help)",
        (
            ("error: ", r"(?i)\berror: (unrecogni[sz]ed arguments?|the following arguments are required|argument [^:]{1,200}: |one of the arguments|too few arguments|ambiguous option|unexpected argument|unknown (option|argument|flag)|invalid value .* for '|the following required arguments|unrecogni[sz]ed (option|subcommand)|no such (option|command)|missing (option|argument|parameter|command)|got unexpected extra argument|found argument )"),
            ("no such option", r"(?i)no such option:? "),
            "no such command", "missing option '", "missing option \"", "missing argument '", "missing argument \"", "missing parameter: ",
            "invalid value for ", "got unexpected extra argument", "unrecognized arguments",
            ("option", r"(?i): (unrecogni[sz]ed|unknown|invalid|illegal) option\b|^(unknown|unrecogni[sz]ed|invalid) option\b|option .* requires an argument|requires an argument --"),
            ("extra operand", r"(?i): extra operand|: missing operand"),
            "unknown command line flag", "unknown flag: ", "flag --*must have a value specified", "flags parsing error",
            "flag provided but not defined", "could not consume arg", "not used by the hfargumentparser",
            ("could not override", r"(?i)could not override '|key '.*' is not in struct"),
            "you must specify", "missing mandatory value",
            ("getopt", r"(?i)getopterror"),
            ("for more information", r"(?i)try '.*--?h(elp)?' for (more information|help)"),
            ("click.exceptions", r"click\.exceptions\.(NoSuchOption|UsageError|BadParameter|MissingParameter|BadOptionUsage)"),
            "argparse.argumenterror",
            ("usage: ", r"(?i)^usage: +\S"),
        ),
    ),
    FailureClass(
        "library", "a shared library is missing or does not fit",
        "a shared library is missing or has another version: check the environment of the job and LD_LIBRARY_PATH (ldd FILE)",
        (
            "error while loading shared libraries", "cannot open shared object file", "undefined symbol", "symbol lookup error",
            ("not found", r"(version|Version) [`'\"]?(GLIBC|GLIBCXX|CXXABI|GOMP|LIB\w+|lib\w+|[A-Z]+)[\w.]*'? not found"),
            "cannot load library", "could not load library", "could not load dynamic library", "could not load this library",
            "unable to load library", "unable to find library", "wrong elf class", "invalid elf header", "file too short",
            "relocation error: ", "symbol not found: ",
            ("libcuda", r"(?i)libcud(a|nn|art)\S* (not found|is missing|cannot be found|can't be found)"),
            ("dlopen", r"(?i)dlopen.*(failed|error|cannot|unable)"),
            "unable to load any of {libcudnn", "numpy.dtype size changed", "numpy.ufunc size changed",
            "a module that was compiled using numpy 1.x cannot be run in", "module compiled against abi version",
            "compiled against*but this version of numpy",
        ),
    ),
    FailureClass(
        IMPORT, "a Python module, or a name in it, is missing",
        "a module is missing: does the job need another conda_env? (gpujob show names the interpreter that ran it)",
        (
            "modulenotfounderror: ", "no module named ", "cannot import name ",
            ("partially initialized module", r"(?i)partially initialized module .* has no attribute"),
            "there is no package called",
            ("package", r"(?i)argumenterror: package .* not found in current path"),
            ("no package metadata", r"(?i)no package metadata was found for|packagenotfounderror"),
            ("importerror", r"^[\w.]*ImportError\b"),
            "requires the * library but it was not found", "distributionnotfound: ", "cannot find module '",
        ),
    ),
    FailureClass(
        SYNTAX, "the script is not valid Python or shell",
        "correct the line that the message names; also check that the interpreter is new enough for the script",
        (
            ("error: ", r"^(\w+\.)*(SyntaxError|IndentationError|TabError): "),
            ("syntax error", r"(?i): syntax error|^syntax error"),
            "unexpected eof while looking for", "unexpected end of file", "unterminated quoted string", "bad substitution",
            "bad for loop variable", "syntax error near unexpected token",
            ("parse", r"(?i)\bparse error\b|\bparseerror:"),
            ("loaderror: syntax", r"(?i)loaderror: syntax"),
            ("unexpected", r"^Error: unexpected (symbol|string|numeric|end of input|input|'.*') in "),
        ),
    ),
    FailureClass(
        "open_files", "too many files are open, or no more processes and threads can be started",
        "use fewer workers or threads, close files, or raise the limit (ulimit -n, ulimit -u)",
        (
            "too many open files", "[errno 24]", "can't start new thread", "cannot start new thread", "can't create new thread",
            "received 0 items of ancdata", "thread creation failed", "no file descriptors available",
            ("pthread_create", r"(?i)pthread_create.*(failed|resource temporarily|error|eagain)"),
            ("resource temporarily unavailable", r"(?i)\b(fork|thread|clone|create|spawn|process|BlockingIOError|libgomp)\b.*resource temporarily unavailable|resource temporarily unavailable.*\b(thread|process|fork)"),
            "cannot fork", "fork failed", "emfile", "unable to create new native thread",
            ("thread creation", r"(?i)thread creation failed"),
            "inotify watch limit reached", "inotify instance limit reached",
        ),
    ),
    FailureClass(
        "disk_full", "no space is left on a device, or a disk quota is used up",
        "free space or write to another file system (df -h, df -i, quota -s); old logs and checkpoints are the usual cause",
        (
            "no space left on device", "file size limit exceeded", "disk quota exceeded", "[errno 28]", "[errno 122]", "enospc", "edquot",
            "disk full", "disk is full", "not enough disk space", "not enough free disk space", "not enough free space",
            "insufficient disk space", "pytorchstreamwriter failed writing",
            ("enforce fail at inline_container", r"(?i)inline_container.*unexpected pos"),
            "iostream error*write",
        ),
    ),
    FailureClass(
        HOST_MEMORY, "the memory of the machine, or the job's own limit of it, ran out",
        "it ran out of main memory: use fewer workers or load less at once, or raise its limit (mem=)",
        (
            ("memoryerror", r"^[\w.]*(?<!OfMemory)MemoryError\b"),
            "std::bad_alloc", "unable to allocate*for an array with shape", "cannot allocate memory", "can't allocate memory", "[errno 12]",
            "oom-kill", "oom_kill", "oom killed", "oomkilled", "oom killer", "out of memory: kill", "killed process",
            "is killed by signal: killed", "node running low on memory", "systemd-oomd", "95% memory budget", "killedworker",
            "due to memory pressure", "cannot allocate vector of size", "java heap space", "javascript heap out of memory",
            "runtime: out of memory", "virtual memory exhausted",
            ("memory allocation of", r"memory allocation of \d+ bytes failed"),
            ("memory limit", r"(?i)exceeded .*memory limit|memory limit .*exceeded|job exceeded memory"),
            ("out of memory", r"(?i)(srun|slurmstepd): .*out of memory|^out of memory!?$|cc1(plus)?: out of memory|system is out of memory|host out of memory"),
            ("outofmemoryerror", r"java\.lang\.OutOfMemoryError|^(ERROR: )?(LoadError: )?OutOfMemoryError\(\)|ray\.exceptions\.OutOfMemoryError"),
            "not enough memory: you tried to allocate", "unable to allocate memory", "failed to allocate memory", "insufficient memory",
            "mmap failed*memory", "malloc failed", "arraymemoryerror",
        ),
    ),
    FailureClass(
        "checkpoint", "a checkpoint or weights file cannot be used: damaged, truncated, or of another model",
        "check that the file is complete and belongs to this model; else continue from an older checkpoint",
        (
            "error(s) in loading state_dict", "key(s) in state_dict",
            ("size mismatch for", r"(?i)size mismatch for .*copying a param"),
            "pytorchstreamreader failed", "failed finding central directory", "archive is corrupted", "safetensorerror", "safetensors_rust",
            "error while deserializing header", "headertoolarge", "headertoosmall", "invalidheaderdeserialization",
            "metadataincompletebuffer", "unpicklingerror", "invalid load key", "pickle data was truncated", "weights only load failed",
            "unexpected eof, expected", "ran out of input", "badzipfile", "file is not a zip file", "corrupt file",
            "storage has wrong byte size", "while decompressing data", "objects could not be loaded", "when loading weights",
            "structures do not match", "the checkpoint you are trying to load", "unable to load weights from",
            ("unable to synchronously open file", r"(?i)open file(?!.*no such file)"),
            "file signature not found", "truncated file", "not a valid checkpoint", "compressed file ended before the end-of-stream marker",
            "bad magic number", "invalid magic", "magic_number", "parameter group that doesn't match the size of optimizer's group",
            "loaded state dict has a different number of parameter groups", "different number of parameter groups",
            ("state_dict", r"(?i)(unexpected|missing) keys? .*state_?dict|state_?dict .*(mismatch|does not match|incompatible)"),
            "data loss: ", "datalosserror", "not found in checkpoint",
            ("checkpoint", r"(?i)checkpoint\b.*\b(corrupt(ed)?|damaged|truncated|incompatible|invalid|mismatch|does not match)|\b(corrupt(ed)?|damaged|truncated|invalid)\b.*\bcheckpoint"),
            ("can't get attribute", r"(?i)can't get attribute '.*' on <module"),
            "failed to load model from file", "failed to load gguf", "gguf_init_from_file", "unexpected eof in archive",
            "not in gzip format", "incomplete metadata, file not fully covered",
        ),
    ),
    FailureClass(
        "diverged", "the training diverged: its loss is NaN or infinite",
        "lower the learning rate, clip gradients, use bf16 instead of fp16, or look for bad samples in the data",
        (
            ("floatingpointerror", r"FloatingPointError\b"),
            ("loss", r"(?i)\bloss(es)?\b.{0,60}\b(nan|inf|infinite|infinity|non-?finite|not finite)\b.*\b(stop|abort|terminat|exit|quit|kill|giv|diverg|interrupt|skip all|halt)"),
            ("loss", r"(?i)\b(stop|abort|terminat|exit|halt)\w*\b.*\b(nan|inf|non-?finite)\b.*\bloss|\b(stop|abort|terminat|exit|halt)\w*\b.*\bloss\b.*\b(nan|inf|non-?finite|infinite)\b"),
            ("loss", r"(?i)(error|exception|assert\w*): .*\bloss\b.*\b(nan|inf|infinite|non-?finite|not finite)\b"),
            ("loss", r"(?i)(error|exception|assert\w*): .*\b(nan|inf|infinite|non-?finite)\b.*\bloss"),
            ("loss", r"(?i)(nan|infinite|non-?finite|invalid) loss (encountered|detected|found)|invalid loss, terminating"),
            ("loss", r"(?i)\bloss (became|becomes|has become|went to|turned) (infinite or )?(nan|inf)"),
            "minimum loss scale reached", "loss scale already at minimum",
            ("returned nan", r"(?i)returned nan values in its"),
            "nanlossduringtraining", "returned in `training_step` is nan", "detected nan and/or inf values",
            "probability tensor contains either", "to satisfy the constraint*but found invalid values",
            ("nan", r"(?i)(error|exception|assert\w*): .*(\bnans?\b.*\b(gradients?|weights?|activations?|logits?|parameters?|outputs?|encountered|detected|found)\b|\b(gradients?|weights?|activations?|logits?|parameters?|outputs?|tensor)\b.*\bnans?\b)"),
            ("nan", r"(?i)found invalid values:.*\bnan\b|monitored metric .* is not finite"),
            ("diverged", r"(?i)\b(training|model|optimi[sz]ation|loss|run)\b.*\b(has |have )?diverged"),
            ("invalid value", r"invalid value \((nan|inf)\) encountered in"),
        ),
    ),
    FailureClass(
        "shape", "tensors do not fit: another size, shape, type or device",
        "compare the shapes, types and devices that the message names with those that the model expects",
        (
            "shapes cannot be multiplied", "view size is not compatible", "non-broadcastable", "not at the same device",
            "expected object of scalar type", "expected object of device type", "expected tensor to have", "must match the shape",
            ("error: ", r"(?i)error: .*\b(shape|dimension|size|dtype)s?\b.*\b(mismatch|do(es)? not match|don't match|doesn't match|incompatible|inconsistent|unequal)\b"),
            "size mismatch", "shape mismatch", "shapes mismatch", "mismatched shapes", "the size of tensor a",
            "sizes of tensors must match", "expected scalar type", "expected all tensors to be on the same device", "should be the same",
            "is invalid for input of size", "could not broadcast input array", "could not be broadcast together", "cannot be broadcast",
            "not broadcastable", "must be broadcastable", "must have the same dtype", "to have the same dtype", "dtype mismatch",
            "dimension mismatch", "dimensionmismatch", "has a mismatch in its core dimension", "requires contracting dimensions to have",
            "incompatible shapes", "incompatible shape", "shapes are incompatible", "shapes * are incompatible", "dimensions must be equal",
            ("not aligned", r"(?i)shapes? .* not aligned|matrices are not aligned"),
            "expanded size of the tensor", "inhomogeneous shape", "to match target batch_size",
            ("expected input", r"(?i)expected input\b.* to (have|be)\b"),
            "weight of size*expected input", "kernel size can't be greater than actual input size", "dimension out of range",
            "dimension specified as 0 but tensor has no dimensions", "tensors must have same number of dimensions",
            "stack expects each tensor to be equal size", "stack expects a non-empty", "all input arrays must have the same shape",
            "all the input array dimensions", "must match exactly, but along dimension",
            ("found dtype", r"(?i)found dtype \w+ but expected|expected \w+ but found (double|float|half|long|int|bfloat16)"),
            "expected tensor for argument #", "can't be cast to the desired output type", "scopeparamshapeerror",
            "cannot reshape array of size", "cannot reshape a tensor with", "index tensor must have the same number of dimensions",
            "the shape of the mask", "that is different to the input size",
            ("expected", r"(?i)expected \d+-?d(imensional)? .*(input|tensor|weight).*\b(got|but)\b|expected .*\b\d+d\b.*\bgot \d+d"),
            ("got", r"(?i)(mat|expected|input|target|tensor)\w*.*\bshape\b.*\bgot\b"),
            "batch size mismatch", "mat1 and mat2", "self and mat2 must have", "output with shape*doesn't match the broadcast shape",
            "split_with_sizes expects", "must match the size of tensor", "is incompatible with the layer",
            "tensor on device*is not on the expected device", "pointer argument cannot be accessed from triton (cpu tensor?)",
            "tensors used as indices must be", "inconsistent numbers of samples", "scatter(): expected dtype",
            "embed_dim must be divisible", "input.size(-1) must be equal to input_size", "for input of size",
        ),
    ),
    FailureClass(
        NETWORK, "a download or a connection failed",
        "check the address, the network and the access rights from this machine (proxy, token, HF_HUB_OFFLINE); then gpujob retry",
        (
            "max retries exceeded", "newconnectionerror", "failed to establish a new connection", "name or service not known",
            "temporary failure in name resolution", "nodename nor servname", "no address associated with hostname", "could not resolve",
            "unable to resolve host", "unknown host", "connection refused", "connection reset by peer", "connection timed out",
            "connection aborted", "network is unreachable", "no route to host", "remote end closed connection", "server disconnected",
            "connectionrefusederror", "connectionreseterror", "connectionabortederror", "certificate_verify_failed",
            "certificate verify failed",
            ("ssl", r"(?i)\bsslerror\b|sslcertverificationerror|ssl: [A-Z_]{4,}|ssl handshake|\bsslv3_|ssleoferror"),
            ("http", r"(?i)\bhttp ?error\b.*\b[45]\d\d\b|\b(http/[\d.]+|status(_| )code:?|http status:?) [45]\d\d\b|error: [45]\d\d:? "),
            ("error", r"(?i)\b[45]\d\d (client|server) error"),
            ("error", r"(?i)^(requests|urllib3?|httpx|httpcore|aiohttp|http\.client|huggingface_hub|botocore|google\.api_core|grpc|socket|ssl|smbprotocol|paramiko|wandb|openai|tenacity|boto3|s3fs)\b[\w.]*(error|exception|timeout|refused|disconnected|unavailable|notfound|incompleteread|_inactiverpcerror|gaierror|herror)\b"),
            ("error: ", r"^(\w+\.)*(URLError|HTTPError|ConnectionError|ConnectTimeout|ReadTimeout|ReadTimeoutError|ConnectTimeoutError|ProxyError|RemoteDisconnected|IncompleteRead|ChunkedEncodingError|gaierror|ConnectError|ClientConnectorError|EndpointConnectionError|ServerSelectionTimeoutError|CommError|InvalidURL|NoCredentialsError): "),
            "repositorynotfounderror", "gatedrepoerror", "revisionnotfounderror", "entrynotfounderror", "hfhubhttperror",
            "offlinemodeisenabled", "cannot access gated repo", "gated repo", "is not a local folder and is not a valid model identifier",
            "we couldn't connect to", "couldn't reach ", "cannot send a request, as the client has been closed",
            "can't load tokenizer for '", "can't load the configuration of '", "can't load the model for '",
            "can't load image processor for '", "can't load feature extractor for '", "does not appear to have a file named",
            ("datasetnotfounderror", r"DatasetNotFoundError"),
            "doesn't exist on the hub", "read timed out", "read operation timed out", "can't connect to", "unable to contact",
            "timed out connecting", "failed to connect to", "could not connect to", "couldn't connect to", "cannot connect to",
            "unable to connect to", "unable to access 'http", "failed to download", "download failed",
            ("fatal: ", r"fatal: (repository|remote error|could not read from remote|authentication failed)"),
            "could not read from remote repository", "host key verification failed", "connection closed by remote host",
            "ssh: connect to host",
            ("licen", r"(?i)licen[sc]e (server|manager|daemon)|flexnet|flexlm|(could not|cannot|unable to|failed to) (check ?out|obtain|acquire|get|retrieve) .*licen[sc]e|licen[sc]e (check ?out )?(failed|denied|not available|unavailable|error)|no licen[sc]e"),
            ("curl: (", r"curl: \(\d+\)"),
            ("wget: ", r"wget: (unable|server|can't|bad address|download)"),
            ("operationalerror", r"(?i)operationalerror.*(connect|server|timeout|host)"),
            ("lost connection to", r"(?i)lost connection to (mysql|database|server|scheduler)"),
            "could not translate host name", "statuscode.unavailable", "failed to connect to all addresses", "unauthorized",
            "invalid username or password", "invalid user token", "tunnel connection failed",
        ),
    ),
    FailureClass(
        PERMISSION, "it has no permission for a file or folder",
        "check the owner and the mode of the path (ls -ld), and that the file system is writable; the job runs with your rights",
        (
            "permissionerror: ", "permission denied", "[errno 13]", "[errno 1] operation not permitted", "operation not permitted",
            "read-only file system", "[errno 30]", "permission_denied", "eacces", "not writable", "is not writeable",
        ),
    ),
    FailureClass(
        START, "the command could not be executed at all",
        "the command did not run: its program could not be executed",
        (
            ("gpujob: cannot start ", r"^gpujob: cannot start "),
            "command not found",
            ("not found", r"(^|: )(sh|dash|ash|bash|zsh|ksh|exec|env|[\w./-]*\.sh): ([^:]*\d+: |line \d+: )?[^:]+: not found$"),
            "exec format error", "cannot execute binary file", "cannot execute: required file not found", "bad interpreter",
            "executable file not found in",
            ("env: ", r"(?i)\benv: .*no such file or directory"),
            ("exec", r"(?i)\b(exec|execvp|execve|failed to exec|cannot exec\w*|unable to exec\w*)\b.*no such file or directory"),
            ("cannot execute", r"(?i): cannot execute"),
            "nohup: failed to run", "failed to run command",
        ),
    ),
    FailureClass(
        MISSING_FILE, "a file or folder is missing",
        "check the path, and the folder in which the job starts (gpujob show): relative paths start there",
        (
            "filenotfounderror", "hfvalidationerror", "incorrect path_or_model_id", "no such file or directory", "no such file",
            "[errno 2]", "[errno 20]", "notadirectoryerror", "enoent", "cannot open file '", "can't open file", "unable to access jarfile", "cannot find the file",
            "file does not exist", "path does not exist", "directory does not exist", "directory not found", "file not found",
            "does not exist or is not a file", "unable to open file", "could not open file", "couldn't find any data file",
            ("no file named", r"(?i)error no file named .* found in directory"),
            ("doesn't exist", r"(?i)(error|exception): .*\b(file|path|dir(ectory)?|folder|dataset|checkpoint)\b.*(does not exist|doesn't exist|not found)"),
            ("does not exist", r"(?i)(error|exception): .*(\b(file|path|dir(ectory)?|folder|dataset|checkpoint|config)\b|/).*does not exist"),
            ("not found", r"(?i)(error|exception): .*\b(file|path|dir(ectory)?|folder|dataset|checkpoint|config|primary config)\b.*not found"),
            "missingconfigexception", "found no valid file for the classes", "couldn't find any class folder",
            ("nosuchfileerror", r"NoSuchFile(Exception|Error)"),
            "images not found",
        ),
    ),
    FailureClass(
        ASSERTION, "an assertion of the program failed",
        "a condition that the program checks does not hold: see the line of the assertion in the log",
        (
            ("assertionerror", r"^[\w.]*AssertionError\b"),
            ("assertion", r"(?i)assertion [`'\"‘].*failed|assertion failed|assertion .* failed"),
            ("check failed", r"(?i)\bcheck failed: |check failure"),
            ("check_", r"\bCHECK_\w+\(.*\) failed|CHECK_\w+ failed"),
            "assert failed", "debug_assert",
            ("internal assert failed", r"INTERNAL ASSERT FAILED"),
        ),
    ),
    FailureClass(
        INTERRUPTED, "a signal interrupted it: SIGINT, SIGTERM or SIGHUP",
        "somebody or something stopped it: gpujob retry runs it again",
        (
            "keyboardinterrupt",
            ("signal", r"(?i)(received|got|caught|terminated by|process \d+ got) (the )?signal:? ?(15|2|1|SIGTERM|SIGINT|SIGHUP)\b|signalexception"),
            ("sigterm", r"(?i)(received|caught|got|handling|interrupted by) .{0,30}sig(term|int|hup)|sig(term|int|hup) (received|caught)|terminated (with|by) signal:? ?sig(term|int|hup)|sig(term|int|hup)\) received"),
            ("sigint", r"(?i)(received|caught|got|handling|interrupted by) .{0,30}sigint|sigint (received|caught)|terminated (with|by) signal:? ?sigint"),
            ("sighup", r"(?i)(received|caught|got|handling) .{0,30}sighup|sighup (received|caught)"),
            ("cancelled at", r"(?i)\*\*\* (job|step) \S+ .*cancelled at"),
            ("terminated", r"^(.*: line \d+: +\d+ )?Terminated\b"),
            ("hangup", r"^(.*: line \d+: +\d+ )?Hangup\b"),
            ("interrupted by user", r"(?i)interrupted by user"),
            "due to preemption", "is killed by signal: terminated", "is killed by signal: interrupt", "died with <signals.sigterm",
            "died with <signals.sigint", "died with <signals.sighup",
            ("^c", r"^\^C"),
        ),
    ),
    FailureClass(
        CRASH, "the program crashed (SIGSEGV, SIGABRT, SIGBUS, SIGILL or SIGFPE)",
        "a crash in compiled code: check the versions of the libraries; PYTHONFAULTHANDLER=1 shows the Python line",
        (
            "segmentation fault", "segfault",
            ("sig", r"\b(SIGSEGV|SIGABRT|SIGBUS|SIGILL|SIGFPE)\b"),
            "core dumped", "fatal python error",
            ("aborted", r"^(.*: line \d+: +\d+ )?Aborted\b"),
            ("bus error", r"(?i)\bbus error\b"),
            ("illegal instruction", r"(?i)illegal instruction"),
            ("floating point exception", r"(?i)^(.*: line \d+: +\d+ )?floating point exception"),
            "stack smashing detected", "double free or corruption", "free(): invalid", "malloc(): ", "corrupted size vs. prev_size",
            "corrupted double-linked list", "munmap_chunk()", "terminate called without an active exception", "unexpectedly crashed",
            ("return code", r"(?i)(exits with |exit |return(ed)? (non-zero )?)?return ?code:? ?=? ?-(11|6|7|4|8)\b"),
            "stack overflow",
        ),
    ),
    FailureClass(
        KILLED, "it was killed (SIGKILL), and nothing shows that memory ran out",
        "it got SIGKILL: by a user, an administrator or the kernel (dmesg); if memory ran out, request more (mem=)",
        (
            ("killed", r"^(.*: line \d+: +\d+ )?Killed\b|\bkilled$|signal 9\b|signal:? (9|killed)\b"),
            ("sigkill", r"\bSIGKILL\b"),
            ("return code", r"(?i)return ?code:? ?=? ?-9\b"),
        ),
    ),
    FailureClass(
        TRACEBACK, "any other exception ended the program",
        "see the last lines of the traceback in the log: gpujob logs",
        (
            "terminate called after throwing an instance of",
            ("panicked at", r"thread '.*' (\(\d+\) )?panicked at"),
            ("error: ", r"^ERROR: (LoadError: )?([A-Z]\w*(Error|Exception)\b|\w+ not defined|MethodError|TaskFailed)"),
            ("error", r"^Error in .* ?:|^Error: object '.*' not found|^Error: could not find function"),
            ("execution halted", r"^Execution halted"),
            ("exception in thread", r"^Exception in thread \"[^\"]*\" [\w.]+"),
            ("panic: ", r"^panic: "),
            "libc++abi: terminating", "fortran runtime error: ",
            ("error using", r"^Error using "),
            ("uncaught exception", r"(?i)uncaught exception"),
        ),
    ),
)
# fmt: on

CLASSES: dict[str, FailureClass] = {row.name: row for row in _ROWS}
FAILURE_KINDS = tuple(CLASSES)

# Class of a failure without a sign of a class, if there is a good run to compare with (`core/run_differences.py`).
UNKNOWN = "unknown"
_UNKNOWN_HINT = "neither log nor exit code tells why: see what differs from the last good run (gpujob show)"


def usual_hint(kind: str) -> str:
    """Return the hint of a class that does not depend on the job; empty for the user's own classes."""
    if kind == UNKNOWN:
        return _UNKNOWN_HINT
    return CLASSES[kind].hint if kind in CLASSES else ""

package env

import (
	"slices"
)

// The variables that Chorus reads. Declare new variables only here; `make
// generate` writes docs/ENVIRONMENT.md from All.
var (
	Backend = &Var{"CHORUS_BACKEND", "text", "auto",
		"Devices to use: `cuda`, `virtual`, or `auto`. `auto` means CUDA, or an error without a GPU; only `chorus` and the examples then fall back to virtual devices, and say so."}
	VirtualDevices = &Var{"CHORUS_VIRTUAL_DEVICES", "number", "4",
		"Number of virtual devices, 1 to 64."}
	VirtualSeed = &Var{"CHORUS_VIRTUAL_SEED", "number", "",
		"Seed for the delays of virtual streams. Default: a new seed for each process. Every failure report contains the seed."}
	VirtualFaults = &Var{"CHORUS_VIRTUAL_FAULTS", "text", "",
		"Fault plan for virtual devices: faults separated by commas. `call#n=status` makes the nth call fail, and `hang@call#n` makes it hang. `lose@call#n` kills the process. With `zero@call#n` a copy to another device delivers zeros. With `wrong@call#n` a copy, a product or an NCCL operation delivers a wrong byte, and with `slow@call#n=200ms` it begins so much later. With `short@call#n` file transfers of the call stop half-way. With `async@call#n=status` the NCCL operation is enqueued and fails when it runs. `*` for n means every call, and `call:1#n` counts only the calls on device 1. For example, `cuFileHandleRegister#*=CU_FILE_HANDLE_NOT_REGISTERED` makes cuFile reject all files. `cuFileRead` and `cuFileWrite` can also fail with an errno, as in `cuFileRead#3=EIO`."}
	VirtualNetwork = &Var{"CHORUS_VIRTUAL_NETWORK", "text", "",
		"IP address that virtual ranks listen on, or `process` for tests whose ranks are all in one process and run in virtual time. Default: Unix sockets or, in a job on several hosts, the local address of the route to the coordinator."}
	VirtualNCCL = &Var{"CHORUS_VIRTUAL_NCCL", "text", "2.28.3",
		"Version of the virtual NCCL, 2.23.4 or newer. It has the functions of that version."}
	VirtualKernels = &Var{"CHORUS_VIRTUAL_KERNELS", "text", "auto",
		"How virtual devices run kernels. `go`: only the Go function. `both`: they also run some launches of each kernel from its CUDA source, compiled by g++ for the host, which finds grids that are too small, illegal addresses, traps, and results that differ. `auto`: `both` in tests if g++ is installed, otherwise `go`. Sources that need more of CUDA than g++ can compile are not compared."}
	VirtualHang = &Var{"CHORUS_VIRTUAL_HANG", "duration", "1m",
		"How long virtual devices wait without any progress until they report a deadlock that would hang a GPU. It may be a call that waits for a device whose work waits for something else. It may also be callbacks that wait for each other, or a kernel that is behind others in a hardware queue."}
	P2P = &Var{"CHORUS_P2P", "text", "auto",
		"Direct copies between GPUs. `auto`: test each pair of GPUs at its first copy, and stage copies through host memory if the test fails. `off`: always stage. `force`: skip the test. NCCL has its own variable NCCL_P2P_DISABLE."}
	RequireGPU = &Var{"CHORUS_REQUIRE_GPU", "number", "0",
		"Tests: number of GPUs that this machine must have. A test that would be skipped for lack of GPUs then fails."}
	Fixtures = &Var{"CHORUS_FIXTURES", "path", "",
		"Tests: more recordings of PyTorch to replay: a file like those in `rng/testdata` (`*rng*.json.gz`) and `internal/memtrace/testdata` (`trace_*.json.gz`, `alloc_stats*.json.gz`), or a directory with such files. A directory may also contain files like those in `comm/testdata` (`scatter_chunks*.json`) and, possibly in subdirectories, `*.safetensors` with a `.json` of digests as in `gds/safetensors/testdata`."}
	LeakStacks = &Var{"CHORUS_LEAK_STACKS", "yes/no", "no",
		"`yes` records the place of creation of each buffer, event, pinned buffer and work, which leak reports then show. Each record takes about one microsecond. Leak reports of other objects always show it."}
	KernelCache = &Var{"CHORUS_KERNEL_CACHE", "text", "",
		"Directory for compiled kernels; `off` disables the cache. Default: `chorus/kernels` in the user's cache directory ($XDG_CACHE_HOME or ~/.cache)."}
	DriverTimeout = &Var{"CHORUS_DRIVER_TIMEOUT", "duration", "15m",
		"Limit of calls that may block in the driver and have no context: they open the devices, ask for properties, allocate device or pinned memory, load modules, or create and close streams. Some of them wait for the work on the device, so the limit is longer than the default deadline of a collective; a preflight check sets a shorter one. A call that exceeds it fails, and the process should end, because a driver that hangs rarely recovers. Calls that enqueue work have no limit of their own."}
	LibCUDA = &Var{"CHORUS_LIBCUDA", "text", "",
		"Path of libcuda.so to use instead of searching for it."}
	LibNVML = &Var{"CHORUS_LIBNVML", "text", "",
		"Path of libnvidia-ml.so to use instead of searching for it."}
	LibNCCL = &Var{"CHORUS_LIBNCCL", "text", "",
		"Path of libnccl.so to use instead of searching for it."}
	LibNVRTC = &Var{"CHORUS_LIBNVRTC", "text", "",
		"Path of libnvrtc.so to use instead of searching for it."}
	LibCUBLAS = &Var{"CHORUS_LIBCUBLAS", "text", "",
		"Path of libcublas.so to use instead of searching for it."}
	LibCUBLASLt = &Var{"CHORUS_LIBCUBLASLT", "text", "",
		"Path of libcublasLt.so to use instead of searching for it."}
	LibCUFILE = &Var{"CHORUS_LIBCUFILE", "text", "",
		"Path of libcufile.so to use instead of searching for it."}
	VisibleDevices = &Var{"CUDA_VISIBLE_DEVICES", "text", "",
		"GPUs that the process sees, in order: comma-separated ordinals, or UUIDs (`GPU-…`, `MIG-…`) or their unique prefixes. The driver reads it when it starts; device.Count and `chorus run` interpret it like the driver. It does not affect virtual devices."}
	MaxConnections = &Var{"CUDA_DEVICE_MAX_CONNECTIONS", "number", "8",
		"Number of hardware queues that the streams of a device share, 1 to 32. The driver reads it, and virtual devices do the same."}
	LaunchBlocking = &Var{"CUDA_LAUNCH_BLOCKING", "number", "0",
		"`1` makes the driver wait for each kernel, and virtual devices for each kernel, copy and fill, so that the failing call returns its error. NCCL with several GPUs in one process can then deadlock."}
	Sanitizer = &Var{"CHORUS_SANITIZER", "number", "0",
		"`1` finds uses of device memory that no event orders, and uses of freed memory, also on CUDA, like TORCH_CUDA_SANITIZER. Reports name both calls with file and line; they are logged with log/slog, and `device.System.Reports` returns them. Each operation takes some microseconds longer. In a test binary of Go, the default for virtual devices is 1."}
	Timeline = &Var{"CHORUS_TIMELINE", "path", "",
		"Directory for a file of each process that records when its streams ran kernels, copies, collectives and graphs, what the host waited for, the events of the allocator and nvtx ranges. `chorus timeline` merges the files and summarizes them. Unset: off."}
	NVMLCheck = &Var{"PYTORCH_NVML_BASED_CUDA_CHECK", "number", "1",
		"`0` makes device.Count use the driver instead of NVML, which does not start the driver."}
	NVTXInjection = &Var{"NVTX_INJECTION64_PATH", "text", "",
		"Library of the profiler that receives ranges and marks; set by nsys."}
)

// All lists the declared variables as docs/ENVIRONMENT.md orders them.
func All() []*Var {
	return append([]*Var{Backend, VirtualDevices, VirtualSeed, VirtualFaults, VirtualNetwork, VirtualNCCL, VirtualHang, VirtualKernels, P2P, RequireGPU, Fixtures, LeakStacks, KernelCache,
		DriverTimeout, LibCUDA, LibNVML, LibNCCL, LibNVRTC, LibCUBLAS, LibCUBLASLt, LibCUFILE, VisibleDevices, MaxConnections, LaunchBlocking, Sanitizer, Timeline, NVMLCheck, NVTXInjection}, slices.Concat(blasVars, allocVars, ncclVars, commVars, gdsVars, clusterVars, preflightVars)...)
}

// Configuration of the allocators.
var (
	AllocConf = &Var{"CHORUS_ALLOC_CONF", "text", "",
		"Options of the allocators in torch's format, such as `max_split_size_mb:128,expandable_segments:True`. An invalid value is an error of the first allocation. `backend:cudaMallocAsync` allocates from the driver's pool, which ignores the options of the caching allocator (`backend:native`, the default). `release_lock_on_cudamalloc` is always on and `graph_capture_record_stream_reuse` always off: both are accepted and have no effect. `memory.SetAllocatorSettings` changes options at run time."}
	TorchAcceleratorAllocConf = &Var{"PYTORCH_ALLOC_CONF", "text", "",
		"Used instead of CHORUS_ALLOC_CONF if that is unset, and before PYTORCH_CUDA_ALLOC_CONF."}
	TorchAllocConf = &Var{"PYTORCH_CUDA_ALLOC_CONF", "text", "",
		"Used instead of CHORUS_ALLOC_CONF if that is unset."}
)

var allocVars = []*Var{AllocConf, TorchAcceleratorAllocConf, TorchAllocConf}

// Settings of `chorus preflight`. Those without the prefix are the settings of NVSentinel's preflight checks.
var (
	PreflightBusLimit = &Var{"CHORUS_PREFLIGHT_BUS_LIMIT", "number", "",
		"`chorus preflight`: lowest bus bandwidth of the largest all-reduce in GB/s (`--bus-limit`). Default: 0.65 of the link of the product."}
	PreflightMaxBytes = &Var{"CHORUS_PREFLIGHT_MAX_BYTES", "text", "",
		"`chorus preflight`: largest all-reduce and transfer, with the units K, M and G (`--maxbytes`). Default: 256M."}
	PreflightTimeout = &Var{"CHORUS_PREFLIGHT_TIMEOUT", "duration", "",
		"`chorus preflight`: limit of the whole check (`--timeout`). Default: 5m."}
	PreflightGangTimeout = &Var{"CHORUS_PREFLIGHT_GANG_TIMEOUT", "duration", "",
		"`chorus preflight`: time to wait for the other processes of the job (`--gang-timeout`). Default: CHORUS_JOIN_TIMEOUT."}
	ThresholdGBps = &Var{"BW_THRESHOLD_GBPS", "number", "",
		"`chorus preflight` uses it if CHORUS_PREFLIGHT_BUS_LIMIT is unset."}
	MessageSizes = &Var{"MESSAGE_SIZES", "text", "",
		"Comma-separated sizes, the largest of which `chorus preflight` uses if CHORUS_PREFLIGHT_MAX_BYTES is unset."}
	TestSizeMB = &Var{"TEST_SIZE_MB", "number", "",
		"Size in MiB that `chorus preflight` uses if CHORUS_PREFLIGHT_MAX_BYTES and MESSAGE_SIZES are unset."}
	GangTimeoutSeconds = &Var{"GANG_TIMEOUT_SECONDS", "number", "",
		"`chorus preflight` uses it if CHORUS_PREFLIGHT_GANG_TIMEOUT is unset."}
)

var preflightVars = []*Var{PreflightBusLimit, PreflightMaxBytes, PreflightTimeout, PreflightGangTimeout, ThresholdGBps, MessageSizes, TestSizeMB, GangTimeoutSeconds}

// Configuration of matrix products.
var (
	CUBLASWorkspaceConfig = &Var{"CUBLAS_WORKSPACE_CONFIG", "text", "",
		"Workspace of matrix products for each stream: pairs of a size in KiB and a count, such as `:4096:8`, whose sum is allocated from the caching allocator. Default, as in torch: 32 MiB from compute capability 9.0 on, and `:4096:2:16:8` before."}
	AllowTF32 = &Var{"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "number", "0",
		"`1` makes `tensor.High` the default of `MatMulSettings.Float32Precision`, so that products of float32 use TF32. cuBLAS reads NVIDIA_TF32_OVERRIDE, whose value 0 disables TF32."}
	PreferCUBLASLt = &Var{"TORCH_BLAS_PREFER_CUBLASLT", "number", "0",
		"`1` makes `tensor.CUBLASLt` the default of `MatMulSettings.Library`. The default `tensor.AnyBLAS` also uses cuBLASLt first, but falls back to cuBLAS."}
)

var blasVars = []*Var{CUBLASWorkspaceConfig, AllowTF32, PreferCUBLASLt}

// Variables that define the place of a process in a job. `chorus run` sets them
// for each worker; set them yourself only to start workers by hand.
var (
	Job = &Var{"CHORUS_JOB", "text", "",
		"Name of the job. Processes with different names never join each other. For a job on one host, `chorus run` generates a name."}
	Rank = &Var{"CHORUS_RANK", "number", "",
		"Set by `chorus run`: rank of this process, 0 to CHORUS_WORLD_SIZE-1."}
	WorldSize = &Var{"CHORUS_WORLD_SIZE", "number", "",
		"Set by `chorus run`: world size, the number of processes in the job. Set it yourself in a Kubernetes indexed Job."}
	LocalRank = &Var{"CHORUS_LOCAL_RANK", "number", "",
		"Set by `chorus run`: rank of this process on its host, which is also the ordinal of its device."}
	LocalSize = &Var{"CHORUS_LOCAL_SIZE", "number", "",
		"Set by `chorus run`: number of processes of the job on this host."}
	Node = &Var{"CHORUS_NODE", "number", "",
		"Set by `chorus run`: index of this host, 0 to CHORUS_NODES-1."}
	Nodes = &Var{"CHORUS_NODES", "number", "",
		"Set by `chorus run`: number of hosts in the job."}
	Epoch = &Var{"CHORUS_EPOCH", "number", "",
		"Set by `chorus run`: epoch of the job in which it started this process, from 1 on."}
	RestartCount = &Var{"CHORUS_RESTART_COUNT", "number", "",
		"Set by `chorus run`: how often it has started the processes of the job again (TORCHELASTIC_RESTART_COUNT)."}
	Addr = &Var{"CHORUS_ADDR", "text", "",
		"Set by `chorus run`: host:port of the job's coordinator."}
	Token = &Var{"CHORUS_TOKEN", "text", "",
		"Set by `chorus run`: hexadecimal key for the mutual authentication of workers and the coordinator. It does not permit a process to act as a launcher, and is not valid in the next run of the job."}
)

// Settings of `chorus run` and cluster.Attach.
var (
	Launcher = &Var{"CHORUS_LAUNCHER", "text", "auto",
		"Launcher whose variables cluster.Attach reads: `chorus`, `torchrun`, `openmpi`, `pmi` (MPICH, Intel MPI), `slurm`, `kubernetes`, `none` (a world of one process), or `auto`: the first of these that has started several processes, or else one."}
	Seeds = &Var{"CHORUS_SEEDS", "text", "",
		"Comma-separated host:port addresses of the hosts that may coordinate the job at its start; the same list on every host. With MPI or Kubernetes, the address of the process with rank 0."}
	Bind = &Var{"CHORUS_BIND", "text", "",
		"IP address, or IP:port, that `chorus run` listens on. Default: the loopback for a job on one host, the seed's own address for several hosts."}
	Advertise = &Var{"CHORUS_ADVERTISE", "text", "",
		"IP address, or IP:port, that other hosts use to reach this host, if it differs from the address that it listens on."}
	HostName = &Var{"CHORUS_HOST", "text", "",
		"Name of this host in messages, which also determines rank order. Default: the system's host name."}
	SecretFile = &Var{"CHORUS_SECRET_FILE", "text", "",
		"File with the job's shared secret of at least 16 bytes, readable by its owner only. A job on several hosts needs a secret, as do processes on one host in different network namespaces. Without a secret, the processes of a job on one host communicate through a Unix socket that only processes of the same user and of root can use."}
	Insecure = &Var{"CHORUS_INSECURE", "yes/no", "no",
		"`yes` permits a job without a secret, and without a check of the user on one host: anyone who can reach its port can join."}
	JoinTimeout = &Var{"CHORUS_JOIN_TIMEOUT", "duration", "5m",
		"Time to wait for all processes of the job. After that, the join fails with a list of the missing processes."}
	CallTimeout = &Var{"CHORUS_CALL_TIMEOUT", "duration", "5m",
		"Deadline of a store call or barrier whose context has no deadline."}
	Heartbeat = &Var{"CHORUS_HEARTBEAT", "duration", "500ms",
		"Interval of the heartbeats between each process and the coordinator. The coordinator's value applies to all processes."}
	LostAfter = &Var{"CHORUS_LOST_AFTER", "duration", "3s",
		"Silence after which a process is declared lost. The coordinator's value applies to all processes."}
	RevokeTimeout = &Var{"CHORUS_REVOKE_TIMEOUT", "duration", "15s",
		"Time for the function of cluster.Run to return after its epoch has ended. `chorus run` kills a process that takes longer. The coordinator's value applies to all processes."}
	DrainTimeout = &Var{"CHORUS_DRAIN_TIMEOUT", "duration", "30s",
		"Time for the ranks to come to the end of a step if hosts or processes join or leave. After that, the epoch ends in the middle of the step. The coordinator's value applies."}
	Agent = &Var{"CHORUS_AGENT", "text", "",
		"Set by `chorus run`: identifies the launcher that started this process."}
	AgentAddr = &Var{"CHORUS_AGENT_ADDR", "text", "",
		"Set by `chorus run` in a job on several hosts: address at which the launcher of this process tells it who coordinates the job."}
	Backoff = &Var{"CHORUS_BACKOFF", "duration", "1s",
		"Time before `chorus run` starts processes again after the second failure in a row. It doubles with each further failure, to at most 64 times its value; processes that ran for five minutes count as good. The first restart follows at once. It is also the unit for the exclusion of hosts that fail again and again: see package cluster."}
	Gossip = &Var{"CHORUS_GOSSIP", "yes/no", "yes",
		"`no` disables gossip between the hosts of a job. Reports of lost hosts then say less, and broken paths between two hosts are not found."}
	Grace = &Var{"CHORUS_GRACE", "duration", "10s",
		"Time from the failure of a worker until `chorus run` asks the other workers to stop, and again until it kills them."}
	LogDir = &Var{"CHORUS_LOG_DIR", "text", "",
		"Directory for a copy of each rank's output, in <dir>/<job>/rank-<n>.out and .err, and after restart k in rank-<n>.restart-<k>.out and .err. " +
			"If the program calls cluster.Run, a process that comes later has new-<host>-<local rank> instead of rank-<n>. " +
			"A slash in the name of the job or host is written as %2F. Files that a running job writes are refused."}
	Metrics = &Var{"CHORUS_METRICS", "text", "",
		"host:port at which `chorus run` serves Prometheus metrics of its host's ranks at `/metrics`, and a live web page of the job at `/`, such as `127.0.0.1:9400`. Default: off. Everyone who reaches the address can read them: choose an address other than the loopback only in a trusted network. An address without a host is refused."}
)

// clusterVars are the variables of package cluster and `chorus run`.
var clusterVars = []*Var{Job, Rank, WorldSize, LocalRank, LocalSize, Node, Nodes, Epoch, RestartCount, Agent, AgentAddr, Addr, Token,
	Launcher, Seeds, Bind, Advertise, HostName, SecretFile, Insecure, JoinTimeout, CallTimeout,
	Heartbeat, LostAfter, RevokeTimeout, DrainTimeout, Backoff, Gossip, Grace, LogDir, Metrics}

// Defaults of the configuration of groups.
var (
	CommStrategy = &Var{"CHORUS_COMM_STRATEGY", "text", "nccl",
		"Strategy of collectives, the same on all ranks. `nccl`. `own`: Chorus kernels for small operations if the GPUs are on one host with peer access, otherwise NCCL. `windows`: NCCL's kernels for symmetric memory for small operations. `copy-engines`: copy engines for all-reduces of 1 MiB and more, and for all-gather and all-to-all within one process. `tuned`: the fastest strategy by measurement. For measurements, one algorithm of the Chorus kernels: `one-shot`, `two-shot-packets`, `two-shot`, `pipelined`, `pushed` or, if NVLink connects all GPUs, `two-shot-lines`."}
	TuningFile = &Var{"CHORUS_TUNING_FILE", "path", "",
		"File with the measurements for `tuned`, written by `chorus tune`, or by the first group without measurements. Measurements of another driver, NCCL or version of Chorus are refused. Default: `chorus/tuning.json` in the user's cache directory ($XDG_CACHE_HOME or ~/.cache), where groups replace such measurements."}
	ShareGPUs = &Var{"CHORUS_SHARE_GPUS", "yes/no", "no",
		"`yes` lets several processes of a job use one GPU, the same on all ranks: the process with local rank r uses GPU r modulo the number of GPUs. NCCL then treats each process as a host (Chorus sets NCCL_HOSTID), and transfers go over its network transport. Chorus kernels (`own`) of all ranks on a GPU are resident at once. A communicator then has about 64 operations in flight; a call that would exceed that waits, so that an abort takes seconds at most. Captured operations and launches of graphs do not count. For tests of many ranks on few GPUs: timings mean nothing."}
)

var commVars = []*Var{CommStrategy, TuningFile, ShareGPUs}

// Defaults of package gds's FileConfig.
var (
	GDSEngine = &Var{"CHORUS_GDS_ENGINE", "text", "auto",
		"I/O engine between files and devices: `cufile` (NVIDIA's cuFile), `direct` (past the page cache), `cached` (through the page cache), or `auto`, which chooses for each file and part. If an engine cannot transfer a part, the next one does."}
	GDSPinned = &Var{"CHORUS_GDS_PINNED", "number", "1073741824",
		"Limit of the pinned memory for file transfers in bytes, for all devices together; at least 65536. One transfer uses up to 128 MiB: 8 MiB for each thread, or down to 1 MiB for each thread if several devices of a group share the transfer."}
	GDSThreads = &Var{"CHORUS_GDS_THREADS", "number", "0",
		"Number of threads that read or write for one call. 0: the number of cores for each device, from 4 to 16."}
)

var gdsVars = []*Var{GDSEngine, GDSPinned, GDSThreads}

// Defaults of the configuration of communicators.
var (
	NCCLTimeout = &Var{"CHORUS_NCCL_TIMEOUT", "duration", "10m",
		"Timeout of a collective, send or receive, from issue to completion, and of launches of graphs with them and one-sided operations. After a timeout, the communicator fails and its error names the ranks that are behind. While the process captures graphs, only time of operations that are known to wait counts. A negative duration disables the timeout."}
	NCCLInFlight = &Var{"CHORUS_NCCL_IN_FLIGHT", "number", "256",
		"Bound on the operations, or groups of operations, that a communicator of several processes has in flight; there may be up to a quarter more. A call waits until the operation that was issued so many calls before has ended. This keeps the abort after a failure short, for which NCCL takes about 4 ms for each operation. If no operation ends for a second, calls do not wait until one does. Captured operations and launches of graphs do not count. 4 to 2147483647; `0`: no bound."}
	NCCLTraceSize = &Var{"CHORUS_NCCL_TRACE_SIZE", "number", "2000",
		"Number of operations that the flight recorder of each communicator keeps, at most 1048576; 0 or less disables it."}
	NCCLTraceFrames = &Var{"CHORUS_NCCL_TRACE_FRAMES", "yes/no", "no",
		"`yes` records the caller of each operation, which takes about one microsecond."}
	NCCLNaNCheck = &Var{"CHORUS_NCCL_NAN_CHECK", "0/1", "0",
		"`1` checks the inputs of collectives and sends for elements that are not a number, with a kernel before each operation. The first one makes the communicator fail; the error names the rank, the operation and the element."}
	NCCLEncrypt = &Var{"CHORUS_NCCL_ENCRYPT", "yes/no", "no",
		"`yes` makes comm.Join encrypt NCCL's connections over TCP with a key that all processes derive from the job's secret. It needs a job with a secret, and NCCL 2.32.3 or newer, built with OpenSSL 3; otherwise no communicator is made. NVLink, InfiniBand and network plugins are not encrypted. Set it alike for all processes. It has not run with a real NCCL 2.32 yet: see SECURITY.md."}
	LaunchPollTime = &Var{"CHORUS_LAUNCH_PATIENCE", "duration", "200us",
		"Time that threads which enqueue the operations of several GPUs concurrently poll for more work before they sleep. A polling thread uses a processor. `0` or less disables these threads: one thread then enqueues all operations in turn."}
	NCCLTraceFile = &Var{"CHORUS_NCCL_TRACE_FILE", "text", "",
		"File for the flight recorders of the process in JSON, written when a communicator fails and when a group ends because its job has lost a process. A group over several processes also writes it if it is closed without Shutdown. `chorus analyze` compares the files of all ranks. The rank and, for a named communicator (such as a split group) its name are appended to the file name. Unset: no file."}
)

var ncclVars = []*Var{NCCLTimeout, NCCLInFlight, NCCLTraceSize, NCCLTraceFrames, NCCLTraceFile, NCCLNaNCheck, NCCLEncrypt, LaunchPollTime}

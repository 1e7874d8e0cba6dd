package env

import "slices"

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
		"Fault plan for virtual devices: faults separated by commas. `call#n=status` makes the nth call fail, and `hang@call#n` makes it hang. `lose@call#n` kills the process. With `zero@call#n` a copy to another device delivers zeros. With `wrong@call#n` a copy or an NCCL operation delivers a wrong byte, and with `slow@call#n=200ms` it begins so much later. With `short@call#n` file transfers of the call stop half-way. With `async@call#n=status` the NCCL operation or file transfer is enqueued and fails when it runs. `*` for n means every call. For example, `cuFileHandleRegister#*=CU_FILE_HANDLE_NOT_REGISTERED` makes cuFile reject all files. `cuFileRead` and `cuFileWrite` can also fail with an errno, as in `cuFileRead#3=EIO`."}
	VirtualNetwork = &Var{"CHORUS_VIRTUAL_NETWORK", "text", "",
		"IP address that virtual ranks listen on. Default: Unix sockets or, in a job on several hosts, the local address of the route to the coordinator."}
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

// All lists the declared variables in the order of docs/ENVIRONMENT.md.
func All() []*Var {
	return append([]*Var{Backend, VirtualDevices, VirtualSeed, VirtualFaults, VirtualNetwork, VirtualNCCL, VirtualHang, VirtualKernels, P2P, RequireGPU, Fixtures, LeakStacks, KernelCache,
		DriverTimeout, LibCUDA, LibNVML, LibNCCL, LibNVRTC, LibCUBLAS, LibCUBLASLt, LibCUFILE, VisibleDevices, MaxConnections, LaunchBlocking, Sanitizer, Timeline, NVMLCheck, NVTXInjection}, slices.Concat(blasVars, allocVars, ncclVars, commVars, gdsVars, clusterVars)...)
}

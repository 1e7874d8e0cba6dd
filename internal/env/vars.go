package env

import "slices"

// Every variable that Chorus reads. A new one is declared here and nowhere
// else; `make generate` writes docs/ENVIRONMENT.md from All.
var (
	Backend = &Var{"CHORUS_BACKEND", "text", "auto",
		"Which devices to use: `cuda`, `virtual`, or `auto`, which is CUDA or an error. `chorus` and the examples fall back to virtual devices under `auto` and say so."}
	VirtualDevices = &Var{"CHORUS_VIRTUAL_DEVICES", "number", "4",
		"How many virtual devices there are, 1 to 64."}
	VirtualSeed = &Var{"CHORUS_VIRTUAL_SEED", "number", "",
		"The seed from which virtual streams draw their delays; unset means a new one for each process, named in every report of a failure."}
	VirtualFaults = &Var{"CHORUS_VIRTUAL_FAULTS", "text", "",
		"A fault plan for virtual devices: comma-separated `call#n=status` (the nth call fails), `hang@call#n`, `lose@call#n` (the process is killed there), `zero@call#n` (what the copy brings to another device is zeros), `short@call#n` (the transfers of files that the call makes end half-way), `async@call#n=status` (the operation of NCCL or the transfer of a file is enqueued, and its communicator or the transfer fails when it runs); `*` for n is every call. `cuFileHandleRegister#*=CU_FILE_HANDLE_NOT_REGISTERED` is a host on which cuFile takes no file; `cuFileRead` and `cuFileWrite` can also fail with an errno, as in `cuFileRead#3=EIO`."}
	VirtualNetwork = &Var{"CHORUS_VIRTUAL_NETWORK", "text", "",
		"The IP address on which virtual ranks listen for each other; unset means Unix sockets, or, in a job on several hosts, the address that reaches the coordinator."}
	VirtualNCCL = &Var{"CHORUS_VIRTUAL_NCCL", "text", "2.28.3",
		"The version of the virtual NCCL, 2.23.4 or newer: it has the functions of that version."}
	P2P = &Var{"CHORUS_P2P", "text", "auto",
		"Direct copies between GPUs: `auto` tests the way between two of them at their first copy and stages copies through host memory where what arrives is wrong, `off` stages all of them, `force` trusts the way. NCCL has NCCL_P2P_DISABLE of its own."}
	RequireGPU = &Var{"CHORUS_REQUIRE_GPU", "number", "0",
		"Tests: how many GPUs this machine must have. A test that would be skipped for want of a GPU fails instead."}
	Fixtures = &Var{"CHORUS_FIXTURES", "path", "",
		"Tests: more recordings of PyTorch that the tests play: a file like those of `rng/testdata` (`*rng*.json.gz`) and `internal/memtrace/testdata` (`trace_*.json.gz`, `alloc_stats*.json.gz`), or a folder with such files those of `comm/testdata` (`scatter_chunks*.json`), and `*.safetensors` beside a `.json` of digests as in `gds/safetensors/testdata`, there or in a folder in it."}
	LeakStacks = &Var{"CHORUS_LEAK_STACKS", "yes/no", "no",
		"`yes` records where each buffer, event, pinned buffer and work is made, so that the report of one that nobody closed says it. That costs about a microsecond for each. The report of other objects always says it."}
	KernelCache = &Var{"CHORUS_KERNEL_CACHE", "text", "",
		"The folder in which compiled kernels are kept for later processes; `off` keeps none. Unset means `chorus/kernels` in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."}
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
	LibCUFILE = &Var{"CHORUS_LIBCUFILE", "text", "",
		"Path of libcufile.so to use instead of searching for it."}
	VisibleDevices = &Var{"CUDA_VISIBLE_DEVICES", "text", "",
		"Which GPUs the process sees, in which order: comma-separated ordinals, or UUIDs (`GPU-…`, `MIG-…`) or their unambiguous beginnings. The driver reads it when it starts; device.Count and `chorus run` read it as the driver does. Virtual devices do not obey it."}
	LaunchBlocking = &Var{"CUDA_LAUNCH_BLOCKING", "number", "0",
		"`1` makes the driver wait for each kernel, and virtual devices for each kernel, copy and fill, so that an error belongs to the call that returns it. NCCL with several GPUs in one process can deadlock then."}
	NVMLCheck = &Var{"PYTORCH_NVML_BASED_CUDA_CHECK", "number", "1",
		"`0` makes device.Count ask the driver instead of NVML, which starts none."}
	NVTXInjection = &Var{"NVTX_INJECTION64_PATH", "text", "",
		"The library of the profiler that ranges and marks go to; nsys sets it."}
)

// All lists the declared variables in the order of docs/ENVIRONMENT.md.
func All() []*Var {
	return append([]*Var{Backend, VirtualDevices, VirtualSeed, VirtualFaults, VirtualNetwork, VirtualNCCL, P2P, RequireGPU, Fixtures, LeakStacks, KernelCache,
		LibCUDA, LibNVML, LibNCCL, LibNVRTC, LibCUBLAS, LibCUFILE, VisibleDevices, LaunchBlocking, NVMLCheck, NVTXInjection}, slices.Concat(allocVars, ncclVars, commVars, gdsVars, clusterVars)...)
}

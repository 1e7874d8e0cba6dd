package env

// Defaults of the configuration of groups.
var (
	CommStrategy = &Var{"CHORUS_COMM_STRATEGY", "text", "nccl",
		"Strategy of collectives, the same on all ranks. `nccl`. `own`: Chorus kernels for small operations if the GPUs are on one host with peer access, otherwise NCCL. `windows`: NCCL's kernels for symmetric memory for small operations. `copy-engines`: copy engines for all-gather and all-to-all within one process. `tuned`: the fastest strategy by measurement. For measurements, one algorithm of the Chorus kernels: `one-shot`, `two-shot-packets`, `two-shot` or, if NVLink connects all GPUs, `two-shot-lines`."}
	TuningFile = &Var{"CHORUS_TUNING_FILE", "path", "",
		"File with the measurements for `tuned`, written by `chorus tune`, or by the first group without measurements. Default: `chorus/tuning.json` in the user's cache directory ($XDG_CACHE_HOME or ~/.cache)."}
	ShareGPUs = &Var{"CHORUS_SHARE_GPUS", "yes/no", "no",
		"`yes` lets several processes of a job use one GPU, the same on all ranks: the process with local rank r uses GPU r modulo the number of GPUs. NCCL then treats each process as a host (Chorus sets NCCL_HOSTID), and transfers go over its network transport. Chorus kernels (`own`) of all ranks on a GPU are resident at once. A communicator then has about 64 operations in flight; a call that would exceed that waits, so that an abort takes seconds at most. Captured operations and launches of graphs do not count. For tests of many ranks on few GPUs: timings mean nothing."}
)

var commVars = []*Var{CommStrategy, TuningFile, ShareGPUs}

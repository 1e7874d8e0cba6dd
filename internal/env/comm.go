package env

// What groups are told that their Config leaves open.
var (
	CommStrategy = &Var{"CHORUS_COMM_STRATEGY", "text", "nccl",
		"What carries the collectives of groups out: `nccl`; `own`: Chorus's own kernels for small ones, where the GPUs of a host reach each other's memory, and NCCL for the rest; `windows`: NCCL's kernels for symmetric memory for small ones; `copy-engines` for all-gathers and all-to-alls in one process; `tuned`: what is the fastest by measurements; or, for measurements, own kernels that reduce by `one-shot`, `two-shot-packets`, `two-shot` or, where NVLink joins all GPUs, `two-shot-lines`. All ranks must have the same."}
	TuningFile = &Var{"CHORUS_TUNING_FILE", "path", "",
		"The file with the measurements that `tuned` goes by, which `chorus tune` writes, and the first group of its kind if there are none. Unset means `chorus/tuning.json` in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."}
)

var commVars = []*Var{CommStrategy, TuningFile}

package env

// What groups are told that their Config leaves open.
var (
	CommStrategy = &Var{"CHORUS_COMM_STRATEGY", "text", "nccl",
		"What carries the collectives of groups out: `nccl`, or `own`: Chorus's own kernels for small ones, where the GPUs of a host reach each other's memory, and NCCL for the rest. All ranks must have the same."}
)

var commVars = []*Var{CommStrategy}

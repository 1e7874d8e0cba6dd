package env

// What communicators are told that their Config leaves open.
var (
	NCCLTimeout = &Var{"CHORUS_NCCL_TIMEOUT", "duration", "10m",
		"How long a collective, send or receive may take, from when it is issued until it has completed; then its communicator fails and names the ranks that are behind. The time in which the process captures graphs counts only for what is known to wait. A negative duration is for ever."}
	NCCLTraceSize = &Var{"CHORUS_NCCL_TRACE_SIZE", "number", "2000",
		"How many operations the flight recorder of each communicator keeps, at most 1048576; 0 or less keeps none."}
	NCCLTraceFrames = &Var{"CHORUS_NCCL_TRACE_FRAMES", "yes/no", "no",
		"`yes` records who issued each operation, which takes about a microsecond."}
	LaunchPatience = &Var{"CHORUS_LAUNCH_PATIENCE", "duration", "200us",
		"How long threads that enqueue the operations of several GPUs at the same time look for more of them before they sleep; each keeps a processor busy meanwhile. `0` or less has none: one thread enqueues them one after the other."}
	NCCLTraceFile = &Var{"CHORUS_NCCL_TRACE_FILE", "text", "",
		"Where a communicator that fails writes the flight recorders of its process as JSON; its rank is appended to the name, and its own name where it has one, as those of a split group do. Unset writes none."}
)

var ncclVars = []*Var{NCCLTimeout, NCCLTraceSize, NCCLTraceFrames, NCCLTraceFile, LaunchPatience}

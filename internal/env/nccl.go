package env

// Defaults of the configuration of communicators.
var (
	NCCLTimeout = &Var{"CHORUS_NCCL_TIMEOUT", "duration", "10m",
		"Timeout of a collective, send or receive, from issue to completion. After a timeout, the communicator fails and its error names the ranks that are behind. While the process captures graphs, only time of operations that are known to wait counts. A negative duration disables the timeout."}
	NCCLTraceSize = &Var{"CHORUS_NCCL_TRACE_SIZE", "number", "2000",
		"Number of operations that the flight recorder of each communicator keeps, at most 1048576; 0 or less disables it."}
	NCCLTraceFrames = &Var{"CHORUS_NCCL_TRACE_FRAMES", "yes/no", "no",
		"`yes` records the caller of each operation, which takes about one microsecond."}
	NCCLNaNCheck = &Var{"CHORUS_NCCL_NAN_CHECK", "0/1", "0",
		"`1` checks the inputs of collectives and sends for elements that are not a number, with a kernel before each operation. The first one makes the communicator fail; the error names the rank, the operation and the element."}
	NCCLEncrypt = &Var{"CHORUS_NCCL_ENCRYPT", "yes/no", "no",
		"`yes` makes comm.Join encrypt NCCL's connections over TCP with a key that all processes derive from the job's secret. It needs a job with a secret, and NCCL 2.32.3 or newer, built with OpenSSL 3; otherwise no communicator is made. NVLink, InfiniBand and network plugins are not encrypted. Set it alike for all processes. It has not run with a real NCCL 2.32 yet: see SECURITY.md."}
	LaunchPatience = &Var{"CHORUS_LAUNCH_PATIENCE", "duration", "200us",
		"Time that threads which enqueue the operations of several GPUs concurrently poll for more work before they sleep. A polling thread uses a processor. `0` or less disables these threads: one thread then enqueues all operations in turn."}
	NCCLTraceFile = &Var{"CHORUS_NCCL_TRACE_FILE", "text", "",
		"File for the flight recorders of the process in JSON, written when a communicator fails and when a group ends because its job has lost a process. A group over several processes also writes it if it is closed without Shutdown. `chorus analyze` compares the files of all ranks. The rank and, for a named communicator (such as a split group) its name are appended to the file name. Unset: no file."}
)

var ncclVars = []*Var{NCCLTimeout, NCCLTraceSize, NCCLTraceFrames, NCCLTraceFile, NCCLNaNCheck, NCCLEncrypt, LaunchPatience}

package env

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

package env

// What package gds is told that its FileConfig leaves open.
var (
	GDSEngine = &Var{"CHORUS_GDS_ENGINE", "text", "auto",
		"How files go to devices: `cufile` by NVIDIA's cuFile, `direct` past the page cache, `cached` through it, or `auto`, which chooses for each file and part. What one cannot do, the next one does."}
	GDSPinned = &Var{"CHORUS_GDS_PINNED", "number", "1073741824",
		"How many bytes of pinned memory files have in use at most, on all devices together; 65536 or more. One transfer takes 128 MiB, up to 8 MiB for each thread, and those to several devices of a group share that, down to 1 MiB for each thread."}
	GDSThreads = &Var{"CHORUS_GDS_THREADS", "number", "0",
		"How many threads read or write for one call; 0 is the number of cores for each device, from 4 to 16."}
)

var gdsVars = []*Var{GDSEngine, GDSPinned, GDSThreads}

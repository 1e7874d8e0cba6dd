package ncclapi

import "slices"

// A Defect is a known fault of a range of versions of NCCL. Package nccl and the choice of strategies read the rows that
// they avoid; chorus info and chorus doctor show all rows of the loaded version. Versions are NCCL's codes: 22803 is 2.28.3.
type Defect struct {
	ID     string
	From   int32  // the first version that has it; 0: not known
	Before int32  // the first version without it; 0: none is known
	Fault  string // what goes wrong
	When   string // the condition, which fits after "when"
	// Chorus says what Chorus does about it.
	Chorus string
	// Open says that a program can meet the defect although Chorus does what Chorus says.
	Open   bool
	Source string // release notes or an issue, as project#number
}

// Affects reports whether a version has the defect.
func (d *Defect) Affects(version int32) bool {
	return version >= d.From && (d.Before == 0 || version < d.Before)
}

// Range describes the versions.
func (d *Defect) Range() string {
	switch {
	case d.From == 0 && d.Before == 0:
		return "all known versions"
	case d.From == 0:
		return "before " + VersionText(d.Before)
	case d.Before == 0:
		return VersionText(d.From) + " and newer"
	case d.Before == d.From+1:
		return VersionText(d.From)
	}
	return VersionText(d.From) + " to before " + VersionText(d.Before)
}

// DefectsOf returns the defects of a version, those that a program can meet first.
func DefectsOf(version int32) (list []*Defect) {
	for _, open := range []bool{true, false} {
		for _, d := range Defects {
			if d.Open == open && d.Affects(version) {
				list = append(list, d)
			}
		}
	}
	return slices.Clip(list)
}

// The defects that Chorus's code reads.
var (
	// SymmetricInGraphs: the symmetric kernels do not wait for the kernel before them.
	SymmetricInGraphs = &Defect{
		ID: "symmetric-in-graphs", From: 22800, Before: 23007,
		Fault:  "symmetric kernels may read data that the kernel before them has not written yet",
		When:   "a CUDA graph has a collective on symmetric windows behind another kernel",
		Chorus: "does not choose windows for captured collectives; collectives on windows that the program registered are not refused",
		Open:   true, Source: "release notes of NCCL 2.30.7; sglang#37768",
	}
	// SymmetricParts: symmetric kernels pack parts of other sizes than whole 8 bytes wrongly.
	SymmetricParts = &Defect{
		ID: "symmetric-parts", From: 22703, Before: 22807,
		Fault:  "symmetric kernels corrupt their results",
		When:   "a rank's part of an all-gather or a reduce-scatter on symmetric windows is not a multiple of 8 bytes",
		Chorus: "refuses these operations",
		Source: "release notes of NCCL 2.28.7",
	}
	// SymmetricGroups: several symmetric operations of a group use each other's work.
	SymmetricGroups = &Defect{
		ID: "symmetric-groups", From: 22703, Before: 22807,
		Fault:  "symmetric kernels corrupt their results",
		When:   "a group has several collectives on symmetric windows",
		Chorus: "refuses these groups",
		Source: "release notes of NCCL 2.28.7",
	}
	// OneRank: the kernel for reductions of a single rank omits the last elements.
	OneRank = &Defect{
		ID: "one-rank", Before: 22907,
		Fault:  "a reduction of a single rank omits its last elements",
		When:   "it is an average or a PreMulSum, and the elements do not divide evenly among the blocks of the kernel",
		Chorus: "copies instead of averaging, and divides a PreMulSum into parts that are right",
		Source: "nccl#1950; release notes of NCCL 2.29.7",
	}
	// PutsInGraphs: one-sided operations do not support captures.
	PutsInGraphs = &Defect{
		ID: "puts-in-graphs", From: 22902, Before: 23003,
		Fault:  "one-sided operations are not captured",
		When:   "a CUDA graph captures Put, Signal or WaitSignal",
		Chorus: "refuses these captures",
		Source: "release notes of NCCL 2.29.2 and 2.30.3",
	}
)

// Defects lists the known defects.
var Defects = []*Defect{
	SymmetricInGraphs, SymmetricParts, SymmetricGroups, OneRank, PutsInGraphs,
	{
		ID: "symmetric-unaligned", From: 22703, Before: 23003,
		Fault:  "low-latency symmetric kernels corrupt their results",
		When:   "a buffer in a symmetric window is not aligned",
		Chorus: "aligns the buffers of its own windows; those of the program's windows are not checked",
		Open:   true, Source: "release notes of NCCL 2.30.3",
	},
	{
		ID: "windows-in-one-allocation", From: 22703, Before: 23102,
		Fault:  "collectives corrupt data",
		When:   "several symmetric windows are parts of one memory allocation",
		Chorus: "allocates its own windows one by one; the program's windows are not checked",
		Open:   true, Source: "nccl#2198; nccl#2339",
	},
	{
		ID: "copy-engines-two-ranks", From: 22803, Before: 23102,
		Fault:  "the first collective on copy engines hangs",
		When:   "a communicator has two ranks, its policy is zero CTAs, and NVLink multicast (NVLS) is enabled",
		Chorus: "does not choose this policy; the deadline of the operation ends the wait",
		Open:   true, Source: "nccl#2241; nccl#2290",
	},
	{
		ID: "copy-engines-in-graphs", From: 22803, Before: 23003,
		Fault:  "collectives on copy engines may hang",
		When:   "a CUDA graph has them; the release notes name no other condition than an edge case",
		Chorus: "does not choose this policy; the deadline of the operation ends the wait",
		Open:   true, Source: "release notes of NCCL 2.30.3",
	},
	{
		ID: "sparse-transfers", Before: 22907,
		Fault:  "sends and receives may hang",
		When:   "the ranks repeat patterns in which most pairs exchange nothing",
		Chorus: "reports the operation when its deadline has passed",
		Open:   true, Source: "release notes of NCCL 2.29.7",
	},
	{
		ID: "foreign-connection", Before: 23007,
		Fault:  "the thread of the proxy hangs",
		When:   "a program that is not part of the job, such as a port scanner, connects to its TCP port",
		Chorus: "reports the operation when its deadline has passed",
		Open:   true, Source: "nccl#1834; release notes of NCCL 2.30.7",
	},
	{
		ID: "proxy-order", Before: 22809,
		Fault:  "jobs of many hosts may hang",
		When:   "the main thread and the thread of the proxy enqueue operations in different orders",
		Chorus: "reports the operation when its deadline has passed",
		Open:   true, Source: "release notes of NCCL 2.28.9",
	},
	{
		ID: "arm-exchange", Before: 22903,
		Fault:  "NCCL may hang",
		When:   "the processor is an ARM, and GCC before version 10 compiled NCCL",
		Chorus: "reports the operation when its deadline has passed",
		Open:   true, Source: "release notes of NCCL 2.29.3",
	},
	{
		ID: "puts-are-lost", From: 22902, Before: 23007,
		Fault:  "requests of one-sided operations are lost",
		When:   "a rank issues PutSignal and Signal at a high rate",
		Chorus: "does nothing: a rank that waits for a lost signal waits until the communicator ends",
		Open:   true, Source: "nccl#2119; release notes of NCCL 2.30.7",
	},
	{
		ID: "split-with-threads", From: 22403,
		Fault:  "the process may crash",
		When:   "several threads split communicators that are not blocking",
		Chorus: "creates blocking communicators only",
		Source: "nccl#1605, which is open; the first version with the fault is not known exactly",
	},
	{
		ID: "nvls-start", From: 23004, Before: 23005,
		Fault:  "a job may hang in its first collectives (one report, without a confirmed cause)",
		When:   "eight hosts have one GPU each and no NVLink, and NCCL_NVLS_ENABLE is not 0",
		Chorus: "leaves the variable as it is; the deadline of the operation ends the wait",
		Open:   true, Source: "nccl#2167, in which the reporter withdrew the cure",
	},
}

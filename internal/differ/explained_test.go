package differ

import "slices"

// An explanation is a difference between the backends that is as it should be.
type explanation struct {
	why   string
	holds func(fatal bool, kind string, virtual, cuda *result) bool
}

// explanations has all of them. kind is the kind of the operation, or "" for objects
// that the runner closes at the end of a program.
var explanations = []explanation{
	{"CUDA destroys nothing on a device that is lost, and says so; virtual devices do destroy, so that a test of what " +
		"a program does after the loss finds what it leaks", func(fatal bool, kind string, virtual, cuda *result) bool {
		closes := []string{"", "stream close", "event close", "exec close", "close", "pool close", "pinned close"}
		return fatal && slices.Contains(closes, kind) && virtual.Kind == "" && cuda.Kind == cuIllegal
	}},
}

// explained returns why a difference is as it should be, or "".
func explained(fatal bool, kind string, virtual, cuda *result) string {
	for _, e := range explanations {
		if e.holds(fatal, kind, virtual, cuda) {
			return e.why
		}
	}
	return ""
}

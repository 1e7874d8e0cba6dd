package flight

import (
	"math/bits"
	"time"
)

const (
	numServices = 5
	numSizes    = 6
)

// SizeNames are the names of the classes of sizes, in bytes. The largest class has no limit.
var SizeNames = [numSizes]string{"le_1KiB", "le_32KiB", "le_1MiB", "le_32MiB", "le_1GiB", "gt_1GiB"}

// A Total counts operations and their bytes. An operation counts the larger of its buffers.
type Total struct{ Count, Bytes uint64 }

// totals are the operations that were issued, without captured ones. Operations count when
// they are issued, because the ring may lose them before the watchdog sees that they completed.
type totals [NumKinds][numServices][numSizes]Total

func (t *totals) add(o *Op) {
	n := uint64(max(o.In, o.Out) * o.DType.Size())
	x := t.of(o.Kind, o.Service, n)
	x.Count++
	x.Bytes += n
}

func (t *totals) remove(e *Entry) {
	n := uint64(max(e.in, e.out) * e.DType.Size())
	x := t.of(e.Kind, e.Service, n)
	x.Count--
	x.Bytes -= n
}

func (t *totals) of(k Kind, s Service, bytes uint64) *Total {
	return &t[min(k, NumKinds-1)][min(s, numServices-1)][sizeClass(bytes)]
}

// sizeClass returns the index in SizeNames. Each class is 32 times larger than the one before.
func sizeClass(bytes uint64) int {
	if bytes <= 1<<10 {
		return 0
	}
	return min((bits.Len64(bytes-1)-6)/5, numSizes-1)
}

// A Standing is the progress of a rank at one moment.
type Standing struct {
	WorldRank int    // -1 if not known
	Issued    uint64 // collectives
	Completed uint64 // collectives that are known to have completed, with all before them
	State     State  // Scheduled while the communicator works
	Oldest    Operation
	Kind      Kind          // of Oldest
	Age       time.Duration // of Oldest, which is in flight; its Record is 0 if there is none
	Idle      time.Duration // since the last operation was issued; 0 if there was none
}

// Standing returns the progress of the rank.
func (r *Recorder) Standing() Standing {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := Now()
	s := Standing{WorldRank: -1, Issued: r.collectives, Completed: r.completed, State: r.finalState, Oldest: Operation{Root: -1}}
	if r.Rank < len(r.world) {
		s.WorldRank = r.world[r.Rank]
	}
	e := r.oldest()
	if last := r.find(r.last); e == nil && last != nil && r.last > r.enqueued && !last.refused {
		e = last // in a call of NCCL
	}
	switch {
	case e != nil:
		s.Oldest, s.Kind, s.Age = e.Operation(), e.Kind, time.Duration(now-e.Created)
	case r.lost == 0 && r.finalState == Scheduled:
		s.Completed = s.Issued
	}
	if r.last > 0 {
		s.Idle = max(time.Duration(now-r.at(r.last).Created), 0)
	}
	s.Age = max(s.Age, 0)
	return s
}

// Totals calls visit for each total that is not zero.
func (r *Recorder) Totals(visit func(Kind, Service, int, Total)) {
	r.mu.Lock()
	all := r.totals
	r.mu.Unlock()
	for k := range all {
		for s := range all[k] {
			for size, t := range all[k][s] {
				if t.Count > 0 {
					visit(Kind(k), Service(s), size, t)
				}
			}
		}
	}
}

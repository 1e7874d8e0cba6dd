package collective

import (
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
)

const (
	// MaxArrivals limits the arrivals that a rank reports.
	MaxArrivals = 64
	// pause is the time without calls after which a collective is reported even if no marks are around it. In a burst of
	// collectives only the first shows who is late.
	pause = int64(time.Millisecond)
)

// Clock identifies the clock of Arrivals: processes of the same host, outside of different time namespaces, have the same.
var Clock = sync.OnceValue(func() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	space, err2 := os.Readlink("/proc/self/ns/time")
	if err != nil || err2 != nil {
		return ""
	}
	return strings.TrimSpace(string(boot)) + " " + space
})

// Arrivals returns the latest collectives at which the rank may have waited for others, the oldest first. Collectives with a
// root are not among them, because not all of their ranks wait for each other. Each has its number, the time of the call on Clock,
// and the time that it took on its stream, in nanoseconds, which is 0 if it is not known.
func (r *Recorder) Arrivals() (list [][3]int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := r.last; id > 0 && len(list) < MaxArrivals && r.last-id < uint64(len(r.ring)); id-- {
		e := r.find(id)
		if e == nil {
			break
		}
		before := r.find(id - 1)
		if k := &Kinds[e.Kind]; k.Peer || k.Rooted || !e.runs() || e.took == 0 && before != nil && e.Created-before.Created < pause {
			continue
		}
		list = append(list, [3]int64{int64(e.Collective), originNanos + e.Created, e.took})
	}
	slices.Reverse(list)
	return list
}

// setTook records how long an operation took on its stream.
func (r *Recorder) setTook(record uint64, d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.find(record); e != nil && e.runs() {
		e.took = max(int64(d), 1)
	}
}

// durations calls visit for each operation between two marks that its stream has passed, once.
func (m *Marks) durations(visit func(record uint64, d time.Duration)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range numMarks {
		if m.closed {
			return
		}
		a, b := &m.list[i], &m.list[(i+1)%numMarks]
		if !a.used || !b.used || b.timed || !a.Direct || a.Next == 0 || b.Record != a.Next || a.Stream != b.Stream {
			continue
		}
		var ms float32
		done, err := QueryDone(m.dev, "cuEventElapsedTime", func(drv cudadrv.Driver) (r cudadrv.Result) {
			ms, r = drv.EventElapsedTime(a.event, b.event)
			return r
		})
		if err == nil && done {
			b.timed = true
			visit(b.Record, time.Duration(float64(ms)*float64(time.Millisecond)))
		}
	}
}

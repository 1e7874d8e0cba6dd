package collective

import (
	"math/bits"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The recorder's clock counts nanoseconds since origin. It is read for each operation, and
// a read of the system's clock takes a tenth of a microsecond next to NCCL. If the system
// keeps time by the processor's counter, the recorder therefore reads that counter. tick
// is the duration of one counter tick in 2^-32 nanoseconds. While tick is 0, because it is
// not known yet or the counter is unusable, the system's clock is used. When tick becomes
// more exact, the clock jumps by its error.
var (
	origin                   = time.Now()
	originNanos, originTicks = readOrigins()

	tick atomic.Uint64
)

// ticks reads the processor's counter, which is the same on all processors of the machine.
func ticks() uint64

// Now returns the nanoseconds since origin.
func Now() int64 {
	if length := tick.Load(); length != 0 {
		return nanosOf(ticks()-originTicks, length)
	}
	if virtual.Load() {
		return time.Since(virtualOrigin).Nanoseconds()
	}
	return nanotime() - originNanos
}

// virtual reports that the recorder's clock is that of package time, which testing/synctest replaces in its bubbles.
var virtual atomic.Bool

// virtualOrigin is before the time at which a bubble begins.
var virtualOrigin = time.Date(1999, 12, 31, 0, 0, 0, 0, time.UTC)

// FollowTime lets the recorder read package time's clock, for a test in virtual time, until undo.
func FollowTime() (undo func()) {
	settingClock.Lock()
	defer settingClock.Unlock()
	known, length := unsteady.Swap(true), tick.Swap(0)
	virtual.Store(true)
	return func() {
		settingClock.Lock()
		defer settingClock.Unlock()
		virtual.Store(false)
		unsteady.Store(known)
		tick.Store(length)
	}
}

// Moment converts a value of Now to a time, and 0 to the zero Time.
func Moment(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return origin.Add(time.Duration(ns)).Round(0)
}

// unsteady reports that the system does not keep time by the processor's counter.
var unsteady atomic.Bool

// readOrigins reads the origins of both clocks.
func readOrigins() (nanos int64, count uint64) {
	nanos, count, atOnce := readBoth()
	unsteady.Store(!atOnce || !keepsTime("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
	return nanos, count
}

func keepsTime(path string) bool {
	source, err := os.ReadFile(path)
	switch strings.TrimSpace(string(source)) {
	case "tsc", "arch_sys_counter":
		return err == nil
	}
	return false
}

const (
	// minElapsed is the time until the first comparison of the counter with the system's
	// clock; maxReadTime is the maximum time between the reads of both in a comparison.
	minElapsed, maxReadTime = int64(100 * time.Millisecond), int64(time.Microsecond)
	// maxDrift, plus a fraction of the elapsed time, is the maximum later difference of
	// the two clocks. The difference is larger if the machine has slept.
	maxDrift, driftPart = int64(50 * time.Millisecond), 1 << 14
)

var settingClock sync.Mutex

// SetClock compares the counter with the system's clock, with a result that
// becomes more exact with the age of the process.
func SetClock() {
	settingClock.Lock()
	defer settingClock.Unlock()
	if unsteady.Load() {
		return
	}
	nanos, count, atOnce := readBoth()
	nanos, count = nanos-originNanos, count-originTicks
	if !atOnce || nanos < minElapsed || uint64(nanos)>>32 >= count {
		return
	}
	if old := tick.Load(); old != 0 {
		if drift, most := nanosOf(count, old)-nanos, maxDrift+nanos/driftPart; drift > most || drift < -most {
			unsteady.Store(true)
			tick.Store(0)
			return
		}
	}
	length, _ := bits.Div64(uint64(nanos)>>32, uint64(nanos)<<32, count)
	tick.Store(length)
}

// readBoth reads the system's clock and the counter, and returns a false atOnce
// if every attempt was interrupted between the two reads.
func readBoth() (nanos int64, count uint64, atOnce bool) {
	for range 8 {
		nanos, count = nanotime(), ticks()
		if nanotime()-nanos <= maxReadTime {
			return nanos, count, true
		}
	}
	return nanos, count, false
}

// nanosOf returns the duration of count ticks in nanoseconds.
func nanosOf(count, length uint64) int64 {
	hi, lo := bits.Mul64(count, length)
	return int64(hi<<32 | lo>>32)
}

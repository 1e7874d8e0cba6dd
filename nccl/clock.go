package nccl

import (
	"math/bits"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	_ "unsafe" // for linkname
)

// The recorder's clock counts nanoseconds since origin. It is read for each operation, where
// the system's takes a tenth of a microsecond beside NCCL: so it is the processor's counter,
// where the system itself keeps time by that, and tick is how long one of its ticks is, in
// 2^-32 nanoseconds. tick is 0 until that is known, and where it cannot be: then it is the
// system's clock. When tick becomes more exact, the clock jumps by what it was wrong.
var (
	origin                   = time.Now()
	originNanos, originTicks = begin()

	tick atomic.Uint64
)

// nanotime is the system's monotonic clock, without time.Now's way there.
//
//go:linkname nanotime runtime.nanotime
func nanotime() int64

// ticks is the processor's counter, which all processors of the machine share.
func ticks() uint64

func now() int64 {
	if length := tick.Load(); length != 0 {
		return lasted(ticks()-originTicks, length)
	}
	return nanotime() - originNanos
}

func moment(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return origin.Add(time.Duration(ns)).Round(0)
}

// unsteady is that the system does not keep time by the processor's counter.
var unsteady atomic.Bool

// begin returns where both clocks begin.
func begin() (nanos int64, count uint64) {
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
	// soonest is after how long the counter is compared with the system's clock at first,
	// and closest how close to each other both must be read.
	soonest, closest = int64(100 * time.Millisecond), int64(time.Microsecond)
	// farthest is how far the two may be apart later, beside a part of the time that
	// has passed: when the machine has slept it is more.
	farthest, farthestPart = int64(50 * time.Millisecond), 1 << 14
)

var settingClock sync.Mutex

// setClock compares the counter with the system's clock. The longer the process lives the
// better they agree.
func setClock() {
	settingClock.Lock()
	defer settingClock.Unlock()
	if unsteady.Load() {
		return
	}
	nanos, count, atOnce := readBoth()
	nanos, count = nanos-originNanos, count-originTicks
	if !atOnce || nanos < soonest || uint64(nanos)>>32 >= count {
		return
	}
	if old := tick.Load(); old != 0 {
		if apart, most := lasted(count, old)-nanos, farthest+nanos/farthestPart; apart > most || apart < -most {
			unsteady.Store(true)
			tick.Store(0)
			return
		}
	}
	length, _ := bits.Div64(uint64(nanos)>>32, uint64(nanos)<<32, count)
	tick.Store(length)
}

// readBoth reads the system's clock and the counter, at one time unless it is interrupted
// again and again.
func readBoth() (nanos int64, count uint64, atOnce bool) {
	for range 8 {
		nanos, count = nanotime(), ticks()
		if nanotime()-nanos <= closest {
			return nanos, count, true
		}
	}
	return nanos, count, false
}

// lasted is how many nanoseconds so many ticks of a length are.
func lasted(count, length uint64) int64 {
	hi, lo := bits.Mul64(count, length)
	return int64(hi<<32 | lo>>32)
}

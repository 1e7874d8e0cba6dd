package nccl

import (
	"math/bits"
	"os"
	"strings"
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
	origin, originNanos, originTicks = time.Now(), nanotime(), ticks()

	tick atomic.Uint64
)

// nanotime is the time of time.Now that never goes back, without the way there.
//
//go:linkname nanotime runtime.nanotime
func nanotime() int64

// ticks is the processor's counter, which all processors of the machine share.
func ticks() uint64

func now() int64 {
	if length := tick.Load(); length != 0 {
		hi, lo := bits.Mul64(ticks()-originTicks, length)
		return int64(hi<<32 | lo>>32)
	}
	return nanotime() - originNanos
}

func moment(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return origin.Add(time.Duration(ns)).Round(0)
}

// steady is that the system keeps time by the processor's counter.
var steady = keepsTime("/sys/devices/system/clocksource/clocksource0/current_clocksource")

func keepsTime(path string) bool {
	source, err := os.ReadFile(path)
	switch strings.TrimSpace(string(source)) {
	case "tsc", "arch_sys_counter":
		return err == nil
	}
	return false
}

// soonest is after how long the counter is compared with the system's clock at first.
const soonest = int64(10 * time.Millisecond)

// setClock compares the counter with the system's clock. The longer the process lives the
// better they agree.
func setClock() {
	nanos, count := uint64(nanotime()-originNanos), ticks()-originTicks
	if !steady || int64(nanos) < soonest || nanos>>32 >= count {
		return
	}
	length, _ := bits.Div64(nanos>>32, nanos<<32, count)
	tick.Store(length)
}
